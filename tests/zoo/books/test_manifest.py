"""What the manifest of an earlier run says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckptfix.errors import UsageError
from ckptfix.zoo.books.journal import Journal
from ckptfix.zoo.books.manifest import Known, read_manifest
from ckptfix.zoo.books.record import Outcome, Record
from ckptfix.zoo.books.workspace import opened
from ckptfix.zoo.places import open_place

RECORD = Record("a.pth", 1, "s", "x", Outcome.REPAIRED, output="b.pth", output_size=2, output_parts=("b.pth", "c.pth"))


def written(folder: Path, *changed: dict[str, Any]) -> Journal:
    journal = Journal(folder / "manifest.jsonl")
    journal.append([RECORD.to_json() | each for each in changed])
    return journal


def test_what_counts_of_a_line_is_known(tmp_path):
    journal = written(tmp_path, {}, {"decision": {"b": 1, "a": 2}, "output_parts": []})
    first = Known(1, "s", "x", Outcome.REPAIRED, "b.pth", 2, ("b.pth", "c.pth"))
    assert list(read_manifest(journal)) == [
        ("a.pth", first),
        ("a.pth", Known(1, "s", "x", Outcome.REPAIRED, "b.pth", 2, (), '{"a": 2, "b": 1}')),
    ]


@pytest.mark.parametrize(
    "damage",
    [
        {"stamp": None},
        {"size": "1"},
        {"output": 7},
        {"output_size": 1.5},
        {"size": 2**63},
        {"outcome": "eaten"},
        {"output_parts": "abc"},
        {"output_parts": [1]},
        {"decision": 5},
    ],
    ids=str,
)
def test_a_line_that_is_none_is_an_error_and_no_bug(damage, tmp_path):
    with pytest.raises(UsageError, match="none of a migration"):
        list(read_manifest(written(tmp_path, damage)))


NAMES = {
    "same.pth": "same.pth",
    "old.pth.gz": "old.pth",
    "nothing.pth": None,
    'a "quoted",\\ name.pth': 'a "quoted",\\ name.pth',
    ',"output":"x",.pth': "x",
    "caf\udce9.pth": "caf\udce9.pth",
    "é.pt": "é.pth",
    "a": "a,",
}


@pytest.mark.parametrize("names", [NAMES, {"same.pth": "same.pth"}], ids=["some", "none"])
def test_the_names_that_changed_are_in_renames(names, tmp_path):
    with opened(open_place(str(tmp_path / "new")), dry_run=False) as workspace:
        lines = [
            {"source": source, "output": output, "remarks": [',"output":"x",']} for source, output in names.items()
        ]
        workspace.manifest.append([RECORD.to_json() | line for line in lines])
        workspace.close_books()
    changed = {source: output for source, output in sorted(names.items()) if output not in (None, source)}
    assert (tmp_path / "new/renames.json").read_text() == json.dumps(changed, indent=2) + "\n"
