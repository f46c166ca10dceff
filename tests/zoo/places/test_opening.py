"""What a user types names a place, and perhaps some files in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptfix.bytes.transfers import AbsentError
from ckptfix.errors import UsageError
from ckptfix.zoo.places import open_place, split_source
from ckptfix.zoo.places.local import LocalPlace
from ckptfix.zoo.places.remote import RemotePlace


def test_paths_are_local_and_urls_are_not(tmp_path: Path):
    assert open_place("zoo/") == LocalPlace("zoo")
    assert open_place("/") == LocalPlace("/")
    assert open_place("memory://zoo/") == RemotePlace("memory://zoo")
    assert open_place("file:///zoo/").root == Path("/zoo")
    with pytest.raises(UsageError, match="without a name"):
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
    with pytest.raises(AbsentError, match="nothing: is not there; name a folder, a file, a glob or a URL"):
        split_source("nothing")


def test_remote_sources(memory: str, tmp_path: Path):
    (tmp_path / "model.pth").touch()
    open_place(memory).put(tmp_path / "model.pth", "a/model.pth")
    assert split_source(memory) == (memory, None)
    assert split_source(f"{memory}/a") == (f"{memory}/a", None)
    assert split_source(f"{memory}/a/model.pth") == (f"{memory}/a", "/model.pth")
    assert split_source(f"{memory}/*/model.p?h") == (memory, "/*/model.p?h")


def test_the_pattern_of_one_file_means_that_file(tmp_path: Path):
    from ckptfix.zoo.items.listing import list_zoo

    for name in ("m*.pth", "mx.pth"):
        (tmp_path / name).touch()
        (tmp_path / "deep").mkdir(exist_ok=True)
        (tmp_path / "deep" / name).touch()
    place, pattern = split_source(str(tmp_path / "m*.pth"))
    assert pattern is not None
    assert [item.name for item in list_zoo(open_place(place), [pattern])] == ["m*.pth"]
