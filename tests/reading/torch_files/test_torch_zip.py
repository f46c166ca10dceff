import gc
import zipfile

import pytest
import torch

from ckptfix.bytes.files import OpenFile
from ckptfix.errors import UnreadableError
from ckptfix.reading.opening import open_file
from ckptfix.reading.pickles.torch_pickle import StoragePickle
from tests.attacks.crafted import STORAGE, around, state_dict, torch_zip
from tests.reading.files import opened, saved
from tests.reading.state_dicts import same

WEIGHTS = {"w": torch.arange(16.0), "b": torch.zeros(3)}


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=["stored", "packed"])
def test_an_archive_that_was_packed_again_is_read(method, tmp_path):
    original = saved(WEIGHTS, tmp_path)
    again = tmp_path / "again.pth"
    with zipfile.ZipFile(original) as source, zipfile.ZipFile(again, "w", method) as goal:
        for name in source.namelist():
            goal.writestr(name, source.read(name))
        goal.writestr("__MACOSX/._data.pkl", b"left by a desktop")
    same(dict(opened(again).state_dict()), WEIGHTS)


@pytest.mark.parametrize("root", ["", "archive/", "a/b/c/"])
def test_the_root_folder_may_have_any_name(root, tmp_path):
    path = tmp_path / "file.pth"
    path.write_bytes(b"")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{root}data.pkl", state_dict())
        archive.writestr(f"{root}data/0", STORAGE)
    assert bytes(opened(path).read("w").numpy()) == STORAGE


def test_the_checksum_of_a_storage_is_known(tmp_path):
    specs = opened(saved(WEIGHTS, tmp_path)).specs
    assert all(spec.storage is not None and spec.storage.crc32 for spec in specs.values())


def test_a_checksum_of_zero_means_no_checksum(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        path = saved(WEIGHTS, tmp_path)
    finally:
        torch.serialization.set_crc32_options(before)
    spec = opened(path).specs["w"]
    assert spec.storage is not None
    assert spec.storage.crc32 is None


def test_opening_reads_no_tensor(tmp_path, monkeypatch):
    path, read, fill, taken = saved({"w": torch.zeros(100_000)}, tmp_path), OpenFile.read, OpenFile.fill, []

    def watched_read(file: OpenFile, start: int, count: int) -> bytes:
        taken.append(count)
        return read(file, start, count)

    def watched_fill(file: OpenFile, buffer: memoryview, start: int) -> None:
        taken.append(len(buffer))
        fill(file, buffer, start)

    monkeypatch.setattr(OpenFile, "read", watched_read)
    monkeypatch.setattr(OpenFile, "fill", watched_fill)
    checkpoint = opened(path)
    assert sum(taken) < 40_000
    checkpoint.read("w")
    assert sum(taken) > 400_000


def test_reading_leaves_no_cycles(tmp_path):
    """A file of many tensors is opened twice in a repair; what waits for the collector of cycles is there twice."""
    path = saved(WEIGHTS, tmp_path)
    gc.collect()  # what an error of another test left
    gc.disable()
    try:
        checkpoint = opened(path)
        left = [found for found in gc.get_objects() if type(found) in (zipfile.ZipInfo, StoragePickle)]
    finally:
        gc.enable()
    assert not left
    assert checkpoint.keys() == list(WEIGHTS)


def test_a_file_of_another_protocol_is_named(tmp_path):
    kinds = {remark.kind.value for remark in opened(saved(WEIGHTS, tmp_path, pickle_protocol=4)).remarks}
    assert "protocol" in kinds
    assert "protocol" not in {remark.kind.value for remark in opened(saved(WEIGHTS, tmp_path)).remarks}


def test_a_pickle_that_torch_never_reads_is_remarked(tmp_path):
    path = tmp_path / "file.pth"
    path.write_bytes(torch_zip(around(), {"data/0": STORAGE, "evil.pkl": b"\x80\x02N."}))
    assert ("hidden-pickle", "evil.pkl") in {(remark.kind.value, remark.place) for remark in opened(path).remarks}


@pytest.mark.parametrize(
    ("members", "error", "message"),
    [
        ({"data/1": STORAGE}, UnreadableError, "lacks its storage data/0"),
        ({"data/0": STORAGE[:60]}, UnreadableError, "has 60 of the 64 bytes of its storage data/0"),
    ],
    ids=["missing", "too short"],
)
def test_a_storage_that_does_not_fit_is_named(members, error, message, tmp_path):
    path = tmp_path / "file.pth"
    path.write_bytes(torch_zip(state_dict(), members))
    with pytest.raises(error, match=message):
        opened(path).state_dict()


def repacked(path, change):
    """The file again, each member as ``change(name, bytes)`` gives it; None leaves it out."""
    again = path.with_name("again.pth")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(again, "w") as goal:
        for name in source.namelist():
            data = change(name, source.read(name))
            if data is not None:
                goal.writestr(name, data)
    return again


@pytest.mark.parametrize("left", [None, 5], ids=["missing", "too short"])
def test_the_other_tensors_of_a_file_that_lacks_a_storage_are_salvaged(left, tmp_path):
    path = repacked(
        saved(WEIGHTS, tmp_path), lambda name, data: data if not name.endswith("data/1") else left and data[:left]
    )
    with pytest.raises(UnreadableError, match=r"storage \S*data/1.*1 of 2 tensors .*salvage=True"):
        open_file(str(path))
    checkpoint = open_file(str(path), salvage=True)
    same(dict(checkpoint.state_dict()), {"w": WEIGHTS["w"]})
    assert list(checkpoint.lost) == ["b"]


def test_a_pickle_that_fails_its_checksum_is_damage(tmp_path):
    path = saved({"first": torch.ones(2)}, tmp_path)
    path.write_bytes(path.read_bytes().replace(b"first", b"fisrt"))
    with pytest.raises(UnreadableError, match=r"data.pkl that fails its checksum.*salvage=True"):
        open_file(str(path))
    assert list(open_file(str(path), salvage=True).specs) == ["fisrt"]


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_a_file_of_pickle_protocol_0_is_read(zipped, tmp_path):
    path = saved(WEIGHTS, tmp_path, pickle_protocol=0, _use_new_zipfile_serialization=zipped)
    same(dict(opened(path).state_dict()), WEIGHTS)


@pytest.mark.parametrize(
    "text",
    [
        "('storage', torch.FloatStorage, '0', 'cpu', 4)",
        "('storage', <class 'torch.FloatStorage'>, '0', 'cpu', __import__('os'))",
        "('storage', <class 'torch.FloatStorage'>, '0', 'cpu', -4)",
        "('storage', <class 'torch.FloatStorage'>, '0', 'cpu', 4), 5",
    ],
)
def test_any_other_text_is_not_a_persistent_id(text, tmp_path):
    path = tmp_path / "file.pth"
    path.write_bytes(torch_zip(b"P" + text.encode() + b"\n.", {"data/0": STORAGE}))
    with pytest.raises(UnreadableError, match="persistent id"):
        opened(path)


def test_a_pickle_with_two_defects_is_reported_with_both(tmp_path):
    path = saved(WEIGHTS, tmp_path)
    content = bytearray(path.read_bytes())
    content[content.index(b"\x80\x02") + 2] = 0xFF
    path.write_bytes(content)
    with pytest.raises(UnreadableError, match=r"has a data\.pkl that fails its checksum, and cannot be read: .*again$"):
        opened(path)


def test_bytes_missing_in_the_middle_lose_the_storages_they_touch(tmp_path):
    weights = {f"layers.{index}": torch.rand(500) + index for index in range(12)}
    path = saved(weights, tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[:9000] + content[9600:])
    with pytest.raises(UnreadableError, match="lacks 600 bytes before its zip directory"):
        opened(path)
    checkpoint = open_file(str(path), salvage=True)
    assert len(checkpoint.keys()) >= 10
    assert {*checkpoint.keys(), *checkpoint.lost} == set(weights)
