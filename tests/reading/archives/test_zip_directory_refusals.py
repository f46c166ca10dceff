"""Zip archives that torch refuses although every byte can be found: a finding, and a file that torch reads."""

import io
import zipfile
from pathlib import Path

import pytest
import torch

import ckptfix
from ckptfix.core.finding import Finding, Level
from tests.checks import assert_same
from tests.reading.archives.test_wrapped import zipped
from tests.reading.archives.zips import CENTRAL, END, Zip, saved

WEIGHTS = {f"layer{n}.weight": torch.arange(1.0 + n, 36 + n).reshape(5, 7) for n in range(3)}
NAME = "archive/data/1"


def defects(file: Path) -> list[Finding]:
    """Return the findings above notes: one note says that members are compressed."""
    return [finding for finding in ckptfix.check(file).findings if finding.level > Level.NOTE]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.pth"


def assert_rewritten(file: Path, data: bytes, said: str) -> None:
    """torch fails on the file; ckptfix says why, reads all of it, and writes a file that torch reads."""
    file.write_bytes(data)
    with pytest.raises((RuntimeError, ValueError)):
        torch.load(file)
    (finding,) = defects(file)
    assert (finding.code, said in finding.message) == ("FIL102", True), finding.message
    assert_same(dict(ckptfix.open_checkpoint(file).state_dict()), WEIGHTS)
    goal = file.with_name("out.pth")
    assert ckptfix.repair(file, output=goal, force=True).report.exit_code == 0
    assert_same(torch.load(goal), WEIGHTS)


def is_read(file: Path) -> bool:
    found = torch.load(file)
    return all(torch.equal(found[key], tensor) for key, tensor in WEIGHTS.items())


def members() -> dict[str, bytes]:
    archive = zipfile.ZipFile(io.BytesIO(saved(WEIGHTS)))
    return {info.filename: archive.read(info) for info in archive.infolist()}


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=["stored", "deflated"])
@pytest.mark.parametrize("folders", [True, False])
def test_noop_archives_that_torch_reads(file: Path, method: int, folders: bool) -> None:
    first = {"archive/": b"", "archive/data/": b""} if folders else {}
    file.write_bytes(zipped({**first, **members()}, method))
    assert_same(torch.load(file), WEIGHTS)
    assert not defects(file)


def test_noop_a_comment_and_zip64_records(file: Path) -> None:
    buffer = io.BytesIO(saved(WEIGHTS))
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.comment = b"weights"
        with archive.open("archive/note", "w", force_zip64=True) as note:
            note.write(b"text")
    file.write_bytes(buffer.getvalue())
    assert_same(torch.load(file), WEIGHTS)
    assert not defects(file)


FIELDS = {
    "a member on another disk": (CENTRAL, "disk", 256, "archive/data/1 on disk 256"),
    "a masked header": (CENTRAL, "flags", 1 << 13, "archive/data/1 with a masked header"),
    "a patch": (CENTRAL, "flags", 1 << 5, "archive/data/1 that is marked as a patch"),
    "this disk": (END, "disk", 8, "a zip directory on disk 8"),
    "the first disk": (END, "first disk", 8, "a zip directory on disk 8"),
    "members here": (END, "here", 3, "a zip directory that counts 3 members and lists"),
    "members": (END, "count", 99, "a zip directory that counts 99 members and lists"),
}


@pytest.mark.parametrize("case", FIELDS)
def test_a_field_that_only_torch_looks_at(file: Path, case: str) -> None:
    table, name, value, said = FIELDS[case]
    archive = Zip(zipped(members()))  # torch's own files have another end record, that of zip64
    archive.put(archive.end if table is END else archive.entries[NAME], table[name], value)
    assert_rewritten(file, bytes(archive.data), said)


def test_bytes_after_the_archive_are_counted(file: Path) -> None:
    """torch writes both end records, of which Python's zipfile has given either place, by its release."""
    for more in (b"", b"1234567"):
        file.write_bytes(saved(WEIGHTS) + more)
        found = [finding.message for finding in ckptfix.check(file).findings]
        assert found == ["7 bytes after the checkpoint do not belong to it"] * bool(more)


def test_a_zip64_record_that_is_not_where_it_is_said_to_be(file: Path) -> None:
    archive = Zip(saved(WEIGHTS))
    assert archive.data[archive.end - 20 : archive.end - 16] == b"PK\x06\x07"
    archive.put(archive.end - 20, (8, 8), 7)
    file.write_bytes(archive.data)
    assert is_read(file)  # by the plain end record, which is equal as long as numbers are small
    assert not defects(file)
    said = "a zip64 directory whose end record is not where it claims to be"
    for name in ("count", "place"):
        larger = Zip(saved(WEIGHTS))
        larger.put(larger.end - 20, (8, 8), 7)
        larger.put(larger.end, END[name], (1 << 8 * END[name][1]) - 1)
        larger.put(larger.end, END["here"], larger.get(larger.end, END["count"]))
        assert_rewritten(file, bytes(larger.data), said)
    archive.put(archive.end - 20, (8, 8), 1 << 40)
    assert_rewritten(file, bytes(archive.data), said)


@pytest.mark.parametrize(
    ("back", "field", "value", "said"),
    [
        (20, (16, 4), 0, "a zip directory on 0 disks"),
        (76, (4, 8), 4, "a zip64 end record of 4 bytes"),
    ],
)
def test_a_field_of_zip64_that_only_torch_looks_at(
    file: Path, back: int, field: tuple[int, int], value: int, said: str
) -> None:
    archive = Zip(saved(WEIGHTS))
    archive.put(archive.end - back, field, value)
    assert_rewritten(file, bytes(archive.data), said)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [("attributes", 0x10, "that is marked as a folder"), ("method", 8, "packed by two different methods")],
)
def test_a_member_that_torch_reads_as_anything(file: Path, field: str, value: int, said: str) -> None:
    """torch returns uninitialised memory, or decompresses bytes that are not compressed, without an error."""
    archive = Zip(saved(WEIGHTS))
    archive.put(archive.entries[NAME], CENTRAL[field], value)
    file.write_bytes(archive.data)
    assert field == "attributes" or not is_read(file)  # the memory may have held the same weights before
    (finding,) = defects(file)
    assert f"the member archive/data/1 {said}" in finding.message
    assert_same(dict(ckptfix.open_checkpoint(file).state_dict()), WEIGHTS)
    assert ckptfix.repair(file, output=file.with_name("out.pth")).report.exit_code == 0
    assert_same(torch.load(file.with_name("out.pth")), WEIGHTS)


def test_a_name_with_a_flipped_bit(file: Path) -> None:
    """torch decodes the names of all members, and reads them by those in the directory."""
    archive = Zip(saved(WEIGHTS))
    archive.data[archive.entries["archive/byteorder"] + 46 + len("archive/")] ^= 0x80
    assert_rewritten(file, bytes(archive.data), "with a name that is not UTF-8")


@pytest.mark.parametrize(("method", "name"), [(zipfile.ZIP_BZIP2, "bzip2"), (zipfile.ZIP_LZMA, "LZMA")])
def test_a_method_that_torch_does_not_unpack(file: Path, method: int, name: str) -> None:
    assert_rewritten(file, zipped(members(), method), f"packed by {name}")


@pytest.mark.parametrize("places", [("headers", "entries"), ("entries",)], ids=["everywhere", "directory"])
def test_names_with_backslashes_as_some_programs_for_windows_write_them(file: Path, places: tuple[str, ...]) -> None:
    archive = Zip(saved(WEIGHTS))
    for place in places:
        for name, at in getattr(archive, place).items():
            start = at + (30 if place == "headers" else 46)
            archive.data[start : start + len(name)] = name.replace("/", "\\").encode()
    assert_rewritten(file, bytes(archive.data), "with backslashes in its name")


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_names_with_backslashes_in_a_torchscript_archive_and_without_a_directory(file: Path, cut: bool) -> None:
    module = torch.jit.script(torch.nn.Linear(3, 2))
    module.save(str(file))
    weights = dict(module.state_dict())
    archive = Zip(file.read_bytes())
    for name in archive.names:
        for start in (archive.headers[name] + 30, archive.entries[name] + 46):
            archive.data[start : start + len(name)] = name.replace("/", "\\").encode()
    file.write_bytes(archive.data[: archive.directory] if cut else archive.data)
    assert_same(dict(ckptfix.open_checkpoint(file, salvage=cut).state_dict()), weights)


@pytest.mark.parametrize(
    ("member", "word", "said"),
    [
        ("version", b"x", "the version b'x'"),
        ("version", b"11\n", "the version b'11\\n'"),
        ("version", b"0\n", "the version b'0\\n'"),
        (".storage_alignment", b"6\x14", "the .storage_alignment b'6\\x14'"),
        (".data/serialization_id", b"\xff", "the .data/serialization_id b'\\xff'"),
    ],
)
def test_a_word_that_torch_does_not_take(file: Path, member: str, word: bytes, said: str) -> None:
    assert_rewritten(file, zipped({**members(), f"archive/{member}": word}), said)


@pytest.mark.parametrize(
    ("member", "word"), [("version", b" +10\n"), ("version", b"3 x"), (".storage_alignment", b"9")]
)
def test_a_word_that_torch_takes_is_not_reported(file: Path, member: str, word: bytes) -> None:
    file.write_bytes(zipped({**members(), f"archive/{member}": word}))
    assert_same(torch.load(file), WEIGHTS)
    assert not defects(file)


def test_bytes_after_the_archive_are_a_note(file: Path) -> None:
    file.write_bytes(saved(WEIGHTS) + b"</html>")
    assert_same(torch.load(file), WEIGHTS)
    report = ckptfix.check(file)
    assert [finding.message for finding in report.findings] == ["7 bytes after the checkpoint do not belong to it"]
    assert report.exit_code == 0


@pytest.mark.parametrize("word", [b"litule", b"Little", b"", b"big\n\0\0"])
def test_a_damaged_order_of_bytes_is_damage_and_keeps_the_numbers(file: Path, word: bytes) -> None:
    file.write_bytes(zipped({**members(), "archive/byteorder": word}))
    with pytest.raises(ValueError, match="endianness"):
        torch.load(file)
    with pytest.raises(ckptfix.UnreadableError, match="has a byteorder that is neither little nor big"):
        ckptfix.check(file)
    assert_same(dict(ckptfix.open_checkpoint(file, salvage=True).state_dict()), WEIGHTS)


def test_a_damaged_word_for_big_is_recognised_by_its_length(file: Path) -> None:
    turned = {
        name: b"".join(data[at : at + 4][::-1] for at in range(0, len(data), 4)) if "/data/" in name else data
        for name, data in members().items()
    }
    file.write_bytes(zipped({**turned, "archive/byteorder": b"bif"}))
    assert_same(dict(ckptfix.open_checkpoint(file, salvage=True).state_dict()), WEIGHTS)
    assert any("may differ" in finding.message for finding in ckptfix.check(file, salvage=True).findings)


def test_entries_that_run_over_the_end_of_the_directory(file: Path) -> None:
    archive = Zip(saved(WEIGHTS))
    archive.put(archive.entries[archive.names[-1]], (30, 2), 1)
    assert_rewritten(file, bytes(archive.data), "a zip directory whose entries do not end where it ends")


def test_an_order_of_bytes_that_is_lost_leaves_the_numbers_in_doubt(file: Path) -> None:
    archive = Zip(saved(WEIGHTS))
    archive.put(archive.entries["archive/data.pkl"], CENTRAL["name length"], 999)  # the directory is lost
    archive.data[archive.headers["archive/byteorder"]] = 0
    file.write_bytes(archive.data)
    messages = [finding.message for finding in ckptfix.check(file, salvage=True).findings]
    assert any("lacks its byteorder" in message and "may differ" in message for message in messages)
