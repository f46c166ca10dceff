"""The compiled checksum is that of zlib, and outlives a file that is cut off while it reads."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator

import numpy as np
import pytest

from ckptfix.bytes.compiled import (
    MemoryGone,
    can_hash,
    can_sum,
    copy,
    crc32_of_mapped,
    library,
    sha256_of_two_mapped,
)

pytestmark = pytest.mark.skipif(not can_sum(), reason="no library was built for this machine, or it cannot do this")


@pytest.fixture(params=["as wide as it goes", "with AVX2 alone"])
def width(request: pytest.FixtureRequest) -> Iterator[None]:
    """Once more without the wider instructions of this processor."""
    is_wide = ctypes.c_int.in_dll(library(), "ckptfix_is_wide")  # type: ignore[arg-type]  # it is there
    before = is_wide.value
    is_wide.value = before if request.param == "as wide as it goes" else 0
    yield
    is_wide.value = before


@pytest.fixture
def file(tmp_path):
    (tmp_path / "file").write_bytes(os.urandom(1 << 20))
    return tmp_path / "file"


def mapped(file, access=mmap.ACCESS_COPY):
    with file.open("r+b") as opened:
        return memoryview(mmap.mmap(opened.fileno(), 0, access=access))


@pytest.mark.parametrize("start", [0, 1, 24])
@pytest.mark.parametrize("count", [*range(1, 40), *range(120, 140), *range(250, 390, 7), 4096, 100_003])
def test_the_numbers_are_those_of_zlib_in_one_piece_and_in_two(count, start, file, width):
    block = mapped(file)[start : start + count]
    expected = zlib.crc32(block)
    assert crc32_of_mapped(block) == expected
    assert crc32_of_mapped(block[1:], crc32_of_mapped(block[:1])) == expected if count > 1 else True


def test_a_file_that_shrinks_ends_the_call_alone(file):
    block = mapped(file)
    os.truncate(file, 5000)
    with pytest.raises(MemoryGone):
        crc32_of_mapped(block)
    assert crc32_of_mapped(block[:5000]) == zlib.crc32(block[:5000])


@pytest.mark.skipif(not can_hash(), reason="the processor has no instructions for it")
def test_a_file_that_shrinks_while_it_is_hashed_ends_the_call_alone(file):
    block, other = mapped(file), mapped(file)
    os.truncate(file, 5000)
    with pytest.raises(MemoryGone):
        sha256_of_two_mapped(block.obj, other.obj)


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 127, 128, 200, 100_003])
@pytest.mark.parametrize(("goal", "start"), [(0, 0), (1, 0), (63, 5), (64, 3)])
def test_a_copy_is_all_of_the_bytes_and_no_other(count, goal, start):
    source = np.frombuffer(os.urandom(count + start), np.uint8)
    there = np.full(count + goal + 100, 7, np.uint8)
    copy(there.ctypes.data + goal, source.ctypes.data + start, count)
    assert there[goal : goal + count].tobytes() == source[start:].tobytes()
    assert set(there[:goal].tolist() + there[goal + count :].tolist()) == {7}


def test_a_file_that_shrinks_ends_the_copy_alone(file):
    block = np.frombuffer(mapped(file), np.uint8)
    os.truncate(file, 5000)
    there = np.zeros(len(block), np.uint8)
    with pytest.raises(MemoryGone):
        copy(there.ctypes.data, block.ctypes.data, len(block))
    assert there[:4096].tobytes() == block[:4096].tobytes()


GUARDED_TWICE = """
import os, signal
from ckptfix.bytes.compiled import library
made = library()
assert made.ckptfix_guard() and made.ckptfix_guard()
os.kill(os.getpid(), signal.SIGBUS)
"""


def test_a_signal_that_is_not_ours_ends_the_program_as_it_would_without_us():
    done = subprocess.run([sys.executable, "-c", GUARDED_TWICE], capture_output=True, check=False, timeout=300)
    assert done.returncode == -signal.SIGBUS, done.stderr
