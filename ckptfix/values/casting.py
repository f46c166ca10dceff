"""Tensors whose numbers are changed when they are read: cast to another dtype, or some of them set to zero."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from msgspec.structs import replace

from ckptfix.bytes.sources import ComputedBytes, KeptBytes
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.edits import BLOCKS, INT8, MXFP4, MXFP4_TURNED, NON_FINITE, Dequantise
from ckptfix.core.lazy import np, torch
from ckptfix.core.spec import TensorSpec, computed
from ckptfix.errors import PlanError, WriteError
from ckptfix.reading.tensors import RowMajorBytes, bytes_of, row_major_bytes, torch_dtype
from ckptfix.values.decode import encoding
from ckptfix.values.tally import magnitudes

_BLOCK = 1 << 18  # numbers that are compared at a time


def whole_tensor(spec: TensorSpec, path: str) -> torch.Tensor:
    """Return a copy of a plain tensor of the file, in row-major order."""
    return torch.frombuffer(bytearray(row_major_bytes(spec, path)), dtype=torch_dtype(spec.dtype)).reshape(spec.shape)


@contextmanager
def computing(path: str, what: str) -> Iterator[None]:
    """Raise ``PlanError`` for torch's words for shapes and dtypes that do not go together."""
    try:
        yield
    except (RuntimeError, IndexError, ValueError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise PlanError(f"{path}: {what}: {reason}; the plan belongs to another file") from error


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
    stored, width, size = RowMajorBytes(spec, path), spec.itemsize, DTYPES[dtype].itemsize

    def cast(first: int, last: int) -> memoryview:
        raw = bytearray(stored.read(first * width, last * width))
        values = torch.frombuffer(raw, dtype=torch_dtype(spec.dtype))
        with computing(path, f"{spec.dtype} cannot become {dtype}"):
            converted = values.to(torch_dtype(dtype))
        if values.is_floating_point() and not _are_within(values, converted.dtype):
            raise WriteError(
                f"{path}: a NaN, an infinity or a number out of its range cannot become {dtype}; keep the tensor as it "
                "is"
            )
        return bytes_of(converted.view(torch.uint8))

    content = ComputedBytes(spec.numel * size, size, cast)
    return computed(spec, f"cast {dtype}", content, spec.storages, dtype=dtype)


# The schemes that are known, and by what each scale is multiplied: bitsandbytes keeps 127 times the step of a row.
FACTORS = {INT8: 7.874015718698502e-3, BLOCKS: 1.0}
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
    is_plain = all(each.storage is not None and not each.parts and each.quantizer is None for each in (spec, scales))
    if not is_plain or not DTYPES[edit.dtype].is_float:
        return None
    size = DTYPES[edit.dtype].itemsize
    content: ComputedBytes
    if edit.scheme in (MXFP4, MXFP4_TURNED) and (shape := unpacked_shape(spec, scales)):
        experts, rows, columns = shape
        shape = (experts, columns, rows) if edit.scheme == MXFP4_TURNED else shape
        unit = rows * columns * size
        content = KeptBytes(experts * unit, unit, lambda at, _: _unpacked(spec.at(at), scales.at(at), edit, path))
    elif edit.scheme in FACTORS and scale_steps(spec.shape, scales.shape) is not None:
        shape = spec.shape
        content = ComputedBytes(spec.numel * size, shape[1] * size, partial(_scaled, spec, scales, edit, path))
    else:
        return None
    storages = (*spec.storages, *scales.storages)
    return computed(spec, f"dequantised {edit.dtype}", content, storages, dtype=edit.dtype, shape=shape)


def unpacked_shape(codes: TensorSpec, scales: TensorSpec) -> tuple[int, ...]:
    """Return how many experts, rows and columns codes of MXFP4 have; nothing if they are other codes."""
    if (codes.dtype, scales.dtype, codes.shape) != ("uint8", "uint8", (*scales.shape, PACK)) or len(scales.shape) != 3:
        return ()
    return (*scales.shape[:2], scales.shape[2] * 2 * PACK)


def _scaled(spec: TensorSpec, scales: TensorSpec, edit: Dequantise, path: str, first: int, last: int) -> memoryview:
    """Return rows of the product, worked out in float32 as the formats' own readers do."""
    rows, columns = spec.shape
    across, along = scale_steps(spec.shape, scales.shape) or (1, 1)
    part = replace(spec, shape=(last - first, columns), offset=spec.offset + spec.strides[0] * first)
    codes, factors = (whole_tensor(each, path).float() for each in (part, scales))
    steps = factors.reshape(-(-rows // across), -(-columns // along))
    steps = steps[torch.arange(first, last) // across][:, torch.arange(columns) // along]
    with computing(path, f"{edit.key} cannot become {edit.dtype}"):
        product = (codes * steps * FACTORS[edit.scheme]).to(torch_dtype(edit.dtype)).flatten()
    return bytes_of(product.view(torch.uint8))


def _unpacked(spec: TensorSpec, scales: TensorSpec, edit: Dequantise, path: str) -> memoryview:
    """Return the matrix of an expert of MXFP4, the same as ``convert_moe_packed_tensors`` of transformers makes."""
    with computing(path, f"{edit.key} cannot become {edit.dtype}"):
        codes, powers = (whole_tensor(each, path) for each in (spec, scales))
        dtype = torch_dtype(edit.dtype)
        numbers = torch.tensor([*_FOUR_BITS, *(-number for number in _FOUR_BITS)], dtype=dtype)
        made = torch.empty(codes.shape[0], codes.shape[1] * 2 * PACK, dtype=dtype)
        for first in range(0, len(made), _ROWS):
            rows = codes[first : first + _ROWS].int()
            pairs = torch.stack((numbers[rows & 15], numbers[rows >> 4]), -1).flatten(-2)
            shifts = powers[first : first + _ROWS].int().sub(127).unsqueeze(-1)
            made[first : first + _ROWS] = torch.ldexp(pairs, shifts).flatten(1)
        made = made.T.contiguous() if edit.scheme == MXFP4_TURNED else made
    return bytes_of(made.view(torch.uint8)).cast("B")


WITHOUT_ZERO = "float8_e8m0fnu"  # the dtype in which no bits stand for zero, those that are all 0 for a small number


def can_be_zeroed(spec: TensorSpec) -> bool:
    """Return whether the tensor is a plain one of floats."""
    is_plain = spec.storage is not None and not (spec.parts or spec.math_bits or spec.quantizer)
    stored = encoding(spec.dtype)
    return is_plain and stored is not None and stored.smallest_normal > 0 and spec.dtype != WITHOUT_ZERO


def zeroed_spec(spec: TensorSpec, which: str, path: str) -> TensorSpec:
    """Return the tensor with its non-finite or its subnormal numbers zero; they are changed when they are read."""
    form, stored = encoding(spec.dtype), RowMajorBytes(spec, path)
    assert form is not None, f"{spec.dtype} holds no numbers"

    def zeroed(first: int, last: int) -> memoryview:
        units = np.frombuffer(stored.read(first * form.itemsize, last * form.itemsize), dtype=form.unit).copy()
        with np.errstate(all="ignore"):  # NaN and infinities are what we look for
            values = form.decode(units)
            magnitude = magnitudes(values)
            infinity, normal = (
                magnitudes(np.asarray(bound, values.dtype)) for bound in (math.inf, form.smallest_normal)
            )
            units[magnitude >= infinity if which == NON_FINITE else (magnitude > 0) & (magnitude < normal)] = 0
        return memoryview(units.view(np.uint8))

    return computed(spec, f"without {which}", ComputedBytes(spec.nbytes, form.itemsize, zeroed), spec.storages)
