"""Plain data: what ``torch.load(weights_only=True)`` accepts, and how objects of other classes become it.

Known classes get their natural form (Namespace → dict, Path → str, numpy scalars → numbers); an unknown one becomes a
dict of what it held, under its name. Nothing is dropped, and every conversion is listed so that a finding can say it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from ckptfix.bytes.limits import shown
from ckptfix.core.checkpoint import Checkpoint, PathPart, path_name
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.edits import Plain
from ckptfix.core.objects import Global, Opaque
from ckptfix.core.spec import TensorSpec
from ckptfix.errors import HostileError, UnreadableError
from ckptfix.reading.pickles.arrays import NumpyArray, array_fields
from ckptfix.reading.pickles.claims import TypedStorage
from ckptfix.reading.weights.modules import is_module, module_state_dict
from ckptfix.writing.natural import known_form, natural_form, today

DEPTH_LIMIT = 200
NATIVE = frozenset({"torch.Size", "torch.device", "collections.Counter"})
"""Classes beside the built-in ones that ``weights_only`` accepts as they are."""

_QSCHEMES = (
    "per_tensor_affine",
    "per_tensor_symmetric",
    "per_channel_affine",
    "per_channel_symmetric",
    "per_channel_affine_float_qparams",
)

_LAYOUTS = ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged")


def is_native_global(value: Global) -> bool:
    """Whether a global is a dtype, layout or quantisation scheme of torch, which ``weights_only`` accepts."""
    return value.module == "torch" and (value.name in DTYPES or value.name in _QSCHEMES or is_layout(value))


def is_layout(value: Global) -> bool:
    """Whether a global is a layout of torch, which pickles as a call."""
    return value.module == "torch" and value.name in _LAYOUTS


def plain_root(checkpoint: Checkpoint) -> tuple[Any, list[Plain]]:
    """Return the container of a checkpoint as plain data, with its state_dict in place, and what was converted on the
    way. It is worked out once: rules, writers and the comparison ask for it, and none of them changes it."""
    known: tuple[Any, list[Plain]] | None = checkpoint.derived.get("plain")
    if known is None:
        plainer = _Plainer(checkpoint)
        root = plainer.convert(checkpoint.root, (), 0)
        known = checkpoint.derived["plain"] = root, list(plainer.conversions.values())
    return known


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
        if isinstance(value, str):
            return str(value)  # one of Python 2 is of a class of its own
        if value is None or isinstance(value, (bool, int, float, complex, bytes, bytearray, TensorSpec)):
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
        if isinstance(value, TypedStorage):
            # A storage without a tensor: all of its elements in one dimension.
            self._note(path, "a storage of torch", "torch.Tensor")
            count = value.storage.nbytes // DTYPES[value.dtype].itemsize
            return TensorSpec(value.dtype, (count,), (1,), value.storage)
        kind = type(value)
        self._note(path, f"{kind.__module__}.{kind.__qualname__}", "str")
        return str(value)

    def _key(self, key: Any, path: tuple[PathPart, ...]) -> Any:
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
        return (
            today(key)
            if isinstance(key, Global)
            else f"{_class_name(key)}{key.args}"
            if isinstance(key, Opaque)
            else f"<{_class_name(key)} {shown(key)}>"
        )

    def _object(self, value: Opaque | Global | NumpyArray, path: tuple[PathPart, ...], depth: int) -> Any:
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
        if name in NATIVE:
            return Opaque(value.cls, self.convert(value.args, path, depth + 1))
        if is_module(value):
            self._note(path, name, "state_dict")
            return self.convert(module_state_dict(value, self.checkpoint.path), path, depth + 1)
        made = natural_form(value)
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
