"""An optimizer whose moments have the shape of no weight is that of another model."""

from typing import Any

import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.core.finding import Level


def run(model: nn.Module, make: Any = torch.optim.AdamW) -> dict[str, Any]:
    """Return the checkpoint of a training."""
    optimizer = make(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def found(report: ckptfix.Report, code: str) -> list[Any]:
    return [finding for finding in report.findings if finding.code == code]


def test_noop_the_optimizer_of_the_model(tmp_path):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 5))
    for make in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor):
        torch.save(run(model, make), tmp_path / "run.pth")
        assert found(ckptfix.check(tmp_path / "run.pth"), "OPT104") == []


@pytest.mark.parametrize("kept", ["of each axis", "two averages in one"])
def test_noop_state_of_shampoo_and_ademamix(tmp_path, kept):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 5))
    saved = run(model)
    for number, parameter in enumerate(model.parameters()):
        axes = {f"{name}_{axis}": torch.eye(size) for axis, size in enumerate(parameter.shape) for name in NAMES}
        row = axes if kept == "of each axis" else {"state1": torch.ones(2, *parameter.shape)}
        saved["optimizer"]["state"][number] = {"step": 1, **row}
    torch.save(saved, tmp_path / "run.pth")
    assert found(ckptfix.check(tmp_path / "run.pth"), "OPT104") == []


NAMES = ("precond", "inv_precond", "pre_cond", "inv_pre_cond")  # of torch_optimizer and of pytorch_optimizer


def test_noop_an_optimizer_of_a_part(tmp_path):
    """A frozen backbone, or a second network next to the weights that were taken."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 5))
    saved = run(model[1]) | {"model": model.state_dict()}
    torch.save(saved, tmp_path / "run.pth")
    assert found(ckptfix.check(tmp_path / "run.pth"), "OPT104") == []
    other = run(nn.Linear(7, 6))
    torch.save(
        {"model": model.state_dict(), "critic": other["model"], "optimizer": other["optimizer"]}, tmp_path / "b.pth"
    )
    assert found(ckptfix.check(tmp_path / "b.pth", weights="model"), "OPT104") == []


@pytest.mark.parametrize("step", [1, 11])
def test_noop_what_prodigy_keeps_in_one_row(tmp_path, step):
    """Its own code: ``p.flatten()[::slice_p]``; the optimizer also follows the removal of a head."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    saved = run(model)
    for number, one in enumerate(model.parameters()):
        saved["optimizer"]["state"][number] |= {name: one.detach().flatten()[::step].clone() for name in ("s", "p0")}
    torch.save(saved, tmp_path / "run.pth")
    assert found(ckptfix.check(tmp_path / "run.pth"), "OPT104") == []
    wanted = nn.Sequential(nn.Linear(3, 4))
    ckptfix.repair(tmp_path / "run.pth", wanted, unsafe_fixes=True, output=tmp_path / "out.pth")
    made = torch.load(tmp_path / "out.pth", weights_only=True)["optimizer"]
    torch.optim.AdamW(wanted.parameters()).load_state_dict(made)
    assert all(torch.equal(made["state"][n]["s"], saved["optimizer"]["state"][n]["s"]) for n in range(2))


def test_noop_the_moments_under_a_mask(tmp_path):
    """SPAM keeps the moments of the masked elements in one row."""
    saved = run(nn.Linear(6, 8))
    row = saved["optimizer"]["state"][0]
    row["mask"] = torch.ones(8, 6, dtype=torch.bool).tril()
    row |= {name: row[name][row["mask"]] for name in ("exp_avg", "exp_avg_sq")}
    torch.save(saved, tmp_path / "run.pth")
    assert found(ckptfix.check(tmp_path / "run.pth"), "OPT104") == []


class Projector:
    """GaLore keeps one next to the moments of a matrix in fewer rows."""

    def __init__(self, matrix: torch.Tensor) -> None:
        self.ortho_matrix = matrix


def test_noop_moments_with_fewer_rows(tmp_path):
    saved = run(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5)))
    for row in saved["optimizer"]["state"].values():
        if row["exp_avg"].ndim > 1:
            row |= {name: row[name][:2].clone() for name in ("exp_avg", "exp_avg_sq")}
            row["projector"] = Projector(torch.ones(2, 6))
    torch.save(saved, tmp_path / "run.pth")
    report = ckptfix.check(tmp_path / "run.pth")
    assert found(report, "OPT104") == []
    assert [finding.evidence["classes"] for finding in found(report, "OPT102")] == [[f"{__name__}.Projector"]]


def test_an_optimizer_of_a_network_in_another_file_is_a_note(tmp_path):
    """HiFi-GAN's file of the discriminators has the optimizers of both networks."""
    d, g = run(nn.Linear(3, 2)), run(nn.Linear(7, 6))
    torch.save({"mpd": d["model"], "optim_d": d["optimizer"], "optim_g": g["optimizer"]}, tmp_path / "do.pth")
    (finding,) = found(ckptfix.check(tmp_path / "do.pth"), "OPT104")
    assert (finding.level, "optim_g" in finding.message) == (Level.NOTE, True)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Adafactor])
def test_an_optimizer_of_another_model_is_named(tmp_path, make):
    saved = run(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 5)))
    saved["optimizer"] = run(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 6)), make)["optimizer"]
    torch.save(saved, tmp_path / "run.pth")
    (finding,) = found(ckptfix.check(tmp_path / "run.pth"), "OPT104")
    assert finding.level is Level.WARNING
    assert ckptfix.repair(tmp_path / "run.pth", drop_optimizer=True).report.exit_code == 0
