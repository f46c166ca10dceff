"""Whatever kills the process, the old state or the whole new file is there, and the next run clears up."""

import errno
import os
import signal
import stat
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ckptfix.errors import UsageError, WriteError
from ckptfix.writing import atomic
from ckptfix.writing.atomic import (
    OwnFile,
    atomic_file,
    deliver_file,
    deliver_files,
    has_backup,
    refuse_name,
    refuse_output,
    sibling,
    temporary_beside,
    temporary_folder_beside,
)


@pytest.fixture(autouse=True)
def _nothing_searched() -> None:
    atomic._searched.clear()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_temporary_file_is_removed_after_any_end(tmp_path):
    like = tmp_path / "like"
    like.touch(0o640)
    like.chmod(0o640)

    def fail() -> None:
        with temporary_beside(tmp_path / "out.pth", like) as temporary:
            assert stat.S_IMODE(temporary.stat().st_mode) == 0o640
            assert temporary.parent == tmp_path
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["like"]


def test_a_signal_during_creation_leaves_no_file(tmp_path, monkeypatch):
    real = os.open

    def interrupted(path, flags: int, *mode: int) -> int:
        os.close(real(path, flags, *mode))
        raise KeyboardInterrupt

    monkeypatch.setattr("os.open", interrupted)
    with pytest.raises(KeyboardInterrupt), temporary_beside(tmp_path / "out.pth", None):
        pass
    assert list(tmp_path.iterdir()) == []


def test_permissions_follow_the_umask_without_a_file_like_it(tmp_path):
    plain = tmp_path / "plain"
    plain.touch()
    with temporary_beside(tmp_path / "out.pth", Path("/nowhere")) as temporary:
        assert stat.S_IMODE(temporary.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_the_file_of_a_running_process_is_kept(tmp_path):
    with temporary_beside(tmp_path / "out.pth") as first, temporary_folder_beside(tmp_path / "out.pth") as folder:
        atomic._searched.clear()
        with temporary_beside(tmp_path / "out.pth") as second:
            assert first.exists()
            assert folder.is_dir()
            assert first != second
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "name", [".out.pth.0123456789abcdef.tmp", "out.pth.0123456789abcdef.ckptfix-tmp", ".0123456789ab.ckptfix-tmp"]
)
def test_noop_files_of_other_names_are_kept(name, tmp_path):
    (tmp_path / name).touch()
    with temporary_beside(tmp_path / "out.pth"):
        pass
    assert names(tmp_path) == [name]


KILLED = """
import os, sys
from pathlib import Path
from ckptfix.writing.atomic import deliver_files, temporary_beside, temporary_folder_beside
folder = Path(sys.argv[1])
goals = [folder / name for name in ("a-1", "a-2", "a.index")]
def die(*_): os.kill(os.getpid(), 9)
with temporary_beside(folder / "out.pth"), temporary_folder_beside(folder / "a") as made:
    for goal in goals:
        (made / goal.name).write_text("new")
    if sys.argv[2] == "before":
        die()
    real = Path.replace
    Path.replace = lambda self, goal: real(self, goal) if goal.name == "a-1" else die()
    deliver_files(made, goals)
"""


@pytest.mark.parametrize("moment", ["before", "between"])
def test_the_next_run_removes_what_a_killed_one_left(moment, tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path, moment], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(names(tmp_path)) == (2 if moment == "before" else 3)
    with temporary_beside(tmp_path / "other"):
        pass
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ["../precious", "sub/precious", "{folder}/precious"])
def test_a_forged_folder_does_not_remove_other_files(name, tmp_path):
    below, made = tmp_path / "below", tmp_path / "below" / ".a.0123456789abcdef.ckptfix-tmp"
    (below / "sub").mkdir(parents=True)
    made.mkdir()
    for folder in (tmp_path, below / "sub"):
        (folder / "precious").touch()
    (made / "placing").write_text(f"{name.format(folder=tmp_path)}\na.index")
    with temporary_beside(below / "other"):
        pass
    assert [folder.joinpath("precious").exists() for folder in (tmp_path, below / "sub")] == [True, True]
    assert names(below) == ["sub"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser makes files for others")
def test_files_of_other_users_are_kept(tmp_path):
    left = tmp_path / ".a.0123456789abcdef.ckptfix-tmp"
    left.touch()
    os.chown(left, 1234, 1234)
    with temporary_beside(tmp_path / "other"):
        pass
    assert names(tmp_path) == [left.name]


def test_files_in_place_are_not_removed(tmp_path):
    begun, goals = time.monotonic(), [tmp_path / "a-1", tmp_path / "a.index"]
    with temporary_folder_beside(tmp_path / "a") as folder:
        for goal in goals:
            (folder / goal.name).touch()
        deliver_files(folder, goals)
    assert names(tmp_path) == ["a-1", "a.index"]
    assert (atomic.placed(begun), atomic.placed(time.monotonic())) == (goals, [])


def test_files_that_the_disk_does_not_confirm_are_reported_as_in_place(tmp_path, monkeypatch):
    goals, asked = [tmp_path / "a-1", tmp_path / "a.index"], []
    real = atomic.flush_file

    def refuse_the_last(path: Path) -> None:
        asked.append(path)
        if asked.count(tmp_path) == 2:
            raise OSError(errno.EIO, "Input/output error")
        real(path)

    monkeypatch.setattr(atomic, "flush_file", refuse_the_last)
    with temporary_folder_beside(tmp_path / "a") as folder:
        for goal in goals:
            (folder / goal.name).touch()
        with pytest.raises(WriteError, match=r"a\.index: is written and in place, but the disk"):
            deliver_files(folder, goals)
    assert names(tmp_path) == ["a-1", "a.index"]


def test_a_text_replaces_another_when_it_is_complete(tmp_path):
    goal = tmp_path / "notes.json"
    goal.write_text("old")
    (tmp_path / "link").symlink_to(goal)
    with atomic_file(tmp_path / "link") as file:
        file.write("new é")
        assert goal.read_text() == "old"
    assert goal.read_text(encoding="utf-8") == "new é"
    assert (tmp_path / "link").is_symlink()


def test_an_unfinished_text_replaces_nothing(tmp_path):
    goal = tmp_path / "notes.json"
    goal.write_text("old")

    def fail() -> None:
        with atomic_file(goal) as file:
            file.write("new")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (goal.read_text(), names(tmp_path)) == ("old", ["notes.json"])


def test_a_replaced_file_keeps_its_owner_its_permissions_and_its_attributes(tmp_path):
    goal = tmp_path / "out.pth"
    goal.touch()
    goal.chmod(0o604)
    if os.geteuid() == 0:
        os.chown(goal, 1234, 2345)
    attributes = {}
    if hasattr(os, "setxattr"):
        try:
            os.setxattr(goal, "user.note", b"kept")
            attributes = {"user.note": b"kept"}
        except OSError:
            pass  # a file system without them
    before = goal.stat()
    with temporary_beside(goal) as temporary:
        deliver_file(temporary, goal)
    after = goal.stat()
    assert after.st_ino != before.st_ino
    assert [after.st_mode, after.st_uid, after.st_gid] == [before.st_mode, before.st_uid, before.st_gid]
    assert {name: os.getxattr(goal, name) for name in attributes} == attributes


@pytest.mark.skipif(not hasattr(os, "setxattr"), reason="Linux only")
def test_the_mask_of_an_acl_is_not_given_to_the_group(tmp_path):
    """The mask of an ACL is where the group's permissions are without one."""
    like = tmp_path / "like"
    like.touch()
    everyone, user = 0xFFFFFFFF, 1001
    entries = [(1, 6, everyone), (2, 4, user), (4, 0, everyone), (0x10, 4, everyone), (0x20, 0, everyone)]
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.setxattr(like, "system.posix_acl_access", acl)
    except OSError:
        pytest.skip("a file system without ACLs")
    with temporary_beside(tmp_path / "new", like) as temporary:
        deliver_file(temporary, tmp_path / "new")
    assert os.getxattr(tmp_path / "new", "system.posix_acl_access") == acl


def test_a_new_file_belongs_to_the_user(tmp_path):
    like = tmp_path / "like"
    like.touch()
    if os.geteuid() == 0:
        os.chown(like, 1234, 2345)
    with temporary_beside(tmp_path / "out.pth", like) as temporary:
        assert (temporary.stat().st_uid, temporary.stat().st_gid) == (os.geteuid(), os.getegid())


@pytest.mark.parametrize("can_link", [True, False])
def test_a_backup_has_the_old_content_with_and_without_hard_links(can_link, tmp_path, monkeypatch):
    source = tmp_path / "model.pth"
    source.write_text("old")

    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    if not can_link:
        monkeypatch.setattr("os.link", refuse)
    with temporary_beside(source) as temporary:
        temporary.write_text("new")
        deliver_file(temporary, source, source)
    assert source.read_text() == "new"
    assert (tmp_path / "model.pth.bak").read_text() == "old"
    with pytest.raises(WriteError, match="a backup already exists"):
        has_backup(source)


@pytest.mark.parametrize("can_link", [True, False])
def test_a_run_that_was_killed_after_its_backup_does_not_stop_the_next(can_link, tmp_path, monkeypatch):
    source = tmp_path / "model.pth"
    source.write_text("old")
    if not can_link:
        monkeypatch.setattr("os.link", lambda *_: (_ for _ in ()).throw(OSError(errno.EPERM, "no")))
    assert not has_backup(source)
    atomic._back_up(source)
    assert has_backup(source)
    with temporary_beside(source) as temporary:
        deliver_file(temporary, source, source)
    assert (tmp_path / "model.pth.bak").read_text() == "old"


def test_a_file_that_cannot_be_put_in_place_leaves_no_backup(tmp_path, monkeypatch):
    source = tmp_path / "model.pth"
    source.write_text("old")

    def refuse(self: Path, goal: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with temporary_beside(source) as temporary:
        monkeypatch.setattr(Path, "replace", refuse)
        with pytest.raises(WriteError, match="the source is unchanged"):
            deliver_file(temporary, source, source)
    assert (names(tmp_path), source.read_text()) == (["model.pth"], "old")


def test_only_regular_files_are_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for goal in (tmp_path / "pipe", Path(os.devnull)):
        for force in (False, True):
            with pytest.raises(UsageError, match="is a device, pipe or socket"):
                refuse_output(goal, force)


def test_a_file_is_replaced_only_on_request(tmp_path):
    refuse_output(tmp_path / "new.pth")
    (tmp_path / "old.pth").touch()
    refuse_output(tmp_path / "old.pth", force=True)
    with pytest.raises(UsageError, match=r"old\.pth: already exists; replace it with force=True"):
        refuse_output(tmp_path / "old.pth")


def test_a_name_beside_a_long_one_is_cut_to_fit(tmp_path):
    assert sibling(tmp_path / "a.pth", "a", ".fixed.pth") == tmp_path / "a.fixed.pth"
    cut = sibling(tmp_path / ("é" * 125 + ".pth"), "é" * 125, ".fixed.pth")
    assert cut.name == "é" * 122 + ".fixed.pth"
    cut.touch()


def test_a_name_that_is_too_long_is_refused_by_its_bytes(tmp_path):
    refuse_name(tmp_path / ("é" * 127))
    refuse_name(Path("/nowhere") / ("é" * 128))
    with pytest.raises(UsageError, match="the name has 256 bytes, and this file system takes 255"):
        refuse_name(tmp_path / ("é" * 128))


def test_a_report_on_a_full_disk_says_so_in_words(tmp_path, monkeypatch):
    def full(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(atomic, "atomic_file", full)
    words = "page.html: the report cannot be written: No space left on device; name another place"
    with pytest.raises(WriteError, match=words), OwnFile(tmp_path / "page.html", "report", b"ckptfix").writing():
        pass


def test_a_report_in_a_folder_that_is_not_writable_is_refused_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as on a read-only disk, also for root
    with pytest.raises(UsageError, match=r"page\.html: the folder .* is not writable; name another file"):
        OwnFile(tmp_path / "page.html", "report", b"ckptfix").refuse()
