"""Single numbers of a tensor set to zero, and all others left bit for bit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptfix.core.spec import Storage, TensorSpec, contiguous_strides
from ckptfix.values.decode import Encoding, encoding
from ckptfix.values.tally import magnitudes

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

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
    storage = Storage(f"without {which}", ZeroedBytes(spec, which, path))
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
