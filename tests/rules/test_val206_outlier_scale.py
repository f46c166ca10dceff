import pytest
import torch
from torch import nn

from ckptfix.core.finding import Level
from ckptfix.rules.val206_outlier_scale import outlier_scale
from tests.checks import check_repaired
from tests.rules.healthy import HEALTHY, build
from tests.rules.proposals import propose


def net(factor: float = 1.0, key: str = "2.weight") -> dict[str, torch.Tensor]:
    """Six linear layers, of which one is larger."""
    torch.manual_seed(0)
    state = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6))).state_dict()
    return {name: value * factor if name == key else value for name, value in state.items()}


def test_noop_healthy_models():
    for name in HEALTHY:
        assert propose(outlier_scale, build(name).state_dict()) == [], name


@pytest.mark.parametrize(
    "state",
    [
        pytest.param(net(), id="alike"),
        pytest.param(net(400), id="below-the-threshold"),
        pytest.param({**net(), "embed.weight": torch.randn(64, 64) * 50}, id="the-only-embedding"),
        pytest.param({**net(), "fourier.B": torch.randn(64, 64) * 9000}, id="no-weight"),
        pytest.param({**net(), "fc.weight_v": torch.randn(64, 64) * 9000}, id="weight-norm-direction"),
        pytest.param({**net(), "scale.weight": torch.full((64,), 9e4)}, id="vector"),
        pytest.param(
            {key: value * (1 if key[0] == "0" else 1e-5) for key, value in net().items()}, id="the-others-are-small"
        ),
        pytest.param({"a.weight": torch.randn(8, 8) * 1e6}, id="nothing-to-compare"),
    ],
)
def test_noop(state):
    assert propose(outlier_scale, state) == []


def test_noop_a_layer_that_the_model_initialises_large():
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    nn.init.normal_(model.get_parameter("2.weight"), std=5000)
    assert [finding.keys for finding in propose(outlier_scale, model.state_dict())] == [("2.weight",)]
    assert propose(outlier_scale, model.state_dict(), model) == []


def test_a_thousand_times_its_kind_is_a_warning():
    (finding,) = propose(outlier_scale, net(2000))
    assert (finding.level, finding.keys, finding.fix) == (Level.WARNING, ("2.weight",), None)
    figures = finding.evidence["tensors"]["2.weight"]
    assert figures["rms"] / figures["median_rms_of_kind"] == pytest.approx(2000, rel=0.2)


@pytest.mark.parametrize("key", ["fc.weight", "embed.weight"])
@pytest.mark.parametrize("others", [1, 5])
def test_a_lone_matrix_of_its_kind_is_compared_with_all_others(key, others):
    torch.manual_seed(0)
    state = {f"{index}.weight": torch.randn(8, 8, 3, 3) * 0.05 for index in range(others)}
    assert propose(outlier_scale, state | {key: torch.randn(8, 8) * 10}) == []
    (finding,) = propose(outlier_scale, state | {key: torch.randn(8, 8) * 1e3})
    assert finding.keys == (key,)


def test_replaced_on_request(tmp_path):
    torch.save(net(), tmp_path / "donor.pth")
    check_repaired(net(5000), net(), "VAL206", replace="2.weight", fill=str(tmp_path / "donor.pth"))
