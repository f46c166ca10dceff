"""Tensors in another dtype, converted when they are read."""

from __future__ import annotations

from dataclasses import replace

import torch

from ckptfix.core.dtypes import DTYPES
from ckptfix.core.spec import Storage, TensorSpec, contiguous_strides
from ckptfix.errors import WriteError
from ckptfix.reading.live import bytes_of
from ckptfix.reading.tensors import row_major_bytes, torch_dtype


class CastBytes:
    """The bytes of a tensor in another dtype, converted block by block when they are read."""

    def __init__(self, spec: TensorSpec, dtype: str, path: str) -> None:
        self.spec, self.dtype, self.path = spec, dtype, path
        self.nbytes = spec.numel * DTYPES[dtype].itemsize
        self._row_major: memoryview | None = None

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes ``start`` to ``stop`` of the converted tensor."""
        size, itemsize = DTYPES[self.dtype].itemsize, self.spec.itemsize
        first, last = start // size, -(-stop // size)
        if self.spec.is_contiguous and self.spec.storage is not None:
            begin = self.spec.offset * itemsize
            raw = self.spec.storage.source.read(begin + first * itemsize, begin + last * itemsize)
        else:
            if self._row_major is None:
                self._row_major = row_major_bytes(self.spec, self.path)
            raw = self._row_major[first * itemsize : last * itemsize]
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
    """Whether whole numbers of a dtype can stand for these floats: a conversion of others gives what the machine likes.

    Always true for a dtype of floats or complex numbers.
    """
    if dtype.is_floating_point or dtype.is_complex:
        return True
    if dtype == torch.bool:
        return bool(values.isfinite().all())
    limits = torch.iinfo(dtype)
    whole = values.double().trunc()  # as wide as this, the limits of every dtype are exact
    return bool(((whole >= float(limits.min)) & (whole < float(limits.max + 1))).all())


def cast_spec(spec: TensorSpec, dtype: str, path: str) -> TensorSpec:
    """The spec of a tensor converted to another dtype; the values are converted when they are read."""
    storage = Storage(f"cast {dtype}", CastBytes(spec, dtype, path), parts=spec.storages)
    return replace(spec, dtype=dtype, strides=contiguous_strides(spec.shape), storage=storage, offset=0, math_bits={})
