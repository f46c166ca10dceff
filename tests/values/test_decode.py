"""Every code of every small float, against torch."""

import numpy as np
import pytest
import torch

from ckptfix.core.dtypes import DTYPES
from ckptfix.values.decode import encoding

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


def test_all_floats_but_the_packed_one_have_an_encoding():
    assert {name for name, dtype in DTYPES.items() if dtype.is_float and encoding(name) is None} == {"float4_e2m1fn_x2"}


@pytest.mark.parametrize("name", PACKED)
def test_packed_elements_are_no_numbers(name):
    assert encoding(name) is None
