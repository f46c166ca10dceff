"""Numbers of one kind are described in fewer bits than the same bytes read as other numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfix.core.dtypes import DTYPES
from ckptfix.reading.salvage.descriptions import saved_bits
from tests.checks import bytes_of

FLOATS = ["float64", "float32", "float16", "bfloat16", "complex64"]


def weights(dtype: str, count: int = 400, scale: float = 0.05) -> bytes:
    made = torch.randn(count, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * scale
    made = torch.view_as_complex(made) if dtype.startswith("complex") else made.flatten()
    return bytes_of(made.to(getattr(torch, dtype)))


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=400), dtype=st.sampled_from([*sorted(DTYPES), "bytes"]))
def test_garbage_costs_nothing(data: bytes, dtype: str) -> None:
    width = DTYPES[dtype].itemsize if dtype in DTYPES else 1
    assert 0.0 <= saved_bits(data[: len(data) // width * width], dtype) <= 8 * len(data) + 8


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_reading_at_the_wrong_byte_saves_less(dtype: str) -> None:
    data = weights(dtype)
    width = DTYPES[dtype].itemsize
    assert saved_bits(data[width:], dtype) > saved_bits(data[1 : 1 - width], dtype) + 64


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_mixture_of_two_tensors_saves_less_than_each_for_itself(dtype: str) -> None:
    one, other = weights(dtype), weights(dtype, scale=1.0)
    assert saved_bits(one, dtype) + saved_bits(other, dtype) > saved_bits(one + other, dtype) + 64


def test_counters_are_small_and_bools_are_bits() -> None:
    count = (1234).to_bytes(8, "little")
    assert saved_bits(count, "int64") > 32
    assert saved_bits(count[4:] + count[:4], "int64") < saved_bits(count, "int64")
    assert saved_bits(b"\0\1\1", "bool") == 21
    assert saved_bits(b"\0\2\1", "bool") == 0
    assert saved_bits(b"", "float32") == 0
