"""The record of a tensor, which torch has written in the same thirty opcodes since 0.4, taken in one go.

Most of a checkpoint's pickle are such records, each behind its key, and to find one by a regular expression takes a
tenth of the time that its opcodes take one by one. What they would do is done in the same order: the same calls with
the same arguments, the same values in the memo and the same account. Whatever is not written just so is left to the
opcodes."""

from __future__ import annotations

import re
import struct
from functools import lru_cache
from itertools import compress
from sys import getsizeof
from typing import TYPE_CHECKING, Any

from ckptfix.bytes.limits import SLOT
from ckptfix.core.objects import Global

if TYPE_CHECKING:
    from ckptfix.reading.pickles.machine import PickleMachine
    from ckptfix.reading.pickles.memo import Memo

_GET = rb"(?:h.|j....)"
_PUT = rb"(q.|r....|)"
_NUMBER = rb"(?:K.|M..|J....)"
_SIZES = rb"(%(n)s\x85|%(n)s{2}\x86|%(n)s{3}\x87|\(%(n)s{4,8}t)" % {b"n": _NUMBER}
_NUMBERS = re.compile(_NUMBER, re.DOTALL)
_RECORD = re.compile(
    # ((“storage”, class, key, device, numel[, None]), offset, shape, strides, requires_grad, OrderedDict())
    rb"(?:%(put)s(%(get)s))?"
    rb"\(\((%(get)s)(%(get)s)X(.)\0\0\0(\d{1,20})%(put)s(%(get)s)(%(n)s)(N?)t%(put)sQ(%(n)s)"
    rb"%(sizes)s%(put)s%(sizes)s%(put)s([\x88\x89])(%(get)s)\)R%(put)st%(put)sR%(put)s"
    % {b"get": _GET, b"put": _PUT, b"n": _NUMBER, b"sizes": _SIZES},
    re.DOTALL,
)
"""One that begins with its two marks, behind the function that is called for it; where a key in front of it is taken
too, it begins behind the text of that. What nothing names again need not be kept under a number: torch keeps all, and
ckptfix what it must.
"""

_Named = list[Any]
"""What a record names of the memo: “storage”, the class, the device, what makes the hooks and what is called."""

_STORAGE, _HOOKS, _TENSOR = 11, 18, 20
"""The groups behind which calls are made: for the storage, for the dict of the hooks, and for the tensor."""

_TEXT = ord("X")
_UNSIGNED = struct.Struct("<I").unpack_from
_OPCODES, _OF_KEY = 30, 4
_FORMS = 64
"""Ways to name the same things that are remembered from one record to the next: a file has one for each dtype."""

_PUTS = [struct.Struct("<" + count * "xI") for count in range(9)]
_TUPLE, _ITEM = getsizeof(()) + 8, getsizeof((None,)) - getsizeof(())
_SIZE = 2 * _TUPLE + 11 * _ITEM + 4 * 8
"""What is counted for each record, beside its storage, hooks, shape, strides and the texts and numbers in it: tuples of
five and of six, and a place for each of four objects."""


def run_records(machine: PickleMachine) -> bool:
    """Take the record whose first mark the machine has just passed, and the keys and records that follow it.

    False where the opcodes of the first have to be run instead."""
    window = machine.window
    named: dict[bytes, _Named] = {}
    if not take_record(machine, _RECORD.match(window, machine.place - 1), named):
        return False
    while (place := machine.place) + 5 <= len(window) and window[place] == _TEXT:
        stop = place + 5 + _UNSIGNED(window, place + 1)[0]
        if not take_record(machine, _RECORD.match(window, stop), named, stop):
            break
    return True


def take_record(
    machine: PickleMachine, record: re.Match[bytes] | None, named: dict[bytes, _Named], stop: int = 0
) -> bool:
    """Take a record, and the key in front of it if that ends at ``stop``.

    ``named`` has what the records in front of it name: from one to the next the memo only grows.
    False, and nothing taken, where the opcodes have to be run instead."""
    if record is None:
        return False
    groups = record.groups(b"")
    p0, get, kind, cls, size, key, p1, device, numel, none, p2, at, shape, p3, strides, p4, grad, hooks, p5, p6, p7 = (
        groups
    )
    memo, stack, bounds = machine.memo, machine.stack, machine.bounds
    row, begin = memo.row, memo.following
    puts = (p0, p1, p2, p3, p4, p5, p6, p7)
    joined, kept = b"".join(puts), len(puts) - puts.count(b"")
    if len(joined) == _PUTS[kept].size:  # each of them a far one
        numbers = _PUTS[kept].unpack(joined)
    else:
        numbers = tuple(int.from_bytes(put[1:], "little") for put in puts if put)
    if begin < 0 or size[0] != len(key) or numbers != tuple(range(begin, begin + kept)):
        return False
    if bool(get) != bool(stop) or not (stop or stack):
        return False
    gets = kind + cls + device + hooks + get
    known = named.get(gets)
    if known is None:
        if (known := _named(memo, gets)) is None:
            return False
        if len(named) < _FORMS:
            named[gets] = known
    word, storage_class, tag, hooked, *called = known
    function = called[0] if called else stack[-1]
    if type(function) is not Global or type(hooked) is not Global:
        return False
    waiting = space = 0
    if stop:
        window, place = machine.window, machine.place
        machine.place = stop
        text = str(window[place + 5 : stop], "utf-8", "surrogatepass")
        stack += (text, function)
        if p0:
            row.append(text)
        waiting, space = machine.below + len(stack), getsizeof(text) + 8
    name, (count, more), (start, some) = str(key, "ascii"), _number(numel), _number(at)
    (lengths, long), (steps, wide) = _numbers(shape), _numbers(strides)
    pid = (word, storage_class, name, tag, count, None) if none else (word, storage_class, name, tag, count)
    machine.place = record.end(_STORAGE) + 1
    storage = machine.persistent_load(pid)
    machine.place = record.end(_HOOKS) + 2
    made = machine.call(hooked, ())
    machine.place = record.end(_TENSOR) + 1
    args = (storage, start, tuple(lengths), tuple(steps), grad == b"\x88", made)
    stack[-1] = tensor = machine.call(function, args)
    machine.place = record.end()
    values = (name, pid, args[2], args[3], made, args, tensor)
    row += values if all(puts) else compress(values, puts[1:])
    bounds.step(_OPCODES + _OF_KEY, waiting)
    space += more + some + long + wide + getsizeof(name) + getsizeof(storage) + getsizeof(made) + getsizeof(tensor)
    bounds.left -= _SIZE + space + SLOT * kept + (_ITEM if none else 0)
    if bounds.left < 0:
        bounds.spend(0)
    return True


@lru_cache(1 << 12)
def _number(raw: bytes) -> tuple[int, int]:
    """The number of an opcode, and the bytes that it takes; those below 256 are there already."""
    number = int.from_bytes(raw[1:], "little", signed=raw[:1] == b"J")
    return number, 0 if raw[:1] == b"K" else getsizeof(number) + 8


@lru_cache(1 << 12)
def _numbers(raw: bytes) -> tuple[list[int], int]:
    """The sizes of a shape or of strides, and the bytes that they take in their tuple."""
    found = [_number(number) for number in _NUMBERS.findall(raw)]
    return [number for number, _ in found], sum(size for _, size in found) + _TUPLE + _ITEM * len(found)


def _named(memo: Memo, gets: bytes) -> _Named | None:
    """What the opcodes name of the memo; None where it has none of it in its row."""
    places = [int.from_bytes(get[1:], "little") - memo.first for get in re.findall(_GET, gets, re.DOTALL)]
    return [memo.row[place] for place in places] if 0 <= min(places) <= max(places) < len(memo.row) else None
