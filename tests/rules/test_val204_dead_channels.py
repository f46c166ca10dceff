import pytest
import torch
from torch import nn

from ckptfix.core.finding import Level
from ckptfix.rules.val204_dead_channels import dead_channels
from tests.rules.healthy import HEALTHY, build
from tests.rules.proposals import propose


def kernel(*dead: int) -> torch.Tensor:
    weight = torch.ones(12, 3, 3, 3)
    weight[list(dead)] = 0
    return weight


def table(rows: slice) -> torch.Tensor:
    weight = torch.randn(100, 8)
    weight[rows] = 0
    return weight


def test_noop_healthy_models():
    for name in HEALTHY:
        assert propose(dead_channels, build(name).state_dict()) == [], name


@pytest.mark.parametrize(
    "state",
    [
        pytest.param({"conv.weight": kernel()}, id="none"),
        pytest.param({"conv.weight": torch.zeros(8, 3, 3, 3)}, id="all-are-for-another-rule"),
        pytest.param({"fc.weight": torch.eye(16)}, id="sparse-and-alive"),
        pytest.param(nn.Embedding(50, 8, padding_idx=0).state_dict(prefix="embed."), id="padding"),
        pytest.param({"shared.weight": torch.cat([torch.zeros(1, 8), torch.ones(9, 8)])}, id="padding-of-bart"),
        pytest.param({"dw.weight": kernel(3).flatten(1)[:, :3]}, id="too-short-to-say"),
        pytest.param({"embed.weight": table(slice(84, None))}, id="a-vocabulary-that-was-rounded-up"),
        pytest.param({"embed.weight": table(slice(0, 20))}, id="reserved-rows"),
        pytest.param({"embed.weight": table(slice(1, 99, 2))}, id="unknown-words"),
        pytest.param({"embed.weight": table(slice(40, 55))}, id="few-of-them-together"),
        pytest.param({"0.weight": torch.cat([torch.zeros(1, 8), torch.ones(9, 8)])}, id="padding-without-a-name"),
        pytest.param({"bn.weight": torch.zeros(8), "bn.bias": torch.zeros(8)}, id="a-norm-that-is-off"),
        pytest.param({"bn.weight": torch.tensor([0.0, 1]), "bn.bias": torch.tensor([1.0, 0])}, id="a-bias-is-left"),
        pytest.param({"bn.weight": torch.tensor([0.0, 1]), "bn.bias": torch.ones(2)}, id="a-bias-without-a-zero"),
    ],
)
def test_noop(state):
    assert propose(dead_channels, state) == []


def test_channels_of_zeros_are_noted():
    norm = {"bn.weight": torch.tensor([1.0, 0, 0]), "bn.bias": torch.tensor([1.0, 0, 2])}
    (finding,) = propose(dead_channels, {"conv.weight": kernel(2, 11), **norm})
    assert (finding.level, finding.fix) == (Level.NOTE, None)
    assert finding.message == "3 output channels of 2 layers are zero"
    assert finding.evidence["tensors"] == {
        "conv.weight": {"dead": 2, "of": 12, "channels": [2, 11]},
        "bn.weight": {"dead": 1, "of": 3, "channels": [1]},
    }


def test_many_rows_of_zeros_inside_of_an_embedding_are_noted():
    state = {"conv.weight": kernel(2), "embed.weight": table(slice(30, 80))}
    layer, embedding = propose(dead_channels, state)
    assert (layer.keys, embedding.keys) == (("conv.weight",), ("embed.weight",))
    assert (embedding.level, embedding.message) == (Level.NOTE, "50 rows of 1 embedding are zero")
    assert embedding.evidence["tensors"]["embed.weight"]["channels"][:2] == [30, 31]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(12, 3, 3, 3), (16, 64), (8, 3000)])
def test_nearly_zero_channels_are_noted(dtype, shape):
    weight = torch.randn(shape)
    weight[[2, 7]] *= 1e-24
    assert (
        propose(dead_channels, {"conv.weight": (torch.randn(shape) * 1e-17).to(dtype), "fc.weight": torch.randn(8, 8)})
        == []
    )
    weight[[2, 7]] *= 1e-3
    (finding,) = propose(dead_channels, {"conv.weight": weight.to(dtype), "fc.weight": torch.randn(8, 8)})
    assert finding.evidence["tensors"]["conv.weight"]["channels"] == [2, 7]


def test_a_single_nearly_zero_row_is_not_padding():
    weight = torch.randn(16, 64)
    weight[5] = 0
    assert propose(dead_channels, {"fc.weight": weight}) == []
    weight[5] = torch.randn(64) * 1e-27
    (finding,) = propose(dead_channels, {"fc.weight": weight})
    assert finding.evidence["tensors"]["fc.weight"]["channels"] == [5]
