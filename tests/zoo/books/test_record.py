"""Lines of the manifest, and the document that says what is in them."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from ckptfix.errors import UsageError
from ckptfix.report.weights import WEIGHTS_VERSION
from ckptfix.zoo.books.record import MANIFEST_VERSION, Outcome, Record

DOCUMENT = (Path(__file__).parents[3] / "docs" / "manifest.md").read_text(encoding="utf-8")
LINE = Record("a.pth", 1, "s", "x", Outcome.FINE, findings=({"code": "KEY102"},)).to_json()


def section(title: str) -> str:
    return DOCUMENT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(text: str) -> set[str]:
    """The names in the first column of the tables."""
    return {
        name for row in re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)
    }


def test_every_field_and_outcome_is_documented_and_no_other():
    outcomes = {outcome.value for outcome in Outcome}
    assert (
        rows(section("manifest.jsonl")) == {"version", *(field.name for field in fields(Record)), "outcome"} | outcomes
    )


def test_every_field_of_a_layer_is_documented(tmp_path):
    import torch

    from ckptfix import check
    from ckptfix.report.weights import weights_to_json

    torch.save({"w": torch.ones(3)}, tmp_path / "a.pth")
    line = weights_to_json(check(tmp_path / "a.pth"))
    (layer,) = line["layers"]
    assert rows(section("weights.jsonl")) == {*line, *layer}


@pytest.mark.parametrize(
    ("title", "version"), [("manifest.jsonl", MANIFEST_VERSION), ("weights.jsonl", WEIGHTS_VERSION)]
)
def test_the_document_is_of_this_version(title, version):
    assert f"The version of the line: {version}." in section(title)


def test_a_line_comes_back_as_it_was():
    assert Record.from_json(json.loads(json.dumps(LINE))).to_json() == LINE


def test_a_field_of_a_later_release_is_passed_over():
    assert Record.from_json({**LINE, "colour": "red"}).to_json() == LINE


@pytest.mark.parametrize(
    "line",
    [{**LINE, "version": MANIFEST_VERSION + 1}, {**LINE, "outcome": "eaten"}, {"version": MANIFEST_VERSION}],
    ids=["another version", "an outcome that is none", "fields missing"],
)
def test_a_line_of_something_else_is_refused(line):
    with pytest.raises(UsageError, match="migrate into a new folder"):
        Record.from_json(line)
