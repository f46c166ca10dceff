from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO, cast

import pytest
import torch

from ckptfix.bytes.copying import WINDOW
from ckptfix.bytes.sources import BLOCK, MemoryBytes
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.spec import Storage, TensorSpec
from ckptfix.writing import torch_files as torch_write
from ckptfix.writing.zip_writer import ALIGNMENT, ZipWriter
from tests.reading.files import opened


def archive(members: dict[str, bytes], crc: Callable[[bytes], int | Callable[[], int]] = zlib.crc32) -> bytes:
    file = io.BytesIO()
    writer = ZipWriter(file)
    for name, data in members.items():
        writer.member(name, len(data), crc(data))
        file.write(data[: len(data) // 2])
        file.write(data[len(data) // 2 :])
    writer.close()
    return file.getvalue()


MEMBERS = {"data.pkl": b"abc", "data/0": bytes(range(256)), "empty": b"", "large": b"x" * 100_000}


def test_zipfile_reads_what_is_written():
    with zipfile.ZipFile(io.BytesIO(archive(MEMBERS))) as read:
        assert read.testzip() is None
        assert {info.filename: read.read(info) for info in read.infolist()} == {
            f"archive/{name}": data for name, data in MEMBERS.items()
        }


def test_the_data_of_every_member_is_aligned():
    content = archive(MEMBERS)
    for name, data in MEMBERS.items():
        if data:
            header = content.index(f"archive/{name}".encode())
            assert content.index(data, header) % ALIGNMENT == 0


def test_equal_content_gives_equal_files():
    assert archive(MEMBERS) == archive(MEMBERS)


def test_a_given_checksum_is_written_without_a_look_at_the_data():
    with zipfile.ZipFile(io.BytesIO(archive({"a": b"x"}, crc=lambda data: 5))) as read:
        assert read.infolist()[0].CRC == 5


def test_a_checksum_that_is_known_late_gives_the_same_file():
    assert archive(MEMBERS, crc=lambda data: lambda: zlib.crc32(data)) == archive(MEMBERS)


def test_a_member_from_memory_has_its_checksum():
    file = io.BytesIO()
    writer = ZipWriter(file)
    writer.write("a", b"abc")
    writer.close()
    assert file.getvalue() == archive({"a": b"abc"})


@pytest.mark.parametrize("go_on", [ZipWriter.close, lambda writer: writer.write("b", b"")])
def test_a_member_of_another_size_than_declared_is_our_bug(go_on):
    file = io.BytesIO()
    writer = ZipWriter(file)
    writer.member("a", 5, 0)
    file.write(b"abc")
    with pytest.raises(ValueError, match="member archive/a was declared with 5 bytes and got 3"):
        go_on(writer)


class Zeros:
    """A storage of nothing but zeros, which are one and the same block."""

    block = memoryview(bytes(BLOCK))

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def read(self, start: int, stop: int) -> memoryview:
        return self.block[: stop - start]


class SparseFile:
    """A file in which large blocks of zeros take no place on the disk. It gives no descriptor to write by."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file

    def fileno(self) -> int:
        raise io.UnsupportedOperation

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, block: memoryview) -> int:
        return self.file.seek(WINDOW, 1) if bytes(block) == ZEROS else self.file.write(block)


ZEROS = bytes(WINDOW)


def test_a_file_past_four_gigabytes_is_read_by_zipfile_torch_and_ourselves(tmp_path):
    """Sizes and offsets past 4 GiB move to zip64 records."""
    path, nbytes = tmp_path / "large.pth", (4 << 30) + BLOCK
    # A checksum that is given is not computed, and nobody reads the four gigabytes to compare it.
    large = TensorSpec("uint8", (nbytes,), (1,), Storage("0", Zeros(nbytes), crc32=1))
    last = TensorSpec("float32", (3,), (1,), Storage("1", MemoryBytes(torch.arange(3.0).numpy().tobytes())))
    checkpoint = Checkpoint("made", "test", {"large": large, "last": last}, root={"large": large, "last": last})
    with path.open("wb") as file:
        torch_write.write_zip(checkpoint, cast(BinaryIO, SparseFile(file)))
    assert path.stat().st_size > 1 << 32
    assert path.stat().st_blocks * 512 < 8 * BLOCK
    with zipfile.ZipFile(path) as read:
        sizes = {info.filename: info.file_size for info in read.infolist()}
        assert (sizes["archive/data/0"], sizes["archive/data/1"]) == (nbytes, 12)
        assert read.getinfo("archive/data/1").header_offset > 1 << 32
        assert read.read("archive/version") == b"3\n"
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert loaded["large"].shape == (nbytes,)
    assert loaded["last"].tolist() == [0, 1, 2]
    again = opened(path)
    assert again.specs["large"].nbytes == nbytes
    assert again.read("last").tolist() == [0, 1, 2]


def test_a_directory_of_65535_members_has_a_zip64_record():
    file = io.BytesIO()
    writer = ZipWriter(file)
    for index in range(0xFFFF):
        writer.write(str(index), b"")
    writer.close()
    assert b"PK\x06\x06" in file.getvalue()[-200:]
    with zipfile.ZipFile(file) as read:
        assert len(read.infolist()) == 0xFFFF
