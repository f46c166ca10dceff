"""JSON lines that survive a kill."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckptfix.errors import UsageError
from ckptfix.zoo.journal import Journal, line_of


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
            assert "a" in journal
            journal.append([line("d")])
        assert json.loads(path.read_bytes().splitlines()[0])["source"] == "a"
        assert path.read_bytes().endswith(b"}\n")


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
