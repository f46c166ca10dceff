"""Running statistics measured on data, against the definition."""

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ckptfix
from ckptfix.smoke.recalibration import Recalibration


class Net(nn.Module):
    """Two norms with a dropout between, which would disturb the second one's statistics if it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm1d(4, momentum=0.3)
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(4, 6)
        self.bn2 = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        out: torch.Tensor = self.bn2(self.fc(self.drop(self.bn1(x)))) * scale
        return out


@pytest.fixture
def data() -> torch.Tensor:
    return torch.randn(96, 4, generator=torch.Generator().manual_seed(1)) * 3 + 2


def loader(data: torch.Tensor, size: int = 32) -> Iterator[torch.Tensor]:
    yield from data.split(size)


def test_first_layer_gets_the_mean_of_all_samples(data: torch.Tensor):
    net = Net()
    found = ckptfix.recalibrate(net, loader(data, 40))  # the last batch is shorter
    assert found == Recalibration(3, 96, ("bn1", "bn2"))
    torch.testing.assert_close(net.bn1.running_mean, data.mean(0))
    within = sum(len(part) * part.var(0) for part in data.split(40)) / len(data)
    torch.testing.assert_close(net.bn1.running_var, within)
    assert net.bn1.num_batches_tracked == 3


def test_eval_output_is_that_of_training_batches(data: torch.Tensor):
    net = Net()
    ckptfix.recalibrate(net, [data])
    output = net.eval()(data)
    torch.testing.assert_close(output.mean(0), torch.zeros(6), atol=1e-5, rtol=0)
    torch.testing.assert_close(output.std(0), torch.ones(6), atol=0.02, rtol=0)


def test_only_statistics_change(data: torch.Tensor):
    net = Net().train()
    net.fc.eval()
    before, modes = copy.deepcopy(net.state_dict()), [module.training for module in net.modules()]
    ckptfix.recalibrate(net, loader(data))
    assert [module.training for module in net.modules()] == modes
    assert (net.bn1.momentum, net.bn2.momentum) == (0.3, 0.1)
    assert all(parameter.grad is None for parameter in net.parameters())
    for key, tensor in net.state_dict().items():
        assert torch.equal(tensor, before[key]) is ("running" not in key and "num_batches" not in key), key


def test_only_named_layers_are_measured(data: torch.Tensor):
    net = Net()
    net.bn1.get_buffer("running_mean").fill_(2.0)
    assert ckptfix.recalibrate(net, loader(data), layers=["bn2"]).layers == ("bn2",)
    assert ckptfix.recalibrate(net, loader(data), layers="bn2").layers == ("bn2",)
    assert torch.equal(net.bn1.get_buffer("running_mean"), torch.full((4,), 2.0))
    torch.testing.assert_close(net.bn2.running_mean, net.fc(net.eval().bn1(data)).mean(0))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda data: DataLoader(TensorDataset(data, data), batch_size=32), id="input and label"),
        pytest.param(lambda data: [{"x": data, "scale": 2.0}], id="keywords"),
        pytest.param(lambda data: [data.double()], id="another dtype"),
    ],
)
def test_batches_come_in_the_forms_of_a_data_loader(make: Any, data: torch.Tensor):
    net = Net()
    ckptfix.recalibrate(net, make(data))
    torch.testing.assert_close(net.bn1.running_mean, data.mean(0))


@pytest.mark.parametrize(
    ("batches", "settings", "says"),
    [
        pytest.param([], {}, "no batch", id="no data"),
        pytest.param([torch.ones(2, 4)], {"layers": ["fc"]}, "'fc' is not a norm", id="no such norm"),
        pytest.param(["text"], {}, "type str", id="no batch"),
    ],
)
def test_models_and_data_that_cannot_be_measured(batches: list[Any], settings: dict[str, Any], says: str):
    with pytest.raises(ckptfix.UsageError, match=says):
        ckptfix.recalibrate(Net(), batches, **settings)


def test_floats_take_the_dtype_of_a_model_without_parameters(data: torch.Tensor):
    model = nn.BatchNorm1d(4, affine=False)
    ckptfix.recalibrate(model, loader(data.double()))
    assert model.running_mean is not None
    torch.testing.assert_close(model.running_mean, data.mean(0))


def test_a_model_without_norms():
    with pytest.raises(ckptfix.UsageError, match="nothing to measure"):
        ckptfix.recalibrate(nn.Linear(2, 2), [torch.ones(1, 2)])


@pytest.mark.parametrize("error", [ckptfix.TargetError, RuntimeError])
def test_a_failure_restores_the_old_statistics(error: type[Exception], data: torch.Tensor):
    net = Net()
    ckptfix.recalibrate(net, [data])
    before = copy.deepcopy(net.state_dict())
    broken = data.clone() if error is ckptfix.TargetError else data[:, :3]
    if error is ckptfix.TargetError:
        broken[0, 0] = math.nan
    with pytest.raises(error):
        ckptfix.recalibrate(net, [data, broken])
    assert all(torch.equal(tensor, before[key]) for key, tensor in net.state_dict().items())
