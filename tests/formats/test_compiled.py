"""The compiled checksum is that of zlib, and outlives a file that is cut off while it reads."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import zlib

import pytest

from ckptfix.formats.compiled import MemoryGone, can_sum, crc32_of_mapped

pytestmark = pytest.mark.skipif(not can_sum(), reason="no library was built for this machine, or it cannot do this")


@pytest.fixture
def file(tmp_path):
    (tmp_path / "file").write_bytes(os.urandom(1 << 20))
    return tmp_path / "file"


def mapped(file, access=mmap.ACCESS_COPY):
    with file.open("r+b") as opened:
        return memoryview(mmap.mmap(opened.fileno(), 0, access=access))


@pytest.mark.parametrize("start", [0, 1, 24])
@pytest.mark.parametrize("count", [*range(1, 40), *range(120, 140), *range(250, 390, 7), 4096, 100_003])
def test_the_numbers_are_those_of_zlib_in_one_piece_and_in_two(count, start, file):
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


GUARDED_TWICE = """
import os, signal
from ckptfix.formats.compiled import library
made = library()
assert made.ckptfix_guard() and made.ckptfix_guard()
os.kill(os.getpid(), signal.SIGBUS)
"""


def test_a_signal_that_is_not_ours_ends_the_program_as_it_would_without_us():
    done = subprocess.run([sys.executable, "-c", GUARDED_TWICE], capture_output=True, check=False, timeout=30)
    assert done.returncode == -signal.SIGBUS, done.stderr
