"""What is known of each item is in the catalogue, and nothing of it in memory."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptfix.zoo.books.journal import line_of
from ckptfix.zoo.books.manifest import Known
from ckptfix.zoo.books.record import Outcome
from ckptfix.zoo.catalogue import Catalogue
from ckptfix.zoo.items.claims import Claims
from ckptfix.zoo.items.listing import Item, Kind
from ckptfix.zoo.migrating import migrate
from ckptfix.zoo.places import Entry
from ckptfix.zoo.places.local import LocalPlace
from ckptfix.zoo.work.job import Done, Job

STRANGE = os.fsdecode(b"caf\xe9.pth")
ITEMS = [
    Item("b.pth", 1, "s", Kind.FILE),
    Item("a.pth", 1, "t", Kind.FILE, is_doubtful=True),
    Item(STRANGE, 9, STRANGE, Kind.OTHER, fault=f"a link to {STRANGE}"),
    Item("run", 2**40, "", Kind.FOLDER, (Entry("run/x", 3, "u"), Entry(f"run/{STRANGE}", 4, "v"))),
]
KNOWN = [
    ("b.pth", Known(1, "s", "x", Outcome.FINE, "b.pth", 1)),
    ("gone.pth", Known(1, STRANGE, "y", Outcome.UNREADABLE, None, None)),
    ("run", Known(2**40, "", "z", Outcome.DECISION, "run", 7, ("run/x", f"run/{STRANGE}"), '{"salvage": true}')),
    ("b.pth", Known(2, "s", "x", Outcome.REPAIRED, "c.pth", 3)),
]


def test_items_come_back_the_largest_first():
    with Catalogue(ITEMS) as catalogue:
        assert list(catalogue) == sorted(ITEMS, key=lambda item: (-item.size, item.name))
        assert (len(catalogue), catalogue.nbytes) == (4, 2**40 + 11)
        assert STRANGE in catalogue
        assert "run/x" not in catalogue


def test_each_item_comes_with_the_last_that_is_known_of_it():
    with Catalogue(ITEMS) as catalogue:
        catalogue.learn(KNOWN)
        last = dict(KNOWN)
        found = list(catalogue.all())
        assert [(item.name, known) for _, item, known in found] == [
            (item.name, last.get(item.name)) for item in catalogue
        ]
        assert list(catalogue.known_again()) == [row for row in found if row[2] is not None]
        assert list(catalogue.known_beside()) == [last["gone.pth"]]
        assert list(catalogue.all(lambda number: number == found[1][0])) == [found[1]]
        assert catalogue.known("run") == last["run"]
        assert catalogue.known("a.pth") is None


@pytest.mark.parametrize(
    ("reserved", "claimed", "contested"),
    [
        ([], ["a", "b"], set()),
        ([], ["a", "b", "a"], {"a"}),
        (["a", "a"], ["b"], set()),
        (["a", "b"], ["b"], {"b"}),
    ],
)
def test_a_name_is_contested_that_two_want(reserved, claimed, contested):
    claims = Claims(reserved, claimed)
    assert all(name in claims for name in (*reserved, *claimed))
    assert "c" not in claims
    assert {name for name in "abc" if claims.is_contested(name)} == contested


@dataclass
class Trivial:
    """An engine that does nothing with many files."""

    scratch: Path
    is_grouped: bool = True

    def run_jobs(
        self, jobs: Iterable[Job], on_done: Callable[[Done], None], on_wait: Callable[[int], None] = lambda count: None
    ) -> None:
        """One after the other."""
        for job in jobs:
            record = job.record(Outcome.FINE, output=job.output)
            on_done(Done(job.number, record, line_of({"source": job.item.name, "layers": []})))


@pytest.mark.slow
def test_the_objects_of_the_driver_do_not_grow_with_the_zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def held(count: int) -> int:
        """The bytes of Python's objects at their peak, in a run of so many files, and in a second one."""

        def walk(self: LocalPlace) -> Iterator[Entry]:
            return (
                Entry(f"family{number // 10:06}/model{number:07}.pth", number, str(number)) for number in range(count)
            )

        monkeypatch.setattr(LocalPlace, "walk", walk)
        tracemalloc.start()
        try:
            for done in (0, count):
                with migrate(str(tmp_path / "old"), str(tmp_path / f"new{count}"), engine=Trivial) as migration:
                    assert migration.summary.earlier_files == done
                    assert sum(1 for _ in migration.records()) == count
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    (tmp_path / "old").mkdir()
    held(1000)  # what is imported, and kept once, comes with the first
    assert held(25_000) - held(5_000) < 20_000 * 50, "a name and its entry alone would be more"
