"""Large storages keep their place in a page, and torch finds all of them by every way it has."""

import io
import os
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest
import torch
from msgspec.structs import replace
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.serialization import config

from ckptfix.bytes.copying import LARGE, PAGE, WINDOW, Copier
from ckptfix.bytes.sources import BLOCK, FileBytes, MemoryBytes, located
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.spec import Storage, TensorSpec
from ckptfix.engine.verification import verify
from ckptfix.errors import WriteError
from ckptfix.reading.opening import open_file
from ckptfix.writing import torch_files as torch_write
from ckptfix.writing.output import write_to
from ckptfix.writing.torch_files import ALIGNMENT, ZipWriter, write_zip
from tests.reading.files import opened, saved, write
from tests.reading.state_dicts import same


def mixed() -> dict[str, torch.Tensor]:
    """Storages of which some are large, some are small, and none has the size of whole pages."""
    large = torch.arange(LARGE // 4 + 1, dtype=torch.float32)
    return {"first": large, "small": torch.ones(3), "second": large + 1, "tied": large, "part": large[5:300_000] - 1}


def places(checkpoint: Checkpoint) -> dict[str, FileBytes]:
    found = {key: located(spec.storage.source) for key, spec in checkpoint.specs.items() if spec.storage is not None}
    return {key: place for key, place in found.items() if place is not None}


def renamed(checkpoint: Checkpoint) -> Checkpoint:
    """The same tensors under longer names, so that all offsets differ."""
    entries = {f"{'wrapped.' * 20}{key}": value for key, value in checkpoint.entries.items()}
    return Checkpoint(checkpoint.path, checkpoint.format, entries, root=entries)


def test_large_storages_of_a_zip_file_keep_their_page_offset(tmp_path):
    checkpoint = renamed(opened(saved(mixed(), tmp_path)))
    path = write(checkpoint, "zip", tmp_path)
    before, after = places(checkpoint), places(opened(path))
    assert any(after[key].offset != before[key].offset for key in before)
    for key, place in after.items():
        assert place.offset % ALIGNMENT == 0
        if place.nbytes >= LARGE:
            assert place.offset % PAGE == before[key].offset % PAGE
    padding = path.stat().st_size - sum(place.nbytes for place in {p.offset: p for p in after.values()}.values())
    assert padding < 3 * PAGE + 10_000
    same(
        dict(torch.load(path, weights_only=True)), {f"{'wrapped.' * 20}{key}": value for key, value in mixed().items()}
    )


@pytest.mark.parametrize("form", ["safetensors", "legacy"])
def test_unaligned_storages_are_aligned(form, tmp_path):
    source = write(opened(saved(mixed(), tmp_path)), form, tmp_path, "source")
    after = places(opened(write(opened(source), "zip", tmp_path)))
    assert {place.offset % ALIGNMENT for place in after.values()} == {0}


@pytest.mark.parametrize("form", ["zip", "safetensors", "legacy"])
@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("calculated", [False, True])
def test_torch_finds_the_storages_in_every_way(calculated, mmap, form, tmp_path):
    """torch may work out where its own writer would have placed them, if a file says ``.format_version``."""
    source = write(opened(saved(mixed(), tmp_path)), form, tmp_path, "source")
    path = write(opened(source), "zip", tmp_path)
    with config.patch({"load.calculate_storage_offsets": calculated}):  # type: ignore[attr-defined] # added on import
        same(dict(torch.load(path, weights_only=True, mmap=mmap)), mixed())


def test_torch_finds_the_storages_of_fake_tensors(tmp_path):
    path = write(opened(saved(mixed(), tmp_path)), "zip", tmp_path)
    with FakeTensorMode():
        fakes = torch.load(path)
    for key, place in places(opened(path)).items():
        assert fakes[key].untyped_storage()._checkpoint_offset == place.offset


@pytest.mark.parametrize("form", ["zip", "safetensors", "legacy"])
def test_ranges_that_were_read_back_are_not_read_again(form, tmp_path, monkeypatch):
    source = write(opened(saved(mixed(), tmp_path)), form, tmp_path, "source")
    expected, goal = opened(source), tmp_path / "goal"
    written = write_to(goal, expected, write_zip, goal)
    read: list[int] = []
    real = os.preadv

    def noted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        read.append(buffers[0].nbytes)
        return real(descriptor, buffers, offset)

    monkeypatch.setattr("os.preadv", noted)
    verify(goal, expected, goal, [written])
    assert read == []
    verify(goal, expected, goal)
    assert sum(read) > sum(place.nbytes for place in places(expected).values())


def test_tensors_at_other_places_than_written_are_compared(tmp_path):
    """Two tensors of equal size change places: each is in a range that was read back, but in the other's."""
    state_dict = {"a": torch.zeros(LARGE), "b": torch.ones(LARGE)}
    expected, goal = opened(saved(state_dict, tmp_path)), tmp_path / "goal"

    def exchanging(checkpoint: Checkpoint, file: BinaryIO) -> Copier:
        swapped = {"a": checkpoint.entries["b"], "b": checkpoint.entries["a"]}
        return write_zip(Checkpoint(checkpoint.path, checkpoint.format, swapped, root=swapped), file)

    written = write_to(goal, expected, exchanging, goal)
    assert len(written.copied) == 2
    with pytest.raises(WriteError, match="differs from the plan: the bytes of a;"):
        verify(goal, expected, goal, [written])


def test_another_file_than_the_written_one_is_compared(tmp_path):
    expected, goal = opened(saved({"a": torch.zeros(LARGE)}, tmp_path)), tmp_path / "goal"
    written = write_to(goal, expected, write_zip, goal)
    other = tmp_path / "other"
    content = bytearray(goal.read_bytes())
    content[places(open_file(str(goal)))["a"].offset] = 1
    other.write_bytes(content)
    with pytest.raises(WriteError, match="differs from the plan: the bytes of a;"):
        verify(other, expected, goal, [written])


def test_a_state_dict_in_memory_is_aligned(tmp_path):
    from ckptfix.reading.opening import open_state_dict

    path = write(open_state_dict(mixed()), "zip", Path(tmp_path))
    assert {place.offset % ALIGNMENT for place in places(opened(path)).values()} == {0}


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


def test_a_given_checksum_is_not_computed_again():
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
def test_a_member_of_another_size_than_declared_is_an_error(go_on):
    file = io.BytesIO()
    writer = ZipWriter(file)
    writer.member("a", 5, 0)
    file.write(b"abc")
    with pytest.raises(ValueError, match="member archive/a was declared with 5 bytes and got 3"):
        go_on(writer)


class Zeros:
    """A storage of zeros only, which are the same block."""

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
        is_hole = len(block) > PAGE and bytes(block) == ZEROS[: len(block)]
        return self.file.seek(len(block), 1) if is_hole else self.file.write(block)


ZEROS = bytes(WINDOW)


def test_a_file_beyond_four_gigabytes_is_readable(tmp_path):
    """Sizes and offsets past 4 GiB move to zip64 records."""
    path, nbytes = tmp_path / "large.pth", (4 << 30) + BLOCK
    # A given checksum is not computed, and the four gigabytes are not read to compare it.
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


def test_integers_are_written_without_requires_grad(tmp_path):
    checkpoint = opened(saved({"n": torch.arange(3), "w": torch.ones(2)}, tmp_path))
    entries = {key: replace(spec, requires_grad=True) for key, spec in checkpoint.specs.items()}
    asking = replace(checkpoint, entries=entries, root=entries)
    path = write(asking, "zip", tmp_path)
    verify(path, asking, path)
    assert {key: value.requires_grad for key, value in torch.load(path).items()} == {"n": False, "w": True}
