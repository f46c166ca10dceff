"""The bounds of a cast are where torch's own cast begins to lose."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptfix.core.settings import CAST_DTYPES
from ckptfix.reading.live import spec_of_tensor
from ckptfix.values.narrowing import narrowing_to
from ckptfix.values.statistics import tensor_statistics


def cast(value: float, dtype: str) -> float:
    wide = torch.tensor([value], dtype=torch.float64 if dtype == "float32" else torch.float32)
    return float(wide.to(getattr(torch, dtype)).double())


def step(value: float, dtype: str, towards: float) -> float:
    """The next number of the dtype that is cast."""
    if dtype == "float32":
        return math.nextafter(value, towards)
    return float(np.nextafter(np.float32(value), np.float32(towards)))


@pytest.mark.parametrize("dtype", CAST_DTYPES)
def test_a_number_up_to_the_bound_becomes_zero(dtype):
    bound = narrowing_to(dtype).vanishing
    assert cast(bound, dtype) == 0 < cast(step(bound, dtype, 1), dtype)


@pytest.mark.parametrize("dtype", [dtype for dtype in CAST_DTYPES if dtype != "float8_e4m3fn"])
def test_a_number_above_the_bound_becomes_infinite(dtype):
    bound = narrowing_to(dtype).largest
    assert math.isfinite(cast(bound, dtype))
    assert math.isinf(cast(step(bound, dtype, math.inf), dtype))


def test_the_float_without_infinity_ends_half_a_step_above_its_largest_number():
    assert narrowing_to("float8_e4m3fn").largest == 464.0
    assert cast(464.0, "float8_e4m3fn") == 448.0


@given(st.lists(st.floats(width=32), min_size=1, max_size=40), st.sampled_from(CAST_DTYPES[1:]))
def test_the_scan_counts_what_the_cast_loses(numbers, dtype):
    before = torch.tensor(numbers, dtype=torch.float32)
    after = before.to(getattr(torch, dtype)).float()
    figures = tensor_statistics(spec_of_tensor(before), narrowing_to(dtype))
    assert figures.vanishing == int(((before != 0) & (after == 0)).sum())
    if dtype != "float8_e4m3fn":
        assert figures.overflowing == int((before.isfinite() & ~after.isfinite()).sum())


def test_without_a_cast_nothing_is_counted():
    figures = tensor_statistics(spec_of_tensor(torch.tensor([1e30, 1e-30])))
    assert (figures.overflowing, figures.vanishing) == (0, 0)
