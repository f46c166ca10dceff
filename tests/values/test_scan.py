"""The scanner does not care how the bytes are cut."""

import math

import numpy as np
import pytest

from ckptfix.values.decode import encoding
from ckptfix.values.scan import BLOCK, Scanner, TensorStatistics


def scan(values: np.ndarray, dtype: str, cuts: int = 1) -> TensorStatistics:
    form = encoding(dtype)
    assert form is not None
    scanner = Scanner(form)
    for part in np.array_split(values, cuts):
        scanner.feed(memoryview(part.tobytes()))
    return scanner.result()


def test_nothing_fed_is_nothing_counted():
    assert scan(np.zeros(0, np.float32), "float32") == TensorStatistics(0)


@pytest.mark.parametrize("cuts", [1, 2, 7, 1000])
def test_the_figures_do_not_depend_on_the_blocks(cuts):
    values = np.random.default_rng(0).standard_normal(2 * BLOCK + 17).astype(np.float32)
    values[[5, BLOCK + 3, 2 * BLOCK]] = np.nan, np.inf, 0.0
    whole, parts = scan(values, "float32"), scan(values, "float32", cuts)
    assert (parts.nan, parts.pos_inf, parts.zeros, parts.first_nonfinite) == (1, 1, 1, 5)
    assert (parts.minimum, parts.maximum) == (whole.minimum, whole.maximum)
    assert math.isclose(parts.rms, whole.rms, rel_tol=1e-12)
    assert math.isclose(parts.mean, whole.mean, rel_tol=1e-9)


def test_half_an_element_is_refused():
    form = encoding("complex64")
    assert form is not None
    with pytest.raises(ValueError, match="no whole number of elements"):
        Scanner(form).feed(memoryview(bytes(12)))


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("float64", 1.7e308), ("float64", 1e-300), ("float64", 5e-324), ("float32", 3.4e38), ("float32", 1e-45)],
)
def test_the_rms_neither_overflows_nor_vanishes(dtype, value):
    values = np.full(BLOCK + 3, value, dtype)
    values[::2] *= -1
    figures = scan(values, dtype)
    assert math.isclose(figures.rms, float(values[1]), rel_tol=1e-6)
    assert figures.absmax == figures.maximum == -figures.minimum


def test_the_accumulation_is_in_double_precision():
    values = np.full(1 << 22, 0.1, np.float32)  # a float32 sum of its squares is off by 1e-3
    figures = scan(values, "float32")
    assert math.isclose(figures.rms, float(np.float32(0.1)), rel_tol=1e-12)
    assert math.isclose(figures.mean, float(np.float32(0.1)), rel_tol=1e-12)


def test_all_zero_needs_numbers():
    assert TensorStatistics(4, zeros=4).all_zero
    assert not TensorStatistics(0).all_zero
    assert not TensorStatistics(4, zeros=3, nan=1).all_zero
