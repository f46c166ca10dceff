"""TorchScript archives, which torch.jit.save writes: their weights, without their code.

Since 1.3 ``data.pkl`` holds the modules as objects of classes ``__torch__…``, whose sources under ``code/`` list the
parameters (``__parameters__``) and, since 1.6, the buffers (``__buffers__``). From 1.3 to 1.5 a buffer is a tensor that
is not a parameter; torch's own loader of today drops those. Torch 1.0 to 1.2 wrote ``model.json`` instead
(``read_json``). Layout: https://github.com/pytorch/pytorch/blob/main/torch/csrc/jit/docs/serialization.md"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.bytes.sources import Content
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.facts import Fact, Kind
from ckptfix.core.objects import Global, Opaque, tensors_in
from ckptfix.core.spec import Storage, TensorSpec, contiguous_strides
from ckptfix.errors import HostileError, UnreadableError, damaged, hostile
from ckptfix.reading.archives.zip_recovery import names_in_row
from ckptfix.reading.pickles.claims import checked
from ckptfix.reading.pickles.payload import payload_remarks
from ckptfix.reading.torch_files.torch_zip import Archive, Reading, TorchArchive, open_archive
from ckptfix.reading.weights.document import Document
from ckptfix.reading.weights.loose_tensors import attribute_remarks
from ckptfix.reading.weights.quantized_modules import SCRIPT_OBJECT, is_script_object, packed_entries, quantized_version

NAME = "torchscript"
DEPTH_LIMIT = 200
VISIT_LIMIT = 200_000  # modules, each counted once for every name it has
PACKAGED = ".data/ts_code"
_SOURCE_LIMIT = 64 << 20
_HEAD = 1024
_PICKLED_CODE = b"\x80\x02c__torch__"
_CLASS = re.compile(r"^class ([^\s(:]+)\((\w+)\):\n", re.MULTILINE)
_LISTED = re.compile(r"^  (__parameters__|__buffers__) = (\[[^\]\n]*\])$", re.MULTILINE)
_QUOTED = re.compile(r"""["']([^"'\\]*)["']""")


def read(content: Content) -> Document:
    """Return the document of a TorchScript file: its weights as a state_dict. None of its code is compiled or run.

    The storages lie before the list of the tensors (``data.pkl``, ``model.json``), and the sources and constants after
    it, so that a file that is cut short after the list still has every weight, and one that is cut before it none
    that has a name."""
    archive = _archive(content, "data.pkl") or _archive(content, "model.json") or open_archive(content)
    if "data.pkl" in archive.members:
        document = read_script(archive)
    else:
        reading = Reading(archive)
        document = _document(reading, read_json(reading), [], set())
    document.damage += archive.damage(document.root)
    document.remarks += archive.doubts
    if archive.index.refusal:
        document.remarks.append(Fact.of(Kind.ODD_LAYOUT, oddity=archive.index.refusal))
    if archive.found is not None and any(remark.kind is Kind.GUESSED_BUFFERS for remark in document.remarks):
        document.damage.append(Fact(Kind.SOURCES_LOST))
    return document


def _archive(content: Content, main: str) -> Archive | None:
    """Return the archive with a member ``main``; None if it has none that is whole."""
    try:
        return open_archive(content, main)
    except UnreadableError:
        return None


def names_code(content: Content) -> bool:
    """Return whether the pickle of an archive without directory begins with a class of TorchScript.

    A file of torch.save begins with its pickle, which saves the search for it through all of the file."""
    if any(name.endswith("/data.pkl") for name in names_in_row(content)[:1]):
        return _PICKLED_CODE in content[:_HEAD]
    archive = _archive(content, "data.pkl")
    if archive is None:
        return _archive(content, "model.json") is not None
    try:
        return bytes(archive.source("data.pkl").read(0, len(_PICKLED_CODE))) == _PICKLED_CODE
    except UnreadableError:
        return False


def read_script(archive: TorchArchive) -> Document:
    """Return the document of the members of an archive of torch 1.3 or later.

    Raises ``UnreadableError`` if the module has no weights under names, as a frozen one has none."""
    reading = Reading(archive)
    pickles, constants = reading.pickle("data"), reading.pickle("constants")
    root, _ = pickles.run(reading.member("data.pkl"))
    walk = _Walk(archive.path, _classes(reading))
    entries, remarks = walk.gather(root)
    frozen: Any = ()
    if "constants.pkl" in reading.whole:
        frozen, _ = constants.run(reading.member("constants.pkl"))
    # Freezing turns the weights into constants of the code, which have numbers in the place of names.
    nameless = list(tensors_in(frozen))
    if not entries:
        frozen_into = f"was frozen: its {len(nameless)} weights are constants without names"
        reason = frozen_into if nameless else "has no weights under names"
        raise UnreadableError(f"{archive.path}: a TorchScript module that {reason}; use the file that it was made from")
    if nameless:
        unnamed, named = (sum(spec.numel for spec in specs) for specs in (nameless, tensors_in(entries)))
        kind = Kind.FROZEN if unnamed > named else Kind.CONSTANTS
        remarks.append(Fact.of(kind, tensors=len(nameless), unnamed=unnamed, named=named))
    # A class of TorchScript is never imported by Python, whatever it is called.
    names = {name for name in pickles.names | constants.names if not name.startswith("__torch__.")}
    return _document(reading, entries, remarks, names, walk.metadata if walk.is_quantized else None)


def packaged_weights(reading: Reading, number: str) -> tuple[OrderedDict[str, Any], set[str]]:
    """Return the state_dict of a module of TorchScript inside a package, and the globals that its pickle names.

    The modules of a package share its storages and one tree of sources."""
    folder = f"{PACKAGED}/{number}"
    pickles = reading.pickle(".data")
    root, _ = pickles.run(reading.member(f"{folder}/data.pkl"))
    entries, _ = _Walk(reading.archive.path, _classes(reading, f"{PACKAGED}/code/")).gather(root)
    return entries, {name for name in pickles.names if not name.startswith("__torch__.")}


def _document(
    reading: Reading,
    entries: OrderedDict[str, Any],
    remarks: list[Fact],
    names: set[str],
    metadata: Mapping[str, Any] | None = None,
) -> Document:
    remarks = [Fact(Kind.TORCHSCRIPT), *remarks, *payload_remarks(names), *reading.doubts]
    return Document(reading.archive.path, NAME, entries, metadata, names, remarks, reading.damage)


class ScriptClass(Struct, frozen=True):
    """What the source of a class says: whether it is a module, its parameters, and its buffers where it lists them."""

    is_module: bool
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] | None = None


def _classes(reading: Reading, folder: str = "code/") -> dict[str, ScriptClass]:
    """Return the classes in the sources of an archive, by their full names. The sources are searched as text."""
    classes: dict[str, ScriptClass] = {}
    left = _SOURCE_LIMIT
    for name in reading.whole:
        if not name.startswith(folder) or not name.endswith(".py"):
            continue
        try:
            source = reading.member(name, left).decode("utf-8", "replace")
        except UnreadableError:
            reading.faults.append(Fact(Kind.MEMBER_PACKED, name))
            continue
        left -= len(source)
        package = name.removeprefix(folder).removesuffix(".py").replace("/", ".")
        # A class is a match, its text, and a record; a line of a few bytes may begin one.
        reading.archive.bounds.spend(1000 * source.count("\nclass ") + len(source))
        heads = list(_CLASS.finditer(source))
        stops = [*(head.start() for head in heads[1:]), len(source)]
        for head, stop in zip(heads, stops, strict=False):
            listed: dict[str, tuple[str, ...]] = {}
            for kind, text in _LISTED.findall(source, head.end(), stop):
                listed.setdefault(kind, tuple(_QUOTED.findall(text)))
            parameters, buffers = listed.get("__parameters__", ()), listed.get("__buffers__")
            classes[f"{package}.{head[1]}"] = ScriptClass(head[2] == "Module", parameters, buffers)
    return classes


class _Walk(Struct):
    """One walk over the modules of an archive. A module with two names gives its tensors under both, as in torch."""

    path: str
    classes: Mapping[str, ScriptClass]
    entries: OrderedDict[str, Any] = field(default_factory=OrderedDict)
    left_out: dict[str, Any] = field(default_factory=dict)
    metadata: OrderedDict[str, Any] = field(default_factory=OrderedDict)
    is_quantized: bool = False
    guessed: bool = False
    visits: int = 0

    def gather(self, root: Any) -> tuple[OrderedDict[str, Any], list[Fact]]:
        """Return the state_dict below the root object, and what is to be said of it."""
        if isinstance(root, Opaque):
            self._module(root, "", 0)
        remarks = attribute_remarks(self.left_out, self.entries)
        if self.guessed:
            remarks.append(Fact(Kind.GUESSED_BUFFERS))
        return self.entries, remarks

    def _module(self, module: Opaque, prefix: str, depth: int) -> None:
        self.visits += 1
        if depth > DEPTH_LIMIT or self.visits > VISIT_LIMIT:
            raise HostileError(
                f"{self.path}: modules nested deeper than {DEPTH_LIMIT} or more than {VISIT_LIMIT}; do not use it"
            )
        named = len(self.entries)
        if not isinstance(module.state, (dict, type(None))):  # a module that packs itself
            self._quantized(module, {}, prefix)
            if len(self.entries) == named:
                self._outside(unpacked(module, self.path), prefix.removesuffix(".") or "_packed_params")
            return
        listed = self.classes.get(str(module.cls), ScriptClass(True))
        pairs: dict[Any, Any] = module.attributes
        attributes = {name: value for name, value in pairs.items() if isinstance(name, str)}
        tensors = {name: value for name, value in attributes.items() if isinstance(value, TensorSpec)}
        buffers = listed.buffers
        if buffers is None:
            buffers = tuple(name for name in tensors if name not in listed.parameters)
            self.guessed |= bool(buffers)
        names = [name for group in (listed.parameters, buffers) for name in group if name in tensors]
        for name in names:
            self.entries[prefix + name] = replace(tensors[name], requires_grad=False, is_parameter=False)
        self.left_out |= {prefix + name: tensors[name] for name in tensors if name not in names}
        children = {name: value for name, value in attributes.items() if self._is_module(value)}
        self._quantized(module, children, prefix)
        for name, child in attributes.items():
            if name in children:
                self._module(child, f"{prefix}{name}.", depth + 1)
            elif not isinstance(child, TensorSpec):
                self._outside(child, prefix + name)

    def _quantized(self, module: Opaque, children: Mapping[str, Any], prefix: str) -> None:
        """Add what torch's state_dict of a quantised layer has beside parameters and buffers, and the module's row.

        A state_dict with packed weights loads by the version in its row; other modules do without one."""
        module = python_module(module, self.path)
        version = quantized_version(module)
        self.is_quantized |= version is not None
        version = 2 if f"{prefix}num_batches_tracked" in self.entries else version or 1
        self.metadata[prefix.removesuffix(".")] = {"version": version}
        self.entries.update((prefix + name, value) for name, value in packed_entries(module, children))

    def _is_module(self, value: Any) -> bool:
        if not isinstance(value, Opaque):
            return False
        known = self.classes.get(str(value.cls))
        return known.is_module if known is not None else isinstance(value.state, dict)

    def _outside(self, value: Any, name: str) -> None:
        """Keep the packed weights of a quantised layer under its name, as torch does, and leave out other tensors that
        are neither parameter nor buffer."""
        if name in self.entries or next(tensors_in(value), None) is None:
            return
        if is_packed(value):
            value = unpacked(value, self.path)
        if is_script_object(value):
            self.entries[name] = value
        else:
            self.left_out[name] = value


_TYPES = {"FLOAT": "float32", "DOUBLE": "float64", "BYTE": "uint8"}
_TYPES |= {name: name.lower() for name in ("FLOAT16", "INT8", "UINT8", "INT16", "INT32", "INT64", "BOOL")}


def read_json(reading: Reading) -> OrderedDict[str, Any]:
    """Return the state_dict of the module tree. A storage that is gone is torn.

    Raises ``UnreadableError`` if the tree is damaged or has no tensors."""
    path = reading.archive.path
    try:
        model = reading.archive.bounds.parse_json(reading.member("model.json"))
        table = _table(reading, model.get("tensors", []))
        entries: OrderedDict[str, Any] = OrderedDict()
        _gather(path, model["mainModule"], "", 0, table, entries)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise damaged(path, f"the model.json of TorchScript is malformed ({type(error).__name__}: {error})") from error
    if not entries:
        raise UnreadableError(f"{path}: a TorchScript module without weights; is it the right file?")
    return entries


def _table(reading: Reading, records: list[Mapping[str, Any]]) -> list[TensorSpec]:
    """Return the tensors of the table. How large a storage is, its member says, else the tensors that lie in it."""
    specs = [_tensor(reading.archive.path, record) for record in records]
    sizes: dict[str, int] = {}
    for record, spec in zip(records, specs, strict=True):
        key = str(record["data"]["key"])
        sizes[key] = max(sizes.get(key, 0), spec.extent[1])
    storages: dict[str, Storage] = {}
    table = []
    for record, spec in zip(records, specs, strict=True):
        key = str(record["data"]["key"])
        if key not in storages:
            archive, device = reading.archive, str(record.get("device", "cpu"))
            if key in archive.members and archive.is_whole(key):
                storages[key] = Storage(key, archive.source(key), device, archive.crc32(key))
            else:
                present = key if key in archive.members else None
                storages[key] = reading.storage(key, present, key, sizes[key], device)
        table.append(checked(replace(spec, storage=storages[key]), reading.archive.path))
    return table


def _tensor(path: str, record: Mapping[str, Any]) -> TensorSpec:
    """Return the tensor of a record, without its storage."""
    name = record.get("dataType", "")
    if name not in _TYPES:
        raise UnreadableError(f"{path}: a tensor of type {name!s:.40}, which ckptfix does not know")
    shape = tuple(int(size) for size in record.get("dims", ()))
    strides = tuple(int(size) for size in record["strides"]) if "strides" in record else contiguous_strides(shape)
    if any(size < 0 for size in (*shape, *strides)):
        raise hostile(path, "a tensor has a negative size")
    return checked(TensorSpec(DTYPES[_TYPES[name]].name, shape, strides, offset=int(record.get("offset", 0))), path)


def _gather(
    path: str, module: Mapping[str, Any], prefix: str, depth: int, table: list[TensorSpec], entries: dict[str, Any]
) -> None:
    if depth > DEPTH_LIMIT:
        raise hostile(path, f"modules nested deeper than {DEPTH_LIMIT}")
    records = module.get("parameters", [])
    for record in sorted(records, key=lambda record: bool(record.get("isBuffer", False))):
        entries[prefix + record["name"]] = table[int(record.get("tensorId", 0))]
    for child in module.get("submodules", []):
        _gather(path, child, f"{prefix}{child['name']}.", depth + 1, table, entries)


# How the names of torch's own classes begin; a user's are named after their Python modules.
CLASSES = "__torch__.torch.classes."

PACKED_DEPTH_LIMIT = 100
_TYPED = "torch.jit._pickle."
_ROOT = re.compile(r"^__torch__\.|\.___torch_mangle_\d+")


def python_class(cls: Global) -> Global:
    """Return the Python class that was compiled: ``a.B`` where TorchScript says ``__torch__.a.___torch_mangle_3.B``."""
    return Global(_ROOT.sub("", cls.module), cls.name)


def python_module(module: Opaque, path: str) -> Opaque:
    """Return a module with the names that its pickle in Python has, for its class and the ScriptObjects in it."""
    state: Any = module.state
    if isinstance(state, dict):
        state = {name: unpacked(value, path) if is_packed(value) else value for name, value in state.items()}
    else:
        state = unpacked(state, path)
    return Opaque(python_class(module.cls), state=state)


def is_packed(value: Any) -> bool:
    """Return whether a value is an object of a class of torch itself, with its state in a tuple."""
    return isinstance(value, Opaque) and str(value.cls).startswith(CLASSES)


def unpacked(value: Any, path: str) -> Any:
    """Return plain tuples and lists, with every object in them as Python pickles it: a ``torch.ScriptObject`` whose
    state is ``(contents, class)``. What is in two places is unpacked once, and stays one object.

    Raises ``HostileError`` if they have no end."""
    done: dict[int, Any] = {}

    def plain(value: Any, depth: int) -> Any:
        if depth > PACKED_DEPTH_LIMIT:
            raise hostile(path, f"packed parameters nested deeper than {PACKED_DEPTH_LIMIT}")
        if isinstance(value, (list, tuple, Opaque)) and id(value) not in done:
            done[id(value)] = opened(value, depth + 1)
        return done.get(id(value), value)

    def opened(value: list[Any] | tuple[Any, ...] | Opaque, depth: int) -> Any:
        if not isinstance(value, Opaque):
            items = [plain(item, depth) for item in value]
            return items if isinstance(value, list) else tuple(items)
        if str(value.cls).startswith(_TYPED) and value.args:
            return plain(value.args[0], depth)
        if not isinstance(value.state, tuple):
            return value
        module, _, name = SCRIPT_OBJECT.rpartition(".")
        return Opaque(Global(module, name), state=(plain(value.state, depth), str(value.cls)))

    return plain(value, 0)
