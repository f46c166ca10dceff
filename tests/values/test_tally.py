"""Figures of runs, joined; and numpy finds what exact arithmetic finds, in every dtype."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfix.core.dtypes import DTYPES
from ckptfix.core.spec import TensorStatistics
from ckptfix.values.decode import Encoding, Narrowing, encoding
from ckptfix.values.tally import BLOCK, join, nonfinite_units, tally_units
from tests.values.exact import assert_same_tally, exact_tally


def test_noop_joining_empty_statistics():
    whole = TensorStatistics()
    join(whole, TensorStatistics())
    assert whole == TensorStatistics()


def test_joining_to_empty_statistics_changes_nothing():
    part = TensorStatistics(3, zeros=1, minimum=-0.1, maximum=0.3, mean=0.1, rms=0.7, first_nonfinite=None)
    whole = TensorStatistics()
    join(whole, part)
    assert whole == part
    join(whole, TensorStatistics(2, nan=2, first_nonfinite=7))
    assert (whole.mean, whole.rms, whole.first_nonfinite, whole.finite, whole.nonfinite) == (0.1, 0.7, 7, 3, 2)


def test_the_moments_are_averages_by_count():
    whole = TensorStatistics(1, mean=4.0, rms=4.0, minimum=4.0, maximum=4.0)
    join(whole, TensorStatistics(3, mean=0.0, rms=2.0, minimum=-2.0, maximum=2.0))
    assert (whole.mean, whole.minimum, whole.maximum) == (1.0, -2.0, 4.0)
    assert math.isclose(whole.rms, math.sqrt((16 + 3 * 4) / 4))


def test_the_largest_numbers_do_not_overflow():
    largest = math.nextafter(math.inf, 0)
    whole = TensorStatistics(1, mean=largest, rms=largest)
    join(whole, TensorStatistics(1, mean=largest, rms=largest))
    assert whole.mean == largest
    assert math.isclose(whole.rms, largest)


@pytest.mark.parametrize(("mine", "other", "first"), [(None, 4, 4), (4, None, 4), (9, 4, 4), (4, 9, 4)])
def test_the_smaller_first_index_is_kept(mine, other, first):
    whole = TensorStatistics(1, nan=1, first_nonfinite=mine)
    join(whole, TensorStatistics(1, nan=1, first_nonfinite=other))
    assert whole.first_nonfinite == first


NUMERIC = sorted(name for name in DTYPES if encoding(name) is not None)


def form_of(dtype: str) -> Encoding:
    form = encoding(dtype)
    assert form is not None
    return form


def tally(units: np.ndarray, dtype: str) -> TensorStatistics:
    with np.errstate(all="ignore"):
        return tally_units(units, form_of(dtype), None)


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(NUMERIC), st.binary(min_size=16, max_size=16 * 40), st.sampled_from([1, 20]))
def test_any_bytes_as_any_dtype(dtype, data, times):
    unit = form_of(dtype).unit
    units = np.frombuffer(data[: len(data) // unit.itemsize * unit.itemsize] * times, unit)
    assert_same_tally(tally(units, dtype), exact_tally(units, form_of(dtype)))


def test_losses_of_a_cast_follow_from_counted_codes():
    cast = Narrowing(vanishing=0.01, largest=100.0)
    codes = np.arange(256, dtype=np.uint8)
    values = form_of("float8_e5m2").decode(codes)
    found = tally_units(codes, form_of("float8_e5m2"), cast)
    assert found.overflowing == int((np.isfinite(values) & (np.abs(values) > 100)).sum()) > 0
    assert found.vanishing == int(((values != 0) & (np.abs(values) <= 0.01)).sum()) > 0


def test_all_non_finite_places_are_found():
    units = np.ones(2 * BLOCK + 1, np.float32)
    units[[0, BLOCK, 2 * BLOCK]] = np.nan, np.inf, -np.inf
    assert nonfinite_units(units, form_of("float32")).tolist() == [0, BLOCK, 2 * BLOCK]
    assert len(nonfinite_units(np.ones(3, np.float32), form_of("float32"))) == 0
