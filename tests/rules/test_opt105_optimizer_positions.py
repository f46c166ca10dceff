"""``check --optimizer``: which state belongs to which parameter, and how sure that is."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.core.finding import Level
from tests.rules.test_opt104_optimizer_of_another_model import run


def test_noop_unless_asked(tmp_path):
    torch.save(run(nn.Linear(3, 2)), tmp_path / "run.pth")
    assert ckptfix.check(tmp_path / "run.pth").findings == ()


@pytest.mark.parametrize("named", [False, True])
def test_positions_have_names(tmp_path, named):
    model = nn.Linear(3, 2)
    saved = run(model, lambda parameters: torch.optim.AdamW(model.named_parameters() if named else parameters))
    torch.save(saved, tmp_path / "run.pth")
    (finding,) = ckptfix.check(tmp_path / "run.pth", optimizer_positions=True).findings
    assert finding.level is Level.NOTE
    assert finding.keys == ("weight", "bias")
    assert ("certain" in finding.message) is named
    assert finding.evidence["positions"]["weight"] == {
        "id": 0,
        "group": 0,
        "state": {"step": [], "exp_avg": [2, 3], "exp_avg_sq": [2, 3]},
    }


def test_a_repair_shows_the_positions_of_its_result(tmp_path):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 5))
    torch.save(run(model), tmp_path / "run.pth")
    asked: dict[str, Any] = {"optimizer_positions": True, "unsafe_fixes": True}
    report = ckptfix.repair(tmp_path / "run.pth", model[:1], output=tmp_path / "out.pth", **asked).report
    (finding,) = (finding for finding in report.findings if finding.code == "OPT105")
    assert list(finding.evidence["positions"]) == ["0.weight", "0.bias"]


def test_names_that_no_moment_confirms(tmp_path):
    torch.save(run(model := nn.Linear(3, 2), partial(torch.optim.SGD, lr=0.1)), tmp_path / "run.pth")
    (finding,) = ckptfix.check(tmp_path / "run.pth", model, optimizer_positions=True).findings
    assert finding.message.endswith("named by model.parameters(): no moment confirms it")


def test_unknown_positions_are_reported(tmp_path):
    saved = run(nn.Linear(3, 2))
    saved["optimizer"]["param_groups"][0]["params"] = [0, 1, 2]
    torch.save(saved, tmp_path / "run.pth")
    (finding,) = ckptfix.check(tmp_path / "run.pth", optimizer_positions=True).findings
    assert "nothing shows" in finding.message
    assert finding.keys == ()
