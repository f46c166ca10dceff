"""A pickle machine that runs nothing.

It executes the opcodes of a pickle as https://docs.python.org/3/library/pickletools.html describes them, with one
difference: a global never becomes a callable of Python. It becomes a ``Global``, a name, and calling one asks a fixed
table what inert value stands for the result (``ckptfix.formats.inert``). What the table does not know becomes an
``Opaque`` object. All protocols from 0 to 5 are read, those of Python 2 with their byte strings as latin-1, which keeps
every byte.

Sizes in the stream are claims: nothing is allocated before the bytes are there, and the memo is a dict.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ckptfix.errors import UnreadableError
from ckptfix.formats.bounds import Bounds


class Bytes(Protocol):
    """What the machine reads from: bytes or an mmap."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: slice, /) -> bytes: ...
    def find(self, sub: bytes, start: int, /) -> int: ...


@dataclass(eq=False, frozen=True)
class Global:
    """The name of a class or function in a pickle. It is never resolved."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False, repr=False)
class Opaque:
    """An object whose class stays closed: the class's name, the arguments it was made with, and what was put in
    afterwards.

    ``items`` came by append, ``pairs`` by item assignment, ``state`` by ``__setstate__``.
    """

    cls: Global
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    state: Any = None
    items: list[Any] = field(default_factory=list)
    pairs: dict[Any, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        # Never what it holds: a shared nested object would be written out 2^depth times.
        return f"<{self.cls}>"

    @property
    def attributes(self) -> dict[str, Any]:
        """The instance dict, empty where the state is something else. A slots state ``(dict, slots)`` is merged."""
        if isinstance(self.state, dict):
            return self.state
        if isinstance(self.state, tuple) and len(self.state) == 2:
            return {str(k): v for part in self.state if isinstance(part, dict) for k, v in part.items()}
        return {}


class StandIn(Protocol):
    """An inert value that takes a state by the BUILD opcode."""

    def build(self, state: Any) -> None: ...


Call = Callable[[Global, tuple[Any, ...]], Any]
"""Gives the inert value that stands for calling a global with arguments."""


class PickleMachine:
    """Runs one pickle of ``data`` from ``position`` on; afterwards ``position`` is behind its STOP.

    ``globals`` holds every global that the pickle names, whether it calls it or not. Raises ``UnreadableError`` where
    the stream is not a pickle or ends early, ``HostileError`` where it is built to exhaust the machine."""

    def __init__(
        self,
        data: Bytes,
        path: str,
        call: Call,
        persistent_load: Callable[[Any], Any],
        position: int = 0,
    ) -> None:
        self.data, self.path, self.position = data, path, position
        self.call, self.persistent_load = call, persistent_load
        self.globals: dict[tuple[str, str], Global] = {}
        self.protocol = 0
        self.bounds = Bounds(path, len(data))
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def load(self) -> Any:
        """The inert value of the pickle."""
        data, size, table = self.data, len(self.data), _OPCODES
        try:
            while True:
                position = self.position
                if position >= size:
                    raise UnreadableError(
                        f"{self.path}: the pickle ends before its STOP; the file is cut short: fetch it again"
                    )
                self.position = position + 1
                opcode = data[position : position + 1]
                if opcode == b".":
                    return self._stack.pop()
                handler = table.get(opcode)
                if handler is None:
                    raise UnreadableError(
                        f"{self.path}: byte {opcode!r} at offset {position} is no pickle opcode; this is no pickle or "
                        "a damaged one"
                    )
                handler(self)
        except (
            IndexError,
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            struct.error,
            OverflowError,
            RecursionError,
        ) as error:
            raise UnreadableError(
                f"{self.path}: the pickle is malformed near offset {self.position} ({type(error).__name__}: {error}); "
                "fetch the file again"
            ) from error

    # Reading
    # -----------------------------------------------------------------------------------------------------------------

    def take(self, count: int) -> bytes:
        """The next ``count`` bytes of the stream."""
        start = self.position
        if count < 0 or count > len(self.data) - start:
            raise UnreadableError(
                f"{self.path}: {count} bytes are claimed at offset {start}, {len(self.data) - start} are there; the "
                "file is cut short"
                " or damaged: fetch it again"
            )
        self.position = start + count
        return self.data[start : start + count]

    def unsigned(self, width: int) -> int:
        """The next little-endian unsigned integer of ``width`` bytes."""
        return int.from_bytes(self.take(width), "little")

    def line(self) -> bytes:
        """The bytes up to the next newline."""
        end = self.data.find(b"\n", self.position)
        if end < 0:
            raise UnreadableError(
                f"{self.path}: a line of the pickle does not end; the file is cut short: fetch it again"
            )
        text = self.data[self.position : end]
        self.position = end + 1
        return text

    # Stack ------------------------------------------------------------------------------------------------------------
    # -------

    def push(self, value: Any) -> None:
        """Put a value on the stack."""
        self._stack.append(value)

    def push_new(self, value: Any) -> None:
        """Put a new container on the stack."""
        self._stack.append(self.bounds.make(value))

    def pop(self) -> Any:
        """Take the top value off the stack."""
        return self._stack.pop()

    def mark(self) -> None:
        """Begin a new run of values."""
        self._marks.append(self._stack)
        self._stack = self.bounds.make([])

    def pop_mark(self) -> list[Any]:
        """The values since the last mark."""
        values, self._stack = self._stack, self._marks.pop()
        return values

    def drop(self) -> None:
        """POP: the top value, or the mark where nothing lies above it."""
        if self._stack:
            self._stack.pop()
        else:
            self.pop_mark()

    def remember(self, index: int) -> None:
        """Keep the top value under a number."""
        self._memo[index] = self._stack[-1]

    def memoize(self) -> None:
        """Keep the top value under the next number."""
        self._memo[len(self._memo)] = self._stack[-1]

    def recall(self, index: int) -> None:
        """Push the value that was kept under a number."""
        self._stack.append(self._memo[index])

    # Objects
    # -----------------------------------------------------------------------------------------------------------------

    def push_global(self, module: Any, name: Any) -> None:
        """GLOBAL and STACK_GLOBAL: a name, whatever it says."""
        if not isinstance(module, str) or not isinstance(name, str):
            raise UnreadableError(
                f"{self.path}: a global of the pickle is named by something that is no string; it is damaged or hostile"
            )
        self._stack.append(self.globals.setdefault((module, name), Global(module, name)))

    def reduce(self) -> None:
        """REDUCE: what stands for calling the global with the arguments."""
        args = self._stack.pop()
        self._stack[-1] = self.instantiate(self._stack[-1], args)

    def instantiate(self, function: Any, args: Any, kwargs: Mapping[str, Any] | None = None) -> Any:
        """The inert value of ``function(*args, **kwargs)``."""
        self.bounds.hand(args)
        args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
        self.bounds.hand(*args)
        if not isinstance(function, Global):
            cls = (
                function.cls
                if isinstance(function, Opaque)
                else Global(type(function).__module__, type(function).__name__)
            )
            name = cls.name if cls.name.endswith("()") else f"{cls.name}()"
            return self.bounds.make(Opaque(Global(cls.module, name), (function, *args), kwargs or {}))
        if kwargs:
            return self.bounds.make(Opaque(function, args, kwargs))
        return self.bounds.make(self.call(function, args))

    def build(self) -> None:
        """BUILD: hand a state to the object below it."""
        state = self._stack.pop()
        target = self._stack[-1]
        if isinstance(target, Opaque):
            target.state = state
        elif isinstance(target, OrderedDict) and isinstance(state, dict):
            # torch hangs `_metadata` on the state_dict this way.
            self.bounds.hand(state)
            target.__dict__.update({str(key): value for key, value in state.items()})
        elif hasattr(target, "build"):
            target.build(state)

    def append_all(self, values: list[Any]) -> None:
        """APPEND, APPENDS, ADDITEMS: into the list, set or object on top of the stack."""
        target = self._stack[-1]
        if isinstance(target, list):
            target.extend(values)
        elif isinstance(target, set):
            target.update([self.bounds.key(value, target) for value in values])
        elif isinstance(target, Opaque):
            target.items.extend(values)
        else:
            raise UnreadableError(
                f"{self.path}: the pickle appends to a {type(target).__name__}; it is damaged or hostile"
            )

    def set_all(self, values: list[Any]) -> None:
        """SETITEM, SETITEMS, DICT: pairs into the dict or object on top of the stack."""
        target = self._stack[-1]
        if isinstance(target, Opaque):
            target = target.pairs
        if not isinstance(target, dict):
            raise UnreadableError(
                f"{self.path}: the pickle sets items of a {type(target).__name__}; it is damaged or hostile"
            )
        for key, value in zip(values[::2], values[1::2], strict=True):
            target[key if type(key) is str else self.bounds.key(key, target)] = value


def _text(raw: bytes) -> str:
    # latin-1 keeps every byte of a Python 2 string, whatever it meant.
    return raw.decode("latin-1")


def _quoted(raw: bytes) -> str:
    raw = raw.strip()
    if len(raw) < 2 or raw[:1] != raw[-1:] or raw[:1] not in (b"'", b'"'):
        raise ValueError("a string without quotes")
    import codecs

    return _text(codecs.escape_decode(raw[1:-1])[0])


def _integer(raw: bytes) -> int | bool:
    if raw in (b"00", b"01"):
        return raw == b"01"
    return int(raw.rstrip(b"L"))


def _set_protocol(machine: PickleMachine) -> None:
    machine.protocol = machine.unsigned(1)
    if machine.protocol > 5:
        raise UnreadableError(
            f"{machine.path}: pickle protocol {machine.protocol} is not known; this is no pickle or a damaged one"
        )


def _obj(machine: PickleMachine) -> Any:
    values = machine.pop_mark()
    return machine.instantiate(values[0], tuple(values[1:]))


def _inst(machine: PickleMachine) -> Any:
    module, name = _text(machine.line()), _text(machine.line())
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
    return frozenset([machine.bounds.key(value, values) for value in values])


def _decode(width: int, decode: Callable[[bytes], Any]) -> Callable[[PickleMachine], None]:
    return lambda machine: machine.push(decode(machine.take(machine.unsigned(width))))


def _utf8(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


def _signed(raw: bytes) -> int:
    return int.from_bytes(raw, "little", signed=True)


def _buffer(machine: PickleMachine) -> None:
    raise UnreadableError(
        f"{machine.path}: the pickle keeps its buffers outside the file (protocol 5, out of band); they are not here"
    )


_OPCODES: dict[bytes, Callable[[PickleMachine], Any]] = {
    b"\x80": _set_protocol,
    b"\x95": lambda m: m.take(8),  # FRAME: a hint for readers that block
    b"(": PickleMachine.mark,
    b"0": PickleMachine.drop,
    b"1": lambda m: m.pop_mark(),
    b"2": _duplicate,
    # Plain values
    b"N": lambda m: m.push(None),
    b"\x88": lambda m: m.push(True),
    b"\x89": lambda m: m.push(False),
    b"K": lambda m: m.push(m.unsigned(1)),
    b"M": lambda m: m.push(m.unsigned(2)),
    b"J": lambda m: m.push(_signed(m.take(4))),
    b"I": lambda m: m.push(_integer(m.line())),
    b"L": lambda m: m.push(_integer(m.line())),
    b"\x8a": _decode(1, _signed),
    b"\x8b": _decode(4, _signed),
    b"F": lambda m: m.push(float(m.line())),
    b"G": lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
    b"S": lambda m: m.push(_quoted(m.line())),
    b"T": _decode(4, _text),
    b"U": _decode(1, _text),
    b"V": lambda m: m.push(m.line().decode("raw-unicode-escape")),
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
    b"t": lambda m: m.push(tuple(m.pop_mark())),
    b"]": lambda m: m.push_new([]),
    b"l": lambda m: m.push(m.pop_mark()),
    b"a": lambda m: m.append_all([m.pop()]),
    b"e": lambda m: m.append_all(m.pop_mark()),
    b"}": lambda m: m.push_new({}),
    b"d": _dict,
    b"s": _set_item,
    b"u": lambda m: m.set_all(m.pop_mark()),
    b"\x8f": lambda m: m.push_new(set()),
    b"\x90": lambda m: m.append_all(m.pop_mark()),
    b"\x91": lambda m: m.push(_frozen_set(m)),
    # Memo
    b"p": lambda m: m.remember(int(m.line())),
    b"q": lambda m: m.remember(m.unsigned(1)),
    b"r": lambda m: m.remember(m.unsigned(4)),
    b"\x94": PickleMachine.memoize,
    b"g": lambda m: m.recall(int(m.line())),
    b"h": lambda m: m.recall(m.unsigned(1)),
    b"j": lambda m: m.recall(m.unsigned(4)),
    # Objects
    b"c": lambda m: m.push_global(_text(m.line()), _text(m.line())),
    b"\x93": _stack_global,
    b"R": PickleMachine.reduce,
    b"b": PickleMachine.build,
    b"i": lambda m: m.push(_inst(m)),
    b"o": lambda m: m.push(_obj(m)),
    b"\x81": lambda m: m.push(_new_object(m, with_kwargs=False)),
    b"\x92": lambda m: m.push(_new_object(m, with_kwargs=True)),
    b"\x82": lambda m: m.push(Global("copyreg", f"extension {m.unsigned(1)}")),
    b"\x83": lambda m: m.push(Global("copyreg", f"extension {m.unsigned(2)}")),
    b"\x84": lambda m: m.push(Global("copyreg", f"extension {m.unsigned(4)}")),
    b"P": lambda m: m.push(m.persistent_load(_text(m.line()))),
    b"Q": lambda m: m.push(m.persistent_load(m.pop())),
}
