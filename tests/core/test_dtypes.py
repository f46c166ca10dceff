import pytest
import torch

from ckptfix.core.dtypes import BY_NUMPY, BY_SAFETENSORS, BY_STORAGE, DTYPES

EVERY = sorted({str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)})


def known(name: str) -> torch.dtype | None:
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else None


def test_every_dtype_of_torch_is_known_with_its_size():
    assert {name: DTYPES[name].itemsize for name in EVERY} == {name: getattr(torch, name).itemsize for name in EVERY}


def test_a_dtype_is_of_the_kind_that_torch_says():
    for name, entry in DTYPES.items():
        if (dtype := known(name)) is not None:  # this torch has it
            assert (entry.is_float, entry.is_complex) == (dtype.is_floating_point, dtype.is_complex), name


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
