"""The compiled pass finds what numpy finds, whatever the bits; and outlives a file that is cut off while it reads."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfix.bytes.compiled import LIBRARY, can_sum, library
from ckptfix.core.dtypes import DTYPES
from ckptfix.values.decode import encoding
from ckptfix.values.kernel import KINDS, RANGE_LIMIT, Range, kernel
from ckptfix.values.narrowing import Narrowing, narrowing_to
from ckptfix.values.portable import tally_units
from ckptfix.values.tally import Tally
from tests.values.exact import HALVES, assert_same_tally

compiled = kernel()
pytestmark = pytest.mark.skipif(compiled is None, reason="no kernel was built for this machine")

CHUNK, PIECE = 4096, 1 << 18
"""As in kernel.c."""

BYTE_DTYPES = sorted(name for name in DTYPES if (form := encoding(name)) is not None and form.unit.itemsize == 1)


@pytest.fixture(params=["as wide as it goes", "with AVX2 alone"], autouse=True, scope="module")
def width(request: pytest.FixtureRequest) -> Iterator[None]:
    """Once more without the wider instructions of this processor."""
    found = library()
    assert found is not None
    is_wide = ctypes.c_int.in_dll(found, "ckptfix_is_wide")
    before = is_wide.value
    if request.param == "with AVX2 alone":
        if not before:
            pytest.skip("so it was before")
        is_wide.value = 0
    yield
    is_wide.value = before


def by_kernel(units: np.ndarray, dtype: str, narrowing: Narrowing | None = None) -> Tally:
    form = encoding(dtype)
    assert form is not None
    assert compiled is not None
    assert compiled.takes(form)
    return compiled.tally(units, form, narrowing)


def by_numpy(units: np.ndarray, dtype: str, narrowing: Narrowing | None = None) -> Tally:
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
    narrowing = narrowing_to(cast) if cast else None
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
    bits = np.dtype(f"<u{form.unit.itemsize}")
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
    narrowing = narrowing_to(cast) if cast and dtype in KINDS else None
    units = units_of(np.ascontiguousarray(codes), dtype)
    share = HALVES if bits.itemsize == 2 and kind != "constant" else 1e-12
    assert_same_tally(by_kernel(units, dtype, narrowing), by_numpy(units, dtype, narrowing), share)


@pytest.mark.skipif(not can_sum(), reason="this machine cannot do that")
@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
@pytest.mark.parametrize("excess", [-1, 0, 1, PIECE + 77])
def test_a_look_proves_the_bytes_too_piece_by_piece(dtype, excess):
    form = encoding(dtype)
    assert form is not None
    assert compiled is not None
    count = PIECE // form.unit.itemsize + excess
    numbers = (np.random.default_rng(0).standard_normal(count) * 40 + 90).clip(0, 200).astype(dtype)
    if dtype != "uint8":
        numbers[-1] = math.nan
    units = numbers.view(form.unit)
    tally, crc = compiled.look(units, form, None, is_summed=True)
    assert crc == zlib.crc32(units.tobytes())
    assert_same_tally(tally, by_numpy(units, dtype), HALVES)
    assert tally.first == (None if dtype == "uint8" else count - 1)
    assert compiled.look(units, form, None) == (tally, 0)


@pytest.mark.skipif(not can_sum(), reason="this machine cannot do that")
def test_ranges_of_a_file_give_what_a_look_at_them_gives(tmp_path):
    assert compiled is not None
    numbers = np.random.default_rng(0).standard_normal(PIECE // 4 + 9).astype(np.float32)
    numbers[[70, -3]] = math.inf
    (tmp_path / "numbers").write_bytes(b"abc" + numbers.tobytes())  # nothing in it is aligned
    halves = numbers.view(np.uint16)
    losses = narrowing_to("float8_e5m2")
    wanted = [
        (start, length, dtype, is_summed, narrowing)
        for start, length in [(0, 1), (60, 20), (5, 4096), (1, PIECE // 4), (2, PIECE // 4 + 7), (9, 0)]
        for dtype in KINDS
        for is_summed, narrowing in [(True, None), (False, losses)]
    ]
    with (tmp_path / "numbers").open("rb") as file:
        found = compiled.look_in_files(
            [
                Range(file.fileno(), 3 + start * (4 if dtype == "float32" else 2), length, KINDS[dtype], summed, cast)
                for start, length, dtype, summed, cast in wanted
            ]
        )
        for (start, length, dtype, is_summed, narrowing), here in zip(wanted, found, strict=True):
            units = (numbers if dtype == "float32" else halves)[start : start + length]
            form = encoding(dtype)
            assert form is not None
            if units.nbytes > RANGE_LIMIT:
                assert here is None
            else:
                assert here == compiled.look(units_of(np.ascontiguousarray(units), dtype), form, narrowing, is_summed)


def test_ranges_that_a_file_does_not_have_are_none(tmp_path):
    assert compiled is not None
    (tmp_path / "numbers").write_bytes(bytes(40))
    with (tmp_path / "numbers").open("rb") as file:
        places = [(0, 10), (4, 10), (40, 1), (400, 1), (-8, 1), (0, 10)]
        ranges = [Range(file.fileno(), offset, length, 0, False, None) for offset, length in places]
        assert [found is not None for found in compiled.look_in_files(ranges)] == [True, *[False] * 4, True]
        closed = file.fileno()
    assert list(compiled.look_in_files([Range(closed, 0, 1, 0, False, None)])) == [None]
    assert list(compiled.look_in_files([])) == []


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("power", [*range(-130, 126, 5), -56, -55, -54, 59, 61])
def test_halves_of_any_size_have_exact_counts_and_close_moments(dtype, power):
    """The squares of the smallest and of the largest bfloat16 are no float32."""
    form = encoding(dtype)
    assert form is not None
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
    script = """
import numpy as np, torch
from ckptfix.values.decode import encoding
from ckptfix.values.kernel import kernel
assert torch.set_flush_denormal(True)
numbers = np.full(40, 1, np.uint32).view(np.float32)
found = kernel().tally(numbers, encoding("float32"), None)
print(found.subnormals, found.zeros, found.rms > 0, found.maximum > 0)
print(bool((torch.from_numpy(numbers) * 1.0 == 0).all()))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert (done.stdout.split(), done.stderr) == (["40", "0", "True", "True", "True"], "")


CUT = """
import mmap, os, sys
import numpy as np
from ckptfix.values.decode import encoding
from ckptfix.values.kernel import MemoryGone, kernel
from threading import Thread
compiled, form = kernel(), encoding(sys.argv[2])
def cut():
    descriptor = os.open(sys.argv[1], os.O_RDWR)
    os.ftruncate(descriptor, 1 << 16)
    mapping = mmap.mmap(descriptor, 1 << 16, access=mmap.ACCESS_READ)
    numbers = np.frombuffer(mapping, form.unit)
    assert compiled.tally(numbers, form, None).finite == len(numbers)
    os.ftruncate(descriptor, 0)
    for _ in range(2):
        try:
            compiled.tally(numbers, form, None)
        except MemoryGone:
            print("gone")
    assert compiled.tally(np.ones(5, form.unit), form, None).finite == 5
    return numbers
cut()
thread = Thread(target=cut)
thread.start()
thread.join()
numbers = cut()
print("and then", flush=True)
numbers.max()
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
def test_a_file_that_is_cut_off_ends_the_call_and_not_the_process(tmp_path: Path, dtype):
    file = tmp_path / "numbers"
    file.touch()
    done = subprocess.run(
        [sys.executable, "-c", CUT, file, dtype], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.split("\n") == [*["gone"] * 6, "and then", ""]
    assert done.returncode == -signal.SIGBUS, "what is not of the kernel ends as it does without it"


def test_who_was_there_before_still_gets_the_signal(tmp_path: Path):
    file = tmp_path / "numbers"
    file.touch()
    command = [sys.executable, "-X", "faulthandler", "-c", CUT, os.fspath(file), "float32"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert "Fatal Python error: Bus error" in done.stderr
    assert done.returncode == -signal.SIGBUS


@pytest.mark.parametrize("value", [1e-45, 1e-38, 0.1, -0.1, 3.4e38])
def test_a_constant_has_its_own_mean_and_rms(value):
    numbers = np.full(10 * CHUNK + 3, value, np.float32)
    found = by_kernel(numbers, "float32")
    assert math.isclose(found.mean, float(numbers[0]), rel_tol=1e-13)
    assert math.isclose(found.rms, abs(float(numbers[0])), rel_tol=1e-13)
