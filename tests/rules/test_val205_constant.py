import pytest
import torch
from torch import nn

from ckptfix.core.finding import Level
from ckptfix.rules.val205_constant import constant
from tests.checks import check_repaired
from tests.rules.healthy import HEALTHY, build
from tests.rules.proposals import propose


def test_noop_healthy_models():
    for name in HEALTHY:
        assert propose(constant, build(name).state_dict()) == [], name
        assert propose(constant, build(name).state_dict(), build(name)) == [], name


@pytest.mark.parametrize(
    ("key", "tensor"),
    [
        pytest.param("fc.weight", torch.zeros(16, 16), id="zeros-are-for-another-rule"),
        pytest.param("scale.weight", torch.ones(16, 16), id="ones"),
        pytest.param("ln.weight", torch.full((16, 16), 0.5), id="norm"),
        pytest.param("smooth.weight", torch.full((16, 1, 3, 3), 1 / 9), id="mean-over-a-window"),
        pytest.param("mix.weight", torch.full((16, 16), 1 / 16).half(), id="mean-over-the-inputs"),
        pytest.param("fc.weight", torch.full((7, 9), 0.3), id="too-small"),
        pytest.param("gamma", torch.full((1, 96, 1, 1), 1e-6), id="layer-scale"),
        pytest.param("fc.bias", torch.full((96,), -4.6), id="focal-loss-prior"),
        pytest.param("table", torch.full((16, 16), 0.3), id="no-weight"),
        pytest.param("fc.weight", torch.cat([torch.full((128,), 0.3), torch.tensor([0.31])]).reshape(3, 43), id="two"),
    ],
)
def test_noop(key, tensor):
    assert propose(constant, {key: tensor, "other.weight": torch.randn(8, 8)}) == []


def test_noop_a_layer_that_the_model_initialises_constant():
    model = nn.Linear(16, 16)
    nn.init.constant_(model.weight, 0.3)
    assert propose(constant, model.state_dict(), model) == []
    assert [finding.keys for finding in propose(constant, model.state_dict(), nn.Linear(16, 16))] == [("weight",)]


@pytest.mark.parametrize("key", ["fc.weight", "rnn.weight_hh_l0", "rnn.weight_ih_l1_reverse"])
def test_a_matrix_of_one_value_is_a_warning(key):
    (finding,) = propose(constant, {key: torch.full((16, 16), 0.3)})
    assert (finding.level, finding.keys, finding.fix) == (Level.WARNING, (key,), None)
    assert finding.message == "1 weight matrix has only one value"
    assert finding.evidence["tensors"][key]["value"] == pytest.approx(0.3)


def test_replaced_on_request():
    model = nn.Linear(16, 16, bias=False)
    after = {"weight": model.weight.detach()}
    check_repaired({"weight": torch.full((16, 16), 0.3)}, after, "VAL205", model, replace="VAL205", fill="target")
