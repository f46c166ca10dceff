"""The directory of an archive, intact or damaged."""

import io
import re
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckptfix.bytes.sources import Content
from ckptfix.reading.archives.zip_directory import (
    ChecksumPlaces,
    StoredMembers,
    checksums_left,
    forget_directory,
    member_names,
    read_directory,
)
from ckptfix.writing.torch_files import write_zip
from tests.reading.archives.test_wrapped import zipped
from tests.reading.archives.zips import saved

WEIGHTS = {f"layer{n}.weight": torch.arange(1.0 + n, 2000 + n) for n in range(6)}
KINDS = ("torch", "torch without checksums", "ckptfix", "deflated")


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return archives whose headers have the sizes, and archives whose descriptors do."""
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


FIELDS = "filename flag_bits compress_type CRC compress_size file_size header_offset volume external_attr".split()


def assert_as_zipfile(data: bytes) -> None:
    read = read_directory(Content("f.pth", data))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        said = [tuple(getattr(info, name) for name in FIELDS) for info in archive.infolist()]
    assert [(one.name, *(getattr(one, name) for name in one.__struct_fields__[2:-2])) for one in read.members] == said
    for one in read.members:
        signature, *_, crc = struct.unpack_from("<4s6HI", data, one.entry)
        assert (signature, crc) == (b"PK\x01\x02", one.crc)
    assert (read.fault, read.is_exact, read.names) == ("", True, [name for name, *_ in said])


@pytest.mark.parametrize("front", [b"", b"junk"], ids=["plain", "junk in front"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_members_are_those_that_zipfile_lists(kind: str, front: bytes, archives: dict[str, bytes]) -> None:
    assert_as_zipfile(front + archives[kind])


ODD: dict[str, Callable[[zipfile.ZipInfo], object]] = {
    "a name that is not ASCII": lambda info: setattr(info, "filename", "archivé/data.pkl"),
    "a comment": lambda info: setattr(info, "comment", b"x"),
    "an extra field": lambda info: setattr(info, "extra", b"\x55\x54\x01\x00\x01"),
}


@pytest.mark.parametrize("change", ODD.values(), ids=ODD)
def test_an_odd_entry_is_read_as_zipfile_does(change: Callable[[zipfile.ZipInfo], object]) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", bytes(50))
        change(archive.infolist()[0])
    assert_as_zipfile(buffer.getvalue())


@pytest.mark.parametrize("front", [b"", b"junk"], ids=["plain", "junk in front"])
def test_numbers_of_zip64_are_those_of_its_field(monkeypatch: pytest.MonkeyPatch, front: bytes) -> None:
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 10)
    assert_as_zipfile(front + zipped({"archive/data.pkl": bytes(50), "archive/data/0": bytes(7), "a": bytes(90)}))


def test_the_field_of_zip64_may_come_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 10)
    buffer, info = io.BytesIO(), zipfile.ZipInfo("archive/data.pkl")
    info.extra = b"UT\1\0\1"
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(info, bytes(50))
    data, count = re.subn(rb"(\x01\0\x10\0.{16})(UT\x01\0\x01)", rb"\2\1", buffer.getvalue(), flags=re.DOTALL)
    assert count
    assert_as_zipfile(data)


def test_an_archive_without_members_has_a_whole_directory() -> None:
    assert_as_zipfile(zipped({}))


def test_a_name_ends_at_its_first_zero() -> None:
    data = zipped({"archive/data.pkl_/evil": bytes(50)}).replace(b".pkl_", b".pkl\0")
    assert member_names(Content("f.pth", data)) == ["archive/data.pkl"]


@pytest.mark.parametrize(("at", "fault"), [(0, "no entry of it is at byte"), (28, "no entry of it is at byte")])
def test_a_directory_that_cannot_be_followed_has_no_members(at: int, fault: str) -> None:
    data = bytearray(zipped({"a": bytes(50), "b": bytes(50)}))
    data[data.index(b"PK\x01\x02") + at] ^= 1
    read = read_directory(Content("f.pth", bytes(data)))
    assert not read.members
    assert read.fault.startswith(fault)


def test_a_file_without_an_end_record_has_no_directory(tmp_path: Path) -> None:
    assert read_directory(Content("f.pth", b"PK\x03\x04")).fault == "it has no end record"


def entry(name: bytes, crc: int, length: int | None = None) -> bytes:
    fields = (20, 20, 0, 0, 0, 0, crc, 1, 1, len(name) if length is None else length, 0, 0, 0, 0, 0, 0)
    return struct.pack("<4s6H3L5H2L", b"PK\x01\x02", *fields) + name


def test_complete_entries_give_their_checksums() -> None:
    directory = entry(b"m/data/0", 5) + b"PK\x01" + entry(b"m\\data\\1", 6) + entry(b"m/none", 0) + entry(b"m/z", 7)
    assert checksums_left(Content("m.pth", b"data" + directory), 4) == {"m/data/0": 5, "m/data/1": 6, "m/z": 7}


def test_an_entry_whose_name_overlaps_the_next_is_skipped() -> None:
    directory = entry(b"m/data/0", 5, length=60) + entry(b"m/data/1", 6)
    assert checksums_left(Content("m.pth", directory), 0) == {"m/data/1": 6}


def _in_folder(folder: str, **members: bytes) -> Content:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(f"{folder}/{name}"), data)
    return Content("f.pt", file.getvalue())


def test_checksums_of_an_archive_that_is_alike() -> None:
    """One of them contains the name of the folder."""
    tricky = next(data for each in range(1 << 20) if b"1/" in struct.pack("<I", zlib.crc32(data := b"%07d" % each)))
    places = ChecksumPlaces.of(_in_folder("0", a=b"1234567", b=b"8901234"))
    assert places is not None
    assert places.folder(_in_folder("1", a=tricky, b=b"7654321")) == "1/"
    for other in (_in_folder("1", a=b"1234567", c=b"8901234"), _in_folder("11", a=b"1234567", b=b"8901234")):
        assert places.folder(other) is None


@pytest.mark.parametrize("changed", ["f", "b", "member-0", "other-11"])
def test_each_entry_of_an_archive_that_is_alike_is_compared(changed: str) -> None:
    """Entries of several lengths, of which one has another size or folder."""
    names = ["f", *(f"member-{at}" for at in range(12)), "b", *(f"other-{at}" for at in range(12))]
    places = ChecksumPlaces.of(_in_folder("0", **dict.fromkeys(names, b"12")))
    assert places is not None
    same = {name: name[:1].encode() * 2 for name in names}
    assert places.folder(_in_folder("1", **same)) == "1/"
    data = _in_folder("1", **same).buffer[:]
    at = data.rindex(b"1/" + changed.encode())  # in the directory
    assert places.folder(Content("f.pt", data[:at] + b"2" + data[at + 1 :])) is None
    assert places.folder(Content("f.pt", data[: at - 20] + b"\7" + data[at - 19 :])) is None
    assert places.folder(Content("f.pt", data[: at - 27] + b"\7" + data[at - 26 :])) == "1/"  # in the checksum


def test_members_in_several_folders_are_compared_with_none() -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in ("a/x", "b/y"):
            archive.writestr(name, b"1")
    assert ChecksumPlaces.of(Content("f.pt", file.getvalue())) is None


def test_members_in_a_row_are_those_of_the_directory(archives: dict[str, bytes]) -> None:
    held = read_directory(Content("f.pt", archives["torch"])).members
    kept = StoredMembers({member.name: member for member in held})
    assert [*kept] == [member.name for member in held]
    assert len(kept) == len(held) > len(WEIGHTS)
    fields = ("name", "flags", "method", "crc", "packed", "size", "place", "ahead", "entry")
    for member in held:
        assert [getattr(kept[member.name], field) for field in fields] == [getattr(member, field) for field in fields]
    with pytest.raises(KeyError):
        kept["nothing"]


def test_a_forgotten_directory_is_read_again(archives: dict[str, bytes]) -> None:
    content = Content("f.pt", archives["torch"])
    first = read_directory(content)
    assert read_directory(content) is first
    forget_directory(content)
    forget_directory(content)
    assert read_directory(content) is not first
    assert read_directory(content) == first
