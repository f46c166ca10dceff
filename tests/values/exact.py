"""The figures of numbers by exact arithmetic, and how they are compared."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from msgspec.structs import fields

from ckptfix.core.spec import TensorStatistics
from ckptfix.values.decode import Encoding

INEXACT = ("mean", "rms")

HALVES = 3e-7
"""The share by which the moments of numbers of 16 bits may be off, of which the kernel adds eight as float32."""


def assert_same_tally(found: TensorStatistics, expected: TensorStatistics, share: float = 1e-12) -> None:
    """All is equal but the moments, which may be off by a share of the RMS."""
    for field in fields(TensorStatistics):
        if field.name not in INEXACT:
            assert getattr(found, field.name) == getattr(expected, field.name), field.name
    assert math.isclose(found.rms, expected.rms, rel_tol=share)
    assert math.isclose(found.mean, expected.mean, rel_tol=share, abs_tol=share * expected.rms)


def exact_tally(units: np.ndarray, encoding: Encoding) -> TensorStatistics:
    """One number after the other, in fractions: slow, and right."""
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
    """The square root, of squares too that are no float."""
    if not square:
        return 0.0
    power = (square.numerator.bit_length() - square.denominator.bit_length()) // 2
    return math.ldexp(math.sqrt(float(square / Fraction(4) ** power)), power)
