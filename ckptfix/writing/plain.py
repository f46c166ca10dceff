"""Plain data, which ``torch.load(weights_only=True)`` accepts, and the conversion of other objects to it.

Known classes get their natural form (Namespace → dict, Path → str, numpy scalars → numbers); an object of an unknown
class becomes a dict of its content with the name of the class. Nothing is dropped, and every conversion is recorded for
a finding.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from ckptfix.bytes.limits import shown
from ckptfix.core.checkpoint import Checkpoint, ContainerPath, path_name
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.edits import Plain
from ckptfix.core.facts import Kind
from ckptfix.core.objects import NATIVE, Global, Opaque, is_native
from ckptfix.core.spec import TensorSpec
from ckptfix.errors import HostileError, UnreadableError
from ckptfix.reading.foreign.weightless import is_of_training
from ckptfix.reading.pickles.arrays import NumpyArray, array_fields, dtype_label, numpy_type
from ckptfix.reading.pickles.claims import TypedStorage
from ckptfix.reading.pickles.payload import MODULE_ALIASES
from ckptfix.reading.pickles.stream import raw_bytes
from ckptfix.reading.weights.modules import is_module, module_state_dict
from ckptfix.reading.weights.quantized_modules import SCHEMES, composed_class, is_low_bit_moment

DEPTH_LIMIT = 200

BARE_STORAGE = "a storage of torch"  # without a tensor

_LAYOUTS = ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged")

# Remarks of the readers that are conversions: the forms before and after.
CONVERSIONS = {
    Kind.PROTOCOL: ("pickle protocol {}", "protocol 2"),
    Kind.PLAIN_PICKLE: ("{}", "torch.save"),
    Kind.TORCHSCRIPT: ("{}", "state_dict"),
    Kind.TORCH_PACKAGE: ("{}", "torch.save"),
    Kind.TORCH_EXPORT: ("{}", "state_dict"),
    Kind.UNPACKED_FOLDER: ("{}", "torch.save"),
    Kind.TORCH_TAR: ("{}", "torch.save"),
    Kind.NUMPY_WEIGHTS: ("{}", "torch tensors"),
    Kind.TENSOR_SUBCLASS: ("{}", "torch.Tensor"),
    Kind.ODD_METADATA: ("{} in _metadata", "text"),
    Kind.ODD_LAYOUT: ("{}", "the layout of torch.save"),
    Kind.PYTHON2_TEXT: ("{} that is not UTF-8", "text, read as Latin-1"),
}


def is_native_global(value: Global) -> bool:
    """Return whether a global is a dtype, layout or quantisation scheme of torch, which ``weights_only`` accepts."""
    return value.module == "torch" and (value.name in DTYPES or value.name in SCHEMES.values() or is_layout(value))


def is_layout(value: Global) -> bool:
    """Return whether a global is a layout of torch, which pickles as a call."""
    return value.module == "torch" and value.name in _LAYOUTS


def plain_root(checkpoint: Checkpoint) -> tuple[Any, list[Plain]]:
    """Return the container of a checkpoint as plain data, with its state_dict in place, and the conversions.

    The result is cached; rules, writers and the comparison share it, and must not change it."""
    known: tuple[Any, list[Plain]] | None = checkpoint.derived.get("plain")
    if known is None:
        plainer = _Plainer(checkpoint)
        root = plainer.convert(checkpoint.root, (), 0)
        known = checkpoint.derived["plain"] = root, list(plainer.conversions.values())
    return known


def _is_odd_key(key: Any) -> bool:
    """Return whether a key is a number or a tuple, which torch keeps and ``Checkpoint`` turns into text."""
    return (
        key is None
        or type(key) in (int, float, bool)
        or (isinstance(key, tuple) and all(type(part) in (int, str) for part in key))
    )


class _Plainer:
    """A conversion of a container to plain data; an object that occurs in two places stays one object."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.conversions: dict[tuple[str, str], Plain] = {}
        self._done: dict[int, tuple[Any, Any]] = {}
        self._open: set[int] = set()

    def convert(self, value: Any, path: ContainerPath, depth: int) -> Any:
        """Return the plain form of the value at ``path``."""
        if depth > DEPTH_LIMIT:
            raise HostileError(
                f"{self.checkpoint.path}: data nested deeper than {DEPTH_LIMIT} around the weights; do not use this "
                "file"
            )
        if path == self.checkpoint.container:
            return self._state_dict(value, path, depth)
        if isinstance(value, str):
            return str(value)  # text of Python 2 has a class of its own
        if value is None or isinstance(value, (bool, int, float, complex, bytes, bytearray, TensorSpec)):
            return value
        if id(value) in self._done:
            return self._done[id(value)][1]
        if id(value) in self._open:
            # An object that contains itself; in plain data, only lists and dicts can.
            self._note(path, _class_name(value), "str")
            return f"<{_class_name(value)}>"
        self._open.add(id(value))
        convert = self._object if isinstance(value, (Opaque, Global, NumpyArray)) else self._container
        made = convert(value, path, depth)
        self._open.discard(id(value))
        self._done[id(value)] = (value, made)  # the value is kept alive, or its id could return
        return made

    def _state_dict(self, value: Any, path: ContainerPath, depth: int) -> Any:
        if isinstance(value, Opaque):
            self._note(path, str(value.cls), "state_dict")
        entries: dict[str, Any] = dict(self.checkpoint.entries)
        metadata = self.checkpoint.metadata
        old = value if isinstance(value, dict) else {}
        entries.update((key, entry) for key, entry in old.items() if is_of_training(entry))
        numbers = {str(key): key for key in old if _is_odd_key(key)}
        is_plain = isinstance(value, dict) and not isinstance(value, OrderedDict) and metadata is None
        made: dict[Any, Any] = {} if is_plain else OrderedDict()
        for key, entry in entries.items():
            is_tensor = isinstance(entry, TensorSpec)
            made[numbers.get(key, key)] = entry if is_tensor else self.convert(entry, (*path, key), depth + 1)
        if metadata is not None:
            rows = OrderedDict((module, dict(versions)) for module, versions in metadata.items())
            made.__dict__["_metadata"] = rows  # as torch saves it
        return made

    def _note(self, path: ContainerPath, before: str, after: str) -> None:
        where = path_name(path)
        self.conversions.setdefault((where, before), Plain(where, before, after))

    def _container(self, value: Any, path: ContainerPath, depth: int) -> Any:
        # A list or dict is recorded before it is filled: it may contain itself.
        if isinstance(value, list):
            items: list[Any] = []
            self._done[id(value)] = (value, items)
            items.extend(self.convert(item, (*path, index), depth + 1) for index, item in enumerate(value))
            return items
        if isinstance(value, tuple):
            return type(value)([self.convert(item, (*path, index), depth + 1) for index, item in enumerate(value)])
        if isinstance(value, dict):
            made: dict[Any, Any] = OrderedDict() if isinstance(value, OrderedDict) else {}
            self._done[id(value)] = (value, made)
            is_by_tensor = all(isinstance(key, TensorSpec) for key in value)
            for key, item in value.items():
                plain = key if is_by_tensor else self._key(key, path)
                if plain in made and isinstance(key, Opaque) and isinstance(plain, str):
                    plain = f"{plain} {len(made)}"  # two objects of one class, which have the same text
                if plain in made:
                    raise UnreadableError(
                        f"{self.checkpoint.path}: two keys at {path_name(path)} are both {plain!s:.60} as plain data; "
                        "rename one of them"
                    )
                made[plain] = self.convert(item, (*path, key if isinstance(key, (int, str)) else str(key)), depth + 1)
            if isinstance(value, OrderedDict) and value.__dict__:
                made.__dict__.update(
                    {name: self.convert(item, (*path, name), depth + 1) for name, item in value.__dict__.items()}
                )
            return made
        if isinstance(value, (set, frozenset)):
            if isinstance(value, frozenset):
                self._note(path, "frozenset", "set")
            items = [self.convert(item, path, depth + 1) for item in value]
            try:
                return set(items)
            except TypeError:
                self._note(path, "set", "list")
                return items
        if isinstance(value, TypedStorage):
            # A storage without a tensor becomes a tensor with one dimension.
            self._note(path, BARE_STORAGE, "torch.Tensor")
            count = value.storage.nbytes // DTYPES[value.dtype].itemsize
            return TensorSpec(value.dtype, (count,), (1,), value.storage)
        return value  # an object of a state_dict in memory, which is returned to the caller unchanged

    def _key(self, key: Any, path: ContainerPath) -> Any:
        if isinstance(key, Opaque) and (known := known_form(key)) is not None:
            before, key = _class_name(key), known(key)
            self._note(path, f"key {before}", type(key).__name__)
        if isinstance(key, str):
            return str(key)
        if key is None or isinstance(key, (bool, int, float, complex, bytes)):
            return key
        if isinstance(key, tuple):
            return tuple(self._key(part, path) for part in key)
        self._note(path, f"key {_class_name(key)}", "str")
        if isinstance(key, Global):
            return today(key)
        return f"{_class_name(key)}{key.args}" if isinstance(key, Opaque) else f"<{_class_name(key)} {shown(key)}>"

    def _object(self, value: Opaque | Global | NumpyArray, path: ContainerPath, depth: int) -> Any:
        if isinstance(value, Global):
            if is_native_global(value):
                return value
            name = today(value)
            self._note(path, name, f"the text '{name}'")
            return name
        if isinstance(value, NumpyArray):
            spec = value.spec(self.checkpoint.path)
            self._note(path, "numpy.ndarray", "dict" if spec is None else "torch.Tensor")
            if spec is not None:
                return spec
            return self.convert({"class": "numpy.ndarray", **array_fields(value)}, path, depth + 1)
        name = str(value.cls)
        if is_native(value):
            return Opaque(value.cls, self.convert(value.args, path, depth + 1))
        if is_low_bit_moment(composed_class(value)) and len(value.args) == 4:
            function, cls, made, state = value.args
            made = tuple(part if part is cls else self.convert(part, path, depth + 1) for part in made)
            return Opaque(value.cls, (function, cls, made, self.convert(state, path, depth + 1)))
        container = self.checkpoint.container
        onwards = container[len(path)] if path == container[: len(path)] else None  # member that has the state_dict
        if is_module(value) and onwards is None:
            state_dict = module_state_dict(value, self.checkpoint.path)
            self._note(path, name, "state_dict" if state_dict else "dict")
            return self.convert(state_dict or _settings(value), path, depth + 1)
        made = natural_form(value)
        if onwards is not None and not (isinstance(made, dict) and onwards in made):
            rest = made.items() if isinstance(made, dict) else ()
            made = {name: part for name, part in rest if name not in ("pairs", "state")}
            made |= {**value.pairs, **value.attributes}
        self._note(path, name, type(made).__name__)
        return self.convert(made, path, depth + 1)


def _class_name(value: Any) -> str:
    named = value.cls if isinstance(value, Opaque) else value
    return str(named) if isinstance(named, Global) else type(value).__name__


# The natural forms of classes
# ----------------------------------------------------------------------------------------------------------------------

_LONGEST_RANGE = 10_000
_RENAMED = {"long": "int", "unicode": "str", "xrange": "range"}


def today(name: Global) -> str:
    """Return the Python 3 name of a class or function; torch.save writes many under their Python 2 names."""
    module = MODULE_ALIASES.get(name.module, name.module)
    return f"{module}.{_RENAMED.get(name.name, name.name) if module == 'builtins' else name.name}"


def known_form(value: Opaque) -> Callable[[Opaque], Any] | None:
    """Return the function that makes the natural form of a known class; None if the class is unknown."""
    return _KNOWN.get(f"{MODULE_ALIASES.get(value.cls.module, value.cls.module)}.{value.cls.name}")


_PACKAGES = ("pathlib.", "omegaconf.")  # every class of these packages has a plain form


def is_data_class(name: str) -> bool:
    """Return whether a class has a known plain form, given its name."""
    module, _, leaf = name.rpartition(".")
    usual = f"{MODULE_ALIASES.get(module, module)}.{leaf}"
    return usual in _KNOWN or name in NATIVE or name.startswith(_PACKAGES)


def has_plain_form(value: object) -> bool:
    """Return whether a value is plain or of a class with a known plain form. Functions have none."""
    if isinstance(value, Global):
        return is_native_global(value)
    return not isinstance(value, Opaque) or is_data_class(str(value.cls))


def _settings(module: Opaque) -> dict[str, Any]:
    """Return the attributes and submodules of a module without parameters, such as a loss."""
    return {
        name: value
        for name, value in module.attributes.items()
        if (str(name)[:1] != "_" and name != "training") or (name == "_modules" and value)
    }


def natural_form(value: Opaque) -> Any:
    """Return the content of an object in the nearest plain form. Its members are not converted yet."""
    name = str(value.cls)
    if (known := known_form(value)) is not None:
        return known(value)
    if name.startswith("pathlib."):
        return _path(value)
    if name.startswith("omegaconf."):
        attributes = value.attributes
        return attributes.get("_content", attributes.get("_val", dict(attributes)))
    if (made := _optimizer(value.attributes)) is not None:
        return made
    fields = {
        "args": value.args,
        "kwargs": dict(value.kwargs),
        "items": value.items,
        "pairs": value.pairs,
        "state": value.state,
    }
    held = {field: part for field, part in fields.items() if part}
    if value.pairs and not value.items and (not value.state or value.attributes):
        return {**value.pairs, **value.attributes}
    if value.items and not value.pairs and not value.state:
        return list(value.items)
    if value.attributes and len(held) == 1:
        return dict(value.attributes)
    if not held:
        return name
    return {"class": name, **held}


def _path(value: Opaque) -> str:
    """Return a path in the syntax of its own system, from the parts that Python pickled."""
    kind = PureWindowsPath if "Windows" in value.cls.name else PurePosixPath
    return str(kind(*map(str, value.args)))


def _optimizer(attributes: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return ``Optimizer.state_dict()`` from the attributes of a pickled optimizer; None for any other object."""
    groups, state = attributes.get("param_groups"), attributes.get("state")
    state = state.pairs if isinstance(state, Opaque) else state
    if not isinstance(groups, list) or not isinstance(state, dict):
        return None
    numbers: dict[int, int] = {}
    packed = []
    for group in groups:
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):
            return None
        packed.append({**group, "params": [numbers.setdefault(id(spec), len(numbers)) for spec in group["params"]]})
    if any(id(spec) not in numbers for spec in state):
        return None
    return {"state": {numbers[id(spec)]: row for spec, row in state.items()}, "param_groups": packed}


# The type codes of `struct`, by numpy's names of number types.
_SCALARS = dict(
    zip("f8 f4 f2 i8 i4 i2 i1 u8 u4 u2 u1 b1 c8 c16".split(), "d f e q i h b Q I H B ? ff dd".split(), strict=True)
)


def _numpy_scalar(value: Opaque) -> Any:
    code, order = numpy_type(value.args[0]) if value.args else ("", "<")
    data = value.args[1] if len(value.args) > 1 else None
    if isinstance(data, str):
        data = raw_bytes(data, "replace")
    sign = ">" if order == ">" else "<"
    form = _SCALARS.get(code)
    if isinstance(data, bytes):
        if form is not None and len(data) == struct.calcsize(f"={form}"):
            numbers = struct.unpack(f"{sign}{form}", data)
            return complex(*numbers) if code[0] == "c" else numbers[0]
        if code[:1] == "U" and not len(data) % 4:
            return data.decode("utf-32-be" if sign == ">" else "utf-32-le", "replace").rstrip("\0")
        if code[:1] == "S":
            return data.rstrip(b"\0")
    return {"class": "numpy.generic", "dtype": dtype_label(value.args[0]) if value.args else "", "data": data}


def _record(value: Opaque) -> dict[str, Any]:
    """Return the plain form of an object with invalid arguments."""
    return {"class": str(value.cls), "args": list(value.args)}


def _moment(value: Opaque) -> Any:
    """Return a pickled ``datetime.datetime``, ``date`` or ``time`` in ISO 8601 with its offset from UTC, if it has one;
    a dict if its time zone is not an offset."""
    from datetime import date, datetime, time  # few files need it

    data, zone = (*value.args, None, None)[:2]
    data = raw_bytes(data, "replace") if isinstance(data, str) else data
    kinds: Mapping[int, Callable[..., date | time]] = {4: date, 6: time, 10: datetime}
    try:
        text = kinds[len(data)](data).isoformat()
    except (LookupError, TypeError, ValueError):
        return _record(value)
    if zone is None:
        return text
    offset = _timezone(zone) if isinstance(zone, Opaque) and str(zone.cls) == "datetime.timezone" else None
    return f"{text}{offset}" if isinstance(offset, str) else {"class": str(value.cls), "local": text, "tzinfo": zone}


def _timezone(value: Opaque) -> Any:
    """Return a ``datetime.timezone`` as its offset from UTC: ``+02:00``."""
    from datetime import time, timedelta, timezone

    seconds: Any = _timedelta(value.args[0]) if value.args and isinstance(value.args[0], Opaque) else None
    try:
        return time(tzinfo=timezone(timedelta(seconds=seconds))).isoformat()[len("00:00:00") :]
    except (TypeError, ValueError, OverflowError):
        return _record(value)


def _timedelta(value: Opaque) -> Any:
    """Return a ``datetime.timedelta`` in seconds."""
    from datetime import timedelta

    try:
        return timedelta(*value.args).total_seconds()
    except (TypeError, ValueError, OverflowError):
        return _record(value)


def _range(value: Opaque) -> Any:
    """Return the numbers of a range as a list, or its arguments if there are too many numbers."""
    if 1 <= len(value.args) <= 3 and all(type(bound) is int for bound in value.args) and value.args[2:] != (0,):
        numbers = range(*value.args)
        if not numbers[_LONGEST_RANGE:]:
            return list(numbers)
    return {"class": "range", "args": list(value.args)}


def _uuid(value: Opaque) -> Any:
    number = value.attributes.get("int")
    if type(number) is not int or not 0 <= number < 1 << 128:
        return dict(value.attributes)
    from uuid import UUID

    return str(UUID(int=number))


def _partial(value: Opaque) -> Any:
    """Return a ``functools.partial``, whose state is ``(function, args, keywords, attributes)``, as a dict."""
    if not isinstance(value.state, tuple) or len(value.state) != 4:
        return {"class": "functools.partial", "args": value.args, "state": value.state}
    function, args, keywords, attributes = value.state
    fields = {"function": function, "args": args, "keywords": keywords, "attributes": attributes}
    return {"class": "functools.partial", **{name: part for name, part in fields.items() if part}}


def _mapping(value: Opaque) -> Any:
    return dict(value.pairs)


def _inner(name: str) -> Callable[[Opaque], Any]:
    """Return the function that makes the plain form of a class that wraps its content in one attribute."""
    return lambda value: value.attributes.get(name, list(value.items) or dict(value.pairs))


_KNOWN: Mapping[str, Callable[[Opaque], Any]] = {
    "argparse.Namespace": lambda value: dict(value.attributes),
    "types.SimpleNamespace": lambda value: dict(value.attributes),
    "collections.defaultdict": _mapping,
    "collections.deque": lambda value: (
        list(value.args[0]) if value.args and isinstance(value.args[0], list) else list(value.items)
    ),
    "numpy.core.multiarray.scalar": _numpy_scalar,
    "numpy._core.multiarray.scalar": _numpy_scalar,
    "numpy.dtype": dtype_label,
    "datetime.datetime": _moment,
    "datetime.date": _moment,
    "datetime.time": _moment,
    "datetime.timedelta": _timedelta,
    "datetime.timezone": _timezone,
    "zoneinfo.ZoneInfo._unpickle": lambda value: value.args[0] if value.args else "",
    "uuid.UUID": _uuid,
    "fractions.Fraction": lambda value: "/".join(map(str, value.args)) or "0",
    "decimal.Decimal": lambda value: str(value.args[0]) if value.args else "0",
    "torch.torch_version.TorchVersion": lambda value: str(value.args[0]) if value.args else "",
    "functools.partial": _partial,
    "re._compile": lambda value: dict(zip(("pattern", "flags"), value.args, strict=False)),
    "builtins.slice": lambda value: {"class": "slice", "args": list(value.args)},
    "builtins.range": _range,
    "builtins.xrange": _range,
    "builtins.object": lambda value: {},
    # Configurations that are dicts or lists; their other attributes only say how they may be used.
    "yacs.config.CfgNode": _mapping,
    "fvcore.common.config.CfgNode": _mapping,
    "detectron2.config.config.CfgNode": _mapping,
    "box.box.Box": _mapping,
    "box.config_box.ConfigBox": _mapping,
    "box.box_list.BoxList": _inner("items"),
    "fastcore.foundation.L": _inner("items"),
    "collections.UserList": _inner("data"),
    "collections.UserDict": _inner("data"),
    "collections.IterableUserDict": _inner("data"),  # the same in protocol 2
    "ml_collections.config_dict.config_dict.ConfigDict": _inner("_fields"),
    "mmengine.config.config.ConfigDict": lambda value: value.args[0] if value.args else _mapping(value),
    "frozendict.frozendict": lambda value: value.args[0] if value.args else {},
    "addict.addict.Dict": _mapping,
    "lightning_fabric.utilities.data.AttributeDict": _mapping,
    "lightning.fabric.utilities.data.AttributeDict": _mapping,
    "pytorch_lightning.utilities.parsing.AttributeDict": _mapping,
}
