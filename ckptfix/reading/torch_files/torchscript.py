"""TorchScript archives, which torch.jit.save writes: their weights, without their code.

Since torch 1.3, ``data.pkl`` has the modules as objects of classes ``__torch__…``, whose sources under ``code/`` list
the parameters (``__parameters__``) and, since 1.6, the buffers (``__buffers__``). From 1.3 to 1.5, all tensors that are
not parameters are buffers, which the current loader of torch drops. torch 1.0 to 1.2 wrote ``model.json`` instead
(``read_json``). Layout: https://github.com/pytorch/pytorch/blob/main/torch/csrc/jit/docs/serialization.md"""

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
from ckptfix.errors import UnreadableError, damaged, hostile
from ckptfix.reading.archives.zip_recovery import names_in_row
from ckptfix.reading.pickles.claims import checked
from ckptfix.reading.pickles.payload import payload_remarks
from ckptfix.reading.torch_files.torch_zip import Archive, Reading, TorchArchive, open_archive
from ckptfix.reading.weights.document import Document
from ckptfix.reading.weights.loose_tensors import loose_remarks
from ckptfix.reading.weights.modules import PARTS, is_module, module_state_dict
from ckptfix.reading.weights.quantized_modules import SCRIPT_OBJECT, quantized_version

NAME = "torchscript"
PACKAGED = ".data/ts_code"
_SOURCE_LIMIT = 64 << 20
_HEAD = 1024
_PICKLED_CODE = b"\x80\x02c__torch__"
_CLASS = re.compile(r"^class ([^\s(:]+)\((\w+)\):\n", re.MULTILINE)
_LISTED = re.compile(r"^  (__parameters__|__buffers__) = (\[[^\]\n]*\])$", re.MULTILINE)
_QUOTED = re.compile(r"""["']([^"'\\]*)["']""")


def read(content: Content) -> Document:
    """Return the document of a TorchScript file: its weights as a state_dict. None of its code is compiled or run.

    Storages come before the list of tensors (``data.pkl``, ``model.json``), and sources and constants after it. So a
    file that is truncated after the list still has all weights, and one truncated before it has no names for them."""
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
    """Return the archive if it has a complete member ``main``; None otherwise."""
    try:
        return open_archive(content, main)
    except UnreadableError:
        return None


def names_code(content: Content) -> bool:
    """Return whether the pickle of an archive without a directory begins with a class of TorchScript.

    A torch.save file begins with its pickle, which is tested first to avoid a search through the whole file."""
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
    """Return the document of a TorchScript archive of torch 1.3 or later.

    Raises ``UnreadableError`` if the module has no named weights, as after freezing."""
    reading = Reading(archive)
    pickles, constants = reading.pickle("data"), reading.pickle("constants")
    root, _ = pickles.run(reading.member("data.pkl"))
    entries, remarks = _Modules(archive.path, _classes(reading)).gather(root)
    frozen: Any = ()
    if "constants.pkl" in reading.whole:
        frozen, _ = constants.run(reading.member("constants.pkl"))
    # Freezing turns weights into constants of the code, which have numbers instead of names.
    nameless = list(tensors_in(frozen))
    if not entries:
        frozen_into = f"was frozen: its {len(nameless)} weights are constants without names"
        reason = frozen_into if nameless else "has no weights under names"
        raise UnreadableError(f"{archive.path}: a TorchScript module that {reason}; use the file that it was made from")
    if nameless:
        unnamed, named = (sum(spec.numel for spec in specs) for specs in (nameless, tensors_in(entries)))
        kind = Kind.FROZEN if unnamed > named else Kind.CONSTANTS
        remarks.append(Fact.of(kind, tensors=len(nameless), unnamed=unnamed, named=named))
    # Python never imports a class of TorchScript, whatever its name is.
    names = {name for name in pickles.names | constants.names if not name.startswith("__torch__.")}
    return _document(reading, entries, remarks, names)


def packaged_weights(reading: Reading, number: str) -> tuple[OrderedDict[str, Any], set[str]]:
    """Return the state_dict of a TorchScript module inside a package, and the globals that its pickle names.

    All modules of a package share its storages and sources."""
    folder = f"{PACKAGED}/{number}"
    pickles = reading.pickle(".data")
    root, _ = pickles.run(reading.member(f"{folder}/data.pkl"))
    entries, _ = _Modules(reading.archive.path, _classes(reading, f"{PACKAGED}/code/")).gather(root)
    return entries, {name for name in pickles.names if not name.startswith("__torch__.")}


def _document(reading: Reading, entries: OrderedDict[str, Any], remarks: list[Fact], names: set[str]) -> Document:
    remarks = [Fact(Kind.TORCHSCRIPT), *remarks, *payload_remarks(names), *reading.doubts]
    return Document(reading.archive.path, NAME, entries, None, names, remarks, reading.damage)


class ScriptClass(Struct, frozen=True):
    """The declarations of a class: whether it is a module, its parameters, and its buffers if it lists them."""

    is_module: bool
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] | None = None


def _classes(reading: Reading, folder: str = "code/") -> dict[str, ScriptClass]:
    """Return the classes in the sources of an archive by their full names. Sources are searched as text."""
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
        # A class takes a match, its text and a record in memory, and only a few bytes in the source.
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


class _Modules(Struct):
    """The modules of an archive in the form that Python pickles, which ``weights.modules`` reads."""

    path: str
    classes: Mapping[str, ScriptClass]
    made: dict[int, Opaque] = field(default_factory=dict)
    pending: list[Opaque] = field(default_factory=list)
    is_quantized: bool = False
    guessed: bool = False

    def gather(self, root: Any) -> tuple[OrderedDict[str, Any], list[Fact]]:
        """Return the state_dict of the root object, and remarks on it."""
        top = self._plain(root) if isinstance(root, Opaque) else None
        plain = top if top is not None and is_module(top) else _module({"_packed_params": top})
        while self.pending:
            self._fill(self.pending.pop())
        entries = module_state_dict(plain, self.path)
        if not self.is_quantized:
            del entries.__dict__["_metadata"]  # other modules do not depend on the version of their class
        remarks = loose_remarks(plain, (), entries)
        return entries, [*remarks, Fact(Kind.GUESSED_BUFFERS)] if self.guessed else remarks

    def _plain(self, module: Opaque) -> Opaque:
        if id(module) not in self.made:
            cls, state = python_class(module.cls), module.state
            if isinstance(state, (dict, type(None))):
                made = Opaque(cls, state={name: {} for name in PARTS})
                self.pending.append(module)
            else:  # a module that packs itself
                made = Opaque(cls, state=unpacked(state, self.path))
                made = made if is_module(made) else unpacked(module, self.path)
            self.made[id(module)] = made
            self.is_quantized |= quantized_version(made) is not None
        return self.made[id(module)]

    def _fill(self, module: Opaque) -> None:
        """Sort the attributes of a module into parameters, buffers, modules and others."""
        listed = self.classes.get(str(module.cls), ScriptClass(True))
        state, pairs = self.made[id(module)].state, module.attributes
        tensors = {name: value for name, value in pairs.items() if isinstance(value, TensorSpec)}
        buffers = listed.buffers
        if buffers is None:
            buffers = tuple(name for name in tensors if name not in listed.parameters)
            self.guessed |= bool(buffers)
        for part, names in (("_parameters", listed.parameters), ("_buffers", buffers)):
            state[part] = {
                name: replace(tensors[name], requires_grad=False, is_parameter=False)
                for name in names
                if name in tensors
            }
        for name, value in pairs.items():
            if self._is_module(value):
                state["_modules"][name] = self._plain(value)
            elif is_packed(value):  # the weights of a quantised layer, which torch stores under their name
                state[name] = state["_modules"][name] = unpacked(value, self.path)
            elif name not in (*listed.parameters, *buffers, *PARTS):
                state[name] = value

    def _is_module(self, value: Any) -> bool:
        if not isinstance(value, Opaque):
            return False
        known = self.classes.get(str(value.cls))
        return known.is_module if known is not None else isinstance(value.state, dict)


_TYPES = {"FLOAT": "float32", "DOUBLE": "float64", "BYTE": "uint8"}
_TYPES |= {name: name.lower() for name in ("FLOAT16", "INT8", "UINT8", "INT16", "INT32", "INT64", "BOOL")}


def read_json(reading: Reading) -> OrderedDict[str, Any]:
    """Return the state_dict of the module tree in ``model.json``. Lost storages are torn.

    Raises ``UnreadableError`` if the tree is damaged or has no tensors."""
    path = reading.archive.path
    try:
        model = reading.archive.bounds.parse_json(reading.member("model.json"))
        entries = module_state_dict(_of_json(model["mainModule"], _table(reading, model.get("tensors", []))), path)
        del entries.__dict__["_metadata"]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise damaged(path, f"the model.json of TorchScript is malformed ({type(error).__name__}: {error})") from error
    if not entries:
        raise UnreadableError(f"{path}: a TorchScript module without weights; is it the right file?")
    return entries


def _table(reading: Reading, records: list[Mapping[str, Any]]) -> list[TensorSpec]:
    """Return the tensors of the table. The size of a storage is that of its member, or is taken from its tensors."""
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
    """Return the spec of a record, without its storage."""
    name = record.get("dataType", "")
    if name not in _TYPES:
        raise UnreadableError(f"{path}: a tensor of type {name!s:.40}, which ckptfix does not know")
    shape = tuple(int(size) for size in record.get("dims", ()))
    strides = tuple(int(size) for size in record["strides"]) if "strides" in record else contiguous_strides(shape)
    if any(size < 0 for size in (*shape, *strides)):
        raise hostile(path, "a tensor has a negative size")
    return checked(TensorSpec(DTYPES[_TYPES[name]].name, shape, strides, offset=int(record.get("offset", 0))), path)


def _of_json(record: Mapping[str, Any], table: list[TensorSpec]) -> Opaque:
    """Return the module of a record in the form that Python pickles."""
    made = _module({})
    for child in record.get("submodules", []):
        made.state["_modules"][child["name"]] = _of_json(child, table)
    for tensor in record.get("parameters", []):
        part = "_buffers" if tensor.get("isBuffer", False) else "_parameters"
        made.state[part][tensor["name"]] = table[int(tensor.get("tensorId", 0))]
    return made


def _module(modules: dict[str, Any]) -> Opaque:
    return Opaque(Global("torch.nn", "Module"), state={"_parameters": {}, "_buffers": {}, "_modules": modules})


# The prefix of torch's own classes; those of users are named after their Python modules.
CLASSES = "__torch__.torch.classes."

PACKED_DEPTH_LIMIT = 100
_TYPED = "torch.jit._pickle."
_ROOT = re.compile(r"^__torch__\.|\.___torch_mangle_\d+")


def python_class(cls: Global) -> Global:
    """Return the Python class that was compiled: ``a.B`` for ``__torch__.a.___torch_mangle_3.B``."""
    return Global(_ROOT.sub("", cls.module), cls.name)


def is_packed(value: Any) -> bool:
    """Return whether a value is an object of one of torch's own classes, such as packed parameters."""
    return isinstance(value, Opaque) and str(value.cls).startswith(CLASSES)


def unpacked(value: Any, path: str) -> Any:
    """Return a value with every object in its tuples and lists in the form that Python pickles: a
    ``torch.ScriptObject`` whose state is ``(contents, class)``. An object in two places stays one object.

    Raises ``HostileError`` if they are nested too deeply."""
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
