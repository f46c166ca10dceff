"""What is to be done with each item, and under which name."""

from typing import Any

import pytest
from msgspec.structs import replace

from ckptfix.zoo.items import Item, ItemKind
from ckptfix.zoo.job import Job
from ckptfix.zoo.manifest import Outcome, Record
from ckptfix.zoo.places import Entry
from ckptfix.zoo.planning import MigrationPlan
from ckptfix.zoo.zoo_toml import plain_table


def item(name: str, size: int = 1, kind: ItemKind = ItemKind.FILE, parts: tuple[str, ...] = ()) -> Item:
    return Item(name, size, "s", kind, tuple(Entry(part, 1, "s") for part in parts))


def jobs(*items: Item, known: dict[str, Record] | None = None, sizes: Any = (), **settings: Any) -> dict[str, Job]:
    plan = MigrationPlan(list(items), known or {}, plain_table(settings), "/old", "/new")
    return {job.item.name: job for job in plan.todo(None, dict(sizes).get, lambda item, known: None)}


def test_the_largest_come_first():
    assert list(jobs(item("a", 1), item("c", 9), item("b", 9))) == ["b", "c", "a"]


def test_names_are_mirrored_and_follow_the_format():
    assert jobs(item("x/a.pth"))["x/a.pth"].output == "x/a.pth"
    assert jobs(item("x/a.pth"), format="safetensors")["x/a.pth"].output == "x/a.safetensors"
    assert (
        jobs(item("x/notes.pth.gz", kind=ItemKind.OTHER), format="safetensors")["x/notes.pth.gz"].output
        == "x/notes.pth.gz"
    )


CLASHES = {
    "none": ([item("a.pth"), item("b.pth")], {}, set()),
    "two of one name": ([item("a.pth"), item("a.pt"), item("b.pth")], {"format": "safetensors"}, {"a.pth", "a.pt"}),
    "packed beside the file itself": ([item("a.pth"), item("a.pth.gz")], {}, {"a.pth", "a.pth.gz"}),
    "a folder that would become a file": (
        [item("run", kind=ItemKind.FOLDER, parts=("run/.metadata", "run/0.distcp")), item("run.pth")],
        {},
        {"run"},
    ),
    "a name that the books have": ([item("manifest.jsonl", kind=ItemKind.OTHER)], {}, set()),
    "and the name that it gets": (
        [item("manifest.jsonl", kind=ItemKind.OTHER), item("manifest.old.jsonl", kind=ItemKind.OTHER)],
        {},
        {"manifest.jsonl", "manifest.old.jsonl"},
    ),
    "another file beside a checkpoint": (
        [item("a.bin", kind=ItemKind.OTHER), item("a.bin.gz")],
        {},
        {"a.bin", "a.bin.gz"},
    ),
}


@pytest.mark.parametrize(("items", "settings", "taken"), CLASHES.values(), ids=CLASHES)
def test_names_that_two_sources_want(items, settings, taken):
    assert {name for name, job in jobs(*items, **settings).items() if job.taken} == taken


def test_a_run_for_some_files_leaves_the_outputs_of_the_others():
    known = {"a.pt": Record("a.pt", 1, "s", "x", Outcome.REPAIRED, output="a.pth", output_size=1)}
    assert jobs(item("a.pth"), known=known)["a.pth"].taken == ("a.pth",)


def settings_of(one: Item) -> str:
    return jobs(one)[one.name].settings


def known(outcome: Outcome, output: str | None = "a.pth", size: int | None = 7, **more: Any) -> Record:
    settings = settings_of(item("a.pth"))
    record = Record("a.pth", 1, "s", settings, outcome, sha256="0", output=output, output_size=size)
    return replace(record, **more)


STANDINGS = {
    "fine and there": (known(Outcome.FINE), {"a.pth": 7}, "done"),
    "fine and gone": (known(Outcome.FINE), {}, "again"),
    "fine and of another size": (known(Outcome.FINE), {"a.pth": 8}, "again"),
    "another source": (known(Outcome.FINE, stamp="t"), {"a.pth": 7}, "again"),
    "other settings": (known(Outcome.FINE, settings="t"), {"a.pth": 7}, "again"),
    "failed": (known(Outcome.FAILED, None, None), {}, "again"),
    "unreadable": (known(Outcome.UNREADABLE, None, None), {}, "done"),
    "to decide, written": (known(Outcome.DECISION), {"a.pth": 7}, "done"),
    "to decide, not written": (known(Outcome.DECISION, None, None), {}, "done"),
    "to decide, gone": (known(Outcome.DECISION), {}, "again"),
    "to decide, replaced by hand": (known(Outcome.DECISION), {"a.pth": 9}, "adopted"),
    "to decide, made by hand": (known(Outcome.DECISION, None, None), {"a.pth": 9}, "adopted"),
    "decided": (known(Outcome.FINE, decision={"salvage": True}), {"a.pth": 7}, "done"),
}


@pytest.mark.parametrize(("before", "sizes", "what"), STANDINGS.values(), ids=STANDINGS)
def test_what_an_earlier_run_means(before, sizes, what):
    found = jobs(item("a.pth"), known={"a.pth": before}, sizes=sizes)
    told = "done" if not found else "adopted" if found["a.pth"].adopts else "again"
    assert told == what


def test_what_is_done_already_is_reported_before_the_first_job():
    items, heard = [item("new.pth", 9), item("a.pth")], []
    plan = MigrationPlan(items, {"a.pth": known(Outcome.FINE)}, plain_table(), "/old", "/new")
    todo = plan.todo(None, {"a.pth": 7}.get, lambda one, before: heard.append(one.name))
    assert next(todo).item.name == "new.pth"
    assert heard == ["a.pth"]
    assert list(todo) == []


def test_jobs_are_plain_data():
    import pickle

    job = jobs(item("a.pth"))["a.pth"]
    assert pickle.loads(pickle.dumps(job)) == job
