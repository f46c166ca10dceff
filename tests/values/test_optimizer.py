import math

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from ckptfix.reading.opening import open_file, open_state_dict
from ckptfix.reading.tensors import spec_of_tensor
from ckptfix.values.optimizer import Training, alignment, counted_steps, strongest_decay, trainings, was_stepped


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
def test_noop_a_file_without_an_optimizer(root):
    assert strongest_decay(root) is None


@pytest.mark.parametrize("place", ["optimizer", "optimizer_state_dict", "adamw"])
def test_the_group_with_the_most_decay_is_used(place):
    plain, decayed = {"lr": 0.1, "weight_decay": 0.0}, {"lr": 0.2, "weight_decay": 0.05, "betas": (0.9, 0.999)}
    groups = [{**plain, "params": [0]}, {**decayed, "params": [1]}]
    assert strongest_decay({place: {"state": {}, "param_groups": groups}}) == {"lr": 0.2, "weight_decay": 0.05}


def test_a_list_of_optimizers_is_searched():
    optimizer = {"state": {}, "param_groups": [{"lr": 1, "params": []}]}
    assert strongest_decay({"optimizer_states": [optimizer]}) == {"lr": 1.0}


class Net(nn.Module):
    """Two layers, of which the second never gets a gradient of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.norm, self.spare = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.token = nn.Parameter(torch.ones(1, 8))  # which decays in most scripts, but not in minGPT

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.used(x)) + 0 * self.spare(x) + self.token
        return out


def trained(tmp_path, make, steps=20, groups=None):
    """The file of a trainer after some steps, and its net."""
    net = Net()
    optimizer = make(groups(net) if groups else net.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        (net(torch.randn(4, 8)) * torch.randn(4, 8)).mean().backward()
        optimizer.step()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": steps}, tmp_path / "t.pth")
    return open_file(str(tmp_path / "t.pth")), net


def decay_apart(net):
    flat = [parameter for parameter in net.parameters() if parameter.ndim < 2]
    deep = [parameter for parameter in net.parameters() if parameter.ndim >= 2]
    return [{"params": deep}, {"params": flat, "weight_decay": 0.0}]


@pytest.mark.parametrize("groups", [None, decay_apart], ids=["one-group", "decay-apart"])
def test_adamw_shows_that_no_gradient_arrived(tmp_path, groups):
    checkpoint, net = trained(tmp_path, lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5), groups=groups)
    found = trainings(checkpoint, None)
    assert found.keys() == dict(net.named_parameters()).keys()
    assert (found["used.weight"].saw_no_gradient, found["spare.weight"].saw_no_gradient) == (False, True)
    assert found["spare.weight"].steps == 20
    share = (net.spare.weight.norm() / Net().spare.weight.norm()).item()
    assert found["spare.weight"].predicted_share(20) == pytest.approx(share, rel=1e-4)
    assert found["used.weight"].predicted_share(20) is None, "gradients moved it"


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_predicted_from_its_terms(tmp_path, momentum):
    checkpoint, net = trained(
        tmp_path, lambda p: torch.optim.SGD(p, lr=0.1, momentum=momentum, weight_decay=0.01), steps=400
    )
    found = trainings(checkpoint, None)
    share = (net.spare.weight.norm() / Net().spare.weight.norm()).item()
    if momentum:
        assert math.log(found["spare.weight"].predicted_share(400) or 1.0) == pytest.approx(math.log(share), rel=0.2)
        buffer, other = found["spare.weight"].momentum, found["used.weight"].momentum
        assert buffer is not None
        assert other is not None
        assert alignment(checkpoint.specs["spare.weight"], buffer) == pytest.approx(1.0)
        assert alignment(checkpoint.specs["used.weight"], other) != pytest.approx(1.0, abs=0.01)
    else:
        assert found == {}, "plain SGD saves no moments, so nothing tells which parameter is which"


def test_moments_of_another_model_are_ignored(tmp_path):
    checkpoint, _ = trained(tmp_path, lambda p: torch.optim.AdamW(p, lr=0.1))
    other = {"a": torch.ones(3, 3), "b": torch.ones(3), "c": torch.ones(2), "d": torch.ones(5)}
    assert trainings(replace(open_state_dict(other), root=checkpoint.root), None) == {}


def test_a_learning_rate_schedule_counts_with_its_mean():
    plain, scheduled = Training(0.1, 0.1), Training(0.0, 0.1, initial_lr=0.2)
    assert plain.predicted_share(100) == scheduled.predicted_share(100) == pytest.approx(0.99**100)
    assert Training(0.0, 0.1).predicted_share(100) is None, "a schedule that ended, and no start of it"
    assert plain.predicted_share(None) is None
    assert Training(0.1, 0.0).predicted_share(5) is None


@pytest.mark.parametrize(
    ("root", "steps"),
    [(None, None), ({"step": "7"}, None), ({"step": True}, None), ({"global_step": 7, "iter": 9}, 9)],
)
def test_steps_that_the_trainer_counted(root, steps):
    assert counted_steps(root) == steps
    assert was_stepped(root) is (steps is not None)


def test_moments_whose_squares_underflow():
    small = spec_of_tensor(torch.randn(64, dtype=torch.float64) * 1e-200)
    assert alignment(small, small) == pytest.approx(1.0)
    assert alignment(small, spec_of_tensor(torch.zeros(64, dtype=torch.float64))) is None
    assert alignment(small, spec_of_tensor(torch.ones(8, dtype=torch.float64))) is None
