"""The commands that a migration prints carry out what they say, one after another."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

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


def run(zoo: Path, only: str | None = None, **flags: object) -> dict[str, dict[str, object]]:
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
    assert flags_of(salvaged["command"]) == ["--salvage", "--ignore", "FIL203"]
    taken = run(zoo, "cut.safetensors", salvage=True, ignore=["FIL203"])["cut.safetensors"]
    assert (taken["outcome"], taken["command"]) == ("repaired", None)
    assert sorted(load_file(zoo.parent / "new" / "cut.safetensors")) == ["a", "b"]


def test_what_was_left_out_as_damaged_stays_out_when_that_is_accepted(zoo):
    assert flags_of(run(zoo)["flipped.pth"]["command"]) == ["--salvage"]
    salvaged = run(zoo, "flipped.pth", salvage=True)["flipped.pth"]
    assert flags_of(salvaged["command"]) == ["--salvage", "--ignore", "FIL201"]
    taken = run(zoo, "flipped.pth", salvage=True, ignore=["FIL201"])["flipped.pth"]
    assert (taken["outcome"], taken["command"]) == ("repaired", None)
    assert list(torch.load(zoo.parent / "new" / "flipped.pth")) == ["a"]


def test_what_is_taken_as_it_is_stays_so_when_it_is_made_again(zoo):
    new = zoo.parent / "new" / "nan.pth"
    assert flags_of(run(zoo)["nan.pth"]["command"]) == ["--ignore", "VAL101"]
    decided = run(zoo, "nan.pth", ignore=["VAL101"])["nan.pth"]
    assert decided["outcome"] == "already fine"
    new.unlink()
    again = run(zoo)["nan.pth"]
    assert new.read_bytes() == (zoo / "nan.pth").read_bytes()
    assert (again["outcome"], again["decision"]) == ("already fine", decided["decision"])


def test_a_decision_ends_with_the_file_that_it_was_for(zoo):
    run(zoo, "nan.pth", ignore=["VAL101"])
    torch.save({"w": torch.tensor([float("inf"), 2.0, 3.0])}, zoo / "nan.pth")
    again = run(zoo)["nan.pth"]
    assert (again["outcome"], again["decision"]) == ("needs a decision", None)


def test_what_the_table_ignores_stays_ignored(zoo):
    table = plain_table({"ignore": ["KEY"]})
    with migrate(str(zoo), str(zoo.parent / "new"), table, engine=Alone) as migration:
        commands = {line["source"]: line["command"] for line in migration.records()}
    assert flags_of(commands["nan.pth"]) == ["--ignore", "KEY,VAL101"]


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
