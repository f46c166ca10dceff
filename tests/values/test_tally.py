"""Figures of runs, joined."""

from __future__ import annotations

import math

import pytest

from ckptfix.values.tally import Tally


def test_nothing_joined_to_nothing_is_nothing():
    whole = Tally()
    whole.add(Tally())
    assert whole == Tally()


def test_what_is_joined_to_nothing_stays_bit_for_bit():
    part = Tally(3, zeros=1, minimum=-0.1, maximum=0.3, mean=0.1, rms=0.7, first=None)
    whole = Tally()
    whole.add(part)
    assert whole == part
    whole.add(Tally(2, nan=2, first=7))
    assert (whole.mean, whole.rms, whole.first, whole.finite, whole.nonfinite) == (0.1, 0.7, 7, 3, 2)


def test_the_moments_are_averages_by_count():
    whole = Tally(1, mean=4.0, rms=4.0, minimum=4.0, maximum=4.0)
    whole.add(Tally(3, mean=0.0, rms=2.0, minimum=-2.0, maximum=2.0))
    assert (whole.mean, whole.minimum, whole.maximum) == (1.0, -2.0, 4.0)
    assert math.isclose(whole.rms, math.sqrt((16 + 3 * 4) / 4))


def test_the_largest_numbers_do_not_overflow():
    largest = math.nextafter(math.inf, 0)
    whole = Tally(1, mean=largest, rms=largest)
    whole.add(Tally(1, mean=largest, rms=largest))
    assert whole.mean == largest
    assert math.isclose(whole.rms, largest)


@pytest.mark.parametrize(("mine", "other", "first"), [(None, 4, 4), (4, None, 4), (9, 4, 4), (4, 9, 4)])
def test_the_first_place_of_both_counts(mine, other, first):
    whole = Tally(1, nan=1, first=mine)
    whole.add(Tally(1, nan=1, first=other))
    assert whole.first == first
