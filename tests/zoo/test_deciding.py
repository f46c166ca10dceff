"""The commands that a migration prints carry out what they say, one after another."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptfix.zoo.manifest import Outcome
from ckptfix.zoo.migrating import migrate
from ckptfix.zoo.table import Table, plain_table, treatment_of_choices
from tests.zoo.zoos import Alone


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
