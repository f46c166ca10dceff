"""A plain directory that is read in one go says what ``zipfile`` says."""

from __future__ import annotations

import io
import random
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ckptfix.bytes.sources import Content
from ckptfix.errors import CkptfixError
from ckptfix.reading.archives import zip_recovery
from ckptfix.reading.archives.zip_directory import plain_members
from ckptfix.reading.archives.zip_recovery import list_members
from ckptfix.writing.torch_files import write_zip
from tests.reading.archives.test_wrapped import zipped
from tests.reading.archives.zips import Zip, saved

WEIGHTS = {f"layer{n}.weight": torch.arange(1.0 + n, 2000 + n) for n in range(6)}
ODD: dict[str, Callable[[zipfile.ZipInfo], object]] = {
    "a name that is not ASCII": lambda info: setattr(info, "filename", "archivé/data.pkl"),
    "a comment": lambda info: setattr(info, "comment", b"x"),
    "an extra field": lambda info: setattr(info, "extra", b"\x55\x54\x01\x00\x01"),
    "a version of the format to come": lambda info: setattr(info, "extract_version", 99),
}


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Archives whose headers say the sizes, and those whose descriptors do."""
    from ckptfix import open_checkpoint

    path, written = tmp_path_factory.mktemp("plain") / "f.pth", io.BytesIO()
    torch.save(WEIGHTS, path)
    write_zip(open_checkpoint(path), written)
    members = {name: bytes(500) for name in ("archive/data.pkl", "archive/version", "archive/data/0")}
    return {
        "torch": path.read_bytes(),
        "torch without checksums": saved(WEIGHTS, checksums=False),
        "ckptfix": written.getvalue(),
        "deflated": zipped(members, zipfile.ZIP_DEFLATED),
    }


def listed(data: bytes) -> Any:
    """All that is found out about the members, or the error."""
    content = Content("f.pth", data)
    try:
        listing = list_members(content)
    except CkptfixError as error:
        return repr(error)
    starts = [listing.data_start(content, info) for info in listing.infos]
    return listing.infos, starts, listing.starts, listing.damage, listing.doubts, listing.displaced, listing.refusal


@pytest.fixture
def closely(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], Any]:
    """The same, each entry read by ``zipfile``."""

    def listed_closely(data: bytes) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(zip_recovery, "plain_members", lambda *_: None)
            return listed(data)

    return listed_closely


@pytest.mark.parametrize("kind", ["torch", "torch without checksums", "ckptfix", "deflated"])
def test_all_of_a_plain_archive_is_taken_in_one_go(
    kind: str, archives: dict[str, bytes], closely: Callable[[bytes], Any]
) -> None:
    content = Content("f.pth", archives[kind])
    assert plain_members(content, 0) is not None
    assert listed(archives[kind]) == closely(archives[kind])


@pytest.mark.parametrize("change", ODD.values(), ids=ODD)
def test_an_odd_entry_is_left_to_zipfile(change: Callable[[zipfile.ZipInfo], object]) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", bytes(50))
        change(archive.infolist()[0])
    data = buffer.getvalue()
    assert plain_members(Content("f.pth", data), 0) is None


def test_junk_in_front_moves_all_members(archives: dict[str, bytes], closely: Callable[[bytes], Any]) -> None:
    data = b"junk" + archives["torch"]
    assert listed(data)[5] == 4
    assert listed(data) == closely(data)


@pytest.mark.parametrize("kind", ["torch", "torch without checksums", "ckptfix", "deflated"])
def test_a_damaged_archive_is_listed_alike(
    kind: str, archives: dict[str, bytes], closely: Callable[[bytes], Any]
) -> None:
    rng, whole = random.Random(kind), archives[kind]
    archive = Zip(whole)
    spots = [*archive.headers.values(), *archive.entries.values(), archive.directory, archive.end]
    spots += [start + archive.sizes[name] for name, start in archive.starts.items()]
    for _ in range(250):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2))):
            place = min(rng.choice(spots) + rng.randrange(60), len(data) - 1)
            data[place] = rng.choice((data[place] ^ 1 << rng.randrange(8), rng.randrange(256)))
        assert listed(bytes(data)) == closely(bytes(data))
