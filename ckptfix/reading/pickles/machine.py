"""A pickle interpreter that runs no code of the file.

It executes the opcodes of a pickle as https://docs.python.org/3/library/pickletools.html describes them, with one
difference: a global never becomes a Python callable. It becomes a ``Global``, a name, and a call of it is looked up in
a fixed table of inert values (``inert``). Calls that the table does not have become ``Opaque`` objects. All protocols
from 0 to 5 are read, including the byte strings of Python 2 (``python2_text``).

Sizes in the stream are claims: nothing is allocated before the bytes are known to exist, and every object is counted
(``ckptfix.bytes.limits``)."""

import codecs
import re
import struct
import warnings
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping
from sys import getsizeof
from typing import Any

from ckptfix.bytes.files import Buffer
from ckptfix.bytes.limits import SLOT, Bounds
from ckptfix.core.objects import Global, Opaque
from ckptfix.errors import UnreadableError, damaged
from ckptfix.reading.pickles.payload import wrapped_call
from ckptfix.reading.pickles.stream import (
    MalformedError,
    NoOpcodeError,
    PickleStream,
    UnknownError,
    Utf8Text,
    python2_text,
)

_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, struct.error, OverflowError, RecursionError)
_STRIDE = 1 << 14  # opcodes between two checks of the limits; an opcode pushes at most one value
_LONGEST = 5  # bytes of the longest opcode that is handled inline, with its argument
_MARK = 80  # bytes of a mark and of the list of the values after it
_DICT = getsizeof({}) + 8  # bytes of an empty dict and of its place on the stack
_GLOBAL = 400  # bytes of a global besides its text

# Digits of a number in text. Python's own limit is a little higher, but its message is about the interpreter.
_NUMBER_DIGITS = 4000
FAR = 120  # bytes of an entry of the memo outside the row

# The memo numbers that GET and LONG_BINGET may ask for, wherever their opcodes may be in a pickle; BINGET asks for any
# of the first 256.
_ASKED = re.compile(rb"j(?=(....))|g(?=(\d{1,9}))", re.DOTALL)
_RARELY = 16  # in an honest pickle, at most one of this many bytes looks like such an opcode
_UNASKED = object()
Caller = Callable[..., Any]  # returns the inert value of a call: of a Global, arguments and keywords


class Memo:
    """The memo of a pickle: values by number, stored by PUT and MEMOIZE and recalled by GET.

    Python's picklers count from 0 (in Python 2, from 1) without gaps, so the values fit in a list (``row``), which
    takes a tenth of a dict's memory. Any other numbers, of crafted pickles, go into a dict (``far``)."""

    __slots__ = ("far", "first", "row")

    def __init__(self) -> None:
        self.first = 0
        self.row: list[Any] = []
        self.far: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.row) + len(self.far)

    @property
    def following(self) -> int:
        """The number that a value at the end of the row would get; -1 if the row cannot grow."""
        return self.first + len(self.row) if self.row and not self.far else -1

    def keep(self, index: int, value: Any) -> int:
        """Store a value under a number, and return the bytes of memory that its entry takes."""
        row, far = self.row, self.far
        if not row and index == 1 and not far:
            self.first = 1
        place = index - self.first
        if place == len(row) and (not far or index not in far):
            row.append(value)
            return SLOT
        if 0 <= place < len(row):
            row[place] = value
            return 0
        count = len(far)
        far[index] = value
        return FAR * (len(far) - count)

    def recall(self, index: int) -> Any:
        """Return the value under a number. Raises ``LookupError`` if there is none."""
        place = index - self.first
        value = self.row[place] if 0 <= place < len(self.row) else self.far[index]
        if value is _UNASKED:
            raise LookupError(index)
        return value


class PickleMachine(PickleStream):
    """An interpreter of the pickle at ``position`` of ``data``. After ``load``, ``position`` is after its STOP.

    ``globals`` are all globals that the pickle names, called or not; ``called`` are those whose results it calls again
    (``functools.partial()``); ``unsupported`` are the opcodes that ``weights_only=True`` refuses; ``at`` is the offset
    of the opcode that failed; ``is_torn`` is whether a frame ends inside an opcode, in another frame or after the STOP;
    ``is_unicode`` is whether all strings of Python 2 are UTF-8, as torch.load assumes. Raises ``UnreadableError`` if
    the stream is not a pickle or ends early, ``HostileError`` if it is built to exhaust memory or time."""

    def __init__(
        self,
        data: Buffer,
        path: str,
        call: Caller,
        persistent_load: Callable[[Any], Any],
        position: int = 0,
        bounds: Bounds | None = None,
    ) -> None:
        super().__init__(data, path, position)
        self.call, self.persistent_load = call, persistent_load
        self.bounds = bounds or Bounds(path, len(data))
        self.globals: dict[tuple[str, str], Global] = {}
        self.called: set[str] = set()
        self.protocol, self.is_unicode = 0, True
        self.stack: list[Any] = []
        self.memo = Memo()
        self._asked: Container[int] = range(1 << 32)
        self._marks: list[list[Any]] = []
        self._below = 0
        self._frame_end, self.is_torn = 0, False
        self._seen = bytearray(256)
        self.at = position

    @property
    def unsupported(self) -> set[bytes]:
        """The opcodes so far that ``weights_only=True`` refuses."""
        return {bytes([code]) for code in _REFUSED if self._seen[code]}

    @property
    def runs(self) -> list[list[Any]]:
        """The values on the stack, split at the marks."""
        return [*self._marks, self.stack]

    @property
    def has_misfits(self) -> bool:
        """Whether a pickle that was read to its end has missing or extra bytes, so that no pickler wrote it."""
        return self.is_torn or self.runs != [[]]

    def load(self) -> Any:
        try:
            if not self._run():
                self._asked = self._asked_for()
                while not self._run():
                    pass
            return self.stack.pop()
        except UnknownError as error:
            raise UnreadableError(f"{self.path}: {error} is newer than this release of ckptfix; update it") from error
        except _MALFORMED as error:
            raise damaged(self.path, f"the pickle is malformed near offset {self.at} ({_reason(error)})") from error

    def _asked_for(self) -> Container[int]:
        """Return the memo numbers that the rest of the pickle may ask for; most stored values are never recalled.

        Keeping all of them takes 30 % more memory in a check of 100,000 keys."""
        data = self._data
        if not isinstance(data, bytes) or _RARELY * (data.count(b"j") + data.count(b"g")) > len(data):
            return self._asked
        found = _ASKED.finditer(data, self.position)
        numbers = (int.from_bytes(one[1], "little") if one[1] else int(one[2]) for one in found)
        # Letters of names that look like such opcodes give numbers that are too large.
        asked = {*range(256), *(number for number in numbers if number < len(data))}
        self.bounds.spend(getsizeof(asked))
        return asked

    def _run(self) -> bool:
        """Run a stride of opcodes, and return whether the pickle reached its STOP.

        The pickle of a checkpoint consists almost entirely of the dozen opcodes that are handled inline here: with a
        function call for each, ``check --no-values`` of 10,000 keys takes a third more time."""
        bounds, memo, asked, unsigned = self.bounds, self.memo, self._asked, _UNSIGNED
        persist = self.persistent_load
        bounds.step(_STRIDE, self._below + len(self.stack))
        row, first, following = memo.row, memo.first, memo.following
        window, begin, place, stack, spent = self.window, self._start, self.place, self.stack, 0
        end = self._frame_end - begin if self._frame_end > begin + place else len(window)
        last = min(end, len(window)) - _LONGEST
        try:
            for run in range(_STRIDE):
                opcode = window[place] if place <= last else 0
                # Two halves, each with the frequent opcodes first: most are found with two or three comparisons.
                if opcode > 0x60:
                    if opcode == 0x72 or opcode == 0x71:  # LONG_BINPUT, BINPUT
                        index = unsigned(window, place + 1)[0] if opcode == 0x72 else window[place + 1]
                        if index == following:
                            row.append(stack[-1] if index in asked else _UNASKED)
                            following += 1
                            spent += SLOT
                        else:
                            spent += memo.keep(index, stack[-1])
                            first, following = memo.first, memo.following
                        place += 5 if opcode == 0x72 else 2
                        continue
                    if opcode == 0x94 and first == 0 <= following:  # MEMOIZE: a `.metadata` takes a quarter less time
                        row.append(stack[-1] if following in asked else _UNASKED)
                        following += 1
                        spent += SLOT
                        place += 1
                        continue
                    if opcode == 0x68 or opcode == 0x6A:  # BINGET, LONG_BINGET
                        index = window[place + 1] if opcode == 0x68 else unsigned(window, place + 1)[0]
                        stack.append(row[index - first] if first <= index < following else memo.recall(index))
                        place += 2 if opcode == 0x68 else 5
                        continue
                    if opcode == 0x74:  # TUPLE
                        below = self._marks.pop()
                        made = tuple(stack)
                        stack = self.stack = below
                        self._below -= len(stack)
                        stack.append(made)
                        spent += getsizeof(made) + 8 - _MARK
                        place += 1
                        continue
                    if 0x85 <= opcode <= 0x87 and len(stack) >= opcode - 0x84:  # TUPLE1, TUPLE2, TUPLE3
                        made = tuple(stack[0x84 - opcode :])
                        stack[0x84 - opcode :] = (made,)
                        spent += getsizeof(made) + 8
                        place += 1
                        continue
                    if opcode == 0x89 or opcode == 0x88:  # NEWFALSE, NEWTRUE
                        stack.append(opcode == 0x88)
                        place += 1
                        continue
                    if opcode == 0x7D:  # EMPTY_DICT
                        stack.append({})
                        spent += _DICT
                        place += 1
                        continue
                    if opcode == 0x81:  # NEWOBJ
                        args = stack.pop()
                        stack[-1] = self.instantiate(stack[-1], args)
                        place += 1
                        continue
                elif opcode == 0x4B:  # BININT1
                    stack.append(window[place + 1])
                    place += 2
                    continue
                elif opcode == 0x28:  # MARK
                    spent += _MARK
                    self._below += len(stack)
                    self._marks.append(stack)
                    stack = self.stack = []
                    place += 1
                    continue
                elif opcode == 0x58:  # BINUNICODE
                    if (stop := place + 5 + unsigned(window, place + 1)[0]) <= last:
                        text = str(window[place + 5 : stop], "utf-8", "surrogatepass")
                        stack.append(text)
                        spent += getsizeof(text) + 8
                        place = stop
                        continue
                elif opcode == 0x52:  # REDUCE
                    args = stack.pop()
                    stack[-1] = self.instantiate(stack[-1], args)
                    place += 1
                    continue
                elif opcode == 0x29 or opcode == 0x4E:  # EMPTY_TUPLE, NONE
                    stack.append(() if opcode == 0x29 else None)
                    place += 1
                    continue
                elif opcode == 0x51:  # BINPERSID
                    stack[-1] = value = persist(stack[-1])
                    spent += getsizeof(value) + 8
                    place += 1
                    continue
                elif opcode == 0x4D or opcode == 0x4A:  # BININT2, BININT
                    number = _SHORT(window, place + 1)[0] if opcode == 0x4D else _SIGNED(window, place + 1)[0]
                    stack.append(number)
                    spent += getsizeof(number) + 8
                    place += 3 if opcode == 0x4D else 5
                    continue
                # All other opcodes, and those too close to the end of the bytes in memory.
                if place <= last:
                    code, self.place = opcode, place + 1
                else:
                    self.place = place
                    if place >= len(window):
                        self.refill()
                    code = self.byte()
                if code == _STOP:
                    self.is_torn = self.is_torn or self._frame_end > self.position
                    bounds.step(run + 1 - _STRIDE, 0)  # nested pickles are short, and pay only for the opcodes they ran
                    return True
                self._seen[code] = 1
                handler = _HANDLERS[code]
                if handler is None:
                    raise NoOpcodeError(
                        f"{self.path}: byte {bytes([code])!r} at offset {self.position - 1} is not a pickle opcode;"
                        " this is not a pickle, or a damaged one; fetch it again",
                        self.position - 1,
                    )
                handler(self)
                if begin + place < self._frame_end < self.position:
                    self.is_torn = True
                window, begin, place, stack = self.window, self._start, self.place, self.stack
                end = self._frame_end - begin if self._frame_end > begin + place else len(window)
                last, first, following = min(end, len(window)) - _LONGEST, memo.first, memo.following
        finally:
            self.at = begin + place
            bounds.spend(spent)
        self.place = place
        return False

    # Stack
    # -----------------------------------------------------------------------------------------------------------------

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def push_new(self, value: Any) -> None:
        """Push a new value, and count its memory."""
        self.stack.append(self.bounds.make(value))

    def pop(self) -> Any:
        return self.stack.pop()

    def mark(self) -> None:
        """Begin a new run of values."""
        self.bounds.spend(_MARK)
        self._below += len(self.stack)
        self._marks.append(self.stack)
        self.stack = []

    def pop_mark(self) -> list[Any]:
        """Pop and return the values since the last mark."""
        values, self.stack = self.stack, self._marks.pop()
        self._below -= len(self.stack)
        self.bounds.step(0, 2 * len(values))  # they are about to be copied into a container
        self.bounds.spend(-_MARK)
        return values

    def remember(self, index: int) -> None:
        """Store the top value in the memo under a number."""
        self.bounds.spend(self.memo.keep(index, self.stack[-1] if index in self._asked else _UNASKED))

    # Objects
    # -----------------------------------------------------------------------------------------------------------------

    def push_global(self, module: Any, name: Any) -> None:
        """Push a global by its name (GLOBAL, STACK_GLOBAL); nothing is looked up."""
        if not isinstance(module, str) or not isinstance(name, str):
            raise MalformedError("the name of a global is not a string")
        known = self.globals.get((module, name))
        if known is None:
            self.bounds.spend(_GLOBAL)
            known = self.globals[(module, name)] = Global(module, name)
        self.stack.append(known)

    def instantiate(self, function: Any, args: Any, kwargs: Mapping[str, Any] | None = None) -> Any:
        """Return the inert value of ``function(*args, **kwargs)``."""
        bounds = self.bounds
        if type(function) is Global and type(args) is tuple and kwargs is None:
            bounds.count_copies(args, *args)
            return bounds.make(self.call(function, args))
        if not isinstance(kwargs, dict | None):
            raise MalformedError("keyword arguments that are not a dict")
        bounds.count_copies(args)
        args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
        bounds.count_copies(*args)
        if type(function) is Global:
            return bounds.make(self.call(function, args, kwargs or {}))
        if hasattr(function, "build"):
            raise MalformedError("a numpy array is called as a function")
        is_opaque = isinstance(function, Opaque)
        if is_opaque and (held := wrapped_call(function)) is not None and type(held[0]) is Global:
            # What a functools.partial calls is judged like any other call.
            bounds.count_copies(*held)
            return self.instantiate(held[0], (*held[1], *args), {**held[2], **(kwargs or {})})
        cls = function.cls if is_opaque else Global(type(function).__module__, type(function).__name__)
        name = cls.name if cls.name.endswith("()") else f"{cls.name}()"
        if is_opaque:  # Python refuses to call plain data, which damaged pickles do
            self.called.add(f"{cls.module}.{name}")
        bounds.spend(_GLOBAL)
        return bounds.make(Opaque(Global(cls.module, name), (function, *args), kwargs or {}))

    def build(self) -> None:
        """Pop a state and set it on the object below (BUILD)."""
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, (Opaque, Global)) and (isinstance(target, Global) or _is_armed(state)):
            cls = target if isinstance(target, Global) else target.cls
            self.called.add(f"{cls}.__setstate__()")
        if isinstance(target, Opaque):
            target.state = state
        elif isinstance(target, OrderedDict) and isinstance(state, dict):
            # torch sets `_metadata` of the state_dict this way.
            self.bounds.count_copies(state)
            attributes = target.__dict__
            self.bounds.fill(attributes, attributes.update, {str(key): value for key, value in state.items()})
        elif hasattr(target, "build"):
            target.build(state)

    def append_all(self, values: list[Any]) -> None:
        """Add values to the list, set or object on top of the stack (APPEND, APPENDS, ADDITEMS)."""
        target = self.stack[-1]
        if isinstance(target, list):
            self.bounds.fill(target, target.extend, values)
        elif isinstance(target, set):
            self.bounds.fill(target, target.update, [self.bounds.key(value, id(target)) for value in values])
        elif isinstance(target, Opaque):
            items = target.own_items()
            self.bounds.fill(items, items.extend, values)
        else:
            raise MalformedError(f"it appends to a {type(target).__name__}")

    def set_all(self, values: list[Any]) -> None:
        """Add pairs to the dict or object on top of the stack (SETITEM, SETITEMS, DICT)."""
        target = self.stack[-1]
        if isinstance(target, Opaque):
            target = target.own_pairs()
        if not isinstance(target, dict):
            raise MalformedError(f"it sets items of a {type(target).__name__}")
        before, count = getsizeof(target), len(target)
        for key, value in zip(values[::2], values[1::2], strict=True):
            target[key if type(key) is str else self.bounds.key(key, id(target))] = value
        if len(target) != count:
            self.bounds.spend(getsizeof(target) - before)


_LOOKED_UP = frozenset({"__setstate__", "append", "extend", "add"})  # attributes of an object that the unpickler calls


def _is_armed(state: Any) -> bool:
    """Return whether a state replaces a method that the unpickler itself calls with a function."""
    parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    return any(
        isinstance(part, dict)
        and not _LOOKED_UP.isdisjoint(part)
        and any(isinstance(part.get(name), (Global, Opaque)) for name in _LOOKED_UP)
        for part in parts
    )


def _reason(error: Exception) -> str:
    """Return what is wrong with the pickle, without the words of Python's own error."""
    if isinstance(error, MalformedError):
        return str(error)
    if isinstance(error, LookupError):
        return "a value is missing"
    return "values are of the wrong type"


# Opcodes: https://docs.python.org/3/library/pickletools.html
# ---------------------------------------------------------------------------------------------------------------------

_STOP = ord(".")
_UNSIGNED, _SHORT, _SIGNED = (struct.Struct(form).unpack_from for form in ("<I", "<H", "<i"))


def _name(machine: PickleMachine) -> str:
    """Return the next line, which is a part of the name of a global."""
    raw = machine.line()
    if raw.endswith(b"\r"):
        raise UnreadableError(
            f"{machine.path}: the lines of its pickle end in CR LF; it was transferred in text mode: transfer it again "
            "in binary mode"
        )
    return str(python2_text(raw))


def _quoted(raw: bytes) -> bytes:
    raw = raw.strip()
    if len(raw) < 2 or raw[:1] != raw[-1:] or raw[:1] not in (b"'", b'"'):
        raise MalformedError("a string without quotes")
    if b"\\" not in raw:
        return raw[1:-1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about unknown escapes, which stay as they are
        return bytes(codecs.escape_decode(raw[1:-1])[0])


def _string(machine: PickleMachine, raw: bytes) -> None:
    text = python2_text(raw)
    machine.is_unicode = machine.is_unicode and (raw.isascii() or isinstance(text, Utf8Text))
    machine.push_new(text)


def _integer(raw: bytes) -> int | bool:
    if raw in (b"00", b"01"):
        return raw == b"01"
    digits = raw.rstrip(b"L")
    if len(digits) > _NUMBER_DIGITS:
        raise MalformedError(f"a number of {len(digits)} digits")
    return int(digits)


def _set_protocol(machine: PickleMachine) -> None:
    machine.protocol = machine.unsigned(1)
    if machine.protocol > 5:
        raise UnreadableError(
            f"{machine.path}: pickle protocol {machine.protocol} is not known; this is not a pickle, or a damaged one"
        )


def _frame(machine: PickleMachine) -> None:
    """Record how many bytes of opcodes follow, a hint for readers that read ahead. Frames end where opcodes do."""
    machine.is_torn = machine.is_torn or machine._frame_end >= machine.position
    size = machine.unsigned(8)
    machine._frame_end = machine.position + size


def _obj(machine: PickleMachine) -> Any:
    values = machine.pop_mark()
    return machine.instantiate(values[0], tuple(values[1:]))


def _inst(machine: PickleMachine) -> Any:
    module, name = _name(machine), _name(machine)
    args = tuple(machine.pop_mark())
    machine.push_global(module, name)
    return machine.instantiate(machine.pop(), args)


def _set_item(machine: PickleMachine) -> None:
    value, key = machine.pop(), machine.pop()
    machine.bounds.step(2, 0)  # it takes as long as three other opcodes
    machine.set_all([key, value])


def _dict(machine: PickleMachine) -> None:
    values = machine.pop_mark()
    machine.push_new({})
    machine.set_all(values)


def _tuple(machine: PickleMachine, count: int) -> tuple[Any, ...]:
    return tuple(reversed([machine.pop() for _ in range(count)]))


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


_OPCODES: dict[bytes, Callable[[PickleMachine], Any]] = {
    b"\x80": _set_protocol,
    b"\x95": _frame,
    b"(": lambda m: m.mark(),
    b"0": lambda m: m.pop() if m.stack else m.pop_mark(),
    b"1": lambda m: m.pop_mark(),
    b"2": lambda m: m.push(m.stack[-1]),
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
    b"\x91": lambda m: m.push_new(frozenset(m.bounds.keys(m.pop_mark()))),
    # Memo
    b"p": lambda m: m.remember(_integer(m.line())),
    b"q": lambda m: m.remember(m.byte()),
    b"r": lambda m: m.remember(m.unsigned(4)),
    b"\x94": lambda m: m.remember(len(m.memo)),
    b"g": lambda m: m.push(m.memo.recall(_integer(m.line()))),
    b"h": lambda m: m.push(m.memo.recall(m.byte())),
    b"j": lambda m: m.push(m.memo.recall(m.unsigned(4))),
    # Objects
    b"c": lambda m: m.push_global(_name(m), _name(m)),
    b"\x93": lambda m: m.push_global(name=m.pop(), module=m.pop()),
    b"R": lambda m: m.push(m.instantiate(args=m.pop(), function=m.pop())),
    b"b": lambda m: m.build(),
    b"i": lambda m: m.push(_inst(m)),
    b"o": lambda m: m.push(_obj(m)),
    b"\x81": lambda m: m.push(m.instantiate(args=m.pop(), function=m.pop())),
    b"\x92": lambda m: m.push(m.instantiate(kwargs=m.pop(), args=m.pop(), function=m.pop())),
    b"\x82": lambda m: m.push_global("copyreg", f"extension {m.unsigned(1)}"),
    b"\x83": lambda m: m.push_global("copyreg", f"extension {m.unsigned(2)}"),
    b"\x84": lambda m: m.push_global("copyreg", f"extension {m.unsigned(4)}"),
    b"P": lambda m: m.push_new(m.persistent_load(str(python2_text(m.line())))),
    b"Q": lambda m: m.push_new(m.persistent_load(m.pop())),
}
_HANDLERS = [_OPCODES.get(bytes([code])) for code in range(256)]

# The opcodes that `torch.load(weights_only=True)` knows besides STOP: those of protocol 2, and EMPTY_SET
# (`torch/_weights_only_unpickler.py`).
_WEIGHTS_ONLY = frozenset(b"c\x81Rbaesu(t\x85\x86\x87N\x88\x89)]}\x8fJKMGXU\x8aQhjqr\x80")
_REFUSED = [code for code, handler in enumerate(_HANDLERS) if handler is not None and code not in _WEIGHTS_ONLY]
