"""A plain pickle that is damaged on the way: what of its object is whole before the damage and behind it.

A pickle has no checksum. That bytes are missing or too many shows where the opcodes go wrong, and that may be behind
the place: the bytes of a tensor are taken by their number, and swallow what follows. Picklers keep every string of
bytes under a number right behind it, so that one that is not, in a pickle that keeps the others, ends in the wrong
place. What is trusted before the damage are the items of the innermost dict by then. Behind it the pickle is taken up
again at the next key whose value is a tensor, and believed only if it then ends as a pickle does."""

from __future__ import annotations

import io
import pickletools
import warnings
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckptfix.bytes.limits import Bounds
from ckptfix.core.tree import holds_tensors
from ckptfix.errors import HostileError, UnreadableError
from ckptfix.reading.pickles.arrays import arrays_in
from ckptfix.reading.pickles.key_search import keys_behind
from ckptfix.reading.pickles.machine import PickleMachine
from ckptfix.reading.pickles.memo import Memo
from ckptfix.reading.pickles.stream import Bytes
from ckptfix.reading.pickles.torch_pickle import StoragePickle
from ckptfix.reading.pickles.unfinished import fold, is_whole

TRIALS = 50
"""Keys at which it is tried to go on."""

PASSES = 4
"""How many times the length of the pickle all trials together read; at a place that is no key, one ends soon."""

_LONG = 16
"""Bytes of a value that may be the data of a tensor."""

_DATA = frozenset({
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "BINUNICODE", "BINUNICODE8", "UNICODE", "BINSTRING",
    "STRING",
})  # fmt: skip
_KEEPS = frozenset({"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"})


class _Walled:
    """Bytes that end where they are not believed any more."""

    def __init__(self, data: Bytes, stop: int) -> None:
        self._data, self._stop = data, stop

    def __len__(self) -> int:
        return self._stop

    def __getitem__(self, index: slice, /) -> bytes:
        start, stop, _ = index.indices(self._stop)
        return self._data[start:stop]

    def find(self, sub: bytes, start: int, /) -> int:
        """The first place of some bytes behind a start."""
        found = self._data.find(sub, start)
        return found if found + len(sub) <= self._stop else -1


@dataclass
class Salvaged:
    """What is whole of a damaged pickle; ``places`` are the ranges of bytes that are lost, ``keys`` the names of what
    lay there, as far as they are known, and ``unnamed`` the ranges in which more may have been.
    """

    root: Any
    places: list[tuple[int, int]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    unnamed: list[tuple[int, int]] = field(default_factory=list)


def first_break(data: bytes, start: int = 0) -> tuple[int, int] | None:
    """Where a string of bytes begins and ends that is not kept under a number, in a pickle that keeps the others."""
    return _first_unkept(_long_strings(data, start)[0])


class _LongString(NamedTuple):
    start: int
    stop: int
    is_kept: bool


def _first_unkept(strings: list[_LongString]) -> tuple[int, int] | None:
    unkept = [string for string in strings if not string.is_kept]
    is_odd = unkept and len(strings) > 3 * len(unkept)
    return (unkept[0].start, unkept[0].stop) if is_odd else None


def _long_strings(data: bytes, start: int) -> tuple[list[_LongString], int]:
    """The values of a pickle that may be the data of tensors, and where its opcodes end or go wrong."""
    stream = io.BytesIO(data)
    stream.seek(start)
    found: list[_LongString] = []
    begin = None  # of a long string, while it is not known whether it is kept
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # escapes that no string has by right
        try:
            for opcode, value, place in pickletools.genops(stream):
                if begin is not None:
                    found.append(_LongString(begin, place or 0, opcode.name in _KEEPS))
                is_long = opcode.name in _DATA and isinstance(value, (str, bytes, bytearray)) and len(value) >= _LONG
                begin = place if is_long else None
        except (ValueError, OverflowError):
            if begin is not None:
                found.append(_LongString(begin, stream.tell(), is_kept=False))
    return found, stream.tell()


def resume(pickles: StoragePickle, data: bytes) -> Salvaged | None:
    """What is whole of a damaged plain pickle: with what lies behind the damage where that ends as a pickle should,
    else what lies before; None where no tensor does.
    """
    reader = _Resumption(pickles, data)
    made = reader.run() or reader.run_to_damage()
    return made if made is not None and _holds_tensor(made.root) else None


@dataclass
class _Resumption:
    pickles: StoragePickle
    data: bytes
    trials: int = TRIALS
    read: int = 0

    def run(self) -> Salvaged | None:
        """Read to the damage, and on behind it."""
        made = Salvaged(None)
        machine, damage = self._read(0, None, None)
        while damage is not None:
            target = _open_dict(machine.runs)
            if target is None:
                return None
            runs, key = target
            begin = damage
            name = None if key is None else _name(runs, key)
            resumed = self._go_on(machine, runs, key, begin)
            if resumed is None:
                return None
            machine, damage, stop = resumed
            made.places.append((begin, stop))
            if name is None:
                made.unnamed.append((begin, stop))
            else:
                made.keys.append(name)
        made.root = machine.stack.pop() if machine.stack else None
        return None if machine.runs != [[]] else made

    def run_to_damage(self) -> Salvaged | None:
        """Read to the damage alone."""
        machine, damage = self._read(0, None, None)
        if damage is None:
            return None
        target = _open_dict(machine.runs)
        names = [_name(target[0], target[1])] if target is not None and target[1] is not None else []
        rest = [(damage, len(self.data))]
        unnamed = [] if len(machine.runs) == 1 and len(machine.stack) == 1 else rest  # nothing lacks but the STOP
        return Salvaged(fold(machine.runs, self.pickles.path), rest, names, unnamed)

    def _read(self, start: int, runs: list[list[Any]] | None, memo: Memo | None) -> tuple[PickleMachine, int | None]:
        """The machine that read from a place on, and where it came to damage; None where it came to the end."""
        strings, end = _long_strings(self.data, start)
        self.read += end - start
        unkept = _first_unkept(strings)
        data: Bytes = self.data if unkept is None else _Walled(self.data, unkept[1])
        machine = self.pickles.machine(data, start, Bounds(self.pickles.path, len(self.data)))
        if runs is not None and memo is not None:
            machine.resume(runs, memo)
        try:
            root = machine.load()
        except HostileError:
            raise
        except UnreadableError:
            # Bytes that are missing in front of where the opcodes went wrong may be those of the last long string.
            before = [string.start for string in strings if string.start < machine.position]
            return machine, unkept[0] if unkept is not None else max(before, default=machine.position)
        finally:
            self.pickles.note(machine)
        machine.push(root)
        return machine, None

    def _go_on(
        self, machine: PickleMachine, runs: list[list[Any]], key: str | None, damage: int
    ) -> tuple[PickleMachine, int | None, int] | None:
        """The machine that goes on behind the damage, where it comes to damage again, and where it began."""
        depth, count, target = len(runs), len(runs[-1]), _filled(runs)
        known = {*target, *(item for item in runs[-1] if isinstance(item, str))}
        for start, memo in keys_behind(self.data, damage + 1, machine, key):
            self.trials -= 1
            if self.trials < 0 or self.read > PASSES * len(self.data):
                break
            tried, further = self._read(start, [[*run] for run in runs], memo)
            new = [value for key, value in target.items() if key not in known]
            if further is None or _is_grown(tried.runs, depth, count, new):
                return tried, further, start
        return None


def _open_dict(runs: list[list[Any]]) -> tuple[list[list[Any]], str | None] | None:
    """The stack down to the innermost dict that is being filled, with the whole items for it, and the key whose value
    was under way; None where there is none.
    """
    for depth in range(len(runs) - 1, -1, -1):
        run = runs[depth]
        if depth and runs[depth - 1] and isinstance(runs[depth - 1][-1], dict):
            place = 0
            while place + 1 < len(run) and isinstance(run[place], str) and is_whole(run[place + 1]):
                if place + 2 < len(run) and not isinstance(run[place + 2], str):
                    break
                place += 2
            key = run[place] if place < len(run) and isinstance(run[place], str) else None
            return [*runs[:depth], run[:place]], key
        for place in range(len(run) - 1, -1, -1):
            if isinstance(run[place], dict) and (place + 1 == len(run) or isinstance(run[place + 1], str)):
                key = run[place + 1] if place + 1 < len(run) else None
                return [*runs[:depth], run[: place + 1]], key
    return None


def _name(runs: list[list[Any]], key: str) -> str:
    """The name of a tensor in the state_dict: that of its module in front, where the dict is one of a module."""
    path = [run[-2] if len(run) > 1 and isinstance(run[-2], str) else None for run in runs[:-1]]
    path = [run[-3] if name is None and len(run) > 2 else name for run, name in zip(runs, path, strict=False)]
    if path and path[-1] in ("_parameters", "_buffers"):
        return ".".join([*(str(name) for name in path[:-1] if name not in (None, "_modules")), key])
    return key


def _filled(runs: list[list[Any]]) -> dict[Any, Any]:
    """The dict that the last run of a stack is for: in front of its mark, or at its own end."""
    run = runs[-1]
    if run and isinstance(run[-1], dict) and len(run) % 2:
        return run[-1]
    outer = runs[-2] if len(runs) > 1 else []
    return outer[-1] if outer and isinstance(outer[-1], dict) else {}


def _is_grown(runs: list[list[Any]], depth: int, count: int, new: list[Any]) -> bool:
    """Whether a first item with a tensor came in behind the damage, into the dict or onto the stack."""
    if new or len(runs) < depth:
        return bool(new) and _holds_tensor(new[0])
    items = runs[depth - 1][count:]
    return len(items) > 1 and isinstance(items[0], str) and _holds_tensor(items[1])


def _holds_tensor(value: Any) -> bool:
    """Whether there is a tensor or an array in a value."""
    return any(True for _ in arrays_in(value)) or holds_tensors(value)
