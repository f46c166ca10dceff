"""The opcodes that the pickle of a checkpoint consists of nearly alone, each done in one go.

They do what their entries in ``opcodes`` do, which the tests hold them to: the same values, the same account of memory,
and the same errors, for which they turn to the machine's own methods. A checkpoint of some hundred tensors has
thousands of them, and a zoo has thousands of checkpoints.

They are used where an opcode and its number are at hand, so that none of them has to ask."""

from __future__ import annotations

import struct
from collections.abc import Callable
from sys import getsizeof
from typing import TYPE_CHECKING, Any

from ckptfix.bytes.limits import SLOT
from ckptfix.core.objects import Global
from ckptfix.reading.pickles.records import run_records

if TYPE_CHECKING:
    from ckptfix.reading.pickles.machine import PickleMachine

LONGEST = 5
"""Bytes of an opcode with its number."""

_UNSIGNED = struct.Struct("<I").unpack_from
_SHORT = struct.Struct("<H").unpack_from
_SIGNED = struct.Struct("<i").unpack_from
_MARK = ord("(")


def _mark(machine: PickleMachine) -> None:
    if machine.window[machine.place] != _MARK or not run_records(machine):
        machine.mark()


def _put(machine: PickleMachine) -> None:
    place = machine.place
    machine.place = place + 1
    _keep(machine, machine.window[place])


def _put_far(machine: PickleMachine) -> None:
    place = machine.place
    machine.place = place + 4
    _keep(machine, _UNSIGNED(machine.window, place)[0])


def _keep(machine: PickleMachine, index: int) -> None:
    row = machine.memo.row
    if row and index - machine.memo.first == len(row) and not machine.memo.far:
        row.append(machine.stack[-1])
        machine.bounds.left -= SLOT
        if machine.bounds.left < 0:
            machine.bounds.spend(0)
    else:
        machine.remember(index)


def _get(machine: PickleMachine) -> None:
    place = machine.place
    machine.place = place + 1
    machine.stack.append(machine.memo.recall(machine.window[place]))


def _get_far(machine: PickleMachine) -> None:
    place = machine.place
    machine.place = place + 4
    machine.stack.append(machine.memo.recall(_UNSIGNED(machine.window, place)[0]))


def _byte(machine: PickleMachine) -> None:
    place = machine.place
    machine.place = place + 1
    machine.stack.append(machine.window[place])


def _number(width: int, unpack: Callable[[bytes, int], tuple[int]]) -> Callable[[PickleMachine], None]:
    def number(machine: PickleMachine) -> None:
        place = machine.place
        machine.place = place + width
        _push_new(machine, unpack(machine.window, place)[0])

    return number


def _text(machine: PickleMachine) -> None:
    place = machine.place
    machine.place = place + 4
    _push_new(machine, str(machine.take(_UNSIGNED(machine.window, place)[0]), "utf-8", "surrogatepass"))


def _pair(machine: PickleMachine) -> None:
    stack = machine.stack
    second, first = stack.pop(), stack.pop()
    _push_new(machine, (first, second))


def _single(machine: PickleMachine) -> None:
    _push_new(machine, (machine.stack.pop(),))


def _push_new(machine: PickleMachine, value: object) -> None:
    bounds = machine.bounds
    bounds.left -= getsizeof(value) + 8
    if bounds.left < 0:
        bounds.spend(0)
    machine.stack.append(value)


def _reduce(machine: PickleMachine) -> None:
    stack = machine.stack
    args = stack.pop()
    function = stack[-1]
    if type(args) is not tuple or type(function) is not Global:
        stack[-1] = machine.instantiate(function, args)
        return
    bounds = machine.bounds
    bounds.hand(args, *args)
    stack[-1] = made = machine.call(function, args)
    bounds.left -= getsizeof(made) + 8
    if bounds.left < 0:
        bounds.spend(0)


COMMON: dict[bytes, Callable[[PickleMachine], Any]] = {
    b"(": _mark,
    b"K": _byte,
    b"M": _number(2, _SHORT),
    b"J": _number(4, _SIGNED),
    b"X": _text,
    b"\x85": _single,
    b"\x86": _pair,
    b"q": _put,
    b"r": _put_far,
    b"h": _get,
    b"j": _get_far,
    b"R": _reduce,
}
