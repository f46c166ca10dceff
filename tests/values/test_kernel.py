"""The compiled pass finds what numpy finds, for any bits."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfix.core.dtypes import DTYPES
from ckptfix.core.spec import TensorStatistics
from ckptfix.values.decode import NARROWINGS, Narrowing, encoding
from ckptfix.values.scan import KINDS, LIBRARY, kernel, strips
from ckptfix.values.tally import tally_codes, tally_units
from tests.values.exact import HALVES, assert_same_tally

compiled = kernel()
pytestmark = pytest.mark.skipif(compiled is None, reason="no kernel was built for this machine")

CHUNK = 4096
"""As in kernel.c."""

BYTE_DTYPES = sorted(name for name in DTYPES if (form := encoding(name)) is not None and form.itemsize == 1)


def by_kernel(units: np.ndarray, dtype: str, narrowing: Narrowing | None = None) -> TensorStatistics:
    form = encoding(dtype)
    assert form is not None
    assert compiled is not None
    block = units.data.cast("B")
    if form.itemsize > 1:
        return compiled.tally(block, form, narrowing)
    return tally_codes(units, compiled.count(block), form, narrowing)


def by_numpy(units: np.ndarray, dtype: str, narrowing: Narrowing | None = None) -> TensorStatistics:
    form = encoding(dtype)
    assert form is not None
    with np.errstate(all="ignore"):
        return tally_units(units, form, narrowing)


def units_of(codes: np.ndarray, dtype: str) -> np.ndarray:
    form = encoding(dtype)
    assert form is not None
    return codes.view(form.unit)


def test_a_library_that_was_built_is_used():
    assert LIBRARY.is_file()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("cast", [None, "float8_e4m3fn", "float16"])
def test_every_code_alone_and_among_others(dtype, cast):
    narrowing = NARROWINGS[cast] if cast else None
    codes = np.arange(1 << 16, dtype=np.uint16)
    assert_same_tally(by_kernel(codes, dtype, narrowing), by_numpy(codes, dtype, narrowing), HALVES)
    for code in codes[::97]:
        one = np.full(3, code)
        assert_same_tally(by_kernel(one, dtype, narrowing), by_numpy(one, dtype, narrowing))


@pytest.mark.parametrize("dtype", BYTE_DTYPES)
def test_every_byte(dtype):
    codes = units_of(np.arange(256, dtype=np.uint8), dtype)
    assert_same_tally(by_kernel(codes, dtype), by_numpy(codes, dtype))
    for code in codes:
        one = np.full(11, code)
        assert_same_tally(by_kernel(one, dtype), by_numpy(one, dtype))


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from([*KINDS, *BYTE_DTYPES]),
    st.sampled_from([1, 2, 15, 16, 17, 31, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5]),
    st.sampled_from(["any bits", "positive", "negative", "a few odd ones", "constant"]),
    st.sampled_from([None, "float8_e5m2", "float16", "bfloat16"]),
    st.integers(0, 2**32 - 1),
)
def test_the_kernel_finds_what_numpy_finds(dtype, count, kind, cast, seed):
    generator = np.random.default_rng(seed)
    form = encoding(dtype)
    assert form is not None
    bits = np.dtype(f"<u{form.itemsize}")
    codes = generator.integers(0, 1 << 8 * bits.itemsize, count, dtype=bits)
    sign = bits.type(1 << 8 * bits.itemsize - 1)
    if kind == "positive":
        codes &= ~sign
    elif kind == "negative":
        codes |= sign
    elif kind == "constant":
        codes[:] = codes[0]
    elif kind == "a few odd ones" and dtype in KINDS:
        weights = (generator.standard_normal(count) * 0.02).astype(np.float32)
        plain = {"float32": weights, "float16": weights.astype(np.float16), "bfloat16": weights.view(np.uint16)[1::2]}
        usual = plain[dtype].view(bits)
        codes = np.where(generator.random(count) < 0.001, codes, usual)
    narrowing = NARROWINGS[cast] if cast and dtype in KINDS else None
    units = units_of(np.ascontiguousarray(codes), dtype)
    share = HALVES if bits.itemsize == 2 and kind != "constant" else 1e-12
    assert_same_tally(by_kernel(units, dtype, narrowing), by_numpy(units, dtype, narrowing), share)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_of_any_size_have_exact_counts_and_close_moments(dtype):
    """The squares of the smallest and the largest bfloat16 are outside the range of float32."""
    form = encoding(dtype)
    assert form is not None
    for power in (*range(-130, 126, 5), -56, -55, -54, 59, 61):
        numbers = np.random.default_rng(0).standard_normal(2 * CHUNK + 77) * 2.0**power
        with np.errstate(all="ignore"):
            singles = numbers.astype(np.float32)
            codes = singles.astype(np.float16).view(np.uint16) if dtype == "float16" else singles.view(np.uint16)[1::2]
        units = units_of(np.ascontiguousarray(codes), dtype)
        assert_same_tally(by_kernel(units, dtype), by_numpy(units, dtype), HALVES)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("value", [1.0, 0.1, -3.14159, 1000.7])
def test_the_moments_of_a_constant_of_16_bits_are_exact(dtype, value):
    single = np.float32(value)
    code = np.float16(single).view(np.uint16) if dtype == "float16" else np.uint16(single.view(np.uint32) >> 16)
    units = units_of(np.full(CHUNK + 100, code), dtype)
    assert_same_tally(by_kernel(units, dtype), by_numpy(units, dtype), 1e-14)


def test_subnormals_count_where_the_processor_would_flush_them():
    numbers = np.full(40, 1, np.uint32).view(np.float32)
    assert torch.set_flush_denormal(True)
    try:
        found = by_kernel(numbers, "float32")
        assert (torch.from_numpy(numbers) * 1.0 == 0).all()
    finally:
        torch.set_flush_denormal(False)
    assert (found.subnormals, found.zeros) == (40, 0)
    assert found.rms > 0 < found.maximum


@pytest.mark.parametrize("value", [1e-45, 1e-38, 0.1, -0.1, 3.4e38])
def test_a_constant_has_its_own_mean_and_rms(value):
    numbers = np.full(10 * CHUNK + 3, value, np.float32)
    found = by_kernel(numbers, "float32")
    assert math.isclose(found.mean, float(numbers[0]), rel_tol=1e-13)
    assert math.isclose(found.rms, abs(float(numbers[0])), rel_tol=1e-13)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("rank", [1, 3, 16, 64, 128])
def test_a_merge_has_the_bits_of_torch(dtype, rank):
    import torch

    assert compiled is not None
    if not compiled.merges:
        pytest.skip("a library of an earlier build, or a processor on which MKL has another order")
    torch.manual_seed(rank)
    for height, width, scaling in ((16, 16, 0.5), (33, 520, 1 / 3), (130, 1030, 0.175), (64, 32, 1.0)):
        weight = torch.randn(height, width).to(getattr(torch, dtype))
        weight[0, :5] = torch.tensor([math.inf, -math.inf, -0.0, 6e-8, 1e-40])
        two, one = torch.randn(height, rank) * 1e-2, torch.randn(rank, width)
        two[3], two[4], two[5] = 1e5, 1e-6, 0
        for rounds in (False, True):
            change = (two @ one).mul_(scaling)
            wanted = weight.clone().add_(change.to(weight.dtype) if rounds else change)
            rows = memoryview(bytearray(weight.view(torch.uint8).numpy().tobytes()))
            compiled.merge(dtype, rows, two.numpy(), strips(one.numpy()), width, scaling, rounds)
            assert rows == wanted.view(torch.uint8).numpy().tobytes()


def marks_of(units: np.ndarray, dtype: str, rarity: int = 8, at: int = 0) -> dict[int, int]:
    """The hash of each marked word by its place."""
    form = encoding(dtype)
    assert form is not None
    assert compiled is not None
    found = compiled.tally(units.data.cast("B"), form, None, rarity, at).marks
    hashes, places = np.frombuffer(found, np.uint64).reshape(-1, 2).T.tolist()
    return dict(zip(places, hashes, strict=True))


@pytest.mark.parametrize("dtype", KINDS)
def test_marks_are_where_the_bytes_are_and_as_rare_as_asked_for(dtype):
    bits = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
    bits[600_000:664_000] = bits[100_000:164_000]
    marks = marks_of(units_of(bits, dtype), dtype, at=1000)
    assert 0.9 < len(marks) / (len(bits) / 4 / 256) < 1.1
    copied = {place: marks[place] for place in marks if 101_000 <= place < 165_000 - 16}
    assert len(copied) > 30
    assert all(marks[place + 500_000] == hashed for place, hashed in copied.items())


@pytest.mark.parametrize("dtype", KINDS)
def test_numbers_over_and_over_have_no_marks(dtype):
    for start in range(4):
        marks = marks_of(units_of(np.tile(np.arange(start, start + 8, dtype=np.uint16) * 0x1A5, 1 << 16), dtype), dtype)
        assert len(marks) == 0
    assert marks_of(units_of(np.full(1 << 16, 0x5A5A, np.uint16), dtype), dtype) == {}


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("size", [16000, 16384, 16484])
def test_a_mark_is_whole_in_its_block(dtype, size):
    words = np.zeros(size // 4, np.uint32)
    words[-3:] = 0x5A5A5A5A
    assert marks_of(units_of(words.view(np.uint8), dtype), dtype) == {}
    words[-8] = 0x5A5A5A5A
    assert list(marks_of(units_of(words.view(np.uint8), dtype), dtype)) == ([size - 32] if size <= 16384 else [])


@given(st.lists(st.sampled_from([0, 1, 2**32, 5 << 32 | 5, 5 << 32 | 6, 2**64 - 1, 2**64 - 2, 77]), max_size=60))
def test_each_equal_hash_makes_a_pair_with_the_one_before(hashes):
    assert compiled is not None
    last: dict[int, int] = {}
    wanted: list[int] = []
    for number, hashed in enumerate(hashes):
        if hashed >> 32 != hashed & 0xFFFFFFFF:
            wanted += [last[hashed], number] if hashed in last else []
            last[hashed] = number
    assert compiled.pairs(np.array(hashes, np.uint64).tobytes()).tolist() == wanted


def test_random_hashes_make_no_pairs():
    assert compiled is not None
    for count in (1, 2, 3, 1000, 87_381, 87_382, 100_000):  # the last ones fill two thirds and one third of the table
        assert len(compiled.pairs(np.random.default_rng(count).bytes(8 * count))) == 0
