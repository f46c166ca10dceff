"""A pickle machine that runs nothing.

It executes the opcodes of a pickle as https://docs.python.org/3/library/pickletools.html describes them, with one
difference: a global never becomes a callable of Python. It becomes a ``Global``, a name, and calling one asks a fixed
table what inert value stands for the result (``inert``). What the table does not know becomes an
``Opaque`` object. All protocols from 0 to 5 are read, those of Python 2 with their byte strings as ``python2_text``
reads them.

Sizes in the stream are claims: nothing is allocated before the bytes are there, and whatever is made is counted
(``ckptfix.bytes.limits``).
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from sys import getsizeof
from typing import Any

from ckptfix.bytes.limits import Bounds
from ckptfix.core.objects import Global, Opaque
from ckptfix.errors import UnreadableError
from ckptfix.reading.pickles.common_opcodes import LONGEST
from ckptfix.reading.pickles.memo import Memo
from ckptfix.reading.pickles.opcodes import HANDLERS, STEPS, WEIGHTS_ONLY
from ckptfix.reading.pickles.stream import Bytes, PickleStream
from ckptfix.reading.pickles.unfinished import NoOpcodeError, PickleEndError

_STOP = ord(".")
_REFUSED = [code for code, handler in enumerate(HANDLERS) if handler is not None and bytes([code]) not in WEIGHTS_ONLY]
_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, struct.error, OverflowError, RecursionError)

_STRIDE = 1 << 14
"""Opcodes between two looks at the stack. One opcode puts one value on it."""

_MARK = 80
"""Bytes of a mark and of the list of what comes behind it, as long as they wait."""

_GLOBAL = 400
"""Bytes of the name of a class or function, beside its text."""


Call = Callable[[Global, tuple[Any, ...]], Any]
"""Gives the inert value that stands for calling a global with arguments."""


class PickleMachine(PickleStream):
    """Runs one pickle of ``data`` from ``position`` on; afterwards ``position`` is behind its STOP.

    ``globals`` holds every global that the pickle names, whether it calls it or not; ``called`` has those whose results
    it calls again (``functools.partial()``); ``unsupported`` the opcodes that ``weights_only=True`` refuses;
    ``is_unicode`` tells whether all strings of Python 2 are UTF-8, which torch.load takes them for, ``is_torn`` that a
    frame begins before the last one has ended. Raises
    ``UnreadableError`` where the stream is not a pickle or ends early, ``HostileError`` where it is built to exhaust
    the machine."""

    def __init__(
        self,
        data: Bytes,
        path: str,
        call: Call,
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
        self._marks: list[list[Any]] = []
        self.below = 0
        self.memo = Memo()
        self.frame_end, self.is_torn = 0, False
        self._seen = bytearray(256)

    @property
    def unsupported(self) -> set[bytes]:
        """The opcodes so far that ``weights_only=True`` refuses."""
        return {bytes([code]) for code in _REFUSED if self._seen[code]}

    @property
    def runs(self) -> list[list[Any]]:
        """The values on the stack, split at the marks."""
        return [*self._marks, self.stack]

    def resume(self, runs: list[list[Any]], memo: Memo) -> None:
        """Go on with what another machine had when it came to damage."""
        *self._marks, self.stack = runs
        self.below, self.memo = sum(map(len, self._marks)), memo

    def load(self) -> Any:
        """The inert value of the pickle."""
        seen = self._seen
        try:
            while True:
                self.bounds.step(_STRIDE, self.below + len(self.stack))
                for run in range(_STRIDE):
                    if self.place >= len(self.window):
                        self.refill()
                    place, window = self.place, self.window
                    self.place = place + 1
                    opcode = window[place]
                    if opcode == _STOP:
                        self.bounds.step(run + 1 - _STRIDE, 0)  # nested ones are short, and pay for what they ran
                        return self.stack.pop()
                    seen[opcode] = 1
                    handler = HANDLERS[opcode] if place + LONGEST <= len(window) else STEPS[opcode]
                    if handler is None:
                        raise NoOpcodeError(self.path, opcode, self.position - 1)
                    handler(self)
        except PickleEndError as end:
            end.runs = self.runs
            raise
        except _MALFORMED as error:
            raise UnreadableError(
                f"{self.path}: the pickle is malformed near offset {self.position} ({type(error).__name__}: {error}); "
                "fetch the file again"
            ) from error

    # Stack
    # -----------------------------------------------------------------------------------------------------------------

    def push(self, value: Any) -> None:
        """Put a value on the stack."""
        self.stack.append(value)

    def push_new(self, value: Any) -> None:
        """Put a value on the stack that was made for it."""
        self.stack.append(self.bounds.make(value))

    def pop(self) -> Any:
        """Take the top value off the stack."""
        return self.stack.pop()

    def mark(self) -> None:
        """Begin a new run of values."""
        self.bounds.spend(_MARK)
        self.below += len(self.stack)
        self._marks.append(self.stack)
        self.stack = []

    def pop_mark(self) -> list[Any]:
        """The values since the last mark."""
        values, self.stack = self.stack, self._marks.pop()
        self.below -= len(self.stack)
        self.bounds.step(0, 2 * len(values))  # they are about to lie in a container too
        self.bounds.spend(-_MARK)
        return values

    def drop(self) -> None:
        """POP: the top value, or the mark where nothing lies above it."""
        if self.stack:
            self.stack.pop()
        else:
            self.pop_mark()

    def remember(self, index: int) -> None:
        """Keep the top value under a number."""
        if taken := self.memo.keep(index, self.stack[-1]):
            self.bounds.spend(taken)

    def memoize(self) -> None:
        """Keep the top value under the next number."""
        self.bounds.spend(self.memo.keep(len(self.memo), self.stack[-1]))

    def recall(self, index: int) -> None:
        """Push the value that was kept under a number."""
        self.stack.append(self.memo.recall(index))

    # Objects
    # -----------------------------------------------------------------------------------------------------------------

    def push_global(self, module: Any, name: Any) -> None:
        """GLOBAL and STACK_GLOBAL: a name, whatever it says."""
        if not isinstance(module, str) or not isinstance(name, str):
            raise UnreadableError(
                f"{self.path}: a global of the pickle is named by something that is no string; it is damaged or hostile"
            )
        known = self.globals.get((module, name))
        if known is None:
            self.bounds.spend(_GLOBAL)
            known = self.globals[(module, name)] = Global(module, name)
        self.stack.append(known)

    def reduce(self) -> None:
        """REDUCE: what stands for calling the global with the arguments."""
        args = self.stack.pop()
        self.stack[-1] = self.instantiate(self.stack[-1], args)

    def instantiate(self, function: Any, args: Any, kwargs: Mapping[str, Any] | None = None) -> Any:
        """The inert value of ``function(*args, **kwargs)``."""
        self.bounds.hand(args)
        if not isinstance(kwargs, dict | None):
            raise ValueError("keyword arguments that are no dict")
        args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
        self.bounds.hand(*args)
        if not isinstance(function, Global):
            if hasattr(function, "build"):
                raise TypeError("a numpy array is called as a function")
            cls = (
                function.cls
                if isinstance(function, Opaque)
                else Global(type(function).__module__, type(function).__name__)
            )
            name = cls.name if cls.name.endswith("()") else f"{cls.name}()"
            if isinstance(function, Opaque):  # Python refuses to call plain data, which damaged pickles do
                self.called.add(f"{cls.module}.{name}")
            self.bounds.spend(_GLOBAL)
            return self.bounds.make(Opaque(Global(cls.module, name), (function, *args), kwargs or {}))
        if kwargs:
            return self.bounds.make(Opaque(function, args, kwargs))
        return self.bounds.make(self.call(function, args))

    def persist(self, pid: Any) -> None:
        """PERSID and BINPERSID: what stands for the storage or class that the file keeps outside of the pickle."""
        self.stack.append(self.bounds.make(self.persistent_load(pid)))

    def build(self) -> None:
        """BUILD: hand a state to the object below it."""
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, Opaque):
            target.state = state
        elif isinstance(target, OrderedDict) and isinstance(state, dict):
            # torch hangs `_metadata` on the state_dict this way.
            self.bounds.hand(state)
            attributes = target.__dict__
            self.bounds.fill(attributes, attributes.update, {str(key): value for key, value in state.items()})
        elif hasattr(target, "build"):
            target.build(state)

    def append_all(self, values: list[Any]) -> None:
        """APPEND, APPENDS, ADDITEMS: into the list, set or object on top of the stack."""
        target = self.stack[-1]
        if isinstance(target, list):
            self.bounds.fill(target, target.extend, values)
        elif isinstance(target, set):
            self.bounds.fill(target, target.update, [self.bounds.key(value, id(target)) for value in values])
        elif isinstance(target, Opaque):
            items = target.own_items()
            self.bounds.fill(items, items.extend, values)
        else:
            raise UnreadableError(
                f"{self.path}: the pickle appends to a {type(target).__name__}; it is damaged or hostile"
            )

    def set_all(self, values: list[Any]) -> None:
        """SETITEM, SETITEMS, DICT: pairs into the dict or object on top of the stack."""
        target = self.stack[-1]
        if isinstance(target, Opaque):
            target = target.own_pairs()
        if not isinstance(target, dict):
            raise UnreadableError(
                f"{self.path}: the pickle sets items of a {type(target).__name__}; it is damaged or hostile"
            )
        before, count = getsizeof(target), len(target)
        for key, value in zip(values[::2], values[1::2], strict=True):
            target[key if type(key) is str else self.bounds.key(key, id(target))] = value
        if len(target) != count:
            self.bounds.spend(getsizeof(target) - before)
