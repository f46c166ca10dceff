"""Space that was reserved for a file and never filled: zeros at its end that no training left there.

Downloaders and network file systems make a file in its full size first. Such a file has a whole header, and reads as
zeros from where the transfer stopped. Zeros at the end are common in healthy files too: the ``lora_B`` of a fresh
adapter, a bias, the padded rows of a vocabulary. Those begin where a tensor or one of its rows begins. A transfer stops
anywhere, so what is believed is a run of zeros that begins in the middle of a row of numbers of which hardly one is
zero, and goes on to the end of the file through at least another row or tensor of numbers."""

from __future__ import annotations

from collections.abc import Iterable

from ckptfix.bytes.sources import Content
from ckptfix.bytes.torn import SECTOR, zero_tail
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.spec import TensorSpec

SAMPLE = 1 << 16
"""Bytes in front of the zeros that are looked at."""

DENSE = 0.01
"""The largest share of zeros among the numbers in front."""


def unfilled_from(content: Content, placed: Iterable[tuple[int, TensorSpec]]) -> int | None:
    """Where the zeros begin that were never filled; None where the end of the file may be meant.

    ``placed`` gives contiguous tensors and the byte of the content at which each begins."""
    zeros = zero_tail(content)
    if len(content) - zeros < SECTOR:
        return None
    is_cut, follows = False, False
    for start, spec in placed:
        stop = start + spec.nbytes
        if not _is_float(spec) or stop <= zeros:
            continue
        row = max(spec.nbytes // (spec.shape[0] if len(spec.shape) > 1 else 1), 1)
        if start >= zeros:
            follows = True
        elif _lies_inside(zeros - start, row, spec.itemsize) and _is_dense(content, start, zeros, spec):
            is_cut = True
            follows |= stop - (zeros + row - (zeros - start) % row) >= row
    return zeros if is_cut and follows else None


def _is_float(spec: TensorSpec) -> bool:
    return spec.numel > 0 and (DTYPES[spec.dtype].is_float or DTYPES[spec.dtype].is_complex)


def _lies_inside(offset: int, row: int, itemsize: int) -> bool:
    """Whether zeros begin inside of a row: inside of a number, or between two and not next to an edge, where the last
    numbers of the row may be zero themselves.
    """
    return offset % itemsize > 0 or 2 * itemsize <= offset % row <= row - 2 * itemsize


def _is_dense(content: Content, start: int, zeros: int, spec: TensorSpec) -> bool:
    """Whether hardly a number of the tensor in front of the zeros is zero itself, or so small that its last byte is.

    A complex number is two."""
    itemsize = spec.itemsize
    lasts = (itemsize // 2, itemsize) if DTYPES[spec.dtype].is_complex else (itemsize,)
    first = start + max(0, (zeros - start - SAMPLE) // itemsize) * itemsize
    data = bytes(content.buffer[first : zeros - (zeros - first) % itemsize])
    count = len(data) // itemsize
    empty = sum(not any(ends) for ends in zip(*(data[last - 1 :: itemsize] for last in lasts), strict=True))
    return count > 0 and empty <= DENSE * count
