"""Moments that are not finite are named, and left out."""

from functools import partial

import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.core.finding import Level
from tests.rules.test_opt104_optimizer_of_another_model import found, run


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_noop_finite_moments(tmp_path, make):
    torch.save(run(nn.Linear(3, 2), make), tmp_path / "run.pth")
    assert found(ckptfix.check(tmp_path / "run.pth"), "OPT103") == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("named", [False, True])
def test_non_finite_state_starts_anew(tmp_path, value, named):
    model = nn.Linear(3, 2)
    saved = run(model, lambda parameters: torch.optim.AdamW(model.named_parameters() if named else parameters))
    saved["optimizer"]["state"][1]["exp_avg"][0] = value
    torch.save(saved, tmp_path / "run.pth")
    assert found(ckptfix.check(tmp_path / "run.pth", values=False), "OPT103") == []
    (finding,) = found(ckptfix.check(tmp_path / "run.pth"), "OPT103")
    assert finding.level is Level.ERROR
    assert finding.evidence["parameters"] == {"1": {"exp_avg": 1}}
    report = ckptfix.repair(tmp_path / "run.pth", output=tmp_path / "out.pth", unsafe_fixes=True).report
    assert report.exit_code == 0
    made = torch.load(tmp_path / "out.pth", weights_only=True)["optimizer"]
    assert made["param_groups"] == saved["optimizer"]["param_groups"]
    assert list(made["state"]) == [0]
    assert str(made["state"][0]) == str(saved["optimizer"]["state"][0])
    again = torch.optim.AdamW(model.parameters())
    again.load_state_dict(made)
    again.step()
    assert ckptfix.repair(tmp_path / "run.pth", keep_optimizer=True).report.exit_code == 0


def test_the_state_in_a_lookahead_keeps_its_name(tmp_path):
    saved = run(nn.Linear(3, 2), torch.optim.AdamW)
    saved["optimizer"]["fast_state"] = state = saved["optimizer"].pop("state")
    state[1]["exp_avg"][0] = float("nan")
    torch.save(saved, tmp_path / "run.pth")
    report = ckptfix.repair(tmp_path / "run.pth", output=tmp_path / "out.pth", unsafe_fixes=True).report
    assert report.exit_code == 0
    made = torch.load(tmp_path / "out.pth", weights_only=True)["optimizer"]
    assert list(made) == ["param_groups", "fast_state"]
    assert list(made["fast_state"]) == [0]


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (partial(torch.optim.Adagrad, initial_accumulator_value=0.5), "sum", 0.5),
        (partial(torch.optim.SGD, momentum=0.9, fused=True), "momentum_buffer", 0.0),
    ],
    ids=["Adagrad", "fused SGD"],
)
def test_an_optimizer_with_initial_state_gets_it_again(tmp_path, make, name, value):
    model = nn.Linear(3, 2)
    saved = run(model, make)
    saved["optimizer"]["state"][0][name][0, 0] = float("nan")
    torch.save(saved, tmp_path / "run.pth")
    ckptfix.repair(tmp_path / "run.pth", output=tmp_path / "out.pth", unsafe_fixes=True)
    made = torch.load(tmp_path / "out.pth", weights_only=True)["optimizer"]
    assert torch.equal(made["state"][0][name], torch.full((2, 3), value))
    assert torch.equal(made["state"][1][name], saved["optimizer"]["state"][1][name])
    again = make(model.parameters())
    again.load_state_dict(made)
    again.step()


def test_no_command_if_the_initial_state_is_unknown(tmp_path):
    saved = run(nn.Linear(3, 2), torch.optim.Adagrad)
    saved["optimizer"]["state"][0]["sum"][0, 0] = float("nan")
    saved["optimizer"]["state"][0]["own"] = torch.ones(2, 3)
    torch.save(saved, tmp_path / "run.pth")
    (finding,) = found(ckptfix.repair(tmp_path / "run.pth", unsafe_fixes=True).report, "OPT103")
    assert finding.fix is None
    assert not any(name == "unsafe_fixes" for remedy in finding.remedies for name, _ in remedy.options)


def test_the_fix_applies_after_other_edits(tmp_path):
    """The state is left out of the optimizer that follows the weights."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(2, 4))
    saved = run(model)
    saved["optimizer"]["state"][4]["exp_avg"][0, 0] = float("nan")
    torch.save(saved, tmp_path / "run.pth")
    target = nn.Sequential(nn.Linear(3, 2), nn.Identity(), nn.Linear(2, 4))
    ckptfix.repair(tmp_path / "run.pth", target, output=tmp_path / "out.pth", unsafe_fixes=True)
    made = torch.load(tmp_path / "out.pth", weights_only=True)["optimizer"]
    assert made["param_groups"][0]["params"] == [0, 1, 2, 3]
    assert list(made["state"]) == [0, 1, 3]
