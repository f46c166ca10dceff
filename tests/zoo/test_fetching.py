"""An item is opened in place, or as a temporary copy."""

from dataclasses import dataclass
from pathlib import Path
from threading import Barrier
from typing import cast

import fsspec
import pytest

from ckptfix.bytes.transfers import AbsentError
from ckptfix.errors import CkptfixError
from ckptfix.zoo.items import Item, ItemKind, list_zoo, on_this_machine
from ckptfix.zoo.places import Entry, Place, open_place
from ckptfix.zoo.survey import each_on_this_machine


def test_what_lies_here_is_not_copied(tmp_path: Path):
    (tmp_path / "a.pth").write_bytes(b"weights")
    place = open_place(str(tmp_path))
    with on_this_machine(place, list_zoo(place)[0], tmp_path / "scratch") as path:
        assert path == tmp_path / "a.pth"
        assert not (tmp_path / "scratch").exists()
    assert path.read_bytes() == b"weights"


def test_what_lies_far_away_is_copied_and_the_copy_is_gone_at_the_end(tmp_path: Path, memory: str):
    with fsspec.open(f"{memory}/a.pth", "wb") as file:
        file.write(b"weights")
    place = open_place(memory)
    item = list_zoo(place)[0]
    with on_this_machine(place, item, tmp_path / "scratch") as path:
        assert path == tmp_path / "scratch" / "a.pth"
        assert path.read_bytes() == b"weights"
    assert not (tmp_path / "scratch").exists()
    with fsspec.open(f"{memory}/a.pth", "wb") as file:
        file.write(b"other weights")
    with pytest.raises(CkptfixError), on_this_machine(place, item, tmp_path / "scratch"):
        pass
    assert not (tmp_path / "scratch").exists()


@dataclass
class Slow:
    """Files far away that come in company: each waits for ``barrier``."""

    barrier: Barrier | None = None
    root: None = None

    def fetch(self, name: str, to: Path, known: Entry | None = None) -> None:
        if name == "absent.pth":
            raise AbsentError(f"{name}: is not there")
        if self.barrier is not None:
            self.barrier.wait(timeout=120)
        to.write_bytes(name.encode())


def far(barrier: Barrier | None = None) -> Place:
    return cast(Place, Slow(barrier))


def items(*sizes: int) -> list[Item]:
    return [Item(f"{number}.pth", size, "s", ItemKind.FILE) for number, size in enumerate(sizes)]


def test_what_lies_here_is_given_as_it_is(tmp_path: Path):
    place = open_place(str(tmp_path))
    paths = list(each_on_this_machine(place, items(1, 2), tmp_path / "scratch", 0))
    assert paths == [tmp_path / "0.pth", tmp_path / "1.pth"]
    assert not (tmp_path / "scratch").exists()


def test_several_are_fetched_at_the_same_time_and_come_in_their_order(tmp_path: Path):
    barrier = Barrier(4)
    found = each_on_this_machine(far(barrier), items(1, 1, 1, 1), tmp_path / "scratch", 100)
    texts = [path.read_text() for path in found if isinstance(path, Path)]
    assert texts == ["0.pth", "1.pth", "2.pth", "3.pth"]
    assert list((tmp_path / "scratch").iterdir()) == []


def test_copies_take_no_more_room_than_they_may_except_for_one_alone(tmp_path: Path):
    place, scratch = far(), tmp_path / "scratch"
    there = [
        sorted(path.name for path in scratch.glob("*/*"))
        for _ in each_on_this_machine(place, items(4, 4, 90, 4), scratch, 10)
    ]
    assert [names for names in there if "2.pth" in names] == [["2.pth"]]
    assert there[-1] == ["3.pth"]


def test_what_cannot_be_fetched_says_so_in_its_turn(tmp_path: Path):
    absent = Item("absent.pth", 1, "s", ItemKind.FILE)
    first, second = each_on_this_machine(far(), [absent, *items(1)], tmp_path / "scratch", 10)
    assert isinstance(first, AbsentError)
    assert isinstance(second, Path)
