"""Reads the pickle of a torch.save file, whose persistent ids refer to storages, for all torch formats."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from ckptfix.bytes.files import Buffer
from ckptfix.bytes.limits import STORAGE, Bounds, shown
from ckptfix.bytes.sources import SwappedBytes, WindowBytes
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.facts import Fact, Kind
from ckptfix.core.objects import Global, Opaque
from ckptfix.core.spec import Storage
from ckptfix.errors import HostileError, hostile
from ckptfix.reading.pickles.claims import TypedStorage, storage_dtype
from ckptfix.reading.pickles.inert import InertTable
from ckptfix.reading.pickles.machine import PickleMachine
from ckptfix.reading.pickles.payload import names_of
from ckptfix.reading.pickles.stream import MalformedError

# In pickle protocol 0, a persistent id is a line of text: the `str` of the tuple.
_TEXT_ID = (
    r"(?a)\('storage', <class '(?P<module>[\w.]{1,200})\.(?P<name>\w{1,100})'>, '(?P<key>[^'\\]{1,200})', "
    r"'(?P<device>[^'\\]{0,100})', (?P<numel>\d{1,19})"
    r"(?:, (?:None|\('(?P<view>[^'\\]{1,200})', (?P<offset>\d{1,19}), (?P<size>\d{1,19})\)))?\)"
)

# The same for the class of a module, which legacy files store with its source.
_TEXT_MODULE = r"(?a)\('module', <class '(?P<module>[\w.]{1,200})\.(?P<name>\w{1,100})'>, "

# The modules of storage classes that `weights_only` knows.
_STORAGE_MODULES = frozenset({"torch", "torch.cuda", "torch.storage"})
NESTING_LIMIT = 4  # largest nesting of torch.save files inside pickles; a plain `pickle.dump(state_dict)` needs one


# Reads a whole torch.save file inside a pickle from its bytes, the path of the outer file, the nesting depth and the
# limits of the outer file; returns its root object and the globals that it names.
ReadNested = Callable[[bytes, str, int, Bounds], tuple[Any, set[str]]]


class End(NamedTuple):
    """How a pickle ended: the values left on the stack, split at the marks; the offset of the last opcode; whether a
    frame is torn; whether bytes are missing or extra, so that no pickler wrote it; and whether the memo skips numbers,
    which some picklers do."""

    runs: list[list[Any]]
    at: int
    is_torn: bool
    has_misfits: bool
    has_gaps: bool


# The function that torch.package calls for a TorchScript module, with the number of its folder.
_SCRIPTED = "torch.jit._script.unpackage_script_module"


class StoragePickle:
    """A reader of the pickles of one file.

    ``find_storage(key, nbytes, device)`` returns the storage of a persistent id, and is called once for each key.
    ``read_nested`` reads torch.save files inside the pickle; without it they are refused. ``names`` collects all
    globals that the pickles name, and again with ``()`` appended those that they call to run code. ``is_plain`` is
    whether ``weights_only`` knows all opcodes, ``is_unicode`` whether all strings of Python 2 are UTF-8, and ``end``
    how the last pickle ended. With ``big_endian``, storages have big-endian elements. ``bounds`` limits all pickles of
    the file together."""

    def __init__(
        self,
        path: str,
        find_storage: Callable[[str, int, str], Storage],
        bounds: Bounds,
        read_nested: ReadNested | None = None,
        nesting: int = 0,
        big_endian: bool = False,
    ) -> None:
        self.path, self.big_endian = path, big_endian
        self.names: set[str] = set()
        self.table = InertTable(path, partial(_nested, path, read_nested, nesting, bounds, self.names))
        self.protocol = 0
        self.is_plain, self.is_unicode = True, True
        self.end = End([[]], 0, False, False, False)
        self.storages: dict[str, Storage] = {}
        self.dtypes: dict[str, str] = {}
        # Returns the weights of a TorchScript module in a package, by its number, and the globals that it names.
        self.read_script: Callable[[str], tuple[Any, set[str]]] | None = None
        self._classes: dict[Global, str] = {}
        self._objects: dict[int | str, Any] = {}
        self._find_storage = find_storage
        self._bounds = bounds

    def run(self, data: Buffer, position: int = 0) -> tuple[Any, int]:
        """Return the inert value of the pickle at ``position`` and the position after it."""
        machine = PickleMachine(data, self.path, self.table.call, self.persistent, position, self._bounds)
        try:
            value = machine.load()
        finally:
            self.names |= self.table.derived | names_of(machine.globals.values(), machine.called | self.table.called)
            self._bounds.names |= self.names
            self.protocol = max(self.protocol, machine.protocol)
            has_gaps = machine.protocol < 4 and bool(machine.memo.far)
            self.end = End(machine.runs, machine.at, machine.is_torn, machine.has_misfits, has_gaps)
        self.is_plain = self.is_plain and not machine.unsupported
        self.is_unicode = self.is_unicode and machine.is_unicode
        return value, machine.position

    def refuse_torn(self) -> None:
        """Raise ``HostileError`` if a frame of the last pickle is torn: after such a frame, CPython reads other opcodes
        than those in the file (https://github.com/python/cpython/issues/154848)."""
        if self.end.is_torn:
            raise HostileError(
                f"{self.path}: the frames and opcodes of its pickle end in different places, so programs read it "
                "differently; do not load this file"
            )

    def protocol_remarks(self, where: str) -> list[Fact]:
        """Return remarks on opcodes that ``weights_only`` does not know, and on text that is not UTF-8."""
        # Protocol 2 can have some too: a tuple that contains itself is written with POP.
        protocol = {0: "0 or 1", 2: "2 with rare opcodes"}.get(self.protocol, str(self.protocol))
        remarks = [] if self.is_plain else [Fact.of(Kind.PROTOCOL, where, protocol=protocol)]
        return remarks if self.is_unicode else [*remarks, Fact(Kind.PYTHON2_TEXT, where)]

    def persistent(self, pid: Any) -> Any:
        """Return the inert value of a persistent id: a storage, the class of a module (in legacy files, with its
        source), or an object of torch.package."""
        kind, cls, *rest = _id_of_text(pid) if isinstance(pid, str) else pid
        if kind == "module" and isinstance(cls, Global):
            return cls
        if kind == "reduce_package":
            return self._reduced(cls, *rest)
        if kind != "storage":
            raise MalformedError(f"persistent id of kind {shown(kind)}")
        key, device, numel, *view = rest
        if not isinstance(key, (str, int)) or not isinstance(device, (str, Global, Opaque)):
            raise MalformedError("a storage that is named by neither text nor number")
        if type(numel) is not int or numel < 0:
            raise MalformedError(f"a storage of {shown(numel)} elements")
        dtype = self._classes.get(cls) if type(cls) is Global else None
        if dtype is None:
            dtype = storage_dtype(cls)
            if cls.module in _STORAGE_MODULES:
                self._classes[cls] = dtype
            else:
                self.table.foreign[str(cls)] = None
        nbytes = numel * DTYPES[dtype].itemsize
        key = str(key)
        storage = self.storages.get(key)
        if storage is None:
            storage = self._find_storage(key, nbytes, str(device))
            self._bounds.spend(STORAGE)
            if self.big_endian:
                storage = self._swapped(storage, dtype)
            self.storages[key], self.dtypes[key] = storage, dtype
            self.table.stored_bytes += storage.nbytes
        elif nbytes > storage.nbytes:
            raise HostileError(
                f"{self.path}: storage {key} is declared with two sizes; the file is damaged or hostile: fetch it again"
            )
        return TypedStorage(storage, dtype) if not view or view[0] is None else self.view(key, dtype, view[0])

    def _reduced(self, *given: Any) -> Any:
        """Return the object of a call in torch.package, ``([number,] function, args)``, which the number identifies."""
        number = given[0] if len(given) == 3 else None
        function, args = given[-2:] if len(given) in (2, 3) else (None, None)
        if (
            not isinstance(function, Global)
            or not isinstance(args, tuple)
            or not isinstance(number, (int, str, type(None)))
        ):
            raise MalformedError("an object of a package that no function makes")
        if number is None or number not in self._objects:
            if str(function) == _SCRIPTED and self.read_script is not None and args and isinstance(args[0], str):
                made, names = self.read_script(args[0])
                self.names |= names
            else:
                made = self.table.call(function, args)
            if number is None:
                return made
            self._objects[number] = made
        return self._objects[number]

    def view(self, key: str, dtype: str, view: Any) -> TypedStorage:
        """Return a part of a storage, which torch 0.1 to 0.3 pickled as ``(view_key, offset, size)``; the offsets of
        tensors are relative to it."""
        view_key, offset, size = view
        if type(offset) is not int or type(size) is not int or not isinstance(view_key, (str, int)):
            raise MalformedError("a view of a storage that is placed by no number")
        name, itemsize = f"{key}:{view_key}", DTYPES[dtype].itemsize
        root = self.storages[key]
        if (offset + size) * itemsize > root.nbytes or offset < 0 or size < 0:
            raise HostileError(f"{self.path}: a view claims more than its storage {key} holds; fetch the file again")
        if name not in self.storages:
            source = WindowBytes(root.source, offset * itemsize, size * itemsize)
            view_of_root = Storage(name, source, root.device, parts=(root,))
            self.storages[name] = root if size * itemsize == root.nbytes else view_of_root
        return TypedStorage(self.storages[name], dtype)

    def _swapped(self, storage: Storage, dtype: str) -> Storage:
        """Return the storage with the bytes of its elements swapped. The two numbers of a complex element are swapped
        separately, and bytes of an untyped storage are not swapped, as in torch (``UntypedStorage.byteswap``)."""
        width = DTYPES[dtype].itemsize // (2 if DTYPES[dtype].is_complex else 1)
        if width == 1:
            return storage
        return Storage(storage.key, SwappedBytes(storage.source, width), storage.device, parts=(storage,))


def _nested(
    path: str, read_nested: ReadNested | None, nesting: int, bounds: Bounds, names: set[str], data: bytes
) -> Any:
    """Return the object of a file inside the pickle. As a method, it would be a cycle that keeps everything alive."""
    if read_nested is None or nesting >= NESTING_LIMIT:
        raise hostile(
            path,
            "a file of torch.save inside its pickle, "
            f"{f'{NESTING_LIMIT} levels deep' if nesting else 'where none belongs'}",
        )
    root, more = read_nested(data, path, nesting + 1, bounds)
    names.update(more)
    return root


def _id_of_text(text: str) -> tuple[Any, ...]:
    """Parse a persistent id that pickle protocol 0 wrote as text."""
    if module := re.match(_TEXT_MODULE, text):
        return "module", Global(module["module"], module["name"])
    found = re.fullmatch(_TEXT_ID, text)
    if found is None:
        raise MalformedError(f"persistent id {shown(text)}")
    view = (found["view"], int(found["offset"]), int(found["size"])) if found["view"] is not None else None
    return "storage", Global(found["module"], found["name"]), found["key"], found["device"], int(found["numel"]), view
