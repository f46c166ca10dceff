"""FIL106: parts of a module that its state_dict lacks are reported."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.core.finding import Level
from tests.checks import check_noop


class Detector(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Linear(width, 4)
        self.register_buffer("anchors", torch.randn(30))
        self.grid = torch.randn(6)
        self.levels = [torch.randn(2), torch.randn(2)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x) + self.grid.sum() + self.levels[0].sum()
        return out


def found(module: torch.jit.ScriptModule, folder: Path) -> list[ckptfix.Report]:
    module.save(str(folder / "model.pt"))
    return [ckptfix.check(folder / "model.pt", select=("FIL106",))]


def test_noop_in_memory() -> None:
    check_noop({"weight": torch.ones(2, 2)}, "FIL106")


@pytest.mark.parametrize("trace", [False, True], ids=["scripted", "traced"])
def test_noop_a_module_of_which_nothing_is_frozen(trace: bool, tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
    (report,) = found(torch.jit.trace(module, torch.ones(1, 2)) if trace else torch.jit.script(module), tmp_path)
    assert report.findings == ()


@pytest.mark.parametrize("build", [lambda: nn.LSTM(3, 4), lambda: nn.TransformerEncoderLayer(4, 2, 8)])
def test_noop_what_torch_keeps_twice(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    (report,) = found(torch.jit.script(build()), tmp_path)
    assert report.findings == ()
    torch.save(build(), tmp_path / "whole.pth")
    assert ckptfix.check(tmp_path / "whole.pth", select=("FIL106",)).findings == ()


@pytest.mark.parametrize(("width", "level"), [(1, Level.NOTE), (20, Level.WARNING)], ids=["a small part", "the most"])
@pytest.mark.parametrize("scripted", [True, False], ids=["scripted", "whole"])
def test_attributes_that_outweigh_the_state_dict(scripted: bool, width: int, level: Level, tmp_path: Path) -> None:
    module = Detector(4)
    module.grid = torch.randn(width, 3)
    if scripted:
        (report,) = found(torch.jit.script(module), tmp_path)
    else:
        torch.save({"model": module, "ema": module}, tmp_path / "whole.pth")
        report = ckptfix.check(tmp_path / "whole.pth", select=("FIL106",))
    assert [(finding.level, finding.keys) for finding in report.findings] == [(level, ("grid", "levels"))]
    if level is Level.WARNING:
        assert report.findings[0].message.endswith("left out: 64 elements in attributes, and 50 elements with names")
    assert report.exit_code == int(level is Level.WARNING)


def test_attributes_are_named(tmp_path: Path) -> None:
    (report,) = found(torch.jit.script(Detector(2)), tmp_path)
    assert [(finding.level, finding.keys) for finding in report.findings] == [(Level.NOTE, ("grid", "levels"))]
    assert report.exit_code == 0


@pytest.mark.parametrize(("width", "level"), [(2, Level.NOTE), (20, Level.WARNING)], ids=["a small part", "the most"])
def test_what_was_frozen_is_reported(width: int, level: Level, tmp_path: Path) -> None:
    module = torch.jit.freeze(torch.jit.script(Detector(width).eval()), preserved_attrs=["anchors"])
    (report,) = found(module, tmp_path)
    (finding,) = report.findings
    assert finding.level == level
    assert "have no names, so the state_dict lacks them" in finding.message or level is Level.NOTE
    assert "and 30 elements with names" in finding.message
    assert report.exit_code == int(level is Level.WARNING)
