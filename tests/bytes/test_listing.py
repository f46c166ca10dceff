"""The names in a folder, by what they lead to."""

import os
from pathlib import Path

import pytest

from ckptfix.bytes.listing import Listing, list_folder, stamp_of


def test_links_count_as_what_they_lead_to(tmp_path: Path) -> None:
    (tmp_path / "b").touch()
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "d").mkdir()
    (tmp_path / "c").symlink_to("d")
    (tmp_path / "lost").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    found = list_folder(tmp_path)
    assert found == Listing(("a", "b"), ("c", "d"), ("loop", "lost", "pipe"))
    assert set(found.names) == {path.name for path in tmp_path.iterdir()}


def test_the_attributes_that_macos_keeps_beside_files_are_left_out(tmp_path: Path) -> None:
    for name in ("a", "._a", ".a", "_"):
        (tmp_path / name).touch()
    assert list_folder(tmp_path).names == (".a", "_", "a")


def test_a_folder_that_changed_just_now_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    assert stamp_of(tmp_path) is None
    assert list_folder(tmp_path).files == ("a",)
    (tmp_path / "b").touch()
    assert list_folder(tmp_path).files == ("a", "b")


def test_another_folder_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").touch()
    os.utime(tmp_path, (1, 1))
    first = list_folder(tmp_path)
    monkeypatch.setattr(os, "scandir", lambda folder: pytest.fail(f"{folder} is read again"))
    assert list_folder(tmp_path) is first


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list_folder(tmp_path / "x")
