"""An item is opened where it lies, or as a copy that does not stay."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from ckptfix.errors import CkptfixError
from ckptfix.zoo.fetching import on_this_machine
from ckptfix.zoo.listing import list_zoo
from ckptfix.zoo.places import open_place


def test_what_lies_here_is_not_copied(tmp_path: Path):
    (tmp_path / "a.pth").write_bytes(b"weights")
    place = open_place(str(tmp_path))
    with on_this_machine(place, list_zoo(place)[0], tmp_path / "scratch") as path:
        assert path == tmp_path / "a.pth"
        assert not (tmp_path / "scratch").exists()
    assert path.read_bytes() == b"weights"


def test_what_lies_far_away_is_copied_and_the_copy_is_gone_at_the_end(tmp_path: Path, memory: str):
    with fsspec.open(f"{memory}/a.pth", "wb") as file:
        file.write(b"weights")
    place = open_place(memory)
    item = list_zoo(place)[0]
    with on_this_machine(place, item, tmp_path / "scratch") as path:
        assert path == tmp_path / "scratch" / "a.pth"
        assert path.read_bytes() == b"weights"
    assert not (tmp_path / "scratch").exists()
    with fsspec.open(f"{memory}/a.pth", "wb") as file:
        file.write(b"other weights")
    with pytest.raises(CkptfixError), on_this_machine(place, item, tmp_path / "scratch"):
        pass
    assert not (tmp_path / "scratch").exists()
