"""Outputs are durable and in place before a line tells of them."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from ckptfix.errors import WriteError
from ckptfix.writing import atomic
from ckptfix.zoo import committing
from ckptfix.zoo.committing import Committer
from ckptfix.zoo.journal import Journal, line_of
from ckptfix.zoo.manifest import Outcome, Record
from ckptfix.zoo.places import open_place
from ckptfix.zoo.work import copying
from ckptfix.zoo.work.copying import Staged
from ckptfix.zoo.work.job import Done


def done(folder: Path, number: int, output: str | None = None, **more: Any) -> Done:
    name = output or f"deep/{number}.pth"
    file = folder / "scratch" / f"{number}.draft"
    file.write_bytes(b"%d" % number)
    record = Record(name, 1, "s", "x", Outcome.REPAIRED, output=name, output_size=1)
    return Done(number, record, line_of({"source": name, "layers": []}), (Staged(str(file), name),), **more)


@pytest.fixture
def books(tmp_path: Path) -> tuple[Journal, Journal]:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "new").mkdir()
    return Journal(tmp_path / "manifest"), Journal(tmp_path / "weights")


def commit(folder: Path, books: tuple[Journal, Journal], *finished: Done) -> list[Record]:
    written: list[Record] = []
    place = open_place(str(folder / "new"))
    with Committer(place, folder / "scratch", *books, lambda each: written.append(each.record)) as committer:
        for each in finished:
            committer.add(each)
    return written


def test_nothing_comes_of_nothing(books, tmp_path):
    assert commit(tmp_path, books) == []
    assert list((tmp_path / "new").iterdir()) == []


def test_outputs_are_in_place_and_written_down(books, tmp_path):
    written = commit(tmp_path, books, *(done(tmp_path, number) for number in range(20)))
    assert [record.source for record in written] == [f"deep/{number}.pth" for number in range(20)]
    assert (tmp_path / "new/deep/7.pth").read_bytes() == b"7"
    assert len(books[0]) == len(books[1]) == 20
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.parametrize("has_syncfs", [True, False])
def test_the_order_is_flush_rename_flush_append(has_syncfs, books, tmp_path, monkeypatch):
    told: list[str] = []

    def noting(name: str, real: Any, result: Any = None) -> Any:
        def noted(*args: Any) -> Any:
            told.append(name)
            return real(*args) if result is None else result

        return noted

    monkeypatch.setattr(committing, "flush_file_system", noting("flush all", None, has_syncfs or 0))
    monkeypatch.setattr(committing, "flush_file", noting("flush", atomic.flush_file))
    monkeypatch.setattr(committing, "put_in_place", noting("rename", copying.put_in_place))
    monkeypatch.setattr(Journal, "append", noting("append", Journal.append))
    commit(tmp_path, books, done(tmp_path, 1))
    flushes = ["flush all"] if has_syncfs else ["flush all", "flush"]
    assert told == [*flushes, "rename", *flushes, "append", "append"]


def test_an_output_that_cannot_be_put_in_place_fails_alone(books, tmp_path):
    (tmp_path / "new/taken.pth").mkdir()
    written = commit(tmp_path, books, done(tmp_path, 1, "taken.pth"), done(tmp_path, 2))
    assert [record.outcome for record in written] == [Outcome.FAILED, Outcome.REPAIRED]
    assert "taken.pth" in str(written[0].error)
    assert written[0].output is None
    assert list((tmp_path / "scratch").iterdir()) == []


def test_what_is_known_gets_no_second_line(books, tmp_path):
    commit(tmp_path, books, Done(1, Record("a", 1, "s", "x", Outcome.FINE), is_known=True))
    assert (tmp_path / "manifest").read_bytes() == b""


def test_a_full_disk_stops_the_migration(books, tmp_path, monkeypatch):
    def full(self: Journal, entries: object) -> None:
        raise WriteError("manifest.jsonl: cannot be written: No space left on device")

    monkeypatch.setattr(Journal, "append", full)
    with pytest.raises(WriteError, match="No space left"):
        commit(tmp_path, books, *(done(tmp_path, number) for number in range(3)))


def test_a_bug_of_ours_stops_the_migration_too(books, tmp_path, monkeypatch):
    def broken(self: Journal, entries: object) -> None:
        raise TypeError("'bytes' object is not a mapping")

    monkeypatch.setattr(Journal, "append", broken)
    with pytest.raises(TypeError, match="not a mapping"):
        commit(tmp_path, books, done(tmp_path, 1))


def test_after_an_exception_what_is_finished_is_still_written_down(books, tmp_path):
    committer = Committer(open_place(str(tmp_path / "new")), tmp_path / "scratch", *books)
    with contextlib.suppress(KeyboardInterrupt), committer:
        committer.add(done(tmp_path, 1))
        raise KeyboardInterrupt
    assert [json.loads(line)["source"] for line in (tmp_path / "manifest").open()] == ["deep/1.pth"]
