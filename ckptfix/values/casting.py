"""Tensors whose numbers are changed when they are read: cast to another dtype, or some set to zero."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from ckptfix.bytes.sources import ComputedBytes
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.edits import NON_FINITE
from ckptfix.core.lazy import np, torch
from ckptfix.core.spec import TensorSpec, computed
from ckptfix.errors import PlanError, WriteError
from ckptfix.reading.boxes import row_major, row_major_bytes
from ckptfix.reading.tensors import bytes_of, torch_dtype
from ckptfix.values.decode import encoding
from ckptfix.values.tally import magnitudes

_BLOCK = 1 << 18  # numbers compared at a time


def whole_tensor(spec: TensorSpec, path: str) -> torch.Tensor:
    """Return a copy of a plain tensor of the file, in row-major order."""
    return torch.frombuffer(bytearray(row_major_bytes(spec, path)), dtype=torch_dtype(spec.dtype)).reshape(spec.shape)


@contextmanager
def computing(path: str, what: str) -> Iterator[None]:
    """Turn torch's errors about shapes and dtypes into ``PlanError``."""
    try:
        yield
    except (RuntimeError, IndexError, ValueError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise PlanError(f"{path}: {what}: {reason}; the plan belongs to another file") from error


def _are_within(values: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether all floats are within the range of an integer dtype: others convert to undefined values.

    Always true for float and complex dtypes."""
    if dtype.is_floating_point or dtype.is_complex:
        return True
    if dtype == torch.bool:
        return bool(values.isfinite().all())
    limits = torch.iinfo(dtype)
    whole = values.double().trunc()  # float64 has the exact limits of every dtype
    return bool(((whole >= float(limits.min)) & (whole < float(limits.max + 1))).all())


def cast_spec(spec: TensorSpec, dtype: str, path: str) -> TensorSpec:
    """Return the spec of a tensor converted to another dtype; the values are converted when they are read."""
    stored, width, size = row_major(spec, path), spec.itemsize, DTYPES[dtype].itemsize

    def cast(first: int, last: int) -> memoryview:
        raw = bytearray(stored.read(first * width, last * width))
        values = torch.frombuffer(raw, dtype=torch_dtype(spec.dtype))
        with computing(path, f"{spec.dtype} cannot become {dtype}"):
            converted = values.to(torch_dtype(dtype))
        if values.is_floating_point() and not _are_within(values, converted.dtype):
            raise WriteError(
                f"{path}: NaN, infinity and out-of-range numbers cannot become {dtype}; keep the tensor unchanged"
            )
        return bytes_of(converted.view(torch.uint8))

    content = ComputedBytes(spec.numel * size, size, cast)
    return computed(spec, f"cast {dtype}", content, spec.storages, dtype=dtype)


def is_cast_of(master: TensorSpec, copy: TensorSpec, path: str) -> bool:
    """Return whether a copy is its fp32 master, rounded to float16 or bfloat16 bit for bit, or equal in fp32.

    True for pairs of other dtypes, which are not compared. All NaN count as equal."""
    if (master.dtype, copy.dtype) not in (("float32", "bfloat16"), ("float32", "float16"), ("float32", "float32")):
        return True
    wide, narrow = row_major(master, path), row_major(copy, path)
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


WITHOUT_ZERO = "float8_e8m0fnu"  # a dtype without zero: an all-zero byte is a small number


def can_be_zeroed(spec: TensorSpec) -> bool:
    """Return whether a tensor is a plain tensor of floats with a zero."""
    is_plain = spec.storage is not None and not (spec.parts or spec.math_bits or spec.quantizer)
    stored = encoding(spec.dtype)
    return is_plain and stored is not None and stored.smallest_normal > 0 and spec.dtype != WITHOUT_ZERO


def zeroed_spec(spec: TensorSpec, which: str, path: str) -> TensorSpec:
    """Return the tensor with its non-finite or subnormal numbers set to zero when they are read."""
    form, stored = encoding(spec.dtype), row_major(spec, path)
    assert form is not None, f"{spec.dtype} holds no numbers"

    def zeroed(first: int, last: int) -> memoryview:
        units = np.frombuffer(stored.read(first * form.itemsize, last * form.itemsize), dtype=form.unit).copy()
        with np.errstate(all="ignore"):  # NaN and infinities are expected
            values = form.decode(units)
            magnitude = magnitudes(values)
            infinity, normal = (
                magnitudes(np.asarray(bound, values.dtype)) for bound in (math.inf, form.smallest_normal)
            )
            units[magnitude >= infinity if which == NON_FINITE else (magnitude > 0) & (magnitude < normal)] = 0
        return memoryview(units.view(np.uint8))

    return computed(spec, f"without {which}", ComputedBytes(spec.nbytes, form.itemsize, zeroed), spec.storages)
