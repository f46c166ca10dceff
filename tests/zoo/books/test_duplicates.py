"""How much of a zoo is there twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptfix.zoo.books import duplicates
from ckptfix.zoo.books.duplicates import Duplicates, Family, find_duplicates


def layer(content: str, numel: int = 4096, dtype: str = "float32", **more: Any) -> dict[str, Any]:
    digest = hashlib.md5(f"{content} {numel} {dtype}".encode()).hexdigest()
    return {"key": content, "dtype": dtype, "shape": [numel], "minimum": -1.0, "maximum": 1.0, "xxh3": digest, **more}


def line(source: str, *layers: dict[str, Any]) -> dict[str, Any]:
    return {"version": 1, "source": source, "layers": list(layers)}


def test_a_zoo_of_nothing():
    assert find_duplicates([]) == Duplicates()


def test_different_files_save_nothing():
    found = find_duplicates([line("a", layer("1")), line("b", layer("2")), line("c", layer("1", 8192))])
    assert (found.files, found.tensors, found.nbytes) == (3, 3, 4 * (4096 + 4096 + 8192))
    assert (found.repeated, found.saved, found.families) == (0, 0, ())


def test_fine_tunes_of_one_backbone():
    lines = [line(f"tune{n}", layer("backbone"), layer("stem", 1024), layer(f"head{n}")) for n in range(3)]
    found = find_duplicates([*lines, line("other", layer("alone"))])
    saved = 2 * 4 * (4096 + 1024)
    assert (found.repeated, found.saved) == (4, saved)
    assert found.families == (Family(("tune0", "tune1", "tune2"), 2, saved),)


def test_a_tensor_that_a_file_has_twice_is_saved_and_makes_no_family():
    found = find_duplicates([line("tied", layer("x"), layer("x"))])
    assert (found.repeated, found.saved, found.families) == (1, 4 * 4096, ())


@pytest.mark.parametrize(
    "alike",
    [
        layer("counter", 1, "int64"),
        layer("small", 100),
        layer("zeros", minimum=0.0, maximum=0.0),
    ],
    ids=["counter", "small", "constant"],
)
def test_what_is_alike_by_chance_makes_no_family(alike: dict[str, Any]):
    found = find_duplicates([line("a", alike), line("b", alike)])
    assert (found.repeated, found.families) == (1, ())
    assert found.saved > 0


def test_families_are_joined_through_others():
    lines = [line("a", layer("1")), line("b", layer("1"), layer("2")), line("c", layer("2")), line("d", layer("3"))]
    found = find_duplicates([*lines, line("e", layer("3"))])
    assert [family.files for family in found.families] == [("a", "b", "c"), ("d", "e")]
    assert [family.tensors for family in found.families] == [2, 1]
    assert find_duplicates([*lines, line("e", layer("3"))], families=False) == replace(found, families=())


def test_a_tensor_without_a_hash_counts_and_saves_nothing():
    found = find_duplicates([line("a", layer("1", xxh3=None)), line("b", layer("1", xxh3=None))])
    assert (found.tensors, found.repeated) == (2, 0)


def test_the_result_is_the_same_from_disk(monkeypatch: pytest.MonkeyPatch):
    def lines() -> Iterator[dict[str, Any]]:
        for number in range(50):
            yield line(f"f{number}", *(layer(f"{number % 7}.{part}") for part in range(20)), layer(f"own{number}"))

    in_memory = find_duplicates(lines())
    monkeypatch.setattr(duplicates, "HELD", 1000)
    assert find_duplicates(lines()) == in_memory
    assert in_memory.repeated == (50 - 7) * 20


def test_packed_elements_count_their_bytes():
    found = find_duplicates([line("a", layer("x", 10, "quint4x2")), line("b", layer("y", 10, "no such dtype"))])
    assert found.nbytes == 5


def test_lines_are_read_from_a_file(tmp_path: Path):
    path = tmp_path / "weights.jsonl"
    path.write_text("".join(json.dumps(line(name, layer("x"))) + "\n" for name in "ab"))
    found = find_duplicates(map(json.loads, path.read_text().splitlines()))
    assert found.families[0].files == ("a", "b")
    assert json.loads(json.dumps(found.to_json()))["saved"] == 4 * 4096
