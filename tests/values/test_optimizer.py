import pytest
import torch

from ckptfix.values.optimizer import strongest_decay


@pytest.mark.parametrize(
    "root",
    [
        pytest.param(None, id="nothing"),
        pytest.param({"w": torch.ones(2)}, id="bare-state-dict"),
        pytest.param({"optimizer": "sgd"}, id="a-name"),
        pytest.param({"optimizer": {"param_groups": None}}, id="no-list"),
        pytest.param({"optimizer": {"param_groups": [3]}}, id="no-groups"),
    ],
)
def test_no_optimizer_is_none(root):
    assert strongest_decay(root) is None


@pytest.mark.parametrize("place", ["optimizer", "optimizer_state_dict"])
def test_the_group_with_most_decay_counts(place):
    groups = [{"lr": 0.1, "weight_decay": 0.0}, {"lr": 0.2, "weight_decay": 0.05, "betas": (0.9, 0.999), "params": [0]}]
    assert strongest_decay({place: {"param_groups": groups}}) == {"lr": 0.2, "weight_decay": 0.05}


def test_a_list_of_optimizers_is_searched():
    assert strongest_decay({"optimizer_states": [{"param_groups": [{"lr": 1}]}]}) == {"lr": 1.0}
