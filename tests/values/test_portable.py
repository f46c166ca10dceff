"""numpy alone finds what exact arithmetic finds, in every dtype."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfix.core.dtypes import DTYPES
from ckptfix.values.decode import Encoding, encoding
from ckptfix.values.narrowing import Narrowing
from ckptfix.values.portable import BLOCK, nonfinite_units, tally_units
from ckptfix.values.tally import Tally
from tests.values.exact import assert_same_tally, exact_tally

NUMERIC = sorted(name for name in DTYPES if encoding(name) is not None)


def form_of(dtype: str) -> Encoding:
    form = encoding(dtype)
    assert form is not None
    return form


def tally(units: np.ndarray, dtype: str) -> Tally:
    with np.errstate(all="ignore"):
        return tally_units(units, form_of(dtype), None)


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(NUMERIC), st.binary(min_size=16, max_size=16 * 40), st.sampled_from([1, 20]))
def test_any_bytes_as_any_dtype(dtype, data, times):
    unit = form_of(dtype).unit
    units = np.frombuffer(data[: len(data) // unit.itemsize * unit.itemsize] * times, unit)
    assert_same_tally(tally(units, dtype), exact_tally(units, form_of(dtype)))


def test_counted_codes_tell_what_a_cast_loses():
    cast = Narrowing("none", vanishing=0.01, largest=100.0)
    codes = np.arange(256, dtype=np.uint8)
    values = form_of("float8_e5m2").decode(codes)
    found = tally_units(codes, form_of("float8_e5m2"), cast)
    assert found.overflowing == int((np.isfinite(values) & (np.abs(values) > 100)).sum()) > 0
    assert found.vanishing == int(((values != 0) & (np.abs(values) <= 0.01)).sum()) > 0


def test_every_place_that_is_not_finite_is_found():
    units = np.ones(2 * BLOCK + 1, np.float32)
    units[[0, BLOCK, 2 * BLOCK]] = np.nan, np.inf, -np.inf
    assert nonfinite_units(units, form_of("float32")).tolist() == [0, BLOCK, 2 * BLOCK]
    assert len(nonfinite_units(np.ones(3, np.float32), form_of("float32"))) == 0
