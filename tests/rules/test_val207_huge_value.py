"""VAL207: a number far beyond what any training gives."""

import struct

import pytest
import torch
from torch import nn

from ckptfix.core.finding import Level
from ckptfix.rules.val207_huge_value import huge_value
from tests.rules.healthy import HEALTHY
from tests.rules.proposals import propose, repaired


def flipped(value: float, bit: int) -> float:
    (number,) = struct.unpack("<I", struct.pack("<f", value))
    return float(struct.unpack("<f", struct.pack("<I", number ^ (1 << bit)))[0])


def test_noop_models_as_they_are_born():
    for name, make in HEALTHY.items():
        assert propose(huge_value, make().state_dict()) == [], name


@pytest.mark.parametrize(
    "state",
    [
        pytest.param({"w.weight": torch.full((4, 4), 2046.0)}, id="the largest of published files"),
        pytest.param({"bn.running_var": torch.full((4,), 5e8)}, id="a variance of raw pixels"),
        pytest.param({"attn.mask": torch.full((4, 4), -1e9)}, id="a mask"),
        pytest.param({"attn.bias": torch.full((4, 4), -3.4e38)}, id="a bias of attention scores"),
        pytest.param({"scaler.mean_": torch.tensor([1e7, 2e8]), "y_std": torch.full((3,), 3e9)}, id="data in its unit"),
        pytest.param({"total_ops": torch.tensor(1e12)}, id="a counter"),
        pytest.param({"head.logit_scale": torch.tensor(1e30)}, id="a number of any unit"),
        pytest.param({"steps": torch.tensor(10**12)}, id="a whole number"),
    ],
)
def test_noop(state):
    assert propose(huge_value, state) == []


@pytest.mark.parametrize(
    "key", ["fc.bias", "fc.weight", "norm.weight", "bn.running_mean", "norm.scale", "scaler.mean_"]
)
def test_a_flipped_bit_of_the_exponent(key):
    values = 0.02 * torch.randn(64)
    values[7] = flipped(0.02, 30)
    (finding,) = propose(huge_value, {key: values.view(8, 8) if key == "fc.weight" else values})
    assert finding.level is Level.ERROR
    assert finding.keys == (key,)


def test_a_flipped_bit_of_float16_in_a_matrix():
    weight = (0.02 * torch.randn(64, 256)).half()
    weight[3, 5] = 0.0023
    assert propose(huge_value, {"fc.weight": weight}) == []
    weight.view(torch.int16)[3, 5] ^= 1 << 14
    (finding,) = propose(huge_value, {"fc.weight": weight})
    assert (finding.level, finding.keys) == (Level.WARNING, ("fc.weight",))
    assert finding.evidence["tensors"]["fc.weight"]["channels"] == [3]


@pytest.mark.parametrize(
    "outlier",
    [
        pytest.param(lambda w: w[:, 7].mul_(50), id="a column"),
        pytest.param(lambda w: w[3, 5].fill_(2.0), id="a heavy weight of a language model"),
        pytest.param(lambda w: w[1:].zero_(), id="an embedding of which one row was trained"),
    ],
)
def test_noop_outliers_of_training(outlier):
    weight = 0.02 * torch.randn(64, 256)
    outlier(weight)
    assert propose(huge_value, {"fc.weight": weight}) == []


def test_a_variance_has_its_own_limit():
    (finding,) = propose(huge_value, {"bn.running_var": torch.tensor([1.0, 2e9])})
    assert finding.level is Level.WARNING
    assert finding.evidence["tensors"]["bn.running_var"]["channels"] == [1]


@pytest.mark.parametrize(
    ("state", "level"),
    [
        pytest.param(
            {"bn.running_mean": torch.tensor([1.7e9, 0.1, 0.2]), "bn.running_var": torch.tensor([7.3e13, 1.0, 1.0])},
            Level.NOTE,
            id="a norm of raw inputs, one of them a time",
        ),
        pytest.param(
            {"bn.running_mean": torch.tensor([0.3, 0.1, 0.2]), "bn.running_var": torch.tensor([7.3e13, 1.0, 1.0])},
            Level.WARNING,
            id="a variance without its mean",
        ),
        pytest.param(
            {"running_mean": torch.tensor([1.7e9, 0.1]), "running_var": torch.tensor([7.3e13, 1.0])},
            Level.NOTE,
            id="a norm at the top",
        ),
        pytest.param({"out.weight": 1e7 * torch.linspace(0.2, 1, 8)[None]}, Level.NOTE, id="a regression"),
        pytest.param({"out.bias": torch.tensor([1e9])}, Level.NOTE, id="its bias"),
        pytest.param({"scaler.weight": torch.tensor([[1e9]])}, Level.NOTE, id="a scaler"),
        pytest.param({"out.weight": torch.tensor([[1e9, 0.1, 0.2, 0.1]])}, Level.WARNING, id="one far from the others"),
    ],
)
def test_data_in_a_large_unit_is_a_note(state, level):
    found = propose(huge_value, state)
    assert [finding.level for finding in found] == [level]
    assert level is Level.WARNING or not found[0].remedies


def test_huge_values_of_the_initial_model():
    model = nn.Linear(4, 4)
    nn.init.constant_(model.weight, 5e6)
    assert propose(huge_value, model.state_dict(), model) == []
    (finding,) = propose(huge_value, model.state_dict(), nn.Linear(4, 4))
    assert finding.keys == ("weight",)


def test_replaced_from_a_donor():
    donor = {"fc.bias": torch.ones(4)}
    settings = {"replace": ("VAL207",), "fill": "donor.pth"}
    after = repaired(huge_value, {"fc.bias": torch.tensor([1.0, 1e12, 0, 0])}, donor=donor, **settings)
    assert torch.equal(after["fc.bias"], donor["fc.bias"])
