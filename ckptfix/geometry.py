"""How many elements and bytes a strided tensor has, and which of its storage it touches."""

from __future__ import annotations

import math

from ckptfix.dtypes import DTYPES


class Geometry:
    """What follows from a tensor's dtype, shape, strides and offset.

    A repair asks for it dozens of times for each tensor. So what takes a walk over the dimensions is kept, in fields
    that are no part of equality."""

    __slots__ = ()

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    _numel: int | None
    _is_contiguous: bool | None

    @property
    def numel(self) -> int:
        """Number of elements (1 for a 0-d tensor)."""
        numel = self._numel
        if numel is None:
            numel = math.prod(self.shape)
            object.__setattr__(self, "_numel", numel)
        return numel

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return DTYPES[self.dtype].itemsize

    @property
    def per_byte(self) -> int:
        """Elements that share a byte, 1 but for the quantised dtypes of 2 and 4 bits."""
        return DTYPES[self.dtype].per_byte

    @property
    def nbytes(self) -> int:
        """Bytes of the dense tensor; a zero-stride tensor needs fewer in its file."""
        dtype = DTYPES[self.dtype]
        return -(-self.numel * dtype.itemsize // dtype.per_byte)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie one after another in row-major order."""
        known = self._is_contiguous
        if known is None:
            known = self.numel == 0 or _is_row_major(self.shape, self.strides)
            object.__setattr__(self, "_is_contiguous", known)
        return known

    @property
    def extent(self) -> tuple[int, int]:
        """The first and one past the last byte of the storage that the tensor touches."""
        dtype, offset, count = DTYPES[self.dtype], self.offset, self.numel
        if count and not self.is_contiguous:
            count = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        itemsize, per_byte = dtype.itemsize, dtype.per_byte
        if per_byte == 1:
            return offset * itemsize, (offset + count) * itemsize
        first = offset * itemsize // per_byte
        return first, -(-(offset + count) * itemsize // per_byte) if count else first


def _is_row_major(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    step, axis = 1, len(shape)
    if axis != len(strides):
        raise ValueError(f"{axis} sizes and {len(strides)} strides")
    for stride in reversed(strides):
        axis -= 1
        size = shape[axis]
        if stride != step and size != 1:
            return False
        step *= size
    return True
