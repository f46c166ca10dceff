"""The record of a tensor, which torch has written in the same thirty opcodes since 0.4, taken in one go.

Most of a checkpoint's pickle are such records, and to find one by a regular expression takes a tenth of the time that
its opcodes take one by one. What they would do is done in the same order: the same calls with the same arguments, the
same values in the memo and the same account. Whatever is not written just so is left to the opcodes."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import compress
from sys import getsizeof
from typing import TYPE_CHECKING

from ckptfix.formats.pickles.objects import Global
from ckptfix.formats.raw.bounds import SLOT

if TYPE_CHECKING:
    from ckptfix.formats.pickles.machine import PickleMachine

_GET = rb"(?:h.|j....)"
_PUT = rb"(q.|r....|)"
_NUMBER = rb"(?:K.|M..|J....)"
_SIZES = rb"(%(n)s\x85|%(n)s{2}\x86|%(n)s{3}\x87|\(%(n)s{4,8}t)" % {b"n": _NUMBER}
_NUMBERS = re.compile(_NUMBER, re.DOTALL)
_RECORD = re.compile(
    # ((“storage”, class, key, device, numel[, None]), offset, shape, strides, requires_grad, OrderedDict())
    rb"\(\((%(get)s)(%(get)s)X(.)\0\0\0(\d{1,20})%(put)s(%(get)s)(%(n)s)(N?)t%(put)sQ(%(n)s)"
    rb"%(sizes)s%(put)s%(sizes)s%(put)s([\x88\x89])(%(get)s)\)R%(put)st%(put)sR%(put)s"
    % {b"get": _GET, b"put": _PUT, b"n": _NUMBER, b"sizes": _SIZES},
    re.DOTALL,
)
"""One that begins with its two marks, behind the function that is called for it. What nothing names again need not be
kept under a number: torch keeps all, and ckptfix what it must.
"""

_STORAGE, _HOOKS, _TENSOR = 9, 16, 18
"""The groups behind which calls are made: for the storage, for the dict of the hooks, and for the tensor."""

_OPCODES = 30
_PUTS = [struct.Struct("<" + count * "xI") for count in range(8)]
_TUPLE, _ITEM = getsizeof(()) + 8, getsizeof((None,)) - getsizeof(())
_SIZE = 2 * _TUPLE + 11 * _ITEM + 4 * 8
"""What is counted for each record, beside its storage, hooks, shape, strides and the texts and numbers in it: tuples of
five and of six, and a place for each of four objects."""


def run_record(machine: PickleMachine) -> bool:
    """Take the record whose first mark the machine has just passed. False where its opcodes have to be run instead."""
    match = _RECORD.match(machine.window, machine.place - 1)
    if match is None:
        return False
    kind, cls, length, key, p1, device, numel, none, p2, offset, shape, p3, strides, p4, grad, hooks, *rest = (
        match.groups()
    )
    memo, stack, bounds = machine.memo, machine.stack, machine.bounds
    row, first, begin = memo.row, memo.first, memo.following
    puts = (p1, p2, p3, p4, *rest)
    joined, kept = b"".join(puts), len(puts) - puts.count(b"")
    if len(joined) == _PUTS[kept].size:  # each of them a far one
        numbers = _PUTS[kept].unpack(joined)
    else:
        numbers = tuple(int.from_bytes(put[1:], "little") for put in puts if put)
    if begin < 0 or length[0] != len(key) or numbers != tuple(range(begin, begin + kept)):
        return False
    lowest, highest, known = _places(kind + cls + device + hooks)
    if lowest < first or highest >= begin or not stack:
        return False
    kind, cls, device, hooks = [row[place - first] for place in known]
    function = stack[-1]
    if type(function) is not Global or type(hooks) is not Global:
        return False
    name, (count, more), (start, some) = str(key, "ascii"), _number(numel), _number(offset)
    (lengths, size), (steps, space) = _numbers(shape), _numbers(strides)
    pid = (kind, cls, name, device, count, None) if none else (kind, cls, name, device, count)
    machine.place = match.end(_STORAGE) + 1
    storage = machine.persistent_load(pid)
    machine.place = match.end(_HOOKS) + 2
    made = machine.call(hooks, ())
    machine.place = match.end(_TENSOR) + 1
    lengths, steps = tuple(lengths), tuple(steps)
    args = (storage, start, lengths, steps, grad == b"\x88", made)
    stack[-1] = tensor = machine.call(function, args)
    machine.place = match.end()
    row += compress((name, pid, lengths, steps, made, args, tensor), puts)
    bounds.step(_OPCODES, 0)
    space += more + some + size + getsizeof(name) + getsizeof(storage) + getsizeof(made) + getsizeof(tensor)
    bounds.spend(_SIZE + space + SLOT * kept + (_ITEM if none else 0))
    return True


@lru_cache(1 << 12)
def _number(raw: bytes) -> tuple[int, int]:
    """The number of an opcode, and the bytes that it takes; those below 256 are there already."""
    number = int.from_bytes(raw[1:], "little", signed=raw[:1] == b"J")
    return number, 0 if raw[:1] == b"K" else getsizeof(number) + 8


@lru_cache(1 << 12)
def _numbers(raw: bytes) -> tuple[Sequence[int], int]:
    """The sizes of a shape or of strides, and the bytes that they take in their tuple."""
    found = [_number(number) for number in _NUMBERS.findall(raw)]
    return [number for number, _ in found], sum(size for _, size in found) + _TUPLE + _ITEM * len(found)


@lru_cache(1 << 12)
def _places(raw: bytes) -> tuple[int, int, list[int]]:
    """Which places of the memo are named, the lowest and the highest first."""
    found = [int.from_bytes(get[1:], "little") for get in re.findall(_GET, raw, re.DOTALL)]
    return min(found), max(found), found
