"""One job, whatever its file is."""

from __future__ import annotations

import hashlib
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfix
from ckptfix.zoo import performing
from ckptfix.zoo.job import Done, Job, Workplace
from ckptfix.zoo.listing import Item, Kind, list_zoo
from ckptfix.zoo.manifest import Outcome
from ckptfix.zoo.performing import perform
from ckptfix.zoo.places import open_place
from ckptfix.zoo.planning import Plan
from ckptfix.zoo.table import Treatment, plain_table
from tests.zoo.zoos import weights


def done(folder: Path, name: str, content: Any, **settings: Any) -> Done:
    """The job of one file, done by itself."""
    for each in ("old", "new", "scratch"):
        (folder / each).mkdir(exist_ok=True)
    if isinstance(content, bytes):
        (folder / "old" / name).write_bytes(content)
    else:
        torch.save(content, folder / "old" / name)
    items = list_zoo(open_place(str(folder / "old")))
    plan = Plan(items, {}, plain_table(settings), str(folder / "old"), str(folder / "new"))
    (job,) = plan.todo(None, lambda name: None, lambda item, known: None)
    result = perform(job, folder / "scratch")
    assert result.staged == ()
    assert list((folder / "scratch").iterdir()) == []
    return result


def test_a_fine_file_is_copied_with_its_dates(tmp_path):
    record = done(tmp_path, "a.pth", weights(1)).record
    old, new = tmp_path / "old/a.pth", tmp_path / "new/a.pth"
    assert (record.outcome, new.read_bytes()) == (Outcome.FINE, old.read_bytes())
    assert record.sha256 == record.output_sha256 == hashlib.sha256(old.read_bytes()).hexdigest()
    assert old.stat().st_mtime_ns == new.stat().st_mtime_ns
    assert record.peak_memory
    assert record.peak_memory > 1 << 20


def test_a_repaired_file_is_what_repair_writes(tmp_path):
    result = done(tmp_path, "a.pth", {"state_dict": weights(1, "module.")})
    ckptfix.repair(tmp_path / "old/a.pth", output=tmp_path / "mine.pth")
    assert result.record.outcome is Outcome.REPAIRED
    assert (tmp_path / "new/a.pth").read_bytes() == (tmp_path / "mine.pth").read_bytes()
    assert {finding["code"] for finding in result.record.findings} == {"KEY102"}
    assert all("fix" not in finding for finding in result.record.findings)
    assert result.weights


def test_shards_come_with_their_index(tmp_path):
    record = done(tmp_path, "a.pth", weights(1), shard_size="2KB", format="safetensors").record
    assert record.output == "a.safetensors.index.json"
    assert sorted(record.output_parts) == sorted(path.name for path in (tmp_path / "new").iterdir())
    assert ckptfix.open_checkpoint(tmp_path / "new" / str(record.output)).keys() == list(weights(1))


def test_a_changing_source_is_not_written_down_as_what_it_was(tmp_path, monkeypatch):
    treated = performing.treated

    def slow(job: Any, path: Path, workplace: Any) -> Done:
        result = treated(job, path, workplace)
        path.write_bytes(path.read_bytes() + b"more")
        return result

    monkeypatch.setattr(performing, "treated", slow)
    record = done(tmp_path, "a.pth", weights(1)).record
    assert (record.outcome, record.output) == (Outcome.FAILED, None)
    assert "changed while it was read" in str(record.error)
    assert list((tmp_path / "new").iterdir()) == []


def test_a_bug_of_ours_ends_one_job(tmp_path, monkeypatch):
    monkeypatch.setattr(performing, "treated", lambda *args: 1 // 0)
    record = done(tmp_path, "a.pth", weights(1)).record
    assert record.outcome is Outcome.FAILED
    assert "bug of ckptfix" in str(record.error)


DECISIONS = {
    "what is not finite is set to zero": ("nan", "--zero-non-finite"),
    "a damaged file is salvaged": ("cut", "--salvage"),
    "code is disarmed": ("evil", "--disarm"),
}


@pytest.mark.parametrize(("what", "flags"), DECISIONS.values(), ids=DECISIONS)
def test_the_command_says_what_to_do(what, flags, tmp_path):
    from tests.zoo import zoos

    zoo = zoos.build(tmp_path / "zoo", Path(__file__).parents[2] / "sample_checkpoints")
    record = done(tmp_path, f"{what}.pth", (zoo / f"broken/{what}.pth").read_bytes()).record
    folders = shlex.join((str(tmp_path / "old"), str(tmp_path / "new")))
    assert record.command in (f"ckptfix migrate {folders} --only {what}.pth {flags}", None)
    assert record.outcome is (Outcome.UNREADABLE if what == "cut" else Outcome.DECISION)
    assert (record.command is None) == (what == "cut" and "--salvage" not in str(record.error))
    assert str(tmp_path) not in str(record.error)


@pytest.mark.parametrize(
    ("source", "text", "shown"),
    [
        (
            ".",
            "it names the file '../x.safetensors', which leads out",
            "it names the file '../x.safetensors', which leads out",
        ),
        ("old", "old/a.pth: cannot be read", "a.pth: cannot be read"),
        ("old", "threshold/a.pth and 'old/b.pth'", "threshold/a.pth and 'b.pth'"),
        ("/zoo/old", "/zoo/old/deep/a.pth: is cut short", "deep/a.pth: is cut short"),
        ("old", "/tmp/7.source/a.pth: no (/tmp/7.draft.pth)", "a.pth: no (draft.pth)"),
    ],
    ids=["the working directory", "relative", "part of another name", "absolute", "temporary"],
)
def test_messages_have_the_names_of_the_zoo(source, text, shown):
    job = Job(7, Item("a.pth", 1, "s", Kind.FILE), source, "new", Treatment(), "a.pth", "x")
    assert job.shown(text, Workplace(Path("/tmp"), 7)) == shown
