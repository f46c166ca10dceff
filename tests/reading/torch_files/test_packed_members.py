"""Torch archives that another program packed, and members whose sizes or checksums are not what they should be."""

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckptfix
from ckptfix.core.facts import Kind
from ckptfix.core.finding import Level
from ckptfix.errors import DamageWarning, HostileError, UnreadableError
from ckptfix.reading.archives import unpacking
from ckptfix.reading.torch_files import torch_zip
from tests.checks import assert_same
from tests.reading.archives.zips import CENTRAL, Zip, saved

STATE = {"a": torch.randn(100, 10, generator=torch.Generator().manual_seed(1)), "b": torch.ones(7), "c": torch.zeros(3)}
DATA = saved(STATE)
METHODS = {"deflate": zipfile.ZIP_DEFLATED, "bzip2": zipfile.ZIP_BZIP2, "LZMA": zipfile.ZIP_LZMA}


def rezipped(data: bytes, method: int, change: Callable[[str, bytes], bytes] = lambda name, data: data) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(out, "w", method) as packed:
        for info in archive.infolist():
            packed.writestr(info.filename, change(info.filename, archive.read(info)))
    return out.getvalue()


def write(folder: Path, data: bytes) -> Path:
    path = folder / "model.pth"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("memory", [1 << 23, 100], ids=["in memory", "in a file"])
@pytest.mark.parametrize("method", METHODS)
def test_a_repacked_file_is_read_and_reported(
    tmp_path: Path, method: str, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacking, "MEMORY_LIMIT", memory)
    path = write(tmp_path, rezipped(DATA, METHODS[method]))
    checkpoint = ckptfix.open_checkpoint(path)
    assert not checkpoint.damage
    assert_same(checkpoint.state_dict(), STATE)
    assert_same({key: checkpoint.read(key) for key in reversed(STATE)}, dict(reversed(STATE.items())))
    (note, *_) = (finding for finding in ckptfix.check(path).findings if finding.code == "FIL203")
    assert (note.level, "which torch.save never does" in note.message) == (Level.NOTE, True)


def test_noop_zeros_in_a_large_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They pack a thousandfold; what counts is what the whole archive unpacks to."""
    monkeypatch.setattr(unpacking, "RATIO_FLOOR", 1 << 16)
    monkeypatch.setattr(unpacking, "MEMORY_LIMIT", 1 << 10)
    state = {"w": torch.randn(4000, generator=torch.Generator().manual_seed(1)), "zeros": torch.zeros(100_000)}
    checkpoint = ckptfix.open_checkpoint(write(tmp_path, rezipped(saved(state), zipfile.ZIP_DEFLATED)))
    assert_same(checkpoint.state_dict(), state)


def test_a_bomb_is_refused_while_it_unpacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacking, "RATIO_FLOOR", 1 << 16)
    monkeypatch.setattr(unpacking, "MEMORY_LIMIT", 1 << 10)
    path = write(tmp_path, rezipped(saved({"z": torch.zeros(1_000_000)}), zipfile.ZIP_DEFLATED))
    with pytest.raises(HostileError, match="expands more than 50 times"):
        ckptfix.check(path)


def test_a_pickle_of_more_than_its_archive_is_refused_before_it_unpacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_zip, "SMALL_LIMIT", 1 << 10)
    data = rezipped(DATA, zipfile.ZIP_DEFLATED, lambda name, data: data + bytes(1 << 20) * name.endswith("data.pkl"))
    with pytest.raises(HostileError, match=r"member data\.pkl declares \d{7} bytes"):
        ckptfix.check(write(tmp_path, data))


def test_views_of_a_packed_storage_unpack_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    views = {f"v{number}": whole[number:] for number in range(40)}
    checkpoint = ckptfix.open_checkpoint(write(tmp_path, rezipped(saved(views), zipfile.ZIP_DEFLATED)))
    made: list[object] = []
    monkeypatch.setattr(unpacking.PackedBytes, "unpack", counted(unpacking.PackedBytes.unpack, made))
    assert_same({key: checkpoint.read(key) for key in views}, views)
    assert len(made) == 1


def counted(function: Callable[..., None], made: list[object]) -> Callable[..., None]:
    def unpack(self: object) -> None:
        made.append(self)
        function(self)

    return unpack


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize(
    "change", [lambda data: b"\1" * 64 + data, lambda data: data + b"\1" * 64, lambda data: data[:-4]]
)
def test_a_storage_of_another_size_than_declared_is_lost(
    tmp_path: Path, method: int, change: Callable[[bytes], bytes]
) -> None:
    """torch refuses it: record size does not match."""
    data = rezipped(DATA, method, lambda name, data: change(data) if name.endswith("data/0") else data)
    path = write(tmp_path, data)
    with pytest.raises(UnreadableError, match=r"data/0.*take 2 of 3 tensors"):
        ckptfix.open_checkpoint(path)
    checkpoint = ckptfix.open_checkpoint(path, salvage=True)
    assert [fact.kind for fact in checkpoint.damage] == [Kind.STORAGE_SIZE]
    assert list(checkpoint.lost) == ["a"]
    assert_same(checkpoint.state_dict(), {key: STATE[key] for key in "bc"})


def test_a_packed_member_of_wrong_size_is_not_unpacked(tmp_path: Path) -> None:
    archive = Zip(rezipped(DATA, zipfile.ZIP_DEFLATED))
    archive.put(archive.entries["archive/data/0"], CENTRAL["size"], 1 << 20)
    checkpoint = ckptfix.open_checkpoint(write(tmp_path, bytes(archive.data)), salvage=True)
    assert "a" in checkpoint.lost or torch.equal(checkpoint.read("a"), STATE["a"])


def test_an_archive_without_checksums_is_not_verified(tmp_path: Path) -> None:
    archive = Zip(saved(STATE, checksums=False))
    archive.data[archive.starts["archive/data/0"]] ^= 1
    assert not any(finding.code == "FIL201" for finding in ckptfix.check(write(tmp_path, bytes(archive.data))).findings)


def test_a_checksum_of_zero_counts_if_others_exist(tmp_path: Path) -> None:
    archive = Zip(DATA)
    start, size = archive.starts["archive/data/0"], archive.sizes["archive/data/0"]
    archive.data[start] ^= 1
    archive.put(archive.entries["archive/data/0"], CENTRAL["checksum"], 0)
    assert bytes(archive.data[start + size : start + size + 4]) == b"PK\7\x08"
    archive.data[start + size + 4 : start + size + 8] = bytes(4)
    path = write(tmp_path, bytes(archive.data))
    assert [finding.keys for finding in ckptfix.check(path).findings if finding.code == "FIL201"][:1] == [("a",)]
    with pytest.raises(UnreadableError, match="checksum"):
        ckptfix.open_checkpoint(path).state_dict()


def test_exchanged_offsets_without_checksums_are_reported(tmp_path: Path) -> None:
    state = {"a": torch.arange(5.0), "b": -torch.arange(5.0)}
    archive = Zip(saved(state, checksums=False))
    first, second = (archive.entries[f"archive/data/{number}"] for number in (0, 1))
    archive.swap(first + CENTRAL["place"][0], second + CENTRAL["place"][0], 4)
    path = write(tmp_path, bytes(archive.data))
    with pytest.warns(DamageWarning, match="names a member archive/data/0 in its directory and archive/data/1"):
        checkpoint = ckptfix.open_checkpoint(path, salvage=True)
    assert {fact.kind for fact in checkpoint.remarks} == {Kind.DOUBTFUL_NAMES}


def test_zero_strides_of_many_bytes_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, saved({"w": torch.ones(1).expand(1 << 29)}))
    with pytest.raises(HostileError, match="would take 2048 MiB in memory out of 4 stored bytes"):
        ckptfix.open_checkpoint(path)


def test_a_mask_that_repeats_its_rows_is_read(tmp_path: Path) -> None:
    state = {"mask": torch.arange(2048.0).expand(16, 2048, 2048)}
    assert ckptfix.open_checkpoint(write(tmp_path, saved(state))).specs["mask"].strides == (0, 0, 1)
