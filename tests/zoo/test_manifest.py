"""Lines of the manifest, and the document that says what is in them."""

import json
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import fields, replace

from ckptfix.errors import UsageError, WriteError
from ckptfix.report.page.data import WEIGHTS_VERSION
from ckptfix.zoo.manifest import (
    MANIFEST_VERSION,
    Journal,
    Outcome,
    Record,
    line_of,
    read_manifest,
    version,
    versions,
)
from ckptfix.zoo.places import open_place
from ckptfix.zoo.workspace import opened

DOCUMENT = (Path(__file__).parents[2] / "docs" / "manifest.md").read_text(encoding="utf-8")
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
    from ckptfix.report.page.data import weights_to_json

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


RECORD = Record("a.pth", 1, "s", "x", Outcome.REPAIRED, output="b.pth", output_size=2, output_parts=("b.pth", "c.pth"))


def written(folder: Path, *changed: dict[str, Any]) -> Journal:
    journal = Journal(folder / "manifest.jsonl")
    journal.append([("a.pth", line_of(RECORD.to_json() | each)) for each in changed])
    return journal


def test_what_a_later_run_needs_is_known(tmp_path):
    long = {"findings": [{"code": "KEY102"}], "remarks": ["x"], "edits": [{"edit": "rename"}]}
    journal = written(tmp_path, long, {"decision": {"b": 1, "a": 2}, "output_parts": []})
    assert list(read_manifest(journal)) == [RECORD, replace(RECORD, output_parts=(), decision={"a": 2, "b": 1})]


@pytest.mark.parametrize(
    "damage",
    [
        {"stamp": None},
        {"size": "1"},
        {"output": 7},
        {"output_size": 1.5},
        {"size": True},
        {"outcome": "eaten"},
        {"output_parts": "abc"},
        {"output_parts": [1]},
        {"decision": 5},
    ],
    ids=str,
)
def test_an_invalid_line_is_an_error_and_not_a_bug(damage, tmp_path):
    with pytest.raises(UsageError, match="not valid"):
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
        workspace.close_journals(names)
    changed = {source: output for source, output in sorted(names.items()) if output not in (None, source)}
    assert (tmp_path / "new/renames.json").read_text() == json.dumps(changed, indent=2) + "\n"


def line(source: str, **more: object) -> tuple[str, bytes]:
    return source, line_of({"version": 1, "source": source, **more})


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    (tmp_path / "scratch").mkdir()
    return tmp_path / "scratch"


def test_an_empty_journal(tmp_path, scratch):
    with Journal(tmp_path / "m") as journal:
        assert list(journal.load()) == list(journal.lines()) == []
        journal.tidy(scratch)
    assert (tmp_path / "m").read_bytes() == b""


def test_lines_come_back_sorted_and_the_last_of_a_source_counts(tmp_path, scratch):
    with Journal(tmp_path / "m") as journal:
        journal.append([line("b", n=1), line('odd "name"\\ of ünicode')])
        journal.append([line("a"), line("b", n=2)])
        assert [each["source"] for each in journal.lines()] == ["a", "b", 'odd "name"\\ of ünicode']
        assert journal.entry("b")["n"] == 2
        journal.tidy(scratch)
        assert journal.entry("b")["n"] == 2
        journal.append([line("b", n=3)])
        assert journal.entry("b")["n"] == 3
    assert len((tmp_path / "m").read_text().splitlines()) == 4


@pytest.mark.parametrize("way", ["load", "index"])
def test_a_torn_last_line_is_dropped(way, tmp_path):
    path = tmp_path / "m"
    with Journal(path) as journal:
        journal.append([line("a"), line("b")])
    whole = path.read_bytes()
    for torn in (whole[:-1], whole[:-9], whole + b'{"source":"c', whole + bytes(20)):
        path.write_bytes(torn)
        with Journal(path) as journal:
            list(getattr(journal, way)() or ())
            assert "a" in [each["source"] for each in journal.lines()]
            journal.append([line("d")])
        assert json.loads(path.read_bytes().splitlines()[0])["source"] == "a"
        assert path.read_bytes().endswith(b"}\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, of Linux")
def test_a_full_disk_is_reported_with_the_name_of_the_journal(tmp_path):
    (tmp_path / "manifest.jsonl").symlink_to("/dev/full")
    full = pytest.raises(WriteError, match=r"manifest\.jsonl: cannot be written: No space left on device; make room")
    with full, Journal(tmp_path / "manifest.jsonl") as journal:
        journal.append([("a", b'{"source": "a"}\n')])


def test_a_damaged_line_in_the_middle_is_an_error(tmp_path):
    (tmp_path / "m").write_bytes(b'{"source":"a"}\nnothing\n{"source":"b"}\n')
    with Journal(tmp_path / "m") as journal, pytest.raises(UsageError, match="line 2"):
        list(journal.load())


def test_a_tidy_journal_is_not_written_again(tmp_path, scratch):
    with Journal(tmp_path / "m") as journal:
        journal.append([line("b"), line("a")])
        journal.tidy(scratch)
    before = (tmp_path / "m").stat()
    with Journal(tmp_path / "m") as journal:
        journal.index()
        journal.tidy(scratch)
    assert (tmp_path / "m").stat().st_ino == before.st_ino


def test_a_dropped_source_has_no_line(tmp_path, scratch):
    with Journal(tmp_path / "m") as journal:
        journal.append([line("a"), line("b")])
        journal.drop("a")
        journal.drop("never there")
        journal.tidy(scratch)
    assert (tmp_path / "m").read_text() == '{"source":"b","version":1}\n'


def test_packages_that_are_not_installed_have_a_word_too(monkeypatch):
    """ckptfix runs from a tree that is only on the path, and without torch."""

    def unknown(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", unknown)
    version.cache_clear()
    try:
        found = versions.__wrapped__()
    finally:
        version.cache_clear()
    assert (found["ckptfix"], found["torch"]) == ("not installed", "")
