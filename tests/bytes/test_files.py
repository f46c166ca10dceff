"""A file that stays open: its path may be removed, but its bytes may not change."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckptfix.bytes.files import NEAR, FileBuffer, OpenFile, open_bytes
from ckptfix.errors import UnreadableError


@pytest.fixture
def file(tmp_path):
    (tmp_path / "f").write_bytes(b"0123456789")
    return OpenFile(str(tmp_path / "f"))


@pytest.fixture
def reopened(tmp_path, monkeypatch):
    """A file opened by a process that cannot open another one."""
    monkeypatch.setattr("ckptfix.bytes.files._SPARE", 1 << 62)
    monkeypatch.setattr("resource.setrlimit", lambda *limits: None)
    (tmp_path / "f").write_bytes(b"0123456789")
    return open_bytes(str(tmp_path / "f"))


def test_a_file_that_is_renamed_removed_or_read_is_unchanged(file, tmp_path):
    file.refuse_changed()
    (tmp_path / "f").rename(tmp_path / "g")
    file.refuse_changed()
    (tmp_path / "g").chmod(0o400)
    (tmp_path / "g").unlink()
    file.refuse_changed()
    assert file.read(2, 3) == b"234"
    file.refuse_changed()


@pytest.mark.parametrize("how", ["grown", "cut", "written over"])
def test_a_file_that_someone_writes_to_is_refused(how, file, tmp_path):
    before = (tmp_path / "f").stat().st_mtime_ns
    if how == "written over":
        with (tmp_path / "f").open("r+b") as other:
            other.write(b"x")
        os.utime(tmp_path / "f", ns=(before + 1, before + 1))  # the resolution of a system clock may be 4 ms
    else:
        os.truncate(tmp_path / "f", 20 if how == "grown" else 5)
        os.utime(tmp_path / "f", ns=(before, before))
    with pytest.raises(UnreadableError, match=r"/f: changed while it was read; run the same command again$"):
        file.refuse_changed()


def test_a_file_that_is_opened_for_each_read_holds_no_descriptor(reopened):
    assert (reopened.descriptor, reopened.size, reopened.read(8, 9)) == (-1, 10, b"89")
    reopened.fill(memoryview(buffer := bytearray(4)), 6)
    assert bytes(buffer) == b"6789"
    reopened.refuse_changed()


def test_another_file_of_its_name_is_refused(reopened, tmp_path):
    (tmp_path / "f").rename(tmp_path / "g")
    (tmp_path / "f").write_bytes(b"9876543210")
    found = (tmp_path / "g").stat()
    os.utime(tmp_path / "f", ns=(found.st_atime_ns, found.st_mtime_ns))
    with pytest.raises(UnreadableError, match="changed while it was read"):
        reopened.read(0, 4)


def test_a_file_that_ends_before_a_buffer_is_full_is_named(file):
    buffer = bytearray(4)
    file.fill(memoryview(buffer), 6)
    assert bytes(buffer) == b"6789"
    with pytest.raises(UnreadableError, match=r"/f: the file ends inside a storage: 4 bytes .* at offset 8, 2 are"):
        file.fill(memoryview(buffer), 8)


DATA = bytes(range(251)) * 100


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(DATA)
    return path


@pytest.fixture
def buffer(path: Path) -> FileBuffer:
    return FileBuffer(OpenFile(str(path)))


def test_a_buffer_slices_like_bytes(buffer: FileBuffer) -> None:
    ends = (None, 0, 1, 30, NEAR - 1, NEAR, NEAR + 1, 2 * NEAR, len(DATA) - 1, len(DATA), len(DATA) + 9, -1, -30, -NEAR)
    assert len(buffer) == len(DATA)
    for start in ends:
        for stop in ends:
            assert buffer[start:stop] == DATA[start:stop], (start, stop)


def test_nearby_ranges_are_read_once(buffer: FileBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
    read, taken = OpenFile.read, []

    def counted(file: OpenFile, start: int, count: int) -> bytes:
        taken.append((start, count))
        return read(file, start, count)

    monkeypatch.setattr(OpenFile, "read", counted)
    for near in (slice(600, 604), slice(604, 700), slice(1000, 600 + NEAR)):
        assert buffer[near] == DATA[near]
    assert taken == [(600, NEAR)]


def test_small_reads_of_another_thread_change_nothing(buffer: FileBuffer) -> None:
    """The other one reads before each step of the interpreter in turn."""
    steps = 0

    def reads(is_other_at: int) -> bytes:
        nonlocal steps
        steps, before = 0, sys.gettrace()

        def step(frame: FrameType, event: str, _: object) -> Callable[..., Any]:
            nonlocal steps
            if frame.f_code is FileBuffer.__getitem__.__code__:
                frame.f_trace_opcodes = True
                steps += event == "opcode"
                if steps == is_other_at:
                    steps += 1
                    sys.settrace(None)
                    assert buffer[20:24] == DATA[20:24]
                    sys.settrace(step)
            return step

        sys.settrace(step)
        try:
            return buffer[600:604]
        finally:
            sys.settrace(before)

    for nearby in (slice(-1, None), slice(598, 599)):  # the bytes are not in memory, or are
        for other in range(1, 80):
            assert buffer[-1:] == DATA[-1:]
            assert buffer[nearby] == DATA[nearby]
            assert reads(other) == DATA[600:604], (nearby, other)
        assert 10 < steps < other


def test_find_across_block_boundaries(buffer: FileBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptfix.bytes.files.NEAR", 60)
    monkeypatch.setattr("ckptfix.bytes.files.SEARCHED", 100)
    for sub in (bytes((59, 60, 61)), bytes((159, 160, 161)), DATA[90:310], b"\0", b"nowhere"):
        for start in (0, 1, 98, 100, 252, len(DATA) - 2, len(DATA)):
            assert buffer.find(sub, start) == DATA.find(sub, start)
            assert buffer.find(sub, start, start + 400) == DATA.find(sub, start, start + 400)
    assert buffer.find(bytes((99, 100))) == 99


@pytest.mark.parametrize("place", [0, NEAR, 4 * NEAR])
def test_a_file_that_was_cut_is_an_error(path: Path, buffer: FileBuffer, place: int) -> None:
    os.truncate(path, 100)
    with pytest.raises(UnreadableError, match=f"was cut short while it was read: it had {len(DATA)} bytes and has 100"):
        buffer[place : place + NEAR + 9]
    with pytest.raises(UnreadableError, match="was cut short while it was read"):
        buffer.find(b"nowhere")


STATE_DICT = {f"layer{number}.weight": torch.arange(600.0) + number for number in range(40)}

CUTTING = """
import os, sys
from ckptfix.bytes.files import FileBuffer

path, left, *arguments = sys.argv[1:]
opened = FileBuffer.__init__

def cut_when_opened(self, file):
    opened(self, file)
    os.truncate(path, int(left))

FileBuffer.__init__ = cut_when_opened
from ckptfix.cli import main

sys.argv[1:] = arguments
main()
"""
"""The program, and somebody who cuts its source short right after it was opened."""


def _saved(form: str, path: Path) -> int:
    if form == "safetensors":
        save_file(STATE_DICT, path)
    else:
        torch.save(STATE_DICT, path, _use_new_zipfile_serialization=form == "zip")
    return path.stat().st_size


@pytest.mark.parametrize("form", ["zip", "legacy", "safetensors"])
def test_the_program_says_in_one_line_that_its_source_was_cut(form: str, tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    for share in (0, 0.01, 0.5, 0.97):
        size = _saved(form, path)
        command = [
            sys.executable,
            "-c",
            CUTTING,
            str(path),
            str(int(share * size)),
            "repair",
            str(path),
            "-o",
            "out.pth",
        ]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert (done.returncode, done.stdout) == (2, ""), (share, done.stderr)
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"ckptfix: error: {path}: ")
        assert [left.name for left in tmp_path.iterdir()] == ["model.bin"]
