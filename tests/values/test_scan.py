"""The scanner does not care how the bytes are cut."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ckptfix.core.spec import TensorStatistics
from ckptfix.values.decode import encoding
from ckptfix.values.scan import Scanner
from ckptfix.values.tally import BLOCK
from tests.values.exact import HALVES, exact_tally


@pytest.fixture(autouse=True, params=["kernel", "numpy alone"])
def _way(request, monkeypatch):
    """Every test here holds for both."""
    if request.param == "numpy alone":
        monkeypatch.setattr("ckptfix.values.scan.kernel", lambda: None)


def scan(values: np.ndarray, dtype: str, cuts: int = 1) -> TensorStatistics:
    form = encoding(dtype)
    assert form is not None
    scanner = Scanner(form)
    for part in np.array_split(values, cuts):
        scanner.feed(memoryview(part.tobytes()))
    return scanner.found


def test_noop_statistics_of_nothing():
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


def test_incomplete_elements_are_refused():
    form = encoding("complex64")
    assert form is not None
    with pytest.raises(ValueError, match="not a whole number of elements"):
        Scanner(form).feed(memoryview(bytes(12)))


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("float64", 1.7e308), ("float64", 1e-300), ("float64", 5e-324), ("float32", 3.4e38), ("float32", 1e-45)],
)
def test_the_rms_of_extreme_numbers(dtype, value):
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


def test_an_empty_tensor_is_not_all_zero():
    assert TensorStatistics(4, zeros=4).all_zero
    assert not TensorStatistics(0).all_zero
    assert not TensorStatistics(4, zeros=3, nan=1).all_zero


def test_unaligned_blocks():
    values = np.random.default_rng(0).standard_normal(100).astype(np.float32)
    form = encoding("float32")
    assert form is not None
    scanner = Scanner(form)
    scanner.feed(memoryview(b"?" + values.tobytes())[1:])
    assert scanner.found == scan(values, "float32")


SHARP = {
    "constant": lambda generator, count: np.full(count, 0.1, np.float32),
    "one side": lambda generator, count: -np.abs(generator.standard_normal(count)),
    "far from zero": lambda generator, count: 6e4 + generator.standard_normal(count),
    "sixty orders of magnitude": lambda generator, count: np.where(generator.random(count) < 0.5, 1e-30, 1e30),
    "tiny": lambda generator, count: 1e-30 * generator.standard_normal(count),
    "subnormal": lambda generator, count: 1e-40 * generator.standard_normal(count),
    "huge": lambda generator, count: 1e38 * generator.standard_normal(count),
    "with NaN": lambda generator, count: np.where(generator.random(count) < 0.01, np.nan, generator.random(count)),
}


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("kind", SHARP)
def test_moments_of_extreme_numbers(kind, dtype):
    with np.errstate(over="ignore"):
        values = np.asarray(SHARP[kind](np.random.default_rng(0), 30_011), np.float32).astype(dtype)
    found = scan(values, dtype, 3)
    finite = values[np.isfinite(values)].astype(np.longdouble)
    if not len(finite):  # in float16 the huge ones are infinite
        assert (found.mean, found.rms) == (0.0, 0.0)
        return
    mean, rms = float(finite.mean()), float(np.sqrt((finite * finite).mean()))
    share = HALVES if dtype == "float16" else 1e-12
    assert math.isclose(found.rms, rms, rel_tol=share)
    assert math.isclose(found.mean, mean, rel_tol=share, abs_tol=share * rms)


FED = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "complex64",
    "complex32",
    "float8_e4m3fn",
    "float8_e5m2fnuz",
    "int8",
]


@settings(deadline=None, max_examples=100)
@given(st.data(), st.sampled_from(FED))
def test_statistics_of_any_bytes_are_exact(data, dtype):
    form = encoding(dtype)
    assert form is not None
    width = form.unit.itemsize * form.units
    raw = data.draw(st.binary(max_size=60 * width).map(lambda raw: raw[: len(raw) // width * width]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw) // width), max_size=4)))
    scanner = Scanner(form)
    for start, stop in zip([0, *cuts], [*cuts, len(raw) // width], strict=True):
        scanner.feed(memoryview(raw)[start * width : stop * width])
    found, expected = scanner.found, exact_tally(np.frombuffer(raw, form.unit), form)
    if expected.first_nonfinite is not None:
        expected.first_nonfinite //= form.units
    assert math.isclose(found.rms, expected.rms, rel_tol=1e-12)
    assert math.isclose(found.mean, expected.mean, rel_tol=1e-12, abs_tol=1e-12 * expected.rms)
    assert replace(found, mean=0.0, rms=0.0) == replace(expected, mean=0.0, rms=0.0)
