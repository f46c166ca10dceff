"""What a cast to a narrower float loses: the magnitudes beyond which a number overflows or becomes zero.

Casts round to the nearest number, ties to the even code (IEEE 754). What lies half a step or more above the largest
finite number becomes infinite, in float8_e4m3fn NaN; what lies half of the smallest subnormal or less above zero
becomes zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from ckptfix.values.decode import encoding


@dataclass(frozen=True)
class Narrowing:
    """A cast to ``dtype``. Finite magnitudes above ``largest`` do not stay finite; those up to ``vanishing`` become
    zero."""

    dtype: str
    vanishing: float
    largest: float

    @property
    def bounds(self) -> tuple[float, float]:
        """``vanishing`` and ``largest``."""
        return self.vanishing, self.largest


@cache
def narrowing_to(dtype: str) -> Narrowing:
    """What a cast to a float of 8, 16 or 32 bits loses.

    ``largest`` is a float32, or of a cast to float32 a float64, so that it can be compared with what is cast."""
    import numpy as np

    if dtype == "float32":
        finite = np.finfo(np.float32)
        halfway = float(finite.max) + 2.0 ** (127 - 24)
        return Narrowing(dtype, float(finite.smallest_subnormal) / 2, math.nextafter(halfway, 0))
    stored = encoding(dtype)
    assert stored is not None, f"{dtype} is no float"
    codes = np.arange(1 << (8 * stored.unit.itemsize - 1)).astype(stored.unit)  # those without a sign
    with np.errstate(invalid="ignore"):  # signalling NaNs among the codes
        numbers = stored.decode(codes).astype(np.float64)
    finite_codes = np.flatnonzero(np.isfinite(numbers))
    top = int(finite_codes[numbers[finite_codes].argmax()])
    halfway = np.float32(numbers[top] + (numbers[top] - numbers[top - 1]) / 2)
    # A tie goes to the even one of the two codes, which is the larger one where the largest number's is odd.
    largest = np.nextafter(halfway, np.float32(0)) if top % 2 else halfway
    return Narrowing(dtype, float(numbers[numbers > 0].min()) / 2, float(largest))
