"""A pickle that ends before its STOP: what of its object was whole by then.

A pickle makes a dict or list first and fills it afterwards: in protocol 0 item by item, later in runs behind a mark.
When the stream ends, the items of every open run wait on the stack. They are put where they belong; the last one may
still be under way, and is left out where that shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptfix.bytes.limits import bounded_keys
from ckptfix.core.objects import Global, Opaque
from ckptfix.errors import UnreadableError
from ckptfix.reading.pickles.arrays import NumpyArray

if TYPE_CHECKING:
    from ckptfix.reading.pickles.machine import PickleMachine


_MODULE = frozenset({"_parameters", "_buffers", "_modules"})
"""What a module has of its weights and of the modules in it, in this order."""


class PickleEndError(UnreadableError):
    """The stream ends inside of a pickle. ``runs`` are the values on its stack, split at the marks."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position
        self.runs: list[list[Any]] = []


class NoOpcodeError(UnreadableError):
    """The stream goes on at ``position`` with a byte that means nothing."""

    def __init__(self, path: str, byte: int, position: int) -> None:
        super().__init__(
            f"{path}: byte {bytes([byte])!r} at offset {position} is no pickle opcode; this is no pickle or a damaged "
            "one"
        )
        self.position = position


def fold(runs: list[list[Any]], path: str) -> Any:
    """The dict, list or object at the bottom of the stack with all that was whole in it; None where there is none."""
    for outer, run in zip(reversed(runs[:-1]), reversed(runs[1:]), strict=True):
        _settle(run)
        if outer:
            _fill(outer[-1], run, path)
    bottom = runs[0]
    _settle(bottom)
    for target, key, value in zip(bottom[::2], bottom[1::2], bottom[2::2], strict=False):
        _fill(target, [key, value], path)
    return bottom[0] if bottom and isinstance(bottom[0], (dict, list, Opaque)) else None


def _settle(run: list[Any]) -> None:
    """Give objects at the end of a run the state that was being made for them, as that of a module and its parts."""
    while len(run) > 1 and isinstance(run[-2], Opaque) and run[-2].state is None and isinstance(run[-1], dict):
        owner, state = run[-2], run.pop()
        if not _MODULE.isdisjoint(state):
            state.update((name, {}) for name in _MODULE - state.keys())
        owner.state = state


def _fill(target: Any, values: list[Any], path: str) -> None:
    """Put the whole values of an open run into what it is for. Those of a tuple or of a call are lost with it."""
    if isinstance(target, list):
        target.extend(value for value in values if is_whole(value))
    elif isinstance(target, dict):
        for key, value in zip(values[::2], values[1::2], strict=False):
            parts = key if isinstance(key, tuple) else (key,)
            if not all(isinstance(part, (str, int)) for part in parts) or not is_whole(value):
                return
            bounded_keys([key], path)
            target[key] = value


def is_whole(value: Any) -> bool:
    """Whether nothing more is to be expected for a value: no arguments for a class, and no state for its object."""
    if isinstance(value, NumpyArray):
        return value.dtype is not None
    return not isinstance(value, Global) and not (isinstance(value, Opaque) and not value.args and not value.state)


def is_suspicious(machine: PickleMachine) -> bool:
    """Whether a pickle that was read to its end looks as if bytes were missing in it, or too many: a frame goes on,
    values are left that nobody took, or numbers were passed over, which some picklers do by right.
    """
    return has_misfits(machine) or (machine.protocol < 4 and bool(machine.memo.far))


def has_misfits(machine: PickleMachine) -> bool:
    """Whether a pickle that was read to its end is one that no pickler writes."""
    return machine.is_torn or machine.frame_end > machine.position or machine.runs != [[]]
