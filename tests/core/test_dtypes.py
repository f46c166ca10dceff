from __future__ import annotations

import pytest
import torch

from ckptfix.core.dtypes import BY_NUMPY, BY_SAFETENSORS, BY_STORAGE, DTYPES

EVERY = sorted({str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)})


def known(name: str) -> torch.dtype | None:
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else None


@pytest.mark.parametrize("name", EVERY)
def test_every_dtype_of_torch_is_known_with_its_size(name):
    assert DTYPES[name].itemsize == getattr(torch, name).itemsize


@pytest.mark.parametrize("name", DTYPES)
def test_a_dtype_is_of_the_kind_that_torch_says(name):
    dtype = known(name)
    if dtype is None:
        pytest.skip(f"torch {torch.__version__} does not have {name}")
    assert DTYPES[name].is_float == dtype.is_floating_point
    assert DTYPES[name].is_complex == dtype.is_complex


@pytest.mark.parametrize("name", BY_STORAGE)
def test_a_storage_class_has_the_dtype_that_torch_gives_it(name):
    assert getattr(torch, name).dtype == known(BY_STORAGE[name].name)


def test_the_safetensors_tags_are_those_of_the_official_library():
    from safetensors.torch import _TYPES

    for tag, dtype in _TYPES.items():
        assert known(BY_SAFETENSORS[tag].name) == dtype


@pytest.mark.parametrize("code", BY_NUMPY)
def test_a_numpy_type_has_the_dtype_that_torch_gives_it(code):
    import numpy as np

    assert torch.from_numpy(np.zeros(1, code)).dtype == known(BY_NUMPY[code].name)
