"""Writes the pickle of a torch.save file, in the opcodes that ``torch.load(weights_only=True)`` reads.

It uses protocol 2, which every torch reads, and writes globals by name without importing torch. Tensors are records
that refer to storages by persistent id, as in ``torch/serialization.py``."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from ckptfix.core.dtypes import DTYPES
from ckptfix.core.objects import NATIVE, Global, Opaque
from ckptfix.core.spec import Quantizer, TensorSpec
from ckptfix.errors import WriteError
from ckptfix.reading.weights.quantized_modules import composed_class, is_low_bit_moment
from ckptfix.writing.plain import is_layout, is_native_global

BATCH = 1000

# An opcode and its argument of one, two or four bytes.
_NEAR, _HALF, _FAR, _SIGNED = (struct.Struct(f"<c{kind}") for kind in "BHIi")

_TUPLES = {0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}


class StorageRef(NamedTuple):
    """A storage in the new file."""

    key: str
    nbytes: int
    device: str


class PickleWriter:
    """A writer of object trees. ``place`` returns the storage of a strided tensor in the new file, and its offset there
    in elements.

    Raises ``WriteError`` for data that ``weights_only`` would refuse."""

    _END_OF_ID = b"tQ"

    def __init__(self, path: str, place: Callable[[TensorSpec], tuple[StorageRef, int]]) -> None:
        self.path, self.place = path, place
        self._out: list[bytes] = []
        self._done = bytearray()
        self._memo: dict[Any, int] = {}
        self._alive: list[Any] = []

    def dump(self, root: Any) -> bytes:
        self._out, self._done = [b"\x80\x02"], bytearray()
        self._save(root)
        self._out.append(b".")
        self._gather()
        return bytes(self._done)

    def _gather(self) -> None:
        """Join the pieces written so far: those of 100,000 tensors take 150 MB, and the pickle 12 MB."""
        self._done += b"".join(self._out)
        self._out.clear()

    # Opcodes
    # -----------------------------------------------------------------------------------------------------------------

    def _put(self, identity: Any) -> None:
        index = self._memo[identity] = len(self._memo)
        self._out.append(_FAR.pack(b"r", index) if index > 255 else _NEAR.pack(b"q", index))

    def _get(self, identity: Any) -> bool:
        index = self._memo.get(identity)
        if index is None:
            return False
        self._out.append(_FAR.pack(b"j", index) if index > 255 else _NEAR.pack(b"h", index))
        return True

    def _global(self, module: str, name: str) -> None:
        if not self._get((module, name)):
            self._out.append(f"c{module}\n{name}\n".encode())
            self._put((module, name))

    def _call(self, module: str, name: str, args: tuple[Any, ...]) -> None:
        self._global(module, name)
        self._tuple(args)
        self._out.append(b"R")

    # Values
    # ------------------------------------------------------------------------------------------------------------------

    def _save(self, value: Any) -> None:
        if isinstance(value, str):
            self._text(value)
        elif type(value) is TensorSpec:
            self._tensor(value)
        elif value is None:
            self._out.append(b"N")
        elif isinstance(value, bool):
            self._out.append(b"\x88" if value else b"\x89")
        elif isinstance(value, int):
            self._out.append(self._number(value))
        elif isinstance(value, float):
            self._out.append(b"G" + struct.pack(">d", value))
        else:
            self._compound(value)

    def _number(self, value: int) -> bytes:
        if 0 <= value < 256:
            return _NEAR.pack(b"K", value)
        if 0 <= value < 65536:
            return _HALF.pack(b"M", value)
        if -(1 << 31) <= value < 1 << 31:
            return _SIGNED.pack(b"J", value)
        raw = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
        if len(raw) > 255:
            raise WriteError(
                f"{self.path}: a number of {len(raw)} bytes next to the weights cannot be written; remove it first"
            )
        return b"\x8a" + bytes([len(raw)]) + raw

    def _text(self, value: str) -> None:
        if not self._get(value):
            raw = value.encode("utf-8", "surrogatepass")
            self._out.append(_FAR.pack(b"X", len(raw)) + raw)
            self._put(value)

    def _tuple(self, value: tuple[Any, ...]) -> None:
        if len(value) > 3:
            self._out.append(b"(")
        for item in value:
            self._save(item)
        self._out.append(_TUPLES.get(len(value), b"t"))

    def _compound(self, value: Any) -> None:
        if self._get(id(value)):
            return
        self._alive.append(value)
        if isinstance(value, tuple):
            self._tuple(value)
            # A tuple that contains itself through a list or dict is in the memo already.
            if value and id(value) not in self._memo:
                self._put(id(value))
        elif isinstance(value, list):
            self._out.append(b"]")
            self._put(id(value))
            for start in range(0, len(value), BATCH):
                self._out.append(b"(")
                for item in value[start : start + BATCH]:
                    self._save(item)
                self._out.append(b"e")
        elif isinstance(value, dict):
            self._dict(value)
        elif isinstance(value, set):
            self._call("__builtin__", "set", (sorted(value, key=repr),))
            self._put(id(value))
        elif isinstance(value, complex):
            self._call("__builtin__", "complex", (value.real, value.imag))
        elif isinstance(value, bytearray):
            self._call("__builtin__", "bytearray", (value.decode("latin-1"), "latin-1"))
            self._put(id(value))
        elif isinstance(value, bytes):
            self._call("_codecs", "encode", (value.decode("latin-1"), "latin1"))
            self._put(id(value))
        elif isinstance(value, Global) and is_layout(value):
            self._call("torch.serialization", "_get_layout", (f"torch.{value.name}",))
        elif isinstance(value, Global) and (is_native_global(value) or _is_of_moments(value)):
            self._global(value.module, value.name)
        elif isinstance(value, Opaque) and (str(value.cls) in NATIVE or is_low_bit_moment(composed_class(value))):
            self._call(value.cls.module, value.cls.name, value.args)
            self._put(id(value))
        else:
            self._live(value)

    def _live(self, value: Any) -> None:
        """Write an object of torch that a state_dict in memory may contain: a dtype, quantisation scheme or device."""
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        name = str(value).removeprefix("torch.")
        if kind in ("torch.dtype", "torch.qscheme"):
            self._global("torch", name)
        elif kind == "torch.device":
            self._call("torch", "device", (str(value),))
        else:
            raise WriteError(
                f"{self.path}: a {kind} next to the weights would be refused by torch.load(weights_only=True); remove "
                "it, or turn it into plain data, as FIL102 does for files"
            )

    def _dict(self, value: dict[Any, Any]) -> None:
        if isinstance(value, OrderedDict):
            self._global("collections", "OrderedDict")
            self._out.append(b")R")
        else:
            self._out.append(b"}")
        self._put(id(value))
        items = list(value.items())
        for start in range(0, len(items), BATCH):
            self._out.append(b"(")
            for key, item in items[start : start + BATCH]:
                self._save(key)
                self._save(item)
            self._out.append(b"u")
            self._gather()
        if attributes := getattr(value, "__dict__", None):
            self._save(dict(attributes))
            self._out.append(b"b")

    # Tensors
    # -----------------------------------------------------------------------------------------------------------------

    def _tensor(self, spec: TensorSpec) -> None:
        # A Parameter is a call around the record of its data, and has the requires_grad.
        if spec.is_parameter:
            self._global("torch._utils", "_rebuild_parameter")
            self._out.append(b"(")
        self._record(spec, requires_grad=spec.can_learn and not spec.is_parameter)
        if spec.is_parameter:
            self._hooks(spec.can_learn)
            self._out.append(b"tR")

    def _record(self, spec: TensorSpec, requires_grad: bool) -> None:
        if spec.parts:
            self._sparse(spec)
            return
        if spec.storage is None:
            raise WriteError(f"{self.path}: a tensor on the meta device has no values to write; fill it first")
        dtype, quantizer = DTYPES[spec.dtype], spec.quantizer
        storage = ("torch", dtype.storage) if dtype.storage else ("torch.storage", "UntypedStorage")
        ref, offset = self.place(spec)
        function = "_rebuild_qtensor" if quantizer else "_rebuild_tensor_v2" if dtype.storage else "_rebuild_tensor_v3"
        self._global("torch._utils", function)
        self._out.append(b"((")
        self._text("storage")
        self._global(*storage)
        self._text(ref.key)
        self._text(ref.device)
        count = ref.nbytes // (dtype.itemsize if dtype.storage else 1)
        self._out.append(self._number(count) + self._END_OF_ID + self._number(offset))
        self._compound(spec.shape)
        self._compound(spec.strides)
        if quantizer is not None:
            self._quantizer(quantizer, spec)
        self._hooks(requires_grad)
        if not dtype.storage and quantizer is None:
            self._global("torch", spec.dtype)
        if spec.math_bits:
            self._save(dict(spec.math_bits))
        self._out.append(b"tR")

    def _hooks(self, requires_grad: bool) -> None:
        """Write ``requires_grad`` and the empty dict of hooks, which needs no memo: nothing refers to it."""
        self._out.append(b"\x88" if requires_grad else b"\x89")
        self._global("collections", "OrderedDict")
        self._out.append(b")R")

    def _quantizer(self, quantizer: Quantizer, spec: TensorSpec) -> None:
        if not _is_possible(quantizer, spec.shape):
            raise WriteError(
                f"{self.path}: torch refuses a quantised tensor of shape {spec.shape}, because its scales do not fit; "
                "fetch the file again"
            )
        values: tuple[Any, ...] = (quantizer.scale, quantizer.zero_point)
        self._out.append(b"(")
        self._global("torch", quantizer.scheme)
        for value in values if quantizer.axis is None else (*values, quantizer.axis):
            self._save(value)
        self._out.append(b"t")

    def _sparse(self, spec: TensorSpec) -> None:
        parts: tuple[Any, ...] = (*spec.parts.values(), spec.shape)
        if spec.layout == "sparse_coo" and spec.is_coalesced is not None:
            parts = (*parts, spec.is_coalesced)
        self._global("torch._utils", "_rebuild_sparse_tensor")
        self._call("torch.serialization", "_get_layout", (f"torch.{spec.layout}",))
        self._tuple(parts)
        self._out.append(b"\x86R")


def _is_of_moments(value: Global) -> bool:
    """Return whether a global builds torchao's low-bit moments, which ``weights_only`` allows with torchao."""
    return str(value) == "torch._utils._rebuild_wrapper_subclass" or is_low_bit_moment(str(value))


def _is_possible(quantizer: Quantizer, shape: tuple[int, ...]) -> bool:
    """Return whether torch accepts this quantiser for a tensor of this shape."""
    scale, zero_point, axis = quantizer.scale, quantizer.zero_point, quantizer.axis
    if quantizer.scheme.startswith("per_tensor"):
        return axis is None and isinstance(scale, (int, float)) and isinstance(zero_point, int)
    if not isinstance(axis, int) or not 0 <= axis < len(shape):
        return False
    given: tuple[object, ...] = (scale, zero_point)  # torch 1.3 pickled lists
    counts = [
        part.numel if isinstance(part, TensorSpec) else len(part) if isinstance(part, list) else -1 for part in given
    ]
    return counts == [shape[axis]] * 2
