"""The figures of one tensor's values."""

from __future__ import annotations

from typing import NamedTuple

FAINT = 1e-20
"""A magnitude of weights that passes nothing on: float16 and the activations of float32 lose it beside any other."""

DISK_BLOCK = 4096
"""Bytes that file systems and disks move together."""


class TensorStatistics(NamedTuple):
    """What the numbers of a tensor look like.

    ``numel`` counts numbers: an element of a complex tensor is two. -0.0 counts among the ``zeros``. ``minimum`` to
    ``rms`` are over the finite numbers, and 0.0 if there are none. ``first_nonfinite`` is the flat row-major index
    of the first element that is NaN or infinite; None if there is none, and for sparse tensors. ``overflowing`` and
    ``vanishing`` count the finite numbers that a cast which was asked for would make infinite (or NaN) and zero.
    ``words`` are the 8 bytes at each multiple of 4 KiB of the file, of a row-major tensor in a file without checksums:
    equal ones lead to blocks that were copied. ``has_faint_rows`` says whether a row of a matrix begins with a number
    below ``FAINT`` that is not zero. ``sample`` are some 256 of the numbers, at equal distances, as float32; empty for
    sparse tensors.
    ``mean`` and ``rms`` are off by less than 1e-12 of the RMS, of float16 and bfloat16 by less than 1e-6.
    """

    numel: int
    nan: int = 0
    pos_inf: int = 0
    neg_inf: int = 0
    zeros: int = 0
    subnormals: int = 0
    minimum: float = 0.0
    maximum: float = 0.0
    absmax: float = 0.0
    mean: float = 0.0
    rms: float = 0.0
    first_nonfinite: int | None = None
    overflowing: int = 0
    vanishing: int = 0
    words: bytes = b""
    has_faint_rows: bool = False
    sample: bytes = b""

    @property
    def nonfinite(self) -> int:
        """How many numbers are NaN or infinite."""
        return self.nan + self.pos_inf + self.neg_inf

    @property
    def all_zero(self) -> bool:
        """Whether there are numbers, and each is zero."""
        return 0 < self.numel == self.zeros

    @property
    def is_constant(self) -> bool:
        """Whether there are two numbers or more, all finite and of one value."""
        return self.numel > 1 and not self.nonfinite and self.minimum == self.maximum
