"""One job, with any kind of file."""

import hashlib
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

import ckptfix
from ckptfix.zoo import performing
from ckptfix.zoo.items import Item, ItemKind, list_zoo
from ckptfix.zoo.job import Done, Job, JobFiles
from ckptfix.zoo.manifest import Outcome
from ckptfix.zoo.migrating import migrate
from ckptfix.zoo.performing import perform
from ckptfix.zoo.places import open_place
from ckptfix.zoo.planning import MigrationPlan
from ckptfix.zoo.zoo_toml import Table, Treatment, plain_table, treatment_of_choices
from tests.zoo.zoos import Alone, weights


def done(folder: Path, name: str, content: Any, **settings: Any) -> Done:
    """The job of one file, done by itself."""
    for each in ("old", "new", "scratch"):
        (folder / each).mkdir(exist_ok=True)
    if isinstance(content, bytes):
        (folder / "old" / name).write_bytes(content)
    else:
        torch.save(content, folder / "old" / name)
    items = list_zoo(open_place(str(folder / "old")))
    plan = MigrationPlan(items, {}, plain_table(settings), str(folder / "old"), str(folder / "new"))
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
    repair_item = performing.repair_item

    def slow(job: Any, path: Path, files: Any) -> Done:
        result = repair_item(job, path, files)
        path.write_bytes(path.read_bytes() + b"more")
        return result

    monkeypatch.setattr(performing, "repair_item", slow)
    record = done(tmp_path, "a.pth", weights(1)).record
    assert (record.outcome, record.output) == (Outcome.FAILED, None)
    assert "changed while it was read" in str(record.error)
    assert list((tmp_path / "new").iterdir()) == []


def test_a_verified_file_at_a_url_leaves_no_copies(memory, tmp_path):
    torch.save(weights(1), tmp_path / "a.pth")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    source = open_place(f"{memory}/old")
    source.put(tmp_path / "a.pth", "deep/a.pth")
    plan = MigrationPlan(list_zoo(source), {}, Table(), f"{memory}/old", f"{memory}/new")
    (job,) = plan.todo(None, lambda name: None, lambda item, known: None)
    first = perform(job, scratch)
    again = perform(replace(job, known=first.record), scratch)
    assert (first.record.outcome, again.is_known) == (Outcome.FINE, True)
    assert list(scratch.iterdir()) == []


def test_a_bug_of_ours_ends_one_job(tmp_path, monkeypatch):
    monkeypatch.setattr(performing, "repair_item", lambda *args: 1 // 0)
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
        ("old", "/tmp/7.drafts/a.pth: no space", "a.pth: no space"),
        ("old", "/tmp/7.source/a.pth: no (/tmp/7.draft.pth)", "a.pth: no (a.pth)"),
        ("old", "old/a: use ckptfix repair 'old/a b/c.pt' -o d", "a: use ckptfix repair 'old/a b/c.pt' -o d"),
        ("s3://zoo", "use ckptfix repair /tmp/7.source/a.pt", "use ckptfix repair s3://zoo/a.pt"),
    ],
    ids=["the working directory", "relative", "part", "absolute", "shards", "temporary", "command", "remote command"],
)
def test_messages_have_the_names_of_the_zoo(source, text, shown):
    job = Job(7, Item("a.pth", 1, "s", ItemKind.FILE), source, "new", Treatment(), "a.pth", "x")
    assert job.shown(text, JobFiles(Path("/tmp"), 7)) == shown


def flip(file: Path, tensor: torch.Tensor) -> None:
    """Damage the bytes of a tensor."""
    raw = bytearray(file.read_bytes())
    raw[raw.index(tensor.numpy().tobytes()) + 3] ^= 1
    file.write_bytes(raw)


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    folder = tmp_path / "old"
    folder.mkdir()
    save_file({name: torch.arange(64.0) for name in "abcd"}, folder / "cut.safetensors")
    os.truncate(folder / "cut.safetensors", (folder / "cut.safetensors").stat().st_size - 300)
    torch.save({"w": torch.tensor([1.0, float("nan")])}, folder / "nan.pth")
    torch.save({"a": torch.arange(64.0), "b": torch.arange(100.0, 164.0)}, folder / "flipped.pth")
    flip(folder / "flipped.pth", torch.arange(100.0, 164.0))
    return folder


def run(zoo: Path, only: str | None = None, **flags: object) -> dict[str, dict[str, Any]]:
    decided = plain_table(flags) if flags else None
    listed = None if only is None else [only]
    with migrate(str(zoo), str(zoo.parent / "new"), listed=listed, decided=decided, engine=Alone) as migration:
        return {line["source"]: line for line in migration.records()}


def flags_of(command: object) -> list[str]:
    return shlex.split(str(command))[6:]


def test_a_command_repeats_what_was_decided_before(zoo):
    assert flags_of(run(zoo)["cut.safetensors"]["command"]) == ["--salvage"]
    salvaged = run(zoo, "cut.safetensors", salvage=True)["cut.safetensors"]
    assert salvaged["outcome"] == "needs a decision"
    assert sorted(flags_of(salvaged["command"])) == ["--accept", "--salvage", "FIL203"]
    taken = run(zoo, "cut.safetensors", salvage=True, accept=["FIL203"])["cut.safetensors"]
    assert (taken["outcome"], taken["command"]) == ("accepted", None)
    assert sorted(load_file(zoo.parent / "new" / "cut.safetensors")) == ["a", "b"]


def test_what_was_left_out_as_damaged_stays_out_when_that_is_accepted(zoo):
    assert flags_of(run(zoo)["flipped.pth"]["command"]) == ["--salvage"]
    salvaged = run(zoo, "flipped.pth", salvage=True)["flipped.pth"]
    assert sorted(flags_of(salvaged["command"])) == ["--accept", "--salvage", "FIL201"]
    taken = run(zoo, "flipped.pth", salvage=True, accept=["FIL201"])["flipped.pth"]
    assert (taken["outcome"], taken["command"]) == ("accepted", None)
    assert list(torch.load(zoo.parent / "new" / "flipped.pth")) == ["a"]


def test_a_repair_comes_before_the_word_that_a_file_is_kept_as_it_is(zoo):
    line = run(zoo)["nan.pth"]
    ways = [way["options"] for way in line["decisions"] if way["command"]]
    assert ways == [{"zero_non_finite": True}, {"accept": ["VAL101"]}]
    assert line["command"] == line["decisions"][0]["command"]
    assert {"replace": ["VAL101"], "fill": "FILE"} in [way["options"] for way in line["decisions"]]
    for way in line["decisions"]:
        if way["command"]:
            done = run(zoo, "nan.pth", **way["options"])["nan.pth"]
            assert done["outcome"] == ("accepted" if "accept" in way["options"] else "repaired")


def test_to_accept_is_the_last_way_also_if_a_repair_needs_a_file(zoo):
    weights = torch.randn(4, 64, 64)
    weights[2] *= 1e-9
    torch.save({f"layers.{at}.weight": weight for at, weight in enumerate(weights)}, zoo / "decayed.pth")
    ways = [way["options"] for way in run(zoo)["decayed.pth"]["decisions"]]
    assert "FILE" in ways[0].values()
    assert [way for way in ways if "accept" in way] == ways[-1:]


def test_each_choice_comes_with_what_else_has_to_be_settled(tmp_path):
    """Each recipe by itself would leave the key that the model does not have."""
    model = {"pos_embed": torch.randn(1, 17, 8), "cls_token": torch.randn(1, 1, 8), "fc.weight": torch.randn(64, 8)}
    torch.save(model, tmp_path / "model.pth")
    file = {**model, "pos_embed": torch.randn(1, 5, 8), "old.bias": torch.randn(3)}
    record = done(tmp_path, "a.pth", file, like=str(tmp_path / "model.pth")).record
    ways = [each["options"] for each in record.decisions if each["command"]]
    recipes = [way["adapt"] for way in ways if {"adapt", "unsafe_fixes"} <= way.keys()]
    assert len(recipes) > 1
    assert ways[: len(recipes)] == [{"adapt": recipe, "unsafe_fixes": True} for recipe in recipes]


def test_values_of_an_earlier_checkpoint_are_not_those_of_the_model(zoo):
    lines = run(zoo, fill="target", like=str(zoo / "flipped.pth"))
    ways = [way["options"] for way in lines["nan.pth"]["decisions"] if "replace" in way["options"]]
    assert ways
    assert all(way["fill"] == "FILE" for way in ways)


def test_a_fill_has_its_price(tmp_path):
    record = done(
        tmp_path, "a.pth", {"weight": torch.ones(2, 2)}, model="tests.zoo.factories:linear", smoke=False
    ).record
    first = record.decisions[0]
    assert first["options"] == {"fill": "target"}
    assert first["price"].endswith("untrained: 33.33 % of the model")


def test_what_is_accepted_stays_in_the_manifest_when_it_is_made_again(zoo):
    new = zoo.parent / "new" / "nan.pth"
    run(zoo)
    decided = run(zoo, "nan.pth", accept=["VAL"])["nan.pth"]
    assert (decided["outcome"], decided["decisions"]) == ("accepted", [])
    assert [(each["code"], each["accepted"]) for each in decided["findings"]] == [("VAL101", True)]
    new.unlink()
    again = run(zoo)["nan.pth"]
    assert new.read_bytes() == (zoo / "nan.pth").read_bytes()
    assert (again["outcome"], again["decision"]) == ("accepted", decided["decision"])


def test_noop_what_is_accepted_and_not_there_changes_nothing(zoo):
    torch.save({"w": torch.ones(3)}, zoo / "fine.pth")
    line = run(zoo, "fine.pth", accept=["VAL101"])["fine.pth"]
    assert (line["outcome"], line["findings"]) == ("already fine", [])


def test_what_forbids_to_write_is_not_accepted(zoo):
    line = run(zoo, "flipped.pth", accept=["FIL201"])["flipped.pth"]
    assert (line["outcome"], line["output"]) == ("needs a decision", None)
    assert all("accept" not in way["options"] for way in line["decisions"])


@pytest.mark.slow
def test_a_forward_test_that_failed_is_accepted_with_its_findings(tmp_path):
    zoo = tmp_path / "old"
    zoo.mkdir()
    torch.save({"module.weight": torch.full((2, 2), float("nan")), "module.bias": torch.ones(2)}, zoo / "a.pth")
    model = {"model": "tests.zoo.factories:linear", "input": ["1x2"]}
    table = plain_table(model)
    with migrate(str(zoo), str(tmp_path / "new"), table, engine=Alone) as migration:
        (line,) = migration.records()
    assert line["outcome"] == "needs a decision"
    keep = next(way for way in line["decisions"] if "accept" in way["options"])
    assert {code[:3] for code in keep["options"]["accept"]} == {"VAL", "RUN"}
    decided = plain_table({**model, **keep["options"]})
    with migrate(str(zoo), str(tmp_path / "new"), table, decided=decided, listed=["a.pth"], engine=Alone) as migration:
        (line,) = migration.records()
    assert (line["outcome"], line["smoke"]["passed"]) == ("accepted", False)
    assert list(torch.load(tmp_path / "new/a.pth")) == ["weight", "bias"]


def test_a_decision_ends_with_the_file_that_it_was_for(zoo):
    run(zoo, "nan.pth", ignore=["VAL101"])
    torch.save({"w": torch.tensor([float("inf"), 2.0, 3.0])}, zoo / "nan.pth")
    again = run(zoo)["nan.pth"]
    assert (again["outcome"], again["decision"]) == ("needs a decision", None)


def test_what_the_table_ignores_stays_ignored(zoo):
    table = plain_table({"ignore": ["KEY"]})
    with migrate(str(zoo), str(zoo.parent / "new"), table, engine=Alone) as migration:
        commands = {line["source"]: line["command"] for line in migration.records()}
    assert flags_of(commands["nan.pth"]) == ["--zero-non-finite"], "the table goes on saying what it ignores"


def test_a_decision_whose_file_is_gone_is_asked_for_again(zoo):
    other = zoo.parent / "other.pth"
    torch.save({"w": torch.tensor([1.0, 2.0])}, other)
    assert run(zoo, "nan.pth", fill=str(other), replace=["VAL101"])["nan.pth"]["outcome"] == "repaired"
    other.unlink()
    (zoo.parent / "new" / "nan.pth").unlink()
    again = run(zoo)["nan.pth"]
    assert (again["outcome"], again["decision"]) == ("needs a decision", None)


@pytest.mark.slow
def test_what_the_machine_is_to_blame_for_is_tried_again(tmp_path):
    """The forward test of one file takes more memory than there is; the others are done."""
    zoo, marker = tmp_path / "old", tmp_path / "more memory"
    zoo.mkdir()
    torch.save(torch.nn.Linear(2, 2).state_dict(), zoo / "large.pth")
    torch.save({"w": torch.arange(4.0)}, zoo / "small.pth")
    model = {"model": "tests.zoo.factories:starved", "model_args": [str(marker)], "input": ["1x2"]}
    table = Table((treatment_of_choices(("large.pth",), model, None, ""),))
    for outcome, code in ((Outcome.FAILED, 2), (Outcome.FINE, 0)):
        with migrate(str(zoo), str(tmp_path / "new"), table, engine=Alone) as migration:
            assert migration.summary.exit_code == code
            large, small = migration.records()
        assert (large["outcome"], small["outcome"]) == (outcome.value, "already fine")
        if outcome is Outcome.FAILED:
            assert re.search("memory.*run the same command again", large["error"])
            assert flags_of(large["command"]) == ["--no-smoke"]
            assert not (tmp_path / "new" / "large.pth").exists()
        marker.touch()
