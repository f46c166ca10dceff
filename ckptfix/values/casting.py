"""Tensors whose numbers are changed when they are read: cast to another dtype, or some of them set to zero."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptfix.core.dtypes import DTYPES
from ckptfix.core.spec import Storage, TensorSpec, contiguous_strides
from ckptfix.errors import WriteError
from ckptfix.values.decode import Encoding, encoding
from ckptfix.values.tally import magnitudes

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    Array = npt.NDArray[Any]


class CastBytes:
    """The bytes of a tensor in another dtype, converted block by block when they are read."""

    def __init__(self, spec: TensorSpec, dtype: str, path: str) -> None:
        self.spec, self.dtype, self.path = spec, dtype, path
        self.nbytes = spec.numel * DTYPES[dtype].itemsize
        self._row_major: memoryview | None = None

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes ``start`` to ``stop`` of the converted tensor."""
        import torch

        from ckptfix.reading.live import bytes_of
        from ckptfix.reading.tensors import row_major_bytes, torch_dtype

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
    import torch

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


NON_FINITE, SUBNORMAL = "non-finite", "subnormal"
WHICH = (NON_FINITE, SUBNORMAL)
"""Which numbers can be set to zero."""

WITHOUT_ZERO = "float8_e8m0fnu"
"""The dtype in which no bits stand for zero, those that are all 0 for a small number."""


def can_be_zeroed(spec: TensorSpec) -> bool:
    """Whether the tensor is a plain one of floats."""
    is_plain = spec.storage is not None and not (spec.parts or spec.math_bits or spec.quantizer)
    stored = encoding(spec.dtype)
    return is_plain and stored is not None and stored.smallest_normal > 0 and spec.dtype != WITHOUT_ZERO


def zeroed_spec(spec: TensorSpec, which: str, path: str) -> TensorSpec:
    """The tensor with all its non-finite or all its subnormal numbers zero; they are changed when they are read."""
    storage = Storage(f"without {which}", ZeroedBytes(spec, which, path), parts=spec.storages)
    return replace(spec, strides=contiguous_strides(spec.shape), storage=storage, offset=0)


class ZeroedBytes:
    """The bytes of a tensor in row-major order, in which the numbers of one kind are zero."""

    def __init__(self, spec: TensorSpec, which: str, path: str) -> None:
        stored = encoding(spec.dtype)
        assert stored is not None, f"{spec.dtype} holds no numbers"
        self.spec, self.which, self.path = spec, which, path
        self.nbytes = spec.nbytes
        self._encoding: Encoding = stored
        self._row_major: memoryview | None = None

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes ``start`` to ``stop`` of the changed tensor."""
        import numpy as np

        size = self._encoding.unit.itemsize
        first, last = start // size * size, -(-stop // size) * size
        units = np.frombuffer(self._bytes(first, last), dtype=self._encoding.unit).copy()
        with np.errstate(all="ignore"):  # NaN and infinities are what we look for
            units[self._chosen(self._encoding.decode(units))] = 0
        return memoryview(units.view(np.uint8))[start - first : stop - first]

    def _chosen(self, values: Array) -> Array:
        import numpy as np

        magnitude = magnitudes(values)
        infinity, normal = (
            magnitudes(np.asarray(bound, values.dtype)) for bound in (math.inf, self._encoding.smallest_normal)
        )
        chosen: Array = magnitude >= infinity if self.which == NON_FINITE else (magnitude > 0) & (magnitude < normal)
        return chosen

    def _bytes(self, start: int, stop: int) -> memoryview:
        storage = self.spec.storage
        if storage is not None and self.spec.is_contiguous:
            begin = self.spec.offset * self.spec.itemsize
            return storage.source.read(begin + start, begin + stop)
        if self._row_major is None:
            from ckptfix.reading.tensors import row_major_bytes

            self._row_major = row_major_bytes(self.spec, self.path)
        return self._row_major[start:stop]
