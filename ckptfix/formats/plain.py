"""Plain data: what ``torch.load(weights_only=True)`` accepts, and how objects of other classes become it.

Known classes get their natural form (Namespace → dict, Path → str, numpy scalars → numbers); an unknown one becomes a
dict of what it held, under its name. Nothing is dropped, and every conversion is listed so that a finding can say it.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from ckptfix.checkpoint import Checkpoint, PathPart, TensorSpec, path_name
from ckptfix.dtypes import DTYPES
from ckptfix.errors import HostileError, UnreadableError
from ckptfix.finding import Plain
from ckptfix.formats.arrays import NumpyArray, numpy_type
from ckptfix.formats.inert import MODULE_ALIASES
from ckptfix.formats.modules import is_module, module_state_dict
from ckptfix.formats.objects import Global, Opaque

DEPTH_LIMIT = 200
_LONGEST_RANGE = 10_000
NATIVE = frozenset({"torch.Size", "torch.device", "collections.Counter"})
"""Classes beside the built-in ones that ``weights_only`` accepts as they are."""

_QSCHEMES = (
    "per_tensor_affine",
    "per_tensor_symmetric",
    "per_channel_affine",
    "per_channel_symmetric",
    "per_channel_affine_float_qparams",
)


def is_native_global(value: Global) -> bool:
    """Whether a bare global is a dtype or quantisation scheme of torch, which ``weights_only`` accepts."""
    return value.module == "torch" and (value.name in DTYPES or value.name in _QSCHEMES)


def plain_root(checkpoint: Checkpoint) -> tuple[Any, list[Plain]]:
    """The container of a checkpoint as plain data, with its state_dict in place, and what was converted on the way."""
    plainer = _Plainer(checkpoint)
    root = plainer.convert(checkpoint.root, (), 0)
    return root, list(plainer.conversions.values())


def state_dict_tree(checkpoint: Checkpoint) -> OrderedDict[str, Any]:
    """The entries of a checkpoint as the dict that torch saves, with ``_metadata`` as its attribute."""
    state_dict: OrderedDict[str, Any] = OrderedDict(checkpoint.entries)
    if checkpoint.metadata is not None:
        state_dict.__dict__["_metadata"] = OrderedDict(
            (module, dict(versions)) for module, versions in checkpoint.metadata.items()
        )
    return state_dict


class _Plainer:
    """One walk over a container; an object that stands in two places stays one object."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.conversions: dict[tuple[str, str], Plain] = {}
        self._done: dict[int, tuple[Any, Any]] = {}
        self._open: set[int] = set()

    def convert(self, value: Any, path: tuple[PathPart, ...], depth: int) -> Any:
        """The plain form of a value at a place."""
        if depth > DEPTH_LIMIT:
            raise HostileError(
                f"{self.checkpoint.path}: data nested deeper than {DEPTH_LIMIT} around the weights; do not use this "
                "file"
            )
        if path == self.checkpoint.container:
            return self._state_dict(value, path, depth)
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes, bytearray, TensorSpec)):
            return value
        if id(value) in self._done:
            return self._done[id(value)][1]
        if id(value) in self._open:
            # An object of a class that holds itself; only lists and dicts can do that in plain data.
            self._note(path, _class_name(value), "str")
            return f"<{_class_name(value)}>"
        self._open.add(id(value))
        made = (
            self._object(value, path, depth)
            if isinstance(value, (Opaque, Global, NumpyArray))
            else self._container(value, path, depth)
        )
        self._open.discard(id(value))
        self._done[id(value)] = (value, made)  # the value is kept alive, or its id could return
        return made

    def _state_dict(self, value: Any, path: tuple[PathPart, ...], depth: int) -> Any:
        if isinstance(value, Opaque):
            self._note(path, str(value.cls), "state_dict")
        made = state_dict_tree(self.checkpoint)
        for key, entry in made.items():
            if not isinstance(entry, TensorSpec):
                made[key] = self.convert(entry, (*path, key), depth + 1)
        return made

    def _note(self, path: tuple[PathPart, ...], before: str, after: str) -> None:
        where = path_name(path)
        self.conversions.setdefault((where, before), Plain(where, before, after))

    def _container(self, value: Any, path: tuple[PathPart, ...], depth: int) -> Any:
        # A list or dict is known before it is full: it may hold itself.
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
            for key, item in value.items():
                plain = self._key(key, path)
                if plain in made:
                    raise UnreadableError(
                        f"{self.checkpoint.path}: two keys at {path_name(path)} are both {plain!s:.60} once they are "
                        "plain data; rename one of them"
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
        kind = type(value)
        self._note(path, f"{kind.__module__}.{kind.__qualname__}", "str")
        return str(value)

    def _key(self, key: Any, path: tuple[PathPart, ...]) -> Any:
        if isinstance(key, Opaque) and (known := _known(key)) is not None:
            key = known(key)
        if key is None or isinstance(key, (bool, int, float, complex, str, bytes)):
            return key
        if isinstance(key, tuple):
            return tuple(self._key(part, path) for part in key)
        self._note(path, f"key {_class_name(key)}", "str")
        return (
            str(key)
            if isinstance(key, Global)
            else f"{_class_name(key)}{key.args}"
            if isinstance(key, Opaque)
            else repr(key)
        )

    def _object(self, value: Opaque | Global | NumpyArray, path: tuple[PathPart, ...], depth: int) -> Any:
        if isinstance(value, Global):
            if is_native_global(value):
                return value
            self._note(path, str(value), f"the text '{value}'")
            return str(value)
        if isinstance(value, NumpyArray):
            spec = value.spec(self.checkpoint.path)
            self._note(path, "numpy.ndarray", "dict" if spec is None else "torch.Tensor")
            if spec is not None:
                return spec
            fields = {"dtype": numpy_type(value.dtype)[0], "shape": value.shape, "data": value.data}
            return self.convert({"class": "numpy.ndarray", **fields}, path, depth + 1)
        name = str(value.cls)
        if name in NATIVE:
            return Opaque(value.cls, self.convert(value.args, path, depth + 1))
        if is_module(value):
            self._note(path, name, "state_dict")
            return module_state_dict(value, self.checkpoint.path)
        made = _natural(value)
        self._note(path, name, type(made).__name__)
        return self.convert(made, path, depth + 1)


def _class_name(value: Any) -> str:
    return (
        str(value.cls)
        if isinstance(value, Opaque)
        else str(value)
        if isinstance(value, Global)
        else type(value).__name__
    )


def _known(value: Opaque) -> Callable[[Opaque], Any] | None:
    """The natural form of a known class, whether Python 2 or 3 named it."""
    return _KNOWN.get(f"{MODULE_ALIASES.get(value.cls.module, value.cls.module)}.{value.cls.name}")


def _natural(value: Opaque) -> Any:
    """What an object of a class held, in the form that comes nearest to it."""
    name = str(value.cls)
    if (known := _known(value)) is not None:
        return known(value)
    if name.startswith("pathlib."):
        return "/".join(str(part) for part in value.args).replace("//", "/")
    if name.startswith("omegaconf."):
        attributes = value.attributes
        return attributes.get("_content", attributes.get("_val", dict(attributes)))
    held = [part for part in (value.args, value.kwargs, value.items, value.pairs, value.state) if part]
    if value.pairs and not value.items and (not value.state or value.attributes):
        return {**value.pairs, **value.attributes}
    if value.items and not value.pairs and not value.state:
        return list(value.items)
    if value.attributes and len(held) == 1:
        return dict(value.attributes)
    if not held:
        return name if not value.args else {}
    fields = {
        "args": value.args,
        "kwargs": dict(value.kwargs),
        "items": value.items,
        "pairs": value.pairs,
        "state": value.state,
    }
    return {"class": name, **{field: part for field, part in fields.items() if part}}


def _numpy_scalar(value: Opaque) -> Any:
    code, order = numpy_type(value.args[0]) if value.args else ("", "<")
    data = value.args[1] if len(value.args) > 1 else None
    if isinstance(data, str):
        data = data.encode("latin-1")
    formats = {
        "f8": "d",
        "f4": "f",
        "f2": "e",
        "i8": "q",
        "i4": "i",
        "i2": "h",
        "i1": "b",
        "u8": "Q",
        "u4": "I",
        "u2": "H",
        "u1": "B",
        "b1": "?",
    }
    if code in formats and isinstance(data, bytes) and len(data) == struct.calcsize(f"={formats[code]}"):
        return struct.unpack(f"{'>' if order == '>' else '<'}{formats[code]}", data)[0]
    return {"class": "numpy.generic", "dtype": code, "data": data}


def _moment(value: Opaque) -> Any:
    """``datetime.datetime`` and ``date`` from the bytes of their pickle, in ISO 8601."""
    data = value.args[0] if value.args else b""
    data = data.encode("latin-1") if isinstance(data, str) else data
    if not isinstance(data, bytes) or len(data) not in (4, 10):
        return {"class": str(value.cls), "args": list(value.args)}
    text = f"{data[0] << 8 | data[1]:04}-{data[2] & 0x7F:02}-{data[3]:02}"
    if len(data) == 10:
        text += f"T{data[4]:02}:{data[5]:02}:{data[6]:02}"
        microsecond = data[7] << 16 | data[8] << 8 | data[9]
        text += f".{microsecond:06}" if microsecond else ""
    return text


def _range(value: Opaque) -> Any:
    """The numbers of a range, or its arguments where they are too many."""
    if 1 <= len(value.args) <= 3 and all(type(bound) is int for bound in value.args) and value.args[2:] != (0,):
        numbers = range(*value.args)
        if not numbers[_LONGEST_RANGE:]:
            return list(numbers)
    return {"class": "range", "args": list(value.args)}


def _mapping(value: Opaque) -> Any:
    return dict(value.pairs)


_KNOWN: Mapping[str, Callable[[Opaque], Any]] = {
    "argparse.Namespace": lambda value: dict(value.attributes),
    "types.SimpleNamespace": lambda value: dict(value.attributes),
    "collections.defaultdict": _mapping,
    "collections.deque": lambda value: (
        list(value.args[0]) if value.args and isinstance(value.args[0], list) else list(value.items)
    ),
    "numpy.core.multiarray.scalar": _numpy_scalar,
    "numpy._core.multiarray.scalar": _numpy_scalar,
    "numpy.dtype": lambda value: numpy_type(value)[0],
    "datetime.datetime": _moment,
    "datetime.date": _moment,
    "uuid.UUID": lambda value: f"{value.attributes.get('int', 0):032x}",
    "fractions.Fraction": lambda value: "/".join(map(str, value.args)) or "0",
    "decimal.Decimal": lambda value: str(value.args[0]) if value.args else "0",
    "builtins.slice": lambda value: {"class": "slice", "args": list(value.args)},
    "builtins.range": _range,
    "builtins.xrange": _range,
    "builtins.object": lambda value: {},
}
