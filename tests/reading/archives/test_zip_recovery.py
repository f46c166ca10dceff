"""Flipped bits in the structure of a zip archive: every tensor is recovered, or named."""

import contextlib
import io
import zipfile
from pathlib import Path

import pytest
import torch

import ckptfix
from ckptfix.bytes.sources import Content
from ckptfix.core.facts import clause
from ckptfix.reading.archives.zip_recovery import list_members
from tests.checks import assert_same
from tests.reading.archives.test_wrapped import zipped

WEIGHTS = {f"layer{n}.weight": torch.arange(1.0 + n, 36 + n).reshape(5, 7) for n in range(3)}
NAME = b"archive/data/1"
LENGTHS = {"name length": 26, "extra length": 28}
HARMLESS = {"version": 4, "flags": 6, "method": 8, "time": 10, "checksum": 14, "packed": 18, "size": 22, "name": 38}
CENTRAL = {"packed size": 20, "size": 24, "place": 42}
PACKING = {"marked as encrypted": 8, "packed by Shrink": 10}
BROKEN = {"signature": 0, "name length": 28, "extra length": 30, "comment length": 32}


def saved() -> bytes:
    buffer = io.BytesIO()
    torch.save(WEIGHTS, buffer)
    return buffer.getvalue()


def flipped(data: bytes, place: int) -> bytes:
    changed = bytearray(data)
    changed[place] ^= 1
    return bytes(changed)


def header(data: bytes) -> int:
    return zipfile.ZipFile(io.BytesIO(data)).getinfo(NAME.decode()).header_offset


def entry(data: bytes) -> int:
    return data.rindex(NAME) - 46


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.pth"


def salvaged(file: Path, data: bytes) -> ckptfix.Checkpoint:
    file.write_bytes(data)
    checkpoint = ckptfix.open_checkpoint(file, salvage=True)
    assert_same(dict(checkpoint.state_dict()), WEIGHTS)
    assert not checkpoint.lost
    return checkpoint


@pytest.mark.parametrize("field", HARMLESS)
def test_noop_header_fields_that_torch_does_not_read(file: Path, field: str) -> None:
    """torch reads none of it."""
    data = saved()
    assert not salvaged(file, flipped(data, header(data) + HARMLESS[field])).damage


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_noop_a_sound_archive(method: int) -> None:
    for data in (saved(), zipped({"a.txt": b"text", "data/0": bytes(5000)}, method), b"in front" + zipped({"a": b""})):
        listing = list_members(Content("f", data))
        assert (listing.damage, listing.doubts, listing.found) == ([], [], None)


def test_a_damaged_header_is_named(file: Path) -> None:
    data = saved()
    damage = salvaged(file, flipped(data, header(data))).damage
    assert list(map(clause, damage)) == ["is damaged: the header of member archive/data/1"]
    with pytest.raises(ckptfix.UnreadableError, match=r"the header of member archive/data/1.*take all 3 tensors"):
        ckptfix.open_checkpoint(file)


def assert_damaged(file: Path, data: bytes) -> None:
    """One tensor is named as damaged, and the others are recovered."""
    file.write_bytes(data)
    (found,) = (found for found in ckptfix.check(file, salvage=True).findings if found.code == "FIL201" and found.fix)
    assert found.keys == ("layer1.weight",)
    checkpoint = ckptfix.open_checkpoint(file, salvage=True)
    assert all(torch.equal(checkpoint.read(key), WEIGHTS[key]) for key in ("layer0.weight", "layer2.weight"))


@pytest.mark.parametrize("field", LENGTHS)
def test_a_header_of_another_length_leads_to_bytes_that_fail_the_checksum(file: Path, field: str) -> None:
    data = saved()
    assert_damaged(file, flipped(data, header(data) + LENGTHS[field]))


def test_another_checksum_in_the_directory_is_that_of_other_bytes(file: Path) -> None:
    data = saved()
    assert_damaged(file, flipped(data, entry(data) + 16))


def test_a_member_of_another_name_is_lost(file: Path) -> None:
    data = saved()
    file.write_bytes(flipped(data, entry(data) + 54))
    checkpoint = ckptfix.open_checkpoint(file, salvage=True)
    assert list(checkpoint.lost) == ["layer1.weight"]


@pytest.mark.parametrize("said", PACKING)
def test_a_member_is_packed_only_if_both_say_so(file: Path, said: str) -> None:
    data = saved()
    assert not salvaged(file, flipped(data, entry(data) + PACKING[said])).damage
    (finding,) = ckptfix.check(file).findings
    assert said in finding.message


@pytest.mark.parametrize("field", CENTRAL)
def test_a_damaged_entry_of_the_directory_is_named(file: Path, field: str) -> None:
    data = saved()
    (damage,) = salvaged(file, flipped(data, entry(data) + CENTRAL[field])).damage
    assert clause(damage).startswith("is damaged: the directory's entry of member archive/data/1")


@pytest.mark.parametrize("field", BROKEN)
def test_a_directory_that_cannot_be_followed_is_named(file: Path, field: str) -> None:
    data = saved()
    (damage,) = salvaged(file, flipped(data, entry(data) + BROKEN[field])).damage
    assert clause(damage).startswith("is damaged: the directory of the zip archive (")


@pytest.mark.parametrize("place", range(22))
def test_a_flipped_bit_of_the_end_record_loses_no_tensor(file: Path, place: int) -> None:
    data = saved()
    salvaged(file, flipped(data, len(data) - 22 + place))


def test_wrong_bytes_are_not_damage_of_the_directory(file: Path) -> None:
    data = saved()
    start = data.index(WEIGHTS["layer1.weight"].numpy().tobytes())
    file.write_bytes(flipped(data, start + 5))
    assert [finding.code for finding in ckptfix.check(file).findings if finding.code.startswith("FIL2")] == ["FIL201"]


def test_wrong_bytes_beside_a_damaged_entry_are_reported(file: Path) -> None:
    data = saved()
    start = data.index(WEIGHTS["layer1.weight"].numpy().tobytes())
    file.write_bytes(flipped(flipped(data, start + 5), entry(data) + 16))
    assert {finding.code for finding in ckptfix.check(file).findings} >= {"FIL201"}


METHODS: dict[str, tuple[int, int | None]] = {
    "lzma": (14, None),
    "bzip2": (12, None),
    "Deflate64": (8, 9),
    "zstd": (8, 93),
    "PPMd": (8, 98),
    "99": (8, 99),
}


@pytest.mark.parametrize("name", METHODS)
def test_members_of_other_methods_are_read_or_named(file: Path, name: str) -> None:
    archive = zipfile.ZipFile(io.BytesIO(saved()))
    written, claimed = METHODS[name]
    data = bytearray(zipped({info.filename: archive.read(info) for info in archive.infolist()}, written))
    if claimed is None:
        assert not salvaged(file, bytes(data)).damage
        return
    for signature, offset in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        at = data.find(signature)
        while at >= 0:
            data[at + offset] = claimed
            at = data.find(signature, at + 4)
    file.write_bytes(data)
    said = "is encrypted; unpack" if name == "99" else f"is packed by {name}, which ckptfix cannot unpack"
    with pytest.raises(ckptfix.UnreadableError, match=rf"member archive/\S+ {said}"):
        ckptfix.open_checkpoint(file)


def test_lzma_members_with_other_properties_end_in_an_error_or_a_checkpoint(file: Path) -> None:
    data = bytearray(zipped({"model.pth": saved()}, zipfile.ZIP_LZMA))
    read = []
    for properties in range(226):
        data[30 + len("model.pth") + 4] = properties
        file.write_bytes(data)
        with contextlib.suppress(ckptfix.UnreadableError):
            assert_same(dict(ckptfix.open_checkpoint(file).state_dict()), WEIGHTS)
            read.append(properties)
    assert read == [93]  # lc 3, lp 0, pb 2: the usual settings
