"""Local folders: everything below them is listed once, and nothing is half-written."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from ckptfix.bytes.transfers import AbsentError, ForbiddenError, NoSpaceError, PlaceError
from ckptfix.zoo.places import Entry, open_place
from ckptfix.zoo.places.local import RESERVE, TEMPORARY, LocalPlace, require_space, temporary_beside, temporary_name

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
    assert "a link that leads nowhere: No such file" in str(found["broken.pth"])
    assert "a link that leads nowhere: Too many levels" in str(found["round.pth"])


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
        subprocess.run(["rm", "-r", "d"], check=True)  # what lies so deep is too much for pytest's own cleaning


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


def test_sockets_and_pipes_are_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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
    with pytest.raises(NoSpaceError, match="No space left on device; make room there"):
        place.fetch("model.pth", other) if what == "fetch" else place.put(other, "model.pth")
    assert (other.read_bytes(), (tmp_path / "zoo/model.pth").read_bytes()) == (b"other", b"model.pth")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["model.pth", "other", "zoo"]


def test_what_is_absent_or_no_file(tmp_path: Path):
    place = fill(tmp_path, "a/model.pth")
    for name in ("nothing", "a"):
        with pytest.raises(AbsentError, match="is not there, or is not a file"):
            place.fetch(name, tmp_path / "goal")
    with pytest.raises(PlaceError, match="cannot be written"):
        place.put(tmp_path / "a/model.pth", "a/model.pth/below")
    with pytest.raises((ForbiddenError, PlaceError), match="cannot be removed"):
        place.remove("a")


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


def test_a_long_name_has_a_temporary_one(tmp_path: Path):
    with temporary_beside(tmp_path / ("x" * 255)) as temporary:
        temporary.write_bytes(b"")


def test_it_is_gone_unless_it_was_renamed(tmp_path: Path):
    def stopped() -> None:
        with temporary_beside(tmp_path / "goal") as temporary:
            temporary.write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert list(tmp_path.iterdir()) == []
    with temporary_beside(tmp_path / "goal") as temporary:
        temporary.write_bytes(b"whole")
        temporary.replace(tmp_path / "goal")
    assert [path.name for path in tmp_path.iterdir()] == ["goal"]


def test_space_is_asked_for_with_a_reserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 100 + RESERVE}))
    require_space(tmp_path / "goal", 100, "s3://zoo/a")
    with pytest.raises(NoSpaceError, match="s3://zoo/a: takes 101 bytes"):
        require_space(tmp_path / "goal", 101, "s3://zoo/a")
