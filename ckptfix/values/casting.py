"""Tensors whose numbers are changed when they are read: cast to another dtype, or some of them set to zero."""

from __future__ import annotations

import math

from msgspec.structs import replace

from ckptfix.core.dtypes import DTYPES
from ckptfix.core.edits import Dequantise
from ckptfix.core.lazy import np, torch
from ckptfix.core.spec import TensorSpec, computed
from ckptfix.errors import WriteError
from ckptfix.reading.tensors import RowMajorBytes, bytes_of, row_major_bytes, torch_dtype
from ckptfix.values.decode import Array, encoding
from ckptfix.values.tally import magnitudes

_BLOCK = 1 << 18  # numbers that are compared at a time


def whole_tensor(spec: TensorSpec, path: str) -> torch.Tensor:
    """Return a copy of a plain tensor of the file, in row-major order."""
    return torch.frombuffer(bytearray(row_major_bytes(spec, path)), dtype=torch_dtype(spec.dtype)).reshape(spec.shape)


class CastBytes:
    """The bytes of a tensor in another dtype, converted when they are read."""

    def __init__(self, spec: TensorSpec, dtype: str, path: str) -> None:
        self.spec, self.dtype, self.path = spec, dtype, path
        self.nbytes = spec.numel * DTYPES[dtype].itemsize
        self._stored = RowMajorBytes(spec, path)

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes ``start`` to ``stop`` of the converted tensor."""
        size, width = DTYPES[self.dtype].itemsize, self.spec.itemsize
        first, last = start // size, -(-stop // size)
        raw = self._stored.read(first * width, last * width)
        if not raw:
            return memoryview(b"")
        values = torch.frombuffer(bytearray(raw), dtype=torch_dtype(self.spec.dtype))
        converted = values.to(torch_dtype(self.dtype))
        if values.is_floating_point() and not _are_within(values, converted.dtype):
            raise WriteError(
                f"{self.path}: a NaN, an infinity or a number out of its range cannot become {self.dtype}; keep the "
                "tensor as it is"
            )
        return bytes_of(converted.view(torch.uint8))[start - first * size : stop - first * size]


def _are_within(values: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether whole numbers of a dtype can stand for these floats: a conversion of others gives what the machine
    likes.

    Always true for a dtype of floats or complex numbers."""
    if dtype.is_floating_point or dtype.is_complex:
        return True
    if dtype == torch.bool:
        return bool(values.isfinite().all())
    limits = torch.iinfo(dtype)
    whole = values.double().trunc()  # as wide as this, the limits of every dtype are exact
    return bool(((whole >= float(limits.min)) & (whole < float(limits.max + 1))).all())


def cast_spec(spec: TensorSpec, dtype: str, path: str) -> TensorSpec:
    """Return the spec of a tensor converted to another dtype; the values are converted when they are read."""
    return computed(spec, f"cast {dtype}", CastBytes(spec, dtype, path), spec.storages, dtype=dtype)


INT8, BLOCKS = "bitsandbytes int8", "scaled codes"
# The schemes that are known, and by what each scale is multiplied: bitsandbytes keeps 127 times the step of a row.
FACTORS = {INT8: 7.874015718698502e-3, BLOCKS: 1.0}
# Two numbers of four bits in each byte, the low half first; a scale is the power of two of 16 bytes of a row. The
# matrix of an expert may be turned when it is read, as transformers does with those of gpt-oss.
MXFP4, MXFP4_TURNED = "MXFP4", "MXFP4, turned"
PACK = 16
_FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_ROWS = 256  # that are unpacked at a time
SQUARE = 128  # rows and columns that share a scale, if there is one for each square


def is_cast_of(master: TensorSpec, copy: TensorSpec, path: str) -> bool:
    """Return whether a copy in float16 or bfloat16 is its fp32 master rounded to it, bit for bit; in fp32, the same.

    True for pairs of other dtypes, of which nothing is known. All NaN are one."""
    if (master.dtype, copy.dtype) not in (("float32", "bfloat16"), ("float32", "float16"), ("float32", "float32")):
        return True
    wide, narrow = RowMajorBytes(master, path), RowMajorBytes(copy, path)
    for start in range(0, master.numel, _BLOCK):
        stop = min(start + _BLOCK, master.numel)
        values = np.frombuffer(wide.read(start * 4, stop * 4), "<f4")
        size = copy.itemsize
        held = np.frombuffer(narrow.read(start * size, stop * size), f"<u{size}")
        if copy.dtype == "bfloat16":
            bits = values.view("<u4")
            made = ((bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)).astype("<u2")
        else:
            with np.errstate(over="ignore"):
                made = values.astype(f"<f{size}").view(held.dtype)
        stored = encoding(copy.dtype)
        assert stored is not None
        if not np.array_equal(made, held) and not np.array_equal(
            np.where(np.isnan(values), 0, made), np.where(np.isnan(stored.decode(held.view(stored.unit))), 0, held)
        ):
            return False
    return True


def scale_steps(codes: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, int] | None:
    """Return how many rows and columns of a matrix of codes share a scale; None if the scales do not fit it."""
    if len(codes) != 2 or 0 in codes:
        return None
    rows, columns = codes
    if math.prod(scales) == 1:
        return rows, columns
    if scales in ((rows,), (rows, 1)):
        return 1, columns
    return (SQUARE, SQUARE) if scales == (-(-rows // SQUARE), -(-columns // SQUARE)) else None


def dequantised_spec(spec: TensorSpec, scales: TensorSpec, edit: Dequantise, path: str) -> TensorSpec | None:
    """Return the tensor of codes times their scales, which are multiplied when it is read; None if they do not fit."""
    if any(each.storage is None or each.parts or each.quantizer is not None for each in (spec, scales)):
        return None
    content: ScaledBytes | UnpackedBytes
    if edit.scheme in (MXFP4, MXFP4_TURNED) and (shape := unpacked_shape(spec, scales)):
        experts, rows, columns = shape
        shape = (experts, columns, rows) if edit.scheme == MXFP4_TURNED else shape
        content = UnpackedBytes(spec, scales, edit, path)
    elif edit.scheme in FACTORS and scale_steps(spec.shape, scales.shape) is not None:
        shape, content = spec.shape, ScaledBytes(spec, scales, edit, path)
    else:
        return None
    storages = (*spec.storages, *scales.storages)
    return computed(spec, f"dequantised {edit.dtype}", content, storages, dtype=edit.dtype, shape=shape)


def unpacked_shape(codes: TensorSpec, scales: TensorSpec) -> tuple[int, ...]:
    """Return how many experts, rows and columns codes of MXFP4 have; nothing if they are other codes."""
    if (codes.dtype, scales.dtype, codes.shape) != ("uint8", "uint8", (*scales.shape, PACK)) or len(scales.shape) != 3:
        return ()
    return (*scales.shape[:2], scales.shape[2] * 2 * PACK)


class ScaledBytes:
    """The bytes of a matrix of codes times their scales, in row-major order."""

    def __init__(self, spec: TensorSpec, scales: TensorSpec, edit: Dequantise, path: str) -> None:
        self.spec, self.scales, self.edit, self.path = spec, scales, edit, path
        self.nbytes = spec.numel * DTYPES[edit.dtype].itemsize

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes ``start`` to ``stop`` of the product, worked out in float32 as the formats' own readers do."""
        rows, columns = self.spec.shape
        across, along = scale_steps(self.spec.shape, self.scales.shape) or (1, 1)
        width = columns * DTYPES[self.edit.dtype].itemsize
        first, last = start // width, -(-stop // width)
        row = self.spec.strides[0] * first
        part = replace(self.spec, shape=(last - first, columns), offset=self.spec.offset + row)
        codes, scales = (whole_tensor(spec, self.path).float() for spec in (part, self.scales))
        steps = scales.reshape(-(-rows // across), -(-columns // along))
        steps = steps[torch.arange(first, last) // across][:, torch.arange(columns) // along]
        product = (codes * steps * FACTORS[self.edit.scheme]).to(torch_dtype(self.edit.dtype)).flatten()
        return bytes_of(product.view(torch.uint8))[start - first * width : stop - first * width]


class UnpackedBytes:
    """The bytes of the matrices of MXFP4's experts, unpacked one expert at a time."""

    def __init__(self, spec: TensorSpec, scales: TensorSpec, edit: Dequantise, path: str) -> None:
        self.spec, self.scales, self.edit, self.path = spec, scales, edit, path
        self.nbytes = 2 * spec.numel * DTYPES[edit.dtype].itemsize
        self._kept: tuple[int, memoryview] = (-1, memoryview(b""))  # replaced and never changed: threads read it

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes ``start`` to ``stop``, the same as ``convert_moe_packed_tensors`` of transformers makes."""
        size = self.nbytes // max(self.spec.shape[0], 1)
        parts = []
        for expert in range(start // size, -(-stop // size)) if stop > start else ():
            kept = self._kept
            if kept[0] != expert:
                kept = self._kept = expert, self._expert(expert)
            parts.append(kept[1][max(start - expert * size, 0) : stop - expert * size])
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))

    def _expert(self, expert: int) -> memoryview:
        codes, scales = (whole_tensor(spec.at(expert), self.path) for spec in (self.spec, self.scales))
        dtype = torch_dtype(self.edit.dtype)
        numbers = torch.tensor([*_FOUR_BITS, *(-number for number in _FOUR_BITS)], dtype=dtype)
        made = torch.empty(codes.shape[0], codes.shape[1] * 2 * PACK, dtype=dtype)
        for first in range(0, len(made), _ROWS):
            rows = codes[first : first + _ROWS].int()
            pairs = torch.stack((numbers[rows & 15], numbers[rows >> 4]), -1).flatten(-2)
            powers = scales[first : first + _ROWS].int().sub(127).unsqueeze(-1)
            made[first : first + _ROWS] = torch.ldexp(pairs, powers).flatten(1)
        made = made.T.contiguous() if self.edit.scheme == MXFP4_TURNED else made
        return memoryview(bytes_of(made.view(torch.uint8)))


NON_FINITE, SUBNORMAL = "non-finite", "subnormal"
WHICH = (NON_FINITE, SUBNORMAL)  # which numbers can be set to zero
WITHOUT_ZERO = "float8_e8m0fnu"  # the dtype in which no bits stand for zero, those that are all 0 for a small number


def can_be_zeroed(spec: TensorSpec) -> bool:
    """Return whether the tensor is a plain one of floats."""
    is_plain = spec.storage is not None and not (spec.parts or spec.math_bits or spec.quantizer)
    stored = encoding(spec.dtype)
    return is_plain and stored is not None and stored.smallest_normal > 0 and spec.dtype != WITHOUT_ZERO


def zeroed_spec(spec: TensorSpec, which: str, path: str) -> TensorSpec:
    """Return the tensor with its non-finite or its subnormal numbers zero; they are changed when they are read."""
    return computed(spec, f"without {which}", ZeroedBytes(spec, which, path), spec.storages)


class ZeroedBytes:
    """The bytes of a tensor in row-major order, in which the numbers of one kind are zero."""

    def __init__(self, spec: TensorSpec, which: str, path: str) -> None:
        stored = encoding(spec.dtype)
        assert stored is not None, f"{spec.dtype} holds no numbers"
        self.which, self.nbytes = which, spec.nbytes
        self._encoding, self._stored = stored, RowMajorBytes(spec, path)

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes ``start`` to ``stop`` of the changed tensor."""
        size = self._encoding.itemsize
        first = start // size * size
        units = np.frombuffer(self._stored.read(first, stop + -stop % size), dtype=self._encoding.unit).copy()
        with np.errstate(all="ignore"):  # NaN and infinities are what we look for
            units[self._chosen(self._encoding.decode(units))] = 0
        return memoryview(units.view(np.uint8))[start - first : stop - first]

    def _chosen(self, values: Array) -> Array:
        magnitude = magnitudes(values)
        infinity, normal = (
            magnitudes(np.asarray(bound, values.dtype)) for bound in (math.inf, self._encoding.smallest_normal)
        )
        chosen: Array = magnitude >= infinity if self.which == NON_FINITE else (magnitude > 0) & (magnitude < normal)
        return chosen
