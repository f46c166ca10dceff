"""Local folders: everything below them is listed once, and nothing is half-written."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from ckptfix.bytes.transfers import (
    AbsentError,
    ForbiddenError,
    NoSpaceError,
    PlaceError,
    explained,
    failures,
    final_kind,
)
from ckptfix.errors import UsageError
from ckptfix.zoo.places import (
    RESERVE,
    TEMPORARY,
    Entry,
    LocalPlace,
    RemotePlace,
    open_place,
    require_space,
    split_source,
    temporary_name,
    walk_if_there,
)

AS_ROOT = os.geteuid() == 0


def fill(root: Path, *names: str) -> LocalPlace:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode("utf-8", "surrogateescape"))
    return LocalPlace(str(root))


def walked(place: LocalPlace) -> list[tuple[str, str | None]]:
    return [(entry.name, entry.fault) for entry in place.walk()]


def names(place: LocalPlace) -> list[str]:
    return [entry.name for entry in place.walk()]


def test_an_empty_folder_has_no_files(tmp_path: Path):
    assert names(LocalPlace(str(tmp_path))) == []


def test_files_come_in_the_order_of_their_names(tmp_path: Path):
    # As an object store lists them: "a-" and "a." sort before "a/".
    place = fill(tmp_path, "b.pth", "a/z.pth", "a/b/c.pth", "a-b.pth", "a.pth", ".hidden/x", ".hidden.pth")
    assert names(place) == sorted(names(place))
    assert len(names(place)) == 7


def test_an_entry_has_size_and_time(tmp_path: Path):
    place = fill(tmp_path, "a/b.pth")
    expected = Entry("a/b.pth", 7, str((tmp_path / "a/b.pth").stat().st_mtime_ns))
    assert list(place.walk()) == [expected]
    assert place.entry("a/b.pth") == expected
    assert place.entry("a") is None
    assert place.entry("nothing") is None
    assert place.entry("a/b.pth/c") is None


def test_odd_names(tmp_path: Path):
    odd = ["new\nline.pth", os.fsdecode(b"caf\xe9.pth"), " .pth", "ä.pth", "-rf", "\\.pth"]
    assert names(fill(tmp_path, *odd)) == sorted(odd)


def test_links_to_files_are_files(tmp_path: Path):
    place = fill(tmp_path / "zoo", "real.pth")
    (tmp_path / "outside.pth").write_bytes(b"outside")
    (tmp_path / "zoo/inside.pth").symlink_to("real.pth")
    (tmp_path / "zoo/outside.pth").symlink_to(tmp_path / "outside.pth")
    assert [(entry.name, entry.size) for entry in place.walk()] == [
        ("inside.pth", 8),
        ("outside.pth", 7),
        ("real.pth", 8),
    ]


def test_links_that_lead_nowhere_have_a_fault(tmp_path: Path):
    place = fill(tmp_path, "real.pth")
    (tmp_path / "broken.pth").symlink_to("nothing.pth")
    (tmp_path / "round.pth").symlink_to("round.pth")
    found = dict(walked(place))
    assert found["real.pth"] is None
    assert "a broken link: No such file" in str(found["broken.pth"])
    assert "a broken link: Too many levels" in str(found["round.pth"])


def test_circles_end(tmp_path: Path):
    place = fill(tmp_path, "a/b/model.pth")
    (tmp_path / "a/b/up").symlink_to("../..")
    (tmp_path / "a/b/self").symlink_to(".")
    assert walked(place) == [
        ("a/b/model.pth", None),
        ("a/b/self", "a link to the folder a/b, which is listed by that name"),
        ("a/b/up", "a link to the folder ., which is listed by that name"),
    ]


def test_folders_that_link_to_each_other_are_listed_once_each(tmp_path: Path):
    folders = [f"f{number}" for number in range(8)]
    place = fill(tmp_path, *(f"{folder}/model.pth" for folder in folders))
    for folder in folders:
        for other in folders:
            (tmp_path / folder / f"to-{other}").symlink_to(f"../{other}")
    assert len(names(place)) == 8 + 64
    assert sum(entry.fault is None for entry in place.walk()) == 8


def test_folders_may_lie_as_deep_as_a_path_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    depth = 1500
    monkeypatch.chdir(tmp_path)
    for _ in range(depth):
        os.mkdir("d")  # noqa: PTH102 - the path from the root would be too long
        os.chdir("d")
    Path("model.pth").touch()
    monkeypatch.chdir(tmp_path)
    try:
        assert [entry.name for entry in LocalPlace(".").walk()] == ["d/" * depth + "model.pth"]
    finally:
        subprocess.run(["rm", "-r", "d"], check=True)  # pytest's own cleaning cannot remove folders this deep


def test_a_folder_outside_is_listed_once(tmp_path: Path):
    fill(tmp_path / "outside", "model.pth")
    place = fill(tmp_path / "zoo", "own.pth")
    (tmp_path / "zoo/a").symlink_to(tmp_path / "outside")
    (tmp_path / "zoo/b").symlink_to(tmp_path / "outside")
    assert walked(place) == [
        ("a/model.pth", None),
        ("b", "a link to the folder a, which is listed by that name"),
        ("own.pth", None),
    ]


@pytest.mark.skipif(AS_ROOT, reason="root may read everything")
def test_closed_folders_have_a_fault(tmp_path: Path):
    place = fill(tmp_path, "closed/model.pth", "open.pth")
    (tmp_path / "closed").chmod(0)
    try:
        assert walked(place) == [("closed", "the folder cannot be listed: Permission denied"), ("open.pth", None)]
    finally:
        (tmp_path / "closed").chmod(0o700)


def test_a_folder_that_cannot_be_listed_has_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place = fill(tmp_path, "closed/model.pth", "open.pth")
    scan = os.scandir

    def refusing(path: str) -> object:
        if str(path).rstrip("/").endswith("closed"):
            raise PermissionError(13, "Permission denied")
        return scan(path)

    monkeypatch.setattr(os, "scandir", refusing)
    assert walked(place) == [("closed", "the folder cannot be listed: Permission denied"), ("open.pth", None)]


def test_sockets_and_pipes_are_not_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place = fill(tmp_path, "model.pth")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)  # the path of a socket has 108 bytes at most
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        found = {entry.name: (entry.fault, entry.special) for entry in place.walk()}
    assert found == {
        "model.pth": (None, False),
        "pipe": ("a pipe, not a file", True),
        "socket": ("a socket, not a file", True),
    }


def test_temporary_files_are_not_listed(tmp_path: Path):
    assert names(fill(tmp_path, "a/.0123.ckptfix-tmp", "a/model.pth", "a/x.ckptfix-tmp")) == [
        "a/model.pth",
        "a/x.ckptfix-tmp",
    ]


def test_a_folder_that_is_not_there(tmp_path: Path):
    with pytest.raises(AbsentError, match="zoo: cannot be listed: No such file"):
        list(LocalPlace(str(tmp_path / "zoo")).walk())


def test_copies_are_whole(tmp_path: Path):
    place = fill(tmp_path / "zoo", "model.pth")
    place.fetch("model.pth", tmp_path / "fetched")
    place.put(tmp_path / "fetched", "deep/er/model.pth")
    assert (tmp_path / "zoo/deep/er/model.pth").read_bytes() == b"model.pth"
    assert place.head("model.pth", 5) == b"model"
    assert sorted(path.name for path in (tmp_path / "zoo").rglob("*")) == ["deep", "er", "model.pth", "model.pth"]
    place.remove("deep/er/model.pth")
    place.remove("deep/er/model.pth")
    assert names(place) == ["model.pth"]


@pytest.mark.parametrize("what", ["fetch", "put"])
def test_a_copy_that_fails_leaves_the_old_file(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place = fill(tmp_path / "zoo", "model.pth")
    other = tmp_path / "other"
    other.write_bytes(b"other")

    def stopped(source: Path, goal: Path) -> None:
        goal.write_bytes(b"oth")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", stopped)
    with pytest.raises(NoSpaceError, match="No space left on device; free space there"):
        place.fetch("model.pth", other) if what == "fetch" else place.put(other, "model.pth")
    assert (other.read_bytes(), (tmp_path / "zoo/model.pth").read_bytes()) == (b"other", b"model.pth")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["model.pth", "other", "zoo"]


def test_what_is_absent_or_no_file(tmp_path: Path):
    place = fill(tmp_path, "a/model.pth")
    for name in ("nothing", "a"):
        with pytest.raises(AbsentError, match="does not exist, or is not a file"):
            place.fetch(name, tmp_path / "goal")
    with pytest.raises(PlaceError, match="cannot be written"):
        place.put(tmp_path / "a/model.pth", "a/model.pth/below")
    with pytest.raises((ForbiddenError, PlaceError), match="cannot be removed"):
        place.remove("a/model.pth/below")
    place.remove("a")
    assert (tmp_path / "a/model.pth").is_file()


def test_no_empty_folder_of_a_removed_file_stays(tmp_path: Path):
    place = fill(tmp_path / "zoo", "a/b/c/model.pth", "a/model.pth")
    place.remove("a/b/c/model.pth")
    assert [path.name for path in (tmp_path / "zoo/a").iterdir()] == ["model.pth"]
    place.remove("a/model.pth")
    assert [*(tmp_path / "zoo").iterdir()] == []


def test_a_file_url_is_a_folder(tmp_path: Path):
    fill(tmp_path, "a b/model.pth")
    place = open_place(f"file://{tmp_path}/")
    assert place.root == tmp_path
    assert [entry.name for entry in place.walk()] == ["a b/model.pth"]


def test_names_are_known_and_all_different():
    made = {temporary_name() for _ in range(100)}
    assert len(made) == 100
    assert all(TEMPORARY.fullmatch(name) for name in made)
    assert not any(TEMPORARY.fullmatch(name) for name in ("model.pth", "a.ckptfix-tmp", ".a.ckptfix-tmp.pth"))


def test_space_is_asked_for_with_a_reserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 100 + RESERVE}))
    require_space(tmp_path / "goal", 100, "s3://zoo/a")
    with pytest.raises(NoSpaceError, match="s3://zoo/a: needs 101 bytes"):
        require_space(tmp_path / "goal", 101, "s3://zoo/a")


def test_what_is_there_is_walked(tmp_path: Path):
    (tmp_path / "model.pth").touch()
    assert [entry.name for entry in walk_if_there(open_place(str(tmp_path)))] == ["model.pth"]


def test_what_is_absent_is_empty(tmp_path: Path, memory: str):
    for place in (open_place(str(tmp_path / "new")), open_place(memory)):
        with pytest.raises(AbsentError):
            list(place.walk())
        assert list(walk_if_there(place)) == []


def test_what_is_forbidden_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refusing(self: LocalPlace) -> None:
        raise ForbiddenError("no right")

    monkeypatch.setattr(LocalPlace, "walk", refusing)
    with pytest.raises(ForbiddenError):
        list(walk_if_there(open_place(str(tmp_path))))


def error_with(**attributes: object) -> Exception:
    error = Exception("said by the server")
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


def carriers(status: int) -> dict[str, Exception]:
    return {
        "botocore": error_with(response={"ResponseMetadata": {"HTTPStatusCode": status}}),
        "requests": error_with(response=SimpleNamespace(status_code=status)),
        "aiohttp": error_with(status=status),
        "gcsfs": error_with(code=status),
    }


@pytest.mark.parametrize("backend", sorted(carriers(0)))
def test_the_status_decides(backend: str):
    passing = [status for status in range(400, 600) if final_kind(carriers(status)[backend]) is None]
    assert passing == [408, 409, 412, 423, 425, 429, *range(500, 600)]
    kinds = {
        status: type(explained(carriers(status)[backend], "s3://zoo/a", "read")) for status in (401, 403, 404, 418)
    }
    assert kinds == {401: ForbiddenError, 403: ForbiddenError, 404: AbsentError, 418: PlaceError}


def test_what_was_imported_is_known(monkeypatch: pytest.MonkeyPatch):
    module = ModuleType("gcsfs.retry")
    module.HttpError = type("HttpError", (Exception,), {})  # type: ignore[attr-defined]  # made here
    assert module.HttpError not in failures()
    monkeypatch.setitem(sys.modules, "gcsfs.retry", module)
    assert module.HttpError in failures()


def test_lacking_credentials_are_not_a_temporary_error():
    error = type("NoCredentialsError", (Exception,), {})("Unable to locate credentials")
    assert final_kind(error) is not None
    assert str(explained(error, "s3://zoo", "listed")) == (
        "s3://zoo: cannot be listed: Unable to locate credentials; get permission or credentials"
    )


def test_an_error_without_words_is_named():
    assert str(explained(TimeoutError(), "s3://zoo/a", "read")) == "s3://zoo/a: cannot be read: TimeoutError"


def test_paths_are_local_and_urls_are_not(tmp_path: Path):
    assert open_place("zoo/") == LocalPlace("zoo")
    assert open_place("/") == LocalPlace("/")
    assert open_place("memory://zoo/") == RemotePlace("memory://zoo")
    assert open_place("file:///zoo/").root == Path("/zoo")
    with pytest.raises(UsageError, match="is empty"):
        open_place("")


def test_local_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old/deep").mkdir(parents=True)
    (tmp_path / "old/model[1].pth").touch()
    assert split_source("old") == ("old", None)
    assert split_source("old/model[1].pth") == ("old", "/model[[]1].pth")
    assert split_source("old/*.pth") == ("old", "/*.pth")
    assert split_source("old/**/*.pth") == ("old", "/**/*.pth")
    assert split_source("*/x.pth") == (".", "/*/x.pth")
    assert split_source(f"{tmp_path}/old/?.pth") == (f"{tmp_path}/old", "/?.pth")
    assert split_source("/*.pth") == ("/", "/*.pth")
    with pytest.raises(AbsentError, match="nothing: does not exist; name a folder, a file, a glob or a URL"):
        split_source("nothing")


def test_remote_sources(memory: str, tmp_path: Path):
    (tmp_path / "model.pth").touch()
    open_place(memory).put(tmp_path / "model.pth", "a/model.pth")
    assert split_source(memory) == (memory, None)
    assert split_source(f"{memory}/a") == (f"{memory}/a", None)
    assert split_source(f"{memory}/a/model.pth") == (f"{memory}/a", "/model.pth")
    assert split_source(f"{memory}/*/model.p?h") == (memory, "/*/model.p?h")


def test_the_pattern_of_one_file_means_that_file(tmp_path: Path):
    from ckptfix.zoo.items import list_zoo

    for name in ("m*.pth", "mx.pth"):
        (tmp_path / name).touch()
        (tmp_path / "deep").mkdir(exist_ok=True)
        (tmp_path / "deep" / name).touch()
    place, pattern = split_source(str(tmp_path / "m*.pth"))
    assert pattern is not None
    assert [item.name for item in list_zoo(open_place(place), [pattern])] == ["m*.pth"]
