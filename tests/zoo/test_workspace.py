"""The books and the scratch folder of a migration."""

import os

import pytest

from ckptfix.errors import UsageError
from ckptfix.zoo.manifest import line_of
from ckptfix.zoo.places import open_place
from ckptfix.zoo.workspace import SCRATCH, opened


def test_a_new_destination_is_made_and_nothing_temporary_stays(tmp_path):
    goal = tmp_path / "deep/new"
    with opened(open_place(str(goal)), dry_run=False) as workspace:
        assert workspace.scratch.is_dir()
        workspace.close_journals({})
    assert sorted(path.name for path in goal.iterdir()) == ["manifest.jsonl", "renames.json", "weights.jsonl"]


def test_what_a_killed_run_left_is_removed(tmp_path):
    goal = tmp_path / "new"
    (goal / SCRATCH / "123").mkdir(parents=True)
    (goal / SCRATCH / "123/7.draft.pth").write_bytes(b"half")
    with opened(open_place(str(goal)), dry_run=False) as workspace:
        assert os.listdir(goal / SCRATCH) == [workspace.scratch.name]  # noqa: PTH208 - the names alone
    assert not (goal / SCRATCH).exists()


def test_two_migrations_into_one_folder_are_refused(tmp_path):
    place = open_place(str(tmp_path / "new"))
    with opened(place, dry_run=False), pytest.raises(UsageError, match="another ckptfix"), opened(place, dry_run=False):
        pass
    with opened(place, dry_run=False):
        pass


def test_a_dry_run_makes_nothing(tmp_path):
    with opened(open_place(str(tmp_path / "new")), dry_run=True) as workspace:
        assert workspace.manifest.path.is_file()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_dry_run_left_is_removed_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left, others = tmp_path / f".zoo.0123456789abcdef{SCRATCH}", tmp_path / "others"
    for folder in (left, others):
        (folder / SCRATCH).mkdir(parents=True)
    with opened(open_place(str(tmp_path / "new")), dry_run=True) as first:
        assert not left.exists()
        with opened(open_place(str(tmp_path / "new")), dry_run=True) as second:
            assert first.scratch.is_dir()  # it is in use
            assert second.scratch.is_dir()
    assert list(tmp_path.iterdir()) == [others]


def test_what_an_older_release_left_when_it_was_killed_while_tidying_is_removed(tmp_path):
    goal = tmp_path / "new"
    goal.mkdir()
    (goal / "manifest.jsonl").touch()
    left, mine = goal / f".manifest.jsonl.0123456789abcdef{SCRATCH}", goal / ".manifest.jsonl.mine"
    for file in (left, mine):
        file.write_bytes(b"half")
    with opened(open_place(str(goal)), dry_run=False):
        assert (left.exists(), mine.exists()) == (False, True)


def test_a_kill_while_tidying_leaves_nothing_behind_the_next_run(tmp_path, monkeypatch):
    place = open_place(str(tmp_path / "new"))
    with opened(place, dry_run=False) as workspace:
        workspace.manifest.append([("b", line_of({"source": "b"})), ("a", line_of({"source": "a"}))])
        with monkeypatch.context() as killed:
            killed.setattr("os.fsync", lambda descriptor: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                workspace.close_journals({})
        left = {path.relative_to(tmp_path / "new").parts[0] for path in (tmp_path / "new").rglob("*")}
    assert left == {"manifest.jsonl", "weights.jsonl", SCRATCH}, "unfinished files are where the next run looks"
