"""What is in a zoo: each file in one item."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptfix.bytes.transfers import ForbiddenError
from ckptfix.zoo.items.grouping import Item
from ckptfix.zoo.items.listing import ABSENT, list_zoo, read_list
from ckptfix.zoo.places import open_place
from ckptfix.zoo.places.local import LocalPlace
from tests.zoo.listings import FILE, FOLDER, OTHER, SHARDED, fill, kinds, parts, pickled, the_folder, weights


def test_an_empty_zoo(tmp_path: Path):
    assert list_zoo(LocalPlace(str(tmp_path))) == []


def test_files_are_told_by_name_or_by_bytes(tmp_path: Path):
    place = fill(
        tmp_path,
        {
            "a.pth": pickled({"w": torch.ones(2)}),
            "page.pth": b"<html>not found</html>",
            "weights": pickled({"w": torch.ones(2)}),
            "notes.txt": pickled({"w": torch.ones(2)}),
            "README.md": b"# Zoo",
            "vocabulary.pkl": b"\x80\x04}.",
            "empty.pth": b"",
            "empty.txt": b"",
            ".hidden.pth": weights(),
        },
    )
    items = {item.name: (item.kind, item.is_doubtful) for item in list_zoo(place)}
    assert items == {
        "a.pth": (FILE, False),
        "page.pth": (FILE, False),
        "weights": (FILE, False),
        "notes.txt": (FILE, False),
        "README.md": (OTHER, False),
        "vocabulary.pkl": (FILE, True),
        "empty.pth": (FILE, False),
        "empty.txt": (OTHER, False),
        ".hidden.pth": (FILE, False),
    }


def test_an_item_has_what_its_entry_says(tmp_path: Path):
    place = fill(tmp_path, {"a.pth": b"12345"})
    entry = place.entry("a.pth")
    assert entry is not None
    assert list_zoo(place) == [Item("a.pth", 5, entry.stamp, FILE)]


def test_what_a_repository_keeps_is_not_touched(tmp_path: Path):
    place = fill(tmp_path, {".git/lfs/objects/ab/cd": weights(), "a/.git/x.pth": weights(), "git/x.pth": weights()})
    assert kinds(place) == {".git/lfs/objects/ab/cd": OTHER, "a/.git/x.pth": OTHER, "git/x.pth": FILE}


def test_a_cache_of_the_hub_is_listed_by_its_true_names(tmp_path: Path):
    hub = "hub/models--org--net"
    place = fill(tmp_path, {f"{hub}/blobs/0123": weights(), f"{hub}/refs/main": b"rev"})
    (tmp_path / hub / "snapshots/rev").mkdir(parents=True)
    (tmp_path / hub / "snapshots/rev/model.safetensors").symlink_to("../../blobs/0123")
    items = {item.name.removeprefix(f"{hub}/"): item for item in list_zoo(place)}
    assert items["snapshots/rev/model.safetensors"].kind is FILE
    assert items["blobs/0123"].kind is OTHER
    assert "snapshots/ has under its true name" in str(items["blobs/0123"].fault)


def test_faults_of_the_listing(tmp_path: Path):
    place = fill(tmp_path, {"real.pth": weights()})
    (tmp_path / "broken.pth").symlink_to("nothing")
    os.mkfifo(tmp_path / "pipe")
    items = {item.name: (item.kind, item.fault is not None) for item in list_zoo(place)}
    assert items == {"real.pth": (FILE, False), "broken.pth": (FILE, True), "pipe": (OTHER, True)}


def test_a_file_that_cannot_be_read_has_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place = fill(tmp_path, {"closed": weights(), "open": weights()})
    head = LocalPlace.head

    def refusing(self: LocalPlace, name: str, count: int) -> bytes:
        if name == "closed":
            raise ForbiddenError(f"{self.where(name)}: cannot be read: Permission denied; get the right to it")
        return head(self, name, count)

    monkeypatch.setattr(LocalPlace, "head", refusing)
    items = {item.name: (item.kind, item.fault) for item in list_zoo(place)}
    assert items == {
        "closed": (FILE, "cannot be read: Permission denied; get the right to it"),
        "open": (FILE, None),
    }


def test_shards_whose_index_cannot_be_read_are_no_other_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    alone = {"llm/ema-00001-of-00001.safetensors": weights()}
    place = fill(tmp_path, {**SHARDED, **alone})
    whole = the_folder(place)

    def refusing(self: LocalPlace, name: str, count: int) -> bytes:
        raise ForbiddenError(f"{self.where(name)}: cannot be read: Permission denied; get the right to it")

    monkeypatch.setattr(LocalPlace, "head", refusing)
    items = {item.name: item for item in list_zoo(place)}
    assert items.keys() == {whole.name, *alone, "llm/config.json"}
    assert items[whole.name] == replace(whole, fault="cannot be read: Permission denied; get the right to it")


ZOO = {name: weights() for name in ("a.pth", "b.pt", "sub/a.pth", "sub/deep/c.pth")} | SHARDED | {"sub/x.txt": b"x"}


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["*.pth"], ["a.pth", "sub/a.pth", "sub/deep/c.pth"]),
        (["/*.pth"], ["a.pth"]),
        (["sub/*.pth", "b.pt"], ["b.pt", "sub/a.pth"]),
        (["sub/"], ["sub/a.pth", "sub/deep/c.pth", "sub/x.txt"]),
        (["*-00002-of-*"], ["llm/model.safetensors.index.json"]),
        (["*.index.json"], ["llm/model.safetensors.index.json"]),
        (["nothing"], []),
    ],
)
def test_patterns_choose(tmp_path: Path, patterns: list[str], expected: list[str]):
    items = list_zoo(fill(tmp_path, ZOO), patterns)
    assert [item.name for item in items] == expected
    assert all(len(item.parts) == 3 for item in items if item.kind is FOLDER)


def test_a_list_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place = fill(tmp_path, ZOO)
    monkeypatch.chdir(tmp_path)
    listed = ["./a.pth", f"{tmp_path}/b.pt", "sub", "llm/model-00001-of-00002.safetensors", "gone.pth", "gone.pth"]
    items = {item.name: item for item in list_zoo(place, (), listed)}
    assert list(items) == sorted(
        ["a.pth", "b.pt", "gone.pth", "llm/model.safetensors.index.json", "sub/a.pth", "sub/deep/c.pth", "sub/x.txt"]
    )
    assert {name: item.fault for name, item in items.items() if item.fault} == {"gone.pth": ABSENT}
    assert [item.name for item in list_zoo(place, ["*.pth"], ["sub"])] == ["sub/a.pth", "sub/deep/c.pth"]


def test_lists_have_a_name_in_a_line_or_before_a_nul():
    assert read_list("a\nb c\r\n\n d\n") == ["a", "b c", " d"]
    assert read_list("a\nb\0c\0") == ["a\nb", "c"]
    assert read_list("a\u2028b\x0bc") == ["a\u2028b\x0bc"]


def test_a_remote_zoo_is_the_same(tmp_path: Path, memory: str):
    files = ZOO | {"weights": pickled({"w": torch.ones(2)}), "table.csv": b"1,2", "empty": b""}
    local, remote = fill(tmp_path, files), open_place(memory)
    for name in files:
        remote.put(tmp_path / name, name)
    plain = [(item.name, item.kind, item.size, parts(item)) for item in list_zoo(local)]
    assert [(item.name, item.kind, item.size, parts(item)) for item in list_zoo(remote)] == plain


def test_few_requests_tell_what_is_on_s3(bucket: tuple[Any, str], tmp_path: Path):
    """One listing; the index whole; one range of each file whose name says nothing."""
    server, url = bucket
    files = SHARDED | {"a.pth": weights(), "weights": weights(), "data.csv": b"1", "empty": b"", "README": b"text"}
    place = open_place(url)
    fill(tmp_path, files)
    for name in files:
        place.put(tmp_path / name, name)
    server.requests.clear()
    assert kinds(place)["weights"] is FILE
    path = url.removeprefix("s3:/")
    assert sorted(server.requests) == sorted(
        f"GET {path}{name}" for name in ("", "/weights", "/README", "/llm/model.safetensors.index.json")
    )


@pytest.mark.slow
def test_ten_thousand_files_take_little_more_than_a_look_at_each(tmp_path: Path):
    def look() -> int:
        """What there is to do at the least: each file is found, and read where its name says nothing."""
        files = [path for path in sorted(tmp_path.rglob("*")) if path.is_file()]
        return sum(path.stat().st_size >= 0 and (bool(path.suffix) or path.read_bytes() != b"") for path in files)

    def took(work: Callable[[], int]) -> float:
        began = time.process_time()
        assert work() == 10_000
        return time.process_time() - began

    for folder in range(100):
        (tmp_path / f"{folder:02}").mkdir()
        for number in range(50):
            (tmp_path / f"{folder:02}/{number}.pth").write_bytes(b"x")
            (tmp_path / f"{folder:02}/{number}").write_bytes(b"no suffix")
    place = LocalPlace(str(tmp_path))
    # The two take about the same; how long that is depends on the machine.
    assert any(took(lambda: len(list_zoo(place))) / took(look) < 4 for _ in range(3))
