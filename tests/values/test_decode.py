"""Every code of every small float, against torch, and the bounds of a cast where torch begins to lose."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptfix.core.dtypes import DTYPES
from ckptfix.core.settings import CAST_DTYPES
from ckptfix.reading.tensors import spec_of_tensor
from ckptfix.values.decode import NARROWINGS, encoding
from ckptfix.values.statistics import Statistics, tensor_statistics
from tests.values.memory import checkpoint_of

NARROW = [name for name, dtype in DTYPES.items() if dtype.is_float and dtype.itemsize <= 2 and hasattr(torch, name)]
PACKED = ["float4_e2m1fn_x2", "quint4x2", "quint2x4", "bits8", "int4", "uint3"]


@pytest.mark.parametrize("name", [name for name in NARROW if encoding(name)])
def test_every_code_decodes_as_torch_does(name):
    form, dtype = encoding(name), getattr(torch, name)
    assert form is not None
    units = np.arange(1 << 8 * dtype.itemsize, dtype=form.unit)
    expected = torch.from_numpy(units.copy()).view(dtype).float().numpy()
    decoded = form.decode(units)
    assert decoded.dtype == np.float32
    np.testing.assert_array_equal(decoded, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(decoded)[numbers], np.signbit(expected)[numbers])


@pytest.mark.parametrize("name", [name for name in NARROW if encoding(name)])
def test_the_smallest_normal_is_that_of_torch(name):
    form = encoding(name)
    assert form is not None
    assert form.smallest_normal == torch.finfo(getattr(torch, name)).smallest_normal


def test_all_floats_except_packed_ones_have_an_encoding():
    assert {name for name, dtype in DTYPES.items() if dtype.is_float and encoding(name) is None} == {"float4_e2m1fn_x2"}


@pytest.mark.parametrize("name", PACKED)
def test_packed_elements_are_not_numbers(name):
    assert encoding(name) is None


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
    bound = NARROWINGS[dtype].vanishing
    assert cast(bound, dtype) == 0 < cast(step(bound, dtype, 1), dtype)


@pytest.mark.parametrize("dtype", [dtype for dtype in CAST_DTYPES if dtype != "float8_e4m3fn"])
def test_a_number_above_the_bound_becomes_infinite(dtype):
    bound = NARROWINGS[dtype].largest
    assert math.isfinite(cast(bound, dtype))
    assert math.isinf(cast(step(bound, dtype, math.inf), dtype))


def test_the_float_without_infinity_ends_half_a_step_above_its_largest_number():
    assert NARROWINGS["float8_e4m3fn"].largest == 464.0
    assert cast(464.0, "float8_e4m3fn") == 448.0


@given(st.lists(st.floats(width=32), min_size=1, max_size=40), st.sampled_from(CAST_DTYPES[1:]))
def test_the_scan_counts_what_the_cast_loses(numbers, dtype):
    before = torch.tensor(numbers, dtype=torch.float32)
    after = before.to(getattr(torch, dtype)).float()
    figures = Statistics(checkpoint_of({"key": before}), NARROWINGS[dtype])["key"]
    assert figures.vanishing == int(((before != 0) & (after == 0)).sum())
    if dtype != "float8_e4m3fn":
        assert figures.overflowing == int((before.isfinite() & ~after.isfinite()).sum())


def test_without_a_cast_nothing_is_counted():
    figures = tensor_statistics(spec_of_tensor(torch.tensor([1e30, 1e-30])))
    assert (figures.overflowing, figures.vanishing) == (0, 0)
