"""A damaged storage never passes as intact, and never goes into a file in which it would seem intact."""

import os
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import ckptfix
from ckptfix.bytes.checksums import SKIPPED, Verifier, is_sound, soundness
from ckptfix.bytes.files import OpenFile
from ckptfix.bytes.sources import FileBytes, MemoryBytes, WindowBytes
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.spec import Storage, TensorSpec
from ckptfix.errors import DamageWarning, UnreadableError, WriteError
from ckptfix.reading.weights.containers import LazyTensors
from ckptfix.values.casting import cast_spec
from tests.checks import assert_same, bytes_of

STATE: dict[str, torch.Tensor] = {"weight": torch.arange(64.0), "view": torch.arange(100.0)[:10]}


def flipped(folder: Path, number: int | None) -> Path:
    """Return a file with one bit of a storage flipped; None changes nothing."""
    path = folder / "model.pth"
    torch.save(STATE, path)
    if number is not None:
        with zipfile.ZipFile(path) as archive:
            offset = archive.getinfo(f"model/data/{number}").header_offset
        content = bytearray(path.read_bytes())
        lengths = content[offset + 26 : offset + 30]
        start = offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
        content[start + 16] ^= 1
        path.write_bytes(content)
    return path


UNREAD: list[Any] = [
    pytest.param({"values": False}, id="no values"),
    pytest.param({"select": ("KEY",)}, id="other rules"),
]


@pytest.mark.parametrize("settings", UNREAD)
@pytest.mark.parametrize("form", [{"format": "safetensors"}, {"for_torch": "1.0"}, {}], ids=["safe", "legacy", "zip"])
def test_noop_sound_storages(form, settings, tmp_path):
    ckptfix.repair(flipped(tmp_path, None), output=tmp_path / "out", **form, **settings)
    assert (tmp_path / "out").exists()


@pytest.mark.parametrize("settings", UNREAD)
@pytest.mark.parametrize(
    ("number", "form", "key"),
    [
        pytest.param(0, {"format": "safetensors"}, "weight", id="the other container has no checksum"),
        pytest.param(0, {"for_torch": "1.0"}, "weight", id="the legacy container has none"),
        pytest.param(1, {}, "view", id="a part of a storage gets a checksum of its own"),
    ],
)
def test_a_damaged_storage_is_not_written_without_its_checksum(number, form, key, settings, tmp_path):
    source = flipped(tmp_path, number)
    with pytest.raises(WriteError, match=f"the storage of {key} fails its checksum.*salvage=True"):
        ckptfix.repair(source, output=tmp_path / "out", **form, **settings)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.pth"]


def test_a_copied_storage_keeps_its_checksum(tmp_path):
    ckptfix.repair(flipped(tmp_path, 0), output=tmp_path / "out.pth", values=False)
    assert [finding.code for finding in ckptfix.check(tmp_path / "out.pth").findings] == ["FIL201"]


@pytest.mark.parametrize("form", ["pth", "safetensors"])
def test_nothing_is_written_if_damage_remains(form, tmp_path):
    source = flipped(tmp_path, 0)
    report = ckptfix.repair(source, output=tmp_path / "out", format=form).report
    assert (report.exit_code, report.output) == (1, None)
    assert "nothing is written because of FIL201 storage-damage" in report.remarks
    ckptfix.repair(source, output=tmp_path / "out", format=form, salvage=True)
    assert ckptfix.open_checkpoint(tmp_path / "out").keys() == ["view"]


class CountedBytes:
    """A source that counts the bytes that are read."""

    def __init__(self, data: bytes) -> None:
        self.data, self.nbytes, self.count = data, len(data), 0

    def read(self, start: int, stop: int) -> memoryview:
        self.count += stop - start
        return memoryview(self.data)[start:stop]


def counted(tensor: torch.Tensor, crc32: int | None, parts: int) -> tuple[Checkpoint, CountedBytes]:
    """Return a checkpoint whose tensors are equal parts of one storage."""
    source = CountedBytes(bytes_of(tensor))
    size = tensor.numel() // parts
    spec = TensorSpec("float32", (size,), (1,), Storage("0", source, crc32=crc32))
    entries = {f"t{n}": replace(spec, offset=n * size) for n in range(parts)}
    return Checkpoint("model.pth", "torch-zip", entries, reader=LazyTensors()), source


def crc_of(tensor: torch.Tensor) -> int:
    return zlib.crc32(bytes_of(tensor))


WHOLE = torch.arange(600.0)


@pytest.mark.parametrize("crc32", [None, crc_of(WHOLE)], ids=["without checksum", "with its checksum"])
def test_a_storage_is_read_once(crc32: int | None) -> None:
    checkpoint, source = counted(WHOLE, crc32, 1)
    assert torch.equal(checkpoint.read("t0"), WHOLE)
    assert source.count == source.nbytes


def test_several_views_read_their_storage_once() -> None:
    checkpoint, source = counted(WHOLE, crc_of(WHOLE), 6)
    for number in range(6):
        assert torch.equal(checkpoint.read(f"t{number}"), WHOLE[100 * number : 100 * number + 100])
    assert source.count == 2 * source.nbytes


def test_a_view_without_checksum_reads_only_its_own_bytes() -> None:
    checkpoint, source = counted(WHOLE, None, 6)
    checkpoint.read("t3")
    assert source.count == source.nbytes // 6


@pytest.mark.parametrize("parts", [1, 6])
def test_damaged_values_are_refused_or_read_with_a_warning(parts: int) -> None:
    for _ in range(2):
        checkpoint, _ = counted(WHOLE, crc_of(WHOLE) ^ 1, parts)
        with pytest.raises(UnreadableError, match=r"the storage of t0.* fails its checksum"):
            checkpoint.state_dict()
        with pytest.warns(DamageWarning, match=r"the storage of t0.* fails its checksum"):
            checkpoint.read("t0")


@pytest.mark.parametrize("batch", [1, 5000, 1 << 22], ids=["each alone", "some together", "all together"])
def test_storages_verified_ahead_are_read_once(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptfix.bytes.checksums._BATCH", batch)
    made = [counted(WHOLE, crc_of(WHOLE) ^ (number % 3 == 1), 1) for number in range(7)]
    storages = [checkpoint.specs["t0"].storage for checkpoint, _ in made]
    soundness([storage for storage in storages if storage is not None])
    found = [storage is not None and is_sound(storage) for storage in storages]
    assert found == [number % 3 != 1 for number in range(7)]
    assert [source.count for _, source in made] == [WHOLE.nbytes] * 7


def test_tensors_made_of_a_damaged_storage_are_damaged() -> None:
    sound, damaged = (counted(WHOLE, crc_of(WHOLE) ^ wrong, 1)[0].specs["t0"] for wrong in (0, 1))
    for spec, expected in ((sound, True), (damaged, False)):
        storage = cast_spec(spec, "float16", "model.pth").storage
        assert storage is not None
        assert is_sound(storage) is expected


def scripted(folder: Path) -> Iterator[tuple[Path, torch.Tensor]]:
    module = torch.jit.script(torch.nn.Linear(30, 20))
    module.save(str(folder / "model.pt"))
    yield folder / "model.pt", module.weight


def plain(folder: Path) -> Iterator[tuple[Path, torch.Tensor]]:
    torch.save(torch.nn.Linear(30, 20).state_dict(), folder / "model.pt")
    yield folder / "model.pt", torch.load(folder / "model.pt")["weight"]


def big_endian(folder: Path) -> Iterator[tuple[Path, torch.Tensor]]:
    swapped = torch.nn.Linear(30, 20).weight.detach().view(torch.uint8).reshape(-1, 4).flip(1).reshape(20, 120)
    torch.save({"weight": swapped.clone().view(torch.float32)}, folder / "little.pt")
    with zipfile.ZipFile(folder / "model.pt", "w") as archive:
        for info in (little := zipfile.ZipFile(folder / "little.pt")).infolist():
            archive.writestr(info.filename, b"big" if info.filename.endswith("byteorder") else little.read(info))
    yield folder / "model.pt", swapped


@pytest.mark.parametrize("made", [plain, scripted, big_endian])
def test_a_flipped_bit_is_found_in_every_form_of_zip_file(made: Any, tmp_path: Path) -> None:
    ((path, stored),) = made(tmp_path)
    assert ckptfix.open_checkpoint(path).read("weight").shape == (20, 30)
    data = bytearray(path.read_bytes())
    data[data.index(bytes_of(stored)) + 2] ^= 4
    path.write_bytes(data)
    with pytest.warns(DamageWarning, match="the storage of weight fails its checksum"):
        ckptfix.open_checkpoint(path).read("weight")
    report = ckptfix.check(path)
    assert [finding.keys for finding in report.findings if finding.code == "FIL201"] == [("weight",)]
    with pytest.raises(WriteError, match="the storage of weight fails its checksum"):
        ckptfix.repair(path, output=tmp_path / "out.safetensors", values=False)


@pytest.mark.parametrize("settings", [{}, {"values": False}], ids=["values read", "values not read"])
def test_load_refuses_damaged_values(settings: Any, tmp_path: Path) -> None:
    ((path, weight),) = plain(tmp_path)
    ckptfix.load(torch.nn.Linear(30, 20), path, **settings)
    data = bytearray(path.read_bytes())
    data[data.index(bytes_of(weight)) + 2] ^= 4
    path.write_bytes(data)
    model = torch.nn.Linear(30, 20)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(UnreadableError, match=r"the storage of weight fails its checksum.*salvage=True"):
        ckptfix.load(model, path, **settings)
    assert_same(dict(model.state_dict()), before)


def test_a_file_that_has_shrunk_is_reported_in_one_line(tmp_path):
    torch.save({"w": torch.ones(300_000)}, tmp_path / "model.pth")
    storage = ckptfix.open_checkpoint(tmp_path / "model.pth").specs["w"].storage
    assert storage is not None
    os.truncate(tmp_path / "model.pth", 9000)
    with pytest.raises(UnreadableError, match="the file ends inside a storage"):
        is_sound(storage)


BYTES = bytes(torch.randint(0, 256, (2 * SKIPPED + 1000,), dtype=torch.uint8).numpy())
PASSES: dict[str, tuple[list[tuple[int, int]], int]] = {
    "nothing": ([], len(BYTES)),
    "all of it": ([(0, len(BYTES))], 0),
    "in order, with padding between": ([(0, 500), (500, 700), (710, len(BYTES))], 10),
    "not from the first byte on": ([(9, len(BYTES))], 9),
    "not to the last byte": ([(0, 1000)], len(BYTES) - 1000),
    "some of it twice": ([(0, 500), (0, 700), (3, 300), (600, len(BYTES))], 0),
    "the end first": ([(len(BYTES) - 5, len(BYTES)), (0, len(BYTES) - 5)], 5),
    "with much between": ([(0, 5), (5 + SKIPPED, len(BYTES))], len(BYTES) - 5),
}


@pytest.mark.parametrize("is_sound_there", [True, False])
@pytest.mark.parametrize("name", PASSES)
def test_a_storage_is_verified_from_copied_bytes_and_the_rest_is_read(name, is_sound_there, tmp_path, monkeypatch):
    passes, unread = PASSES[name]
    (tmp_path / "file").write_bytes(b"before" + BYTES + b"after")
    file = OpenFile(str(tmp_path / "file"))
    storage = Storage("0", FileBytes(file, 6, len(BYTES)), crc32=zlib.crc32(BYTES) ^ (not is_sound_there))
    other = Storage("1", WindowBytes(FileBytes(file, 2, 99), 1, 3), crc32=zlib.crc32(b"ore"))
    read: list[int] = []
    real = OpenFile.fill

    def fill(file: OpenFile, buffer: memoryview, start: int) -> None:
        read.append(buffer.nbytes)
        real(file, buffer, start)

    monkeypatch.setattr(OpenFile, "fill", fill)
    verifier = Verifier([Storage("all", MemoryBytes(b""), parts=(storage, other)), storage])
    for start, stop in passes:
        verifier.take(file, 6 + start, memoryview(BYTES)[start:stop])
    verifier.take(file, 6 + len(BYTES), memoryview(b"after"))  # it belongs to neither
    verifier.finish()
    assert (is_sound(storage), is_sound(other)) == (is_sound_there, True)
    assert sum(read) == unread + 3


def test_a_storage_in_memory_is_verified_from_copied_bytes(monkeypatch):
    storage = Storage("0", MemoryBytes(BYTES), crc32=zlib.crc32(BYTES))
    verifier = Verifier([storage])
    verifier.take(storage.source, 0, memoryview(BYTES))
    monkeypatch.setattr(MemoryBytes, "read", None)
    verifier.finish()
    assert is_sound(storage)
