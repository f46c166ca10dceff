"""Files are put in place whole, in their order."""

from __future__ import annotations

import pytest

from ckptfix.errors import WriteError
from ckptfix.zoo.places import open_place
from ckptfix.zoo.work.staging import Staged, deliver_staged, make_folder, put_in_place


def test_files_get_their_names(tmp_path):
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "b").write_bytes(b"b")
    (tmp_path / "new").mkdir()
    staged = [Staged(str(tmp_path / "a"), "x/y/a.pth"), Staged(str(tmp_path / "b"), "b.pth", is_flushed=True)]
    deliver_staged(staged, open_place(str(tmp_path / "new")))
    assert (tmp_path / "new/x/y/a.pth").read_bytes() == b"a"
    assert (tmp_path / "new/b.pth").read_bytes() == b"b"
    assert not (tmp_path / "a").exists()


def test_folders_are_made_once(tmp_path):
    assert make_folder(tmp_path, tmp_path) == []
    assert make_folder(tmp_path / "a/b", tmp_path) == [tmp_path / "a/b", tmp_path / "a"]
    assert make_folder(tmp_path / "a/b", tmp_path) == []


def test_a_place_that_is_taken_by_a_folder_is_an_error(tmp_path):
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "taken").mkdir()
    with pytest.raises(WriteError, match="taken: cannot be put in place"):
        put_in_place(Staged(str(tmp_path / "a"), "taken"), tmp_path)
    assert (tmp_path / "a").exists()
