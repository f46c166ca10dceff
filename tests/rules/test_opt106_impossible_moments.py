"""Averages of an optimizer that no training leaves, as of files that were exchanged."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.core.finding import Level
from tests.reading.folders.ranks.genuine import swap, unpacked
from tests.rules.test_opt104_optimizer_of_another_model import found


def trained(make: Any, steps: int = 30, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> dict[str, Any]:
    """Return the checkpoint of a training on noise with a spike, and a parameter without gradients but at first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Linear(20, 30)).to(dtype)
    optimizer = make(model.parameters())
    for step in range(steps):
        for number, parameter in enumerate(model.parameters()):
            size = scale * (1e4 if step == steps // 2 else 1e-3 if number else 1)
            parameter.grad = torch.randn_like(parameter) * size if number < 3 or not step else None
        optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def findings(saved: Any, path: Path) -> list[Any]:
    torch.save(saved, path)
    return found(ckptfix.check(path), "OPT106")


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.0, 0.99), (0.95, 0.9), (0.5, 0.5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", [1, 2, 30])
def test_noop_moments_of_adam(tmp_path, betas, dtype, steps):
    made = trained(lambda parameters: torch.optim.AdamW(parameters, betas=betas, amsgrad=steps == 2), steps, dtype)
    assert findings(made, tmp_path / "run.pth") == []


@pytest.mark.parametrize("scale", [1e-24, 1e-20, 1e-16, 1e10])
def test_noop_squares_that_underflow(tmp_path, scale):
    assert findings(trained(torch.optim.Adam, scale=scale), tmp_path / "run.pth") == []


@pytest.mark.parametrize("make", [torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Adadelta])
def test_noop_moments_of_other_optimizers(tmp_path, make):
    assert findings(trained(make), tmp_path / "run.pth") == []


@pytest.mark.parametrize("lacks", ["amsgrad", "betas"])
def test_unknown_averages_are_not_judged(tmp_path, lacks):
    """SOAP has its squares in other axes, ADOPT averages what it has divided by them."""
    made = trained(torch.optim.AdamW)
    made["optimizer"]["state"][0]["exp_avg"] *= 1e6
    assert findings(made, tmp_path / "run.pth")
    del made["optimizer"]["param_groups"][0][lacks]
    assert findings(made, tmp_path / "run.pth") == []


def test_exchanged_averages_of_one_parameter(tmp_path):
    made = trained(torch.optim.AdamW)
    row = made["optimizer"]["state"][1]
    row["exp_avg"], row["exp_avg_sq"] = row["exp_avg_sq"], row["exp_avg"]
    (finding,) = findings(made, path := tmp_path / "run.pth")
    assert (finding.level, finding.evidence) == (Level.WARNING, {"parameters": ["1"]})
    assert found(ckptfix.check(path, values=False), "OPT106") == []
    assert ckptfix.repair(path).report.exit_code == 1
    assert ckptfix.repair(path, keep_optimizer=True).report.exit_code == 0
    assert ckptfix.repair(path, drop_optimizer=True).report.exit_code == 0


@pytest.mark.parametrize("field", ["exp_avg", "exp_avg_sq"])
def test_the_average_of_another_parameter(tmp_path, field):
    """All shapes fit; the spike in the gradients was in other elements of each."""
    made = trained(torch.optim.AdamW, steps=8)
    one, other = made["optimizer"]["state"][0], made["optimizer"]["state"][2]
    one[field], other[field] = other[field], one[field]
    (finding,) = findings(made, tmp_path / "run.pth")
    assert (finding.level, finding.evidence["parameters"]) == (Level.NOTE, ["0", "2"])


@pytest.mark.parametrize("sample", ["universal_zero2", "universal_zero3", "zero1_w3_bf16_g2", "zero3_w3_bf16_g2"])
def test_exchanged_files_of_a_universal_checkpoint(tmp_path, sample):
    saved, _ = unpacked(sample, tmp_path)
    assert found(ckptfix.check(saved), "OPT106") == []
    for field in sorted(saved.glob("*/zero/*/exp_avg.pt"))[:1]:
        swap(field, field.with_name("exp_avg_sq.pt"))
        (finding,) = found(ckptfix.check(saved), "OPT106")
        assert (finding.level, finding.evidence["parameters"]) == (Level.WARNING, [field.parent.name])
