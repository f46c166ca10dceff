"""The distance between two tensors, compared with torch's and numpy's own arithmetic."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptfix.comparison.difference import Gap
from ckptfix.comparison.gap import Tolerance, measure_gap
from ckptfix.reading.opening import open_state_dict

NAN, INF = math.nan, math.inf


def gap(a: torch.Tensor, b: torch.Tensor, **tolerance: float) -> Gap:
    specs = open_state_dict({"a": a, "b": b}).specs
    return measure_gap(specs["a"], specs["b"], Tolerance(**tolerance))


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.randn(3, 5), id="floats"),
        pytest.param(torch.tensor([NAN, INF, -INF]), id="NaN equals the same NaN"),
        pytest.param(torch.tensor(7), id="0-d"),
        pytest.param(torch.empty(0, 4), id="empty"),
        pytest.param(torch.randn(4, 6).T, id="transposed"),
        pytest.param(torch.ones(1).expand(1_000_000_000), id="one element repeated"),
        pytest.param(torch.randn(3).to_sparse(), id="sparse"),
        pytest.param(torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8), id="quantised"),
        pytest.param(torch.randn(4, dtype=torch.complex64), id="complex"),
        pytest.param(torch.randn(4).to(torch.float8_e4m3fn), id="fp8"),
        pytest.param(torch.tensor([True, False]), id="bool"),
    ],
)
def test_a_tensor_and_its_copy_are_equal(tensor: torch.Tensor):
    copy = tensor if tensor.stride() == (0,) else tensor.clone()
    found = gap(tensor, copy)
    assert found.is_equal
    assert found.first is None
    assert found.ulp is None
    assert (found.differing, found.absolute, found.relative, found.nonfinite) == (0, 0.0, 0.0, 0)


def test_a_transposed_view_equals_its_contiguous_copy():
    tensor = torch.randn(300, 400).T
    assert gap(tensor, tensor.contiguous()).is_equal


@pytest.mark.parametrize(
    ("a", "b", "far"),
    [
        pytest.param([2**53], [2**53 + 1], 1.0, id="one float64"),
        pytest.param([-(2**63), 5], [2**63 - 1, 5], float(2**64 - 1), id="from end to end"),
        pytest.param([-1], [1], 2.0, id="of two signs"),
    ],
)
def test_int64_beyond_the_mantissa_of_float64(a: list[int], b: list[int], far: float):
    found = gap(torch.tensor(a), torch.tensor(b), absolute=far / 2)
    assert found.absolute == far
    assert not found.is_close
    assert gap(torch.tensor(a), torch.tensor(b), absolute=far).is_close


def test_a_difference_of_two_transposed_views_is_found_at_its_row_major_index():
    a, b = torch.zeros(3, 4).T, torch.zeros(3, 4).T
    b[2, 1] = 1.0
    assert gap(a, b).first == 2 * 3 + 1
    assert gap(a, b.contiguous()).first == 2 * 3 + 1


@pytest.mark.parametrize(
    ("a", "b", "absolute", "relative", "ulp"),
    [
        pytest.param([1.0, 2.0], [1.0, 2.5], 0.5, 0.2, 2**21, id="one element"),
        pytest.param([1.0], [np.nextafter(np.float32(1), np.float32(2))], 2**-23, 2**-23, 1, id="the next float"),
        pytest.param([0.0], [-0.0], 0.0, 0.0, 0, id="two zeros have other bytes"),
        pytest.param([-1e-45], [1e-45], 2.802596928649634e-45, 2.0, 2, id="across zero"),
        pytest.param([3e38], [-3e38], 6e38, 2.0, None, id="a difference beyond float32"),
    ],
)
def test_figures(a: Any, b: Any, absolute: float, relative: float, ulp: int | None):
    found = gap(torch.tensor(a), torch.tensor(b))
    assert found.differing == 1
    assert not found.is_equal
    assert found.absolute == pytest.approx(absolute, rel=1e-6)
    assert found.relative == pytest.approx(relative, rel=1e-6)
    assert ulp is None or found.ulp == ulp


def test_the_greatest_difference_of_float64_is_a_number():
    largest = torch.tensor([1.7e308], dtype=torch.float64)
    assert math.isfinite(gap(largest, -largest).absolute)


def test_nan_on_one_side_is_counted():
    found = gap(torch.tensor([NAN, 1.0, INF, INF]), torch.tensor([1.0, 1.0, -INF, INF]))
    assert (found.differing, found.nonfinite, found.first, found.absolute) == (2, 2, 0, 0.0)


def test_a_cast_is_compared_by_value():
    exact, rounded = torch.tensor([1.0, 0.5]), torch.tensor([1.0, 1 / 3])
    assert gap(exact, exact.half()).is_equal
    assert gap(rounded, rounded.half()).differing == 1
    assert gap(rounded, rounded.half()).ulp is None
    assert gap(rounded, rounded.bfloat16()).relative < 2**-8


def test_tolerance_is_that_of_allclose():
    a, b = torch.tensor([1.0, 100.0]), torch.tensor([1.001, 100.1])
    for atol, rtol in ((0.0, 1.1e-3), (0.11, 0.0), (0.0, 1e-4), (1e-3, 0.0), (0.0, 0.9e-3), (0.05, 0.0006)):
        assert gap(a, b, absolute=atol, relative=rtol).is_close == torch.allclose(a, b, rtol=rtol, atol=atol)


def test_nan_is_never_close():
    assert not gap(torch.tensor([NAN]), torch.tensor([1.0]), absolute=1e9).is_close


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        pytest.param(torch.eye(3).to_sparse(), torch.eye(3), "layouts", id="sparse and dense"),
        pytest.param(torch.eye(3).to_sparse(), torch.ones(3, 3).to_sparse(), "different positions", id="two patterns"),
        pytest.param(
            torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
            torch.quantize_per_tensor(torch.ones(2), 0.2, 5, torch.qint8),
            "quantised",
            id="two scales",
        ),
        pytest.param(torch.eye(3).to_sparse(), torch.eye(3).flip(0).to_sparse(), "different positions", id="moved"),
        pytest.param(torch.ones(2) * 1j, (torch.ones(2) * 1j).conj(), "conjugated", id="a conjugated view"),
        pytest.param(torch.ones(2), torch.ones(2) * 1j, "float32 and complex64", id="real and complex"),
        pytest.param(torch.ones(2), torch.ones(2, device="meta"), "no data", id="meta"),
        pytest.param(torch.ones(1).expand(10**9), torch.ones(2)[:1].expand(10**9)[: 10**9], "", id="both repeat"),
        pytest.param(
            torch.ones(1).expand(10**5, 10**5),
            torch.ones(10**5, 1).expand(10**5, 10**5),
            "endlessly",
            id="repeats apart",
        ),
    ],
)
def test_the_reason_why_tensors_are_not_compared(a: torch.Tensor, b: torch.Tensor, words: str):
    found = gap(a, b)
    assert words in found.unread
    assert bool(words) is not found.is_equal


def test_sparse_tensors_of_one_pattern_are_compared_by_value():
    found = gap(torch.eye(3).to_sparse(), (2 * torch.eye(3)).to_sparse())
    assert (found.differing, found.absolute) == (3, 1.0)


def test_elements_of_expanded_tensors_are_counted_each():
    a, b = torch.zeros(2, 1).expand(2, 500), torch.tensor([[0.0], [1.0]]).expand(2, 500)
    assert (gap(a, b).differing, gap(a, b).first) == (500, 500)


@given(st.lists(st.tuples(*[st.floats(width=32)] * 2), min_size=1, max_size=40))
def test_counts_and_maxima_are_those_of_numpy(pairs: list[tuple[float, float]]):
    a, b = (np.array(side, dtype=np.float32) for side in zip(*pairs, strict=True))
    found = gap(torch.from_numpy(a), torch.from_numpy(b))
    assert found.differing == int((a.view(np.uint32) != b.view(np.uint32)).sum())
    both = np.isfinite(a) & np.isfinite(b)
    expected = np.abs(a[both].astype(np.float64) - b[both].astype(np.float64)).max() if both.any() else 0.0
    assert found.absolute == pytest.approx(expected, rel=1e-12)


@given(st.integers(0, 2**32 - 1), st.integers(1, 1000))
def test_ulp_counts_the_floats_between(bits: int, steps: int):
    a = np.array([bits], dtype=np.uint32).view(np.float32)
    b = a
    for _ in range(min(steps, 40)):
        b = np.nextafter(b, np.float32(INF), dtype=np.float32)
    if np.isfinite(a).all() and np.isfinite(b).all():
        assert gap(torch.from_numpy(a), torch.from_numpy(b)).ulp in (min(steps, 40), min(steps, 40) - 1)
