"""Damaged archives and compressed files: the true cause, and every tensor whose bytes were all recovered."""

import bz2
import gzip
import io
import lzma
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import save as save_safetensors

import ckptfix
from ckptfix.core.facts import clause
from tests.checks import bytes_of
from tests.reading.archives.test_wrapped import saved, tarred, zipped
from tests.reading.salvage.test_salvage import _tensors

TENSORS = _tensors()
INNER = {
    "zip": saved(TENSORS),
    "legacy": saved(TENSORS, legacy=True),
    "safetensors": save_safetensors(dict(TENSORS)),
    "numpy pickle": pickle.dumps({key: tensor.numpy() for key, tensor in TENSORS.items()}, 2),
}
LATER = {"b.txt": b"after it"}
WRAPPERS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "gzip": (gzip.compress, r"its gzip stream ends early, after \d+ bytes"),
    "xz": (lzma.compress, r"its xz stream ends early, after \d+ bytes"),
    "bzip2": (bz2.compress, r"its bzip2 stream ends early, after \d+ bytes"),
    "tar": (lambda data: tarred({"m.pth": data}).rstrip(b"\0"), r"tar archive has \d+ bytes and its file m\.pth ends"),
    "tar.gz": (lambda data: tarred({"a.txt": b"x", "m.pth": data}, "w:gz"), "its gzip stream ends early"),
    "tar.xz": (lambda data: tarred({"m.pth": data}, "w:xz"), "its xz stream ends early"),
    "zip, stored": (
        lambda data: zipped({"a.txt": b"x", "m.pth": data}, zipfile.ZIP_STORED),
        # Once the directory of a torch file inside is whole, that file is what follows other bytes.
        "the zip archive has no directory at its end|has its zip directory 71 bytes after",
    ),
    "zip, deflated": (lambda data: zipped({"m.pth": data}), "the zip archive has no directory at its end"),
    "zip, lzma": (lambda data: zipped({"m.pth": data}, zipfile.ZIP_LZMA), "zip archive has no directory at its end"),
    "zip of a gzip": (lambda data: zipped({"m.gz": gzip.compress(data)}, zipfile.ZIP_STORED), "no directory at its"),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.pth"


def whole_keys(file: Path, data: bytes) -> ckptfix.Checkpoint | None:
    """What is salvaged, every byte of it compared."""
    file.write_bytes(data)
    try:
        checkpoint = ckptfix.open_checkpoint(file, salvage=True)
    except ckptfix.UnreadableError:
        return None
    for key in checkpoint.specs:
        assert bytes_of(checkpoint.read(key)) == bytes_of(TENSORS[key])
    return checkpoint


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_cut_container_gives_what_is_whole_and_names_the_cause(file: Path, wrapper: str, inner: str) -> None:
    wrap, cause = WRAPPERS[wrapper]
    data = wrap(INNER[inner])
    best = 0
    for share in (0.3, 0.5, 0.7, 0.9, 0.96):  # torch puts the storages of a legacy file in any order
        checkpoint = whole_keys(file, data[: int(len(data) * share)])
        with pytest.raises(ckptfix.UnreadableError, match=cause if checkpoint else None) as caught:
            ckptfix.open_checkpoint(file)
        assert str(file) in str(caught.value)
        assert "data.pkl" not in str(caught.value) or inner == "zip"
        if checkpoint is not None:
            assert cause_is_first(checkpoint, cause)
            assert "with salvage=True" in str(caught.value)
            best = max(best, len(checkpoint.keys()))
    assert best >= 1 or wrapper == "bzip2", "bzip2 gives blocks of 900 KB or nothing"


def cause_is_first(checkpoint: ckptfix.Checkpoint, cause: str) -> bool:
    return re.search(cause, clause(checkpoint.damage[0])) is not None


@pytest.mark.parametrize("inner", ["zip", "legacy", "safetensors"])
@pytest.mark.parametrize("wrapper", ["gzip", "xz", "zip, deflated"])
def test_zeros_that_were_never_filled_are_not_unpacked(file: Path, wrapper: str, inner: str) -> None:
    """A decoder fills up with zeros, which would end up in a tensor."""
    data = WRAPPERS[wrapper][0](INNER[inner])
    for share in (0.3, 0.5, 0.7, 0.9):
        cut = int(share * len(data))
        plain = whole_keys(file, data[:cut])
        for zeros in (600, len(data) + 5000):
            padded = whole_keys(file, data[:cut] + bytes(zeros))
            assert (padded and list(padded.specs)) == (plain and list(plain.specs))


def test_bzip2_gives_its_whole_blocks(file: Path) -> None:
    data = bz2.compress(INNER["legacy"] + bytes(range(256)) * 8000, 1)
    assert whole_keys(file, data[: len(data) * 9 // 10]) is not None


def changed(data: bytes, place: int) -> bytes:
    copy = bytearray(data)
    copy[place] ^= 0x10
    return bytes(copy)


SUMS = {
    "gzip, checksum": (lambda data: changed(gzip.compress(data), -6), r"gzip stream fails .*\(wrong checksum\)"),
    "gzip, length": (lambda data: changed(gzip.compress(data), -2), r"gzip stream fails .*\(wrong length\)"),
    "gzip, checksum cut off": (lambda data: gzip.compress(data)[:-5], "gzip stream ends early"),
    "zip, checksum": (
        lambda data: zipped({"m.pth": data}).replace(
            zipfile.ZipFile(io.BytesIO(zipped({"m.pth": data}))).infolist()[0].CRC.to_bytes(4, "little"), b"\1\2\3\4"
        ),
        "fails the checksum of the zip archive",
    ),
    "tar, cut after it": (lambda data: tarred({"m.pth": data, **LATER}).rstrip(b"\0")[:-5], r"its file b\.txt ends"),
}


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("case", SUMS)
def test_what_came_out_whole_is_all_there_where_a_checksum_fails(file: Path, case: str, inner: str) -> None:
    damage, cause = SUMS[case]
    checkpoint = whole_keys(file, damage(INNER[inner]))
    assert checkpoint is not None
    assert set(checkpoint.keys()) == set(TENSORS)
    assert not checkpoint.lost
    assert cause_is_first(checkpoint, cause)
    with pytest.raises(ckptfix.UnreadableError, match=rf"{cause}.*take all 4 tensors with salvage=True"):
        ckptfix.open_checkpoint(file)


def test_nothing_says_where_the_file_after_a_damaged_tar_header_is(file: Path) -> None:
    for members, at in (({"m.pth": INNER["zip"]}, 150), ({"a.txt": b"x", "m.pth": INNER["zip"]}, 124)):
        file.write_bytes(changed(tarred(members), at))
        with pytest.raises(
            ckptfix.UnreadableError, match="no valid header at offset 0; the readable part has no checkpoint"
        ):
            ckptfix.open_checkpoint(file, salvage=True)


def test_a_damaged_directory_of_an_ordinary_zip_is_gone_without(file: Path) -> None:
    data = zipped({"README.md": b"hello", "m.pth": INNER["legacy"]})
    checkpoint = whole_keys(file, changed(data, data.index(b"PK\x01\x02")))
    assert checkpoint is not None
    assert set(checkpoint.keys()) == set(TENSORS)
    assert "the directory of the zip archive" in clause(checkpoint.damage[0])


def test_the_inner_checksums_tell_which_tensors_of_a_faulty_stream_are_whole(file: Path) -> None:
    data = INNER["zip"]
    rotten = data.replace(bytes_of(TENSORS["norm.weight"]), bytes(28))
    gz = gzip.compress(rotten)
    file.write_bytes(gz[:-8] + gzip.compress(data)[-8:])
    report = ckptfix.repair(file, output=file.with_name("out.pth"), salvage=True).report
    assert {finding.code for finding in report.findings} >= {"FIL201", "FIL203"}
    again = ckptfix.open_checkpoint(file.with_name("out.pth"))
    assert set(again.keys()) == set(TENSORS) - {"norm.weight"}


def test_an_archive_that_lost_its_checkpoint_says_so(file: Path) -> None:
    file.write_bytes(zipped({"README.md": b"hello" * 100, "m.pth": INNER["legacy"]}, zipfile.ZIP_STORED)[:400])
    with pytest.raises(ckptfix.UnreadableError, match=r"no directory at its end.*the readable part has no checkpoint"):
        ckptfix.open_checkpoint(file)
