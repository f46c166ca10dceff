"""Which channels of a tensor have a certain kind of number: a second pass, for the few tensors that need one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ckptfix.core.spec import TensorSpec
from ckptfix.values.decode import encoding
from ckptfix.values.tally import BLOCK
from ckptfix.values.walk import Walk

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]


def channels_with(spec: TensorSpec, chosen: Callable[[Array], Array], least: int = 1) -> tuple[int, ...]:
    """The places along the first dimension with at least ``least`` numbers of a kind.

    ``chosen`` makes a mask of an array of float32 or float64. Empty for what has no channels: a 0-d or sparse tensor,
    and one that repeats a single channel. Raises ``UnreadableError`` where the bytes are not in the file.
    """
    import numpy as np

    stored = encoding(spec.dtype)
    if stored is None or stored.units != 1 or spec.storage is None or spec.parts or not spec.numel:
        return ()
    walk = Walk(spec)
    if 0 not in walk.axes:
        return ()
    length = walk.distinct // spec.shape[0]
    counts = np.zeros(spec.shape[0], dtype=np.int64)
    seen = 0
    for block in walk.blocks():
        units = np.frombuffer(block, dtype=stored.unit)
        for start in range(0, len(units), BLOCK):
            part = units[start : start + BLOCK]
            with np.errstate(all="ignore"):  # NaN and infinities are what some look for
                positions = seen + np.flatnonzero(chosen(stored.decode(part)))
            if len(positions):
                places = positions if walk.is_row_major else walk.logical_order(positions)
                counts += np.bincount(places // length, minlength=spec.shape[0])
            seen += len(part)
    return tuple(int(place) for place in np.flatnonzero(counts >= least))
