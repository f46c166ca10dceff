"""What each opcode of a pickle does on the machine: https://docs.python.org/3/library/pickletools.html."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ckptfix.errors import UnreadableError
from ckptfix.reading.pickles.common_opcodes import COMMON
from ckptfix.reading.pickles.python2_text import Utf8Text, python2_text

if TYPE_CHECKING:
    from ckptfix.reading.pickles.machine import PickleMachine


def _text(raw: bytes) -> str:
    return str(python2_text(raw))


def _name(machine: PickleMachine) -> str:
    """A part of the name of a global, which is a line."""
    raw = machine.line()
    if raw.endswith(b"\r"):
        raise UnreadableError(
            f"{machine.path}: the lines of its pickle end in CR LF; it was transferred in text mode: transfer it again "
            "in binary mode"
        )
    return _text(raw)


def _quoted(raw: bytes) -> bytes:
    raw = raw.strip()
    if len(raw) < 2 or raw[:1] != raw[-1:] or raw[:1] not in (b"'", b'"'):
        raise ValueError("a string without quotes")
    return _ESCAPE.sub(_unescaped, raw[1:-1])


def _string(machine: PickleMachine, raw: bytes) -> None:
    """A string of Python 2."""
    text = python2_text(raw)
    machine.is_unicode = machine.is_unicode and (raw.isascii() or isinstance(text, Utf8Text))
    machine.push_new(text)


_ESCAPE = re.compile(rb"\\(x[0-9A-Fa-f]{2}|[0-7]{1,3}|[^x]|)", re.DOTALL)
_ESCAPED = dict(
    zip(b"abfnrtv\\'\"\n", (b"\a", b"\b", b"\f", b"\n", b"\r", b"\t", b"\v", b"\\", b"'", b'"', b""), strict=True)
)


def _unescaped(escape: re.Match[bytes]) -> bytes:
    """The bytes that an escape in a string of Python 2 stands for; Python leaves one that it does not know as it is."""
    sign = escape[1]
    if not sign:
        raise ValueError("an escape that is cut short")
    if sign[:1] == b"x":
        return bytes([int(sign[1:], 16)])
    if sign[:1] in b"01234567":
        return bytes([int(sign, 8) & 0xFF])
    return _ESCAPED.get(sign[0], escape[0])


_LONGEST_NUMBER = 4000
"""Digits of a number in text; Python's own limit is not much higher, and its message speaks of the interpreter."""


def _integer(raw: bytes) -> int | bool:
    if raw in (b"00", b"01"):
        return raw == b"01"
    digits = raw.rstrip(b"L")
    if len(digits) > _LONGEST_NUMBER:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _set_protocol(machine: PickleMachine) -> None:
    machine.protocol = machine.unsigned(1)
    if machine.protocol > 5:
        raise UnreadableError(
            f"{machine.path}: pickle protocol {machine.protocol} is not known; this is no pickle or a damaged one"
        )


def _frame(machine: PickleMachine) -> None:
    """A hint for readers that block: how many bytes of opcodes follow. Frames end where opcodes do."""
    machine.is_torn = machine.is_torn or machine.frame_end >= machine.position
    size = machine.unsigned(8)
    machine.frame_end = machine.position + size


def _obj(machine: PickleMachine) -> Any:
    values = machine.pop_mark()
    return machine.instantiate(values[0], tuple(values[1:]))


def _inst(machine: PickleMachine) -> Any:
    module, name = _name(machine), _name(machine)
    args = tuple(machine.pop_mark())
    machine.push_global(module, name)
    return machine.instantiate(machine.pop(), args)


def _new_object(machine: PickleMachine, with_kwargs: bool) -> Any:
    kwargs = machine.pop() if with_kwargs else None
    args, cls = machine.pop(), machine.pop()
    return machine.instantiate(cls, args, kwargs)


def _stack_global(machine: PickleMachine) -> None:
    name, module = machine.pop(), machine.pop()
    machine.push_global(module, name)


def _set_item(machine: PickleMachine) -> None:
    value, key = machine.pop(), machine.pop()
    machine.bounds.step(2, 0)  # it takes as long as three others
    machine.set_all([key, value])


def _dict(machine: PickleMachine) -> None:
    values = machine.pop_mark()
    machine.push_new({})
    machine.set_all(values)


def _duplicate(machine: PickleMachine) -> None:
    value = machine.pop()
    machine.push(value)
    machine.push(value)


def _tuple(machine: PickleMachine, count: int) -> tuple[Any, ...]:
    values = [machine.pop() for _ in range(count)]
    return tuple(reversed(values))


def _frozen_set(machine: PickleMachine) -> frozenset[Any]:
    values = machine.pop_mark()
    return frozenset(machine.bounds.keys(values))


def _decode(width: int, decode: Callable[[bytes], Any]) -> Callable[[PickleMachine], None]:
    return lambda machine: machine.push_new(decode(machine.take(machine.unsigned(width))))


def _utf8(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


def _signed(raw: bytes) -> int:
    return int.from_bytes(raw, "little", signed=True)


def _buffer(machine: PickleMachine) -> None:
    raise UnreadableError(
        f"{machine.path}: the pickle keeps its buffers outside the file (protocol 5, out of band); they are not here"
    )


OPCODES: dict[bytes, Callable[[PickleMachine], Any]] = {
    b"\x80": _set_protocol,
    b"\x95": _frame,
    b"(": lambda m: m.mark(),
    b"0": lambda m: m.drop(),
    b"1": lambda m: m.pop_mark(),
    b"2": _duplicate,
    # Plain values
    b"N": lambda m: m.push(None),
    b"\x88": lambda m: m.push(True),
    b"\x89": lambda m: m.push(False),
    b"K": lambda m: m.push(m.byte()),
    b"M": lambda m: m.push_new(m.unsigned(2)),
    b"J": lambda m: m.push_new(_signed(m.take(4))),
    b"I": lambda m: m.push_new(_integer(m.line())),
    b"L": lambda m: m.push_new(_integer(m.line())),
    b"\x8a": _decode(1, _signed),
    b"\x8b": _decode(4, _signed),
    b"F": lambda m: m.push_new(float(m.line())),
    b"G": lambda m: m.push_new(struct.unpack(">d", m.take(8))[0]),
    b"S": lambda m: _string(m, _quoted(m.line())),
    b"T": lambda m: _string(m, m.take(m.unsigned(4))),
    b"U": lambda m: _string(m, m.take(m.byte())),
    b"V": lambda m: m.push_new(m.line().decode("raw-unicode-escape")),
    b"X": _decode(4, _utf8),
    b"\x8c": _decode(1, _utf8),
    b"\x8d": _decode(8, _utf8),
    b"B": _decode(4, bytes),
    b"C": _decode(1, bytes),
    b"\x8e": _decode(8, bytes),
    b"\x96": _decode(8, bytearray),
    b"\x97": _buffer,
    b"\x98": _buffer,
    # Containers
    b")": lambda m: m.push(()),
    b"\x85": lambda m: m.push_new(_tuple(m, 1)),
    b"\x86": lambda m: m.push_new(_tuple(m, 2)),
    b"\x87": lambda m: m.push_new(_tuple(m, 3)),
    b"t": lambda m: m.push_new(tuple(m.pop_mark())),
    b"]": lambda m: m.push_new([]),
    b"l": lambda m: m.push_new(m.pop_mark()),
    b"a": lambda m: m.append_all([m.pop()]),
    b"e": lambda m: m.append_all(m.pop_mark()),
    b"}": lambda m: m.push_new({}),
    b"d": _dict,
    b"s": _set_item,
    b"u": lambda m: m.set_all(m.pop_mark()),
    b"\x8f": lambda m: m.push_new(set()),
    b"\x90": lambda m: m.append_all(m.pop_mark()),
    b"\x91": lambda m: m.push_new(_frozen_set(m)),
    # Memo
    b"p": lambda m: m.remember(_integer(m.line())),
    b"q": lambda m: m.remember(m.byte()),
    b"r": lambda m: m.remember(m.unsigned(4)),
    b"\x94": lambda m: m.memoize(),
    b"g": lambda m: m.recall(_integer(m.line())),
    b"h": lambda m: m.recall(m.byte()),
    b"j": lambda m: m.recall(m.unsigned(4)),
    # Objects
    b"c": lambda m: m.push_global(_name(m), _name(m)),
    b"\x93": _stack_global,
    b"R": lambda m: m.reduce(),
    b"b": lambda m: m.build(),
    b"i": lambda m: m.push(_inst(m)),
    b"o": lambda m: m.push(_obj(m)),
    b"\x81": lambda m: m.push(_new_object(m, with_kwargs=False)),
    b"\x92": lambda m: m.push(_new_object(m, with_kwargs=True)),
    b"\x82": lambda m: m.push_global("copyreg", f"extension {m.unsigned(1)}"),
    b"\x83": lambda m: m.push_global("copyreg", f"extension {m.unsigned(2)}"),
    b"\x84": lambda m: m.push_global("copyreg", f"extension {m.unsigned(4)}"),
    b"P": lambda m: m.persist(_text(m.line())),
    b"Q": lambda m: m.persist(m.pop()),
}

STEPS = [OPCODES.get(bytes([code])) for code in range(256)]
"""The same by the opcode's number."""

HANDLERS = [COMMON.get(bytes([code]), STEPS[code]) for code in range(256)]
"""The same with the common ones in their short form."""

WEIGHTS_ONLY = frozenset(bytes([code]) for code in b"c\x81Rbaesu(t\x85\x86\x87N\x88\x89)]}\x8fJKMGXU\x8aQhjqr\x80")
"""The opcodes that ``torch.load(weights_only=True)`` knows beside STOP: those of protocol 2, and EMPTY_SET
(``torch/_weights_only_unpickler.py``).
"""
