"""FIL104: what a safetensors file cannot carry."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ckptfix
from ckptfix.core.finding import Level


def saved(folder: Path, **extras: Any) -> Path:
    torch.save({"state_dict": nn.Linear(2, 2).state_dict(), **extras}, folder / "file.pth")
    return folder / "file.pth"


def optimizer() -> dict[str, Any]:
    return {"state": {0: {"momentum_buffer": torch.ones(2)}}, "param_groups": [{"lr": 0.1}]}


@pytest.mark.parametrize(
    ("extras", "settings"),
    [
        pytest.param({"optimizer": optimizer()}, {}, id="the format stays"),
        pytest.param({"optimizer": optimizer()}, {"format": "pth"}, id="a format that holds it"),
        pytest.param({"epoch": 3, "names": ("a", "b")}, {"format": "safetensors"}, id="plain data goes along"),
        pytest.param({"args": Path("x")}, {"format": "safetensors"}, id="a path becomes text"),
    ],
)
def test_noop(tmp_path, extras, settings):
    assert ckptfix.check(saved(tmp_path, **extras), select=("FIL104",), **settings).findings == ()


@pytest.mark.parametrize(
    ("header", "form", "lost"),
    [
        pytest.param({"format": "pt"}, "pth", [], id="what all files have"),
        pytest.param({"ss_epoch": "3"}, "safetensors", [], id="the format stays"),
        pytest.param({"format": "pt", "ss_epoch": "3"}, "pth", ["ss_epoch"], id="another format"),
    ],
)
def test_the_text_of_a_header(tmp_path: Path, header: dict[str, str], form: str, lost: list[str]) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "in.safetensors", header)
    report = ckptfix.repair(tmp_path / "in.safetensors", output=tmp_path / f"out.{form}").report
    assert [(found.level, found.evidence["header"]) for found in report.findings] == [(Level.NOTE, lost)] * bool(lost)
    assert report.exit_code == 0


def test_an_optimizer_is_named(tmp_path):
    file = saved(tmp_path, optimizer=optimizer(), epoch=3)
    (finding,) = ckptfix.check(file, select=("FIL104",), format="safetensors").findings
    assert (finding.level, finding.fix) == (Level.NOTE, None)
    assert "cannot carry optimizer," in finding.message
    assert finding.evidence == {"places": ["optimizer"]}


@pytest.mark.parametrize("how", [{"output": "out.safetensors"}, {"beside": True, "format": "safetensors"}])
def test_the_suffix_of_the_output_says_the_format_too(tmp_path, how):
    file = saved(tmp_path, optimizer=optimizer(), epoch=3)
    if "output" in how:
        how = {"output": tmp_path / how["output"]}
    report = ckptfix.repair(file, **how).report
    assert [finding.code for finding in report.findings] == ["FIL104"]
    assert report.exit_code == 0
    assert report.output is not None
    assert report.output.endswith(".safetensors")
    root: Any = ckptfix.open_checkpoint(report.output).root
    assert root.keys() == {"state_dict", "epoch"}


@pytest.mark.parametrize(
    ("entry", "is_weight"),
    [
        ({"step": torch.tensor(7, dtype=torch.int32), "ntokens_seen": torch.tensor(512)}, False),
        ({"dp_rank_0": b"state", "world_size": 1}, False),
        ({"step": torch.tensor(7), "scale": torch.ones(4)}, True),
        ({"scale": torch.tensor(7)}, True),
    ],
    ids=["counters of torchtitan", "data loader of torchtitan", "with a larger tensor", "no step"],
)
def test_counters_among_the_weights_are_no_weights(tmp_path, entry, is_weight):
    """As in the file that torch's dcp_to_torch_save makes of a folder of torchtitan."""
    weights = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).state_dict()
    torch.save({**weights, "train_state": entry}, tmp_path / "file.pth")
    (finding,) = ckptfix.check(tmp_path / "file.pth", select=("FIL104",), format="safetensors").findings
    assert finding.level is (Level.ERROR if is_weight else Level.NOTE)
    assert [*finding.keys, *finding.evidence.get("places", ())] == ["train_state"]


def test_many_places_are_cut(tmp_path):
    file = saved(tmp_path, **{f"t{n}": torch.ones(1) for n in range(6)})
    (finding,) = ckptfix.check(file, select=("FIL104",), format="safetensors").findings
    assert "t0, t1, t2, t3 and 2 more" in finding.message
