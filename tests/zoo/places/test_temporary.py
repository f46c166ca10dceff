"""Temporary files are gone at the end, are known by their names, and leave the disk some room."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptfix.zoo.places.errors import NoSpaceError
from ckptfix.zoo.places.temporary import RESERVE, TEMPORARY, require_space, temporary_beside, temporary_name


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
