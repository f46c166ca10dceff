"""Members with another place or name than in the directory: the right bytes, a finding, or nothing."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckptfix
from tests.checks import assert_same
from tests.reading.archives.zips import CENTRAL, LOCAL, Zip, saved

WEIGHTS = {f"layer{n}.weight": torch.arange(1.0 + n, 36 + n).reshape(5, 7) for n in range(4)}
FIRST, SECOND = "archive/data/1", "archive/data/2"
ENTRY = r"is damaged: the directory's entry of member archive/data/1"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.pth"


def write(file: Path, archive: Zip) -> Path:
    file.write_bytes(archive.data)
    return file


def loads(file: Path) -> bool:
    """Return whether torch reads the original weights."""
    try:
        found = torch.load(file)
    except RuntimeError:
        return False
    return all(torch.equal(found[key], tensor) for key, tensor in WEIGHTS.items())


@pytest.mark.parametrize("checksums", [True, False], ids=["checksums", "none"])
def test_a_header_with_another_name_is_not_damage(file: Path, checksums: bool) -> None:
    """torch only reads the name in the directory. The other member has its own header."""
    archive = Zip(saved(WEIGHTS, checksums))
    archive.data[archive.headers[FIRST] + 43] = ord("2")
    assert loads(write(file, archive))
    assert not ckptfix.check(file).findings
    assert_same(dict(ckptfix.open_checkpoint(file).state_dict()), WEIGHTS)


PLACES: dict[str, Callable[[Zip], int]] = {
    "after the end": lambda archive: len(archive.data) + 5,
    "near the end": lambda archive: len(archive.data) - 8,
    "the largest": lambda archive: 0xFFFFFFFE,
    "another member": lambda archive: archive.headers[SECOND],
    "the first member": lambda archive: 0,
    "the bytes of another member": lambda archive: archive.starts[SECOND] + 4,
    "its own header": lambda archive: archive.headers[FIRST] + 30,
    "the directory": lambda archive: archive.directory,
}


@pytest.mark.parametrize("checksums", [True, False], ids=["checksums", "none"])
@pytest.mark.parametrize("place", PLACES)
def test_a_wrong_offset_is_reported_and_loses_no_tensor(file: Path, place: str, checksums: bool) -> None:
    archive = Zip(saved(WEIGHTS, checksums))
    archive.put(archive.entries[FIRST], CENTRAL["place"], PLACES[place](archive))
    assert not loads(write(file, archive))
    with pytest.raises(ckptfix.UnreadableError, match=rf"{ENTRY}: .* take "):
        ckptfix.check(file)
    if checksums or place != "its own header":
        assert_same(dict(ckptfix.open_checkpoint(file, salvage=True).state_dict()), WEIGHTS)


@pytest.mark.parametrize("checksums", [True, False], ids=["checksums", "none"])
def test_a_missing_member_is_lost_and_not_replaced(file: Path, checksums: bool) -> None:
    archive = Zip(saved(WEIGHTS, checksums))
    archive.put(archive.entries[FIRST], CENTRAL["place"], archive.headers[SECOND])
    at = archive.headers[FIRST]
    archive.data[at : archive.headers[SECOND]] = bytes(archive.headers[SECOND] - at)
    checkpoint = ckptfix.open_checkpoint(write(file, archive), salvage=True)
    assert list(checkpoint.lost) == ["layer1.weight"]
    assert_same(dict(checkpoint.state_dict()), {key: WEIGHTS[key] for key in WEIGHTS if key != "layer1.weight"})


def test_the_places_of_two_members_are_distinguished_by_their_checksums(file: Path) -> None:
    archive = Zip(saved(WEIGHTS))
    archive.swap(archive.entries[FIRST] + 42, archive.entries[SECOND] + 42, 4)
    assert not loads(write(file, archive))
    assert_same(dict(ckptfix.open_checkpoint(file, salvage=True).state_dict()), WEIGHTS)


def test_exchanged_members_are_found(file: Path) -> None:
    archive = Zip(saved(WEIGHTS))
    archive.swap(archive.headers[FIRST], archive.headers[SECOND], archive.headers[SECOND] - archive.headers[FIRST])
    assert not loads(write(file, archive))
    assert_same(dict(ckptfix.open_checkpoint(file, salvage=True).state_dict()), WEIGHTS)


@pytest.mark.parametrize("checksums", [True, False], ids=["checksums", "none"])
@pytest.mark.parametrize("where", ["directory", "headers"])
def test_two_members_with_each_others_names_are_in_doubt(file: Path, where: str, checksums: bool) -> None:
    archive = Zip(saved(WEIGHTS, checksums))
    places, offset = (archive.entries, 46) if where == "directory" else (archive.headers, 30)
    archive.swap(places[FIRST] + offset, places[SECOND] + offset, len(FIRST))
    assert loads(write(file, archive)) == (where == "headers")
    said = r"names a member archive/data/\d in its directory and archive/data/\d before its data"
    with pytest.raises(ckptfix.UnreadableError, match=said):
        ckptfix.check(file)
    report = ckptfix.check(file, salvage=True)
    assert any("may differ from what was saved" in finding.message for finding in report.findings)


def test_missing_bytes_of_whole_members_lose_only_these(file: Path) -> None:
    """Each position before the gap then belongs to another member."""
    weights = {f"layer{n}.bias": torch.rand(9) + n for n in range(20)}
    archive = Zip(saved(weights))
    start, stop = archive.headers["archive/data/8"], archive.headers["archive/data/10"]
    assert stop - start == 2 * (start - archive.headers["archive/data/7"])
    del archive.data[start:stop]
    checkpoint = ckptfix.open_checkpoint(write(file, archive), salvage=True)
    assert list(checkpoint.lost) == ["layer8.bias", "layer9.bias"]
    assert_same(dict(checkpoint.state_dict()), {key: weights[key] for key in weights if key not in checkpoint.lost})


def test_a_header_with_the_data_of_another_member_after_it_is_not_a_whole_member(file: Path) -> None:
    archive = Zip(saved(WEIGHTS))
    archive.put(archive.entries["archive/data.pkl"], CENTRAL["name length"], 999)  # the directory is lost
    del archive.data[archive.starts[FIRST] : archive.starts["archive/data/3"]]
    checkpoint = ckptfix.open_checkpoint(write(file, archive), salvage=True)
    assert sorted(checkpoint.lost) == ["layer2.weight", "layer3.weight"]
    (damaged,) = (found for found in ckptfix.check(file, salvage=True).findings if found.code == "FIL201" and found.fix)
    assert damaged.keys == ("layer1.weight",)


@pytest.mark.parametrize("field", ["name length", "extra length"])
def test_a_header_of_another_length_without_checksums_loses_its_tensor(file: Path, field: str) -> None:
    archive = Zip(saved(WEIGHTS, checksums=False))
    archive.data[archive.headers[FIRST] + LOCAL[field][0]] ^= 1
    assert not loads(write(file, archive))
    checkpoint = ckptfix.open_checkpoint(file, salvage=True)
    assert list(checkpoint.lost) == ["layer1.weight"]
    assert_same(dict(checkpoint.state_dict()), {key: WEIGHTS[key] for key in WEIGHTS if key != "layer1.weight"})
