"""Places at URLs: files arrive whole, also after failures on the way, and partial files are never left."""

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptfix.bytes.transfers import AbsentError, ForbiddenError, NoSpaceError, PlaceError, TransferError
from ckptfix.errors import UsageError
from ckptfix.zoo.places import FETCHING, Entry, Place, RemotePlace, open_place
from tests.zoo.bucket import Bucket, Trouble

S3 = tuple[Bucket, str]

RAW = os.urandom(300_000)

PASSING = [Trouble.THROTTLED, Trouble.BROKEN, Trouble.RESET]
GARBLING = [Trouble.CUT, Trouble.SHORT]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.pth"
    path.write_bytes(RAW)
    return path


@pytest.fixture(params=["s3", "memory", "local"])
def place(request: pytest.FixtureRequest) -> Place:
    if request.param == "local":
        return open_place(f"file://{request.getfixturevalue('tmp_path_factory').mktemp('zoo')}")
    return open_place(
        request.getfixturevalue("bucket")[1] if request.param == "s3" else request.getfixturevalue("memory")
    )


def names(place: Place) -> list[str]:
    return [entry.name for entry in place.walk()]


def read(place: Place, name: str, folder: Path) -> bytes:
    place.fetch(name, folder / "fetched")
    return (folder / "fetched").read_bytes()


def test_what_is_put_comes_back(place: Place, file: Path, tmp_path: Path):
    place.put(file, "a/model.pth")
    assert names(place) == ["a/model.pth"]
    assert read(place, "a/model.pth", tmp_path) == RAW
    assert place.head("a/model.pth", 100) == RAW[:100]
    entry = place.entry("a/model.pth")
    assert entry is not None
    assert (entry.name, entry.size, entry.fault) == ("a/model.pth", len(RAW), None)
    assert list(place.walk()) == [entry]


def test_a_put_replaces_and_changes_the_stamp(place: Place, file: Path, tmp_path: Path):
    place.put(file, "model.pth")
    before = place.entry("model.pth")
    file.write_bytes(RAW[::-1])
    place.put(file, "model.pth")
    after = place.entry("model.pth")
    assert before is not None
    assert after is not None
    assert before.stamp != after.stamp
    assert read(place, "model.pth", tmp_path) == RAW[::-1]


def test_an_empty_file_comes_back(place: Place, tmp_path: Path):
    (tmp_path / "empty").touch()
    place.put(tmp_path / "empty", "empty")
    assert read(place, "empty", tmp_path) == b""


def test_names_that_are_odd_but_text(place: Place, file: Path, tmp_path: Path):
    odd = ["a b+c%20.pth", "ä/ü.pth", "tab\there.pth", "[1]*?.pth", "#hash?x=1.pth"]
    for name in odd:
        place.put(file, name)
    assert sorted(names(place)) == sorted(odd)
    assert all(read(place, name, tmp_path) == RAW for name in odd)


def test_a_name_of_bytes_is_refused(memory: str, file: Path):
    place = open_place(memory)
    with pytest.raises(PlaceError, match="the name is not valid text"):
        place.put(file, os.fsdecode(b"caf\xe9.pth"))
    assert names_or_none(place) == []


def names_or_none(place: Place) -> list[str]:
    try:
        return names(place)
    except AbsentError:
        return []


def test_a_listing_without_sizes_is_completed(memory: str, file: Path, monkeypatch: pytest.MonkeyPatch):
    from fsspec.implementations.memory import MemoryFileSystem

    place, find = open_place(memory), MemoryFileSystem.find
    place.put(file, "a/model.pth")
    plain = list(place.walk())

    def without_sizes(*given: Any, **named: Any) -> dict[str, Any]:
        return {path: {**info, "size": None} for path, info in find(*given, **named).items()}

    monkeypatch.setattr(MemoryFileSystem, "find", without_sizes)
    assert list(place.walk()) == plain == [Entry("a/model.pth", len(RAW), plain[0].stamp)]


def test_a_removed_file_is_gone_and_may_be_removed_again(place: Place, file: Path):
    place.put(file, "model.pth")
    place.remove("model.pth")
    assert place.entry("model.pth") is None
    place.remove("model.pth")


def test_what_is_absent(place: Place, tmp_path: Path):
    assert place.entry("nothing.pth") is None
    with pytest.raises(AbsentError, match=r"nothing\.pth: does not exist"):
        place.fetch("nothing.pth", tmp_path / "fetched")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(AbsentError, match=r"nothing: cannot be listed: .*; check the name"):
        list(open_place(f"{place.name}/nothing").walk())


def test_a_place_travels_to_another_process(place: Place):
    assert pickle.loads(pickle.dumps(place)) == place
    assert open_place(place.name) == place


def test_a_folder_is_not_a_file(place: Place, file: Path):
    place.put(file, "folder/model.pth")
    assert place.entry("folder") is None


def test_temporary_files_are_not_listed(place: Place, file: Path):
    place.put(file, "a/.0123456789ab.ckptfix-tmp")
    place.put(file, "a/model.pth")
    assert names(place) == ["a/model.pth"]


def test_keys_that_are_not_paths_have_a_fault(bucket: S3):
    import s3fs

    _, url = bucket
    for key in ("../../etc/x", "a//b", "folder/", "fine.pth"):
        s3fs.S3FileSystem().call_s3("put_object", Bucket=url.removeprefix("s3://"), Key=key, Body=b"x")
    faults = {entry.name: entry.fault is not None for entry in open_place(url).walk()}
    assert faults == {"../../etc/x": True, "a//b": True, "fine.pth": False}


@pytest.mark.parametrize("trouble", PASSING + GARBLING, ids=lambda trouble: trouble.name)
def test_a_fetch_is_tried_again(bucket: S3, file: Path, tmp_path: Path, trouble: Trouble):
    server, url = bucket
    place = open_place(url)
    place.put(file, "model.pth")
    server.plan(trouble, "GET", "model.pth", times=2)
    assert read(place, "model.pth", tmp_path) == RAW
    assert server.count("GET", "model.pth") == 3, "two that went wrong, and the one that did not"


@pytest.mark.parametrize("trouble", PASSING + GARBLING, ids=lambda trouble: trouble.name)
def test_a_fetch_that_never_works_leaves_nothing(bucket: S3, file: Path, tmp_path: Path, trouble: Trouble):
    server, url = bucket
    place = open_place(url)
    place.put(file, "model.pth")
    goal = tmp_path / "goal"
    goal.mkdir()
    server.plan(trouble, "GET", "model.pth", times=100)
    with pytest.raises(TransferError, match=r"model\.pth: .* \(4 tries\); run it again later"):
        place.fetch("model.pth", goal / "model.pth")
    assert server.count("GET", "model.pth") >= 4  # after a reset, the HTTP client tries once more by itself
    assert list(goal.iterdir()) == []


@pytest.mark.parametrize("trouble", [*PASSING, Trouble.HALF_STORED], ids=lambda trouble: trouble.name)
def test_a_put_is_tried_again(bucket: S3, file: Path, tmp_path: Path, trouble: Trouble):
    server, url = bucket
    place = open_place(url)
    server.plan(trouble, "PUT", "model.pth", times=2)
    place.put(file, "model.pth")
    assert server.count("PUT", "model.pth") == 3
    assert read(place, "model.pth", tmp_path) == RAW


@pytest.mark.parametrize("trouble", [*PASSING, Trouble.HALF_STORED], ids=lambda trouble: trouble.name)
def test_a_put_that_never_works_leaves_nothing(bucket: S3, file: Path, trouble: Trouble):
    server, url = bucket
    place = open_place(url)
    server.plan(trouble, "PUT", "model.pth", times=100)
    with pytest.raises(TransferError, match=r"model\.pth: .* \(4 tries\)"):
        place.put(file, "model.pth")
    assert place.entry("model.pth") is None


@pytest.mark.parametrize("trouble", PASSING, ids=lambda trouble: trouble.name)
def test_a_listing_is_tried_again(bucket: S3, file: Path, trouble: Trouble):
    server, url = bucket
    place = open_place(url)
    place.put(file, "model.pth")
    server.plan(trouble, "GET", url.removeprefix("s3:/"), times=2)
    assert names(place) == ["model.pth"]


def test_what_is_forbidden_is_asked_for_once(bucket: S3, file: Path, tmp_path: Path):
    server, url = bucket
    place = open_place(url)
    place.put(file, "model.pth")
    server.plan(Trouble.FORBIDDEN, "GET", "model.pth", times=100)
    with pytest.raises(ForbiddenError, match="Access Denied; get permission"):
        place.fetch("model.pth", tmp_path / "fetched")
    assert server.count("GET", "model.pth") == 1
    server.plan(Trouble.FORBIDDEN, "PUT", "other.pth", times=100)
    with pytest.raises(ForbiddenError, match=r"other\.pth: cannot be written"):
        place.put(file, "other.pth")
    assert server.count("PUT", "other.pth") == 1


def test_a_file_that_changes_while_it_is_fetched_is_fetched_again(
    bucket: S3, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    _, url = bucket
    place = open_place(url)
    place.put(file, "model.pth")
    looks = iter([Entry("model.pth", len(RAW), "old")])
    see = RemotePlace._look
    monkeypatch.setattr(RemotePlace, "_look", lambda self, name: next(looks, None) or see(self, name))
    assert read(place, "model.pth", tmp_path) == RAW
    assert bucket[0].count("GET", "model.pth") == 2


@pytest.mark.parametrize("at_once", [1, 10])
@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_a_large_file_has_no_holes(
    at_once: int, after: int, bucket: S3, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """s3fs can fetch files over 50 MB (here 0.1) in several ranges at once, and does not notice that one is short."""
    server, url = bucket
    place = RemotePlace(url)
    monkeypatch.setattr(place._reached()[0], "default_block_size", 100_000)
    monkeypatch.setitem(FETCHING, "s3", {"max_concurrency": at_once})
    place.put(file, "model.pth")
    server.plan(Trouble.SHORT, "GET", "model.pth", after=after)
    assert read(place, "model.pth", tmp_path) == RAW


def test_the_first_bytes_are_as_many_as_there_are(bucket: S3, file: Path):
    server, url = bucket
    place = open_place(url)
    place.put(file, "model.pth")
    server.plan(Trouble.SHORT, "GET", "model.pth", times=2)
    assert place.head("model.pth", 1000) == RAW[:1000]
    assert place.head("model.pth", len(RAW) + 5) == RAW


def test_what_is_known_is_taken_or_nothing(place: Place, file: Path, tmp_path: Path):
    place.put(file, "model.pth")
    (known,) = place.walk()
    place.fetch("model.pth", tmp_path / "fetched", known)
    assert (tmp_path / "fetched").read_bytes() == RAW
    file.write_bytes(RAW[::-1])
    place.put(file, "model.pth")
    with pytest.raises(PlaceError, match=r"model\.pth: it changed since it was listed; run the same command again"):
        place.fetch("model.pth", tmp_path / "other", known)
    assert not (tmp_path / "other").exists()


def test_one_request_and_one_look_bring_what_is_known(bucket: S3, file: Path, tmp_path: Path):
    server, url = bucket
    place = open_place(url)
    place.put(file, "model.pth")
    (known,) = place.walk()
    server.requests.clear()
    place.fetch("model.pth", tmp_path / "fetched", known)
    path = url.removeprefix("s3:/")
    assert server.requests == [f"GET {path}/model.pth", f"HEAD {path}/model.pth"]


def test_a_full_disk_is_found_before_the_transfer(
    place: Place, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    place.put(file, "model.pth")
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": len(RAW)}))
    with pytest.raises(NoSpaceError, match=f"needs {len(RAW)} bytes, but {tmp_path} has only {len(RAW)} free"):
        place.fetch("model.pth", tmp_path / "fetched")
    assert not (tmp_path / "fetched").exists()


@pytest.mark.parametrize("trouble", [Trouble.THROTTLED, Trouble.RESET], ids=lambda trouble: trouble.name)
@pytest.mark.parametrize("times", [1, 100])
def test_an_upload_in_parts(bucket: S3, tmp_path: Path, trouble: Trouble, times: int, monkeypatch: pytest.MonkeyPatch):
    """Large files are sent in parts (of 50 MB, here of 5): if one fails, the upload ends and leaves nothing."""
    import s3fs

    monkeypatch.setattr("s3fs.core.calculate_chunksize", lambda size, chunksize=None: 5 << 20)
    server, url = bucket
    large = tmp_path / "large.pth"
    with large.open("wb") as file:
        file.truncate(11 << 20)
        file.seek(0, os.SEEK_END)
        file.write(RAW)
    server.plan(trouble, "PUT", "large.pth", times)
    place = open_place(url)
    if times == 1:
        place.put(large, "large.pth")
        place.fetch("large.pth", tmp_path / "fetched")
        assert (tmp_path / "fetched").read_bytes() == large.read_bytes()
    else:
        with pytest.raises(TransferError):
            place.put(large, "large.pth")
        assert place.entry("large.pth") is None
    left = s3fs.S3FileSystem().call_s3("list_multipart_uploads", Bucket=url.removeprefix("s3://"))
    assert left.get("Uploads", []) == []


def test_what_is_not_whole_in_memory_has_no_name(memory: str, file: Path, monkeypatch: pytest.MonkeyPatch):
    """Where an upload shows while it runs, it has another name until it is whole."""
    from fsspec.implementations.memory import MemoryFileSystem

    place = open_place(memory)
    monkeypatch.setattr("ckptfix.bytes.transfers.time.sleep", lambda seconds: None)
    seen: list[list[str]] = []

    def stopped(self: MemoryFileSystem, source: str, goal: str, **rest: object) -> None:
        self.pipe_file(goal, RAW[:1000])
        seen.append([path.rpartition("/")[2] for path in self.find(memory)])
        raise TimeoutError("stopped in the middle")

    monkeypatch.setattr(MemoryFileSystem, "put_file", stopped)
    with pytest.raises(TransferError, match="stopped in the middle"):
        place.put(file, "model.pth")
    assert len(seen) == 6
    assert all(len(found) == 1 and found[0].endswith(".ckptfix-tmp") for found in seen)
    assert names_or_none(place) == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("gs://bucket/zoo", r"the package for gs:// is not installed; install it with pip install 'ckptfix\[gcs\]'"),
        ("hf://org/model", r"the package for hf:// is not installed; install it with pip install 'ckptfix\[hf\]'"),
        ("az://box/zoo", r"the package for az:// is not installed; install it with pip install 'ckptfix\[azure\]'"),
        ("nonsense://zoo", "nonsense"),
    ],
)
def test_what_is_missing_is_named(url: str, message: str, monkeypatch: pytest.MonkeyPatch):
    from fsspec.registry import _registry

    for package in ("gcsfs", "huggingface_hub", "adlfs"):
        monkeypatch.setitem(sys.modules, package, None)
    for scheme in ("gs", "gcs", "hf", "az"):
        monkeypatch.delitem(_registry, scheme, raising=False)
    with pytest.raises(UsageError, match=message):
        open_place(url)
