"""A destination need not be there yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptfix.zoo.places import open_place, walk_if_there
from ckptfix.zoo.places.errors import AbsentError, ForbiddenError
from ckptfix.zoo.places.local import LocalPlace


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
