"""``--recalibrate``: the statistics of broken norms come from the user's data, and nothing else changes."""

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import ckptfix
from tests.checks import bytes_of


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.Flatten()
    )


@pytest.fixture
def data(tmp_path: Path) -> Path:
    images = np.random.default_rng(0).standard_normal((65, 3, 8, 8)).astype(np.float32) * 2 + 1
    np.save(tmp_path / "data.npy", images)
    return tmp_path / "data.npy"


@pytest.fixture
def trained(data: Path) -> nn.Module:
    """A model whose statistics agree with the data."""
    model = net()
    ckptfix.recalibrate(model, [torch.from_numpy(np.load(data))])
    return model


def saved(folder: Path, model: nn.Module, broken: dict[str, float]) -> Path:
    state_dict = copy.deepcopy(model.state_dict())
    for key, value in broken.items():
        state_dict[key][0] = value
    torch.save(state_dict, folder / "broken.pth")
    return folder / "broken.pth"


def test_a_healthy_file_is_left_unchanged(tmp_path: Path, trained: nn.Module, data: Path):
    repaired = ckptfix.repair(saved(tmp_path, trained, {}), net(), recalibrate=str(data))
    assert not repaired.plan


def test_a_factory_and_a_model_measure_the_same(tmp_path: Path, trained: nn.Module, data: Path):
    path = saved(tmp_path, trained, {"1.running_var": math.nan})
    given, made = (ckptfix.repair(path, model, recalibrate=str(data)) for model in (net(), f"{__name__}:net"))
    assert made.report.exit_code == 0
    values = made.state_dict()
    assert {key: bytes_of(tensor) for key, tensor in given.state_dict().items()} == {
        key: bytes_of(tensor) for key, tensor in values.items()
    }


@pytest.mark.parametrize(
    ("broken", "module"),
    [
        pytest.param({"1.running_var": -0.5}, "1.", id="a negative variance"),
        pytest.param({"4.running_var": math.nan}, "4.", id="NaN in a variance"),
        pytest.param({"4.running_mean": math.inf}, "4.", id="Inf in a mean"),
    ],
)
def test_only_broken_norms_are_measured(
    tmp_path: Path, trained: nn.Module, data: Path, broken: dict[str, float], module: str
):
    target = net()
    before = copy.deepcopy(target.state_dict())
    repaired = ckptfix.repair(saved(tmp_path, trained, broken), target, recalibrate=str(data))
    assert repaired.report.exit_code == 0
    for key, tensor in repaired.state_dict().items():
        if key.startswith(module) and "running" in key:
            torch.testing.assert_close(tensor, trained.state_dict()[key], rtol=0.05, atol=0.05)
        elif not key.startswith(module):
            assert bytes_of(tensor) == bytes_of(trained.state_dict()[key]), key
    assert all(torch.equal(tensor, before[key]) for key, tensor in target.state_dict().items())


def test_other_broken_norms_are_measured_first(tmp_path: Path, trained: nn.Module, data: Path):
    broken = saved(tmp_path, trained, {"1.running_var": -3.0, "4.running_mean": math.nan})
    repaired = ckptfix.repair(broken, net(), recalibrate=str(data))
    assert repaired.report.exit_code == 0
    for key, tensor in repaired.state_dict().items():
        if "running" in key:
            torch.testing.assert_close(tensor, trained.state_dict()[key], rtol=0.1, atol=0.1)


def test_the_plan_can_be_saved_and_applied(tmp_path: Path, trained: nn.Module, data: Path):
    broken = saved(tmp_path, trained, {"1.running_var": -0.5})
    first = ckptfix.repair(broken, net(), recalibrate=str(data))
    plan = ckptfix.Plan.from_json(first.plan.to_json())
    again = ckptfix.repair(broken, net(), plan=plan).state_dict()
    assert all(bytes_of(tensor) == bytes_of(again[key]) for key, tensor in first.state_dict().items())
    with pytest.raises(ckptfix.PlanError, match="measured with a model"):
        ckptfix.repair(broken, plan=plan)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        pytest.param(np.full((8, 3, 8, 8), 0.5, np.float32), "no variance", id="constant"),
        pytest.param(np.zeros((0, 3, 8, 8), np.float32), "no sample", id="empty"),
        pytest.param(np.full((8, 3, 8, 8), np.nan, np.float32), "NaN", id="NaN"),
        pytest.param(np.ones((8, 5, 8, 8), np.float32), r"useless.npy: Sequential fails on this data", id="channels"),
    ],
)
def test_data_that_gives_no_statistics(tmp_path: Path, trained: nn.Module, values: np.ndarray, says: str):
    np.save(tmp_path / "useless.npy", values)
    broken = saved(tmp_path, trained, {"1.running_var": -0.5})
    with pytest.raises(ckptfix.CkptfixError, match=says):
        ckptfix.repair(broken, net(), recalibrate=str(tmp_path / "useless.npy"))


@pytest.mark.parametrize("is_factory", [False, True], ids=["model", "factory"])
def test_missing_statistics_are_measured_after_they_were_filled(
    tmp_path: Path, trained: nn.Module, data: Path, is_factory: bool
):
    whole = trained.state_dict()
    torch.save({key: tensor for key, tensor in whole.items() if "running" not in key}, tmp_path / "a.pth")
    model = f"{__name__}:net" if is_factory else net()
    measured = ckptfix.repair(tmp_path / "a.pth", model, fill="target", recalibrate=str(data)).state_dict()
    for key in (key for key in whole if "running" in key):  # in one batch there, and two here
        torch.testing.assert_close(measured[key], whole[key], rtol=0.01, atol=0.001)


def test_usage(tmp_path: Path, trained: nn.Module, data: Path):
    path = saved(tmp_path, trained, {"1.running_var": -0.5})
    with pytest.raises(ckptfix.UsageError, match="add model="):
        ckptfix.repair(path, recalibrate=str(data))
    with pytest.raises(ckptfix.UsageError, match="no such file"):
        ckptfix.repair(path, net(), recalibrate="gone.npy")
    with pytest.raises(ckptfix.TargetError, match="does not fit"):
        ckptfix.repair(path, nn.Sequential(*net().children(), nn.Linear(96, 2)), recalibrate=str(data))
