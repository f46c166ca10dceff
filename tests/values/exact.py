"""Computes statistics by exact arithmetic, and compares them."""

import math
from fractions import Fraction

import numpy as np
from msgspec.structs import fields

from ckptfix.core.spec import TensorStatistics
from ckptfix.values.decode import Encoding

INEXACT = ("mean", "rms")

HALVES = 3e-7
"""The relative error allowed in moments of 16-bit numbers, of which the kernel adds eight at a time in float32."""


def assert_same_tally(found: TensorStatistics, expected: TensorStatistics, share: float = 1e-12) -> None:
    """Assert that all statistics are equal, except moments, which may differ by this share of the RMS."""
    for field in fields(TensorStatistics):
        if field.name not in INEXACT:
            assert getattr(found, field.name) == getattr(expected, field.name), field.name
    assert math.isclose(found.rms, expected.rms, rel_tol=share)
    assert math.isclose(found.mean, expected.mean, rel_tol=share, abs_tol=share * expected.rms)


def exact_tally(units: np.ndarray, encoding: Encoding) -> TensorStatistics:
    """Compute the statistics one number at a time, in fractions: slow but exact."""
    with np.errstate(all="ignore"):
        values = [float(value) for value in encoding.decode(units)]
    finite = [Fraction(value) for value in values if math.isfinite(value)]
    bad = [place for place, value in enumerate(values) if not math.isfinite(value)]
    return TensorStatistics(
        numel=len(values),
        nan=sum(math.isnan(value) for value in values),
        pos_inf=values.count(math.inf),
        neg_inf=values.count(-math.inf),
        zeros=sum(value == 0 for value in values),
        subnormals=sum(0 < abs(value) < encoding.smallest_normal for value in values),
        minimum=float(min(finite)) if finite else 0.0,
        maximum=float(max(finite)) if finite else 0.0,
        mean=float(sum(finite) / len(finite)) if finite else 0.0,
        rms=_root(sum((value * value for value in finite), Fraction()) / len(finite)) if finite else 0.0,
        first_nonfinite=bad[0] if bad else None,
    )


def _root(square: Fraction) -> float:
    """Return the square root, even of numbers outside the range of floats."""
    if not square:
        return 0.0
    power = (square.numerator.bit_length() - square.denominator.bit_length()) // 2
    return math.ldexp(math.sqrt(float(square / Fraction(4) ** power)), power)
