"""KEY103: the target is wrapped."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ckptfix
from ckptfix.core.edits import Fill
from ckptfix.core.finding import Level
from ckptfix.rules.key103_missing_wrapper_prefix import missing_wrapper_prefix
from tests.checks import check_noop, check_repaired
from tests.rules.proposals import propose, repaired

ONE = torch.ones(2, 2)


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


class Twins(nn.Module):
    """Two layers whose names differ only by ``module``."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Linear(2, 2, bias=False)
        self.module = nn.Module()
        self.module.enc = nn.Linear(2, 2, bias=False)


@pytest.mark.parametrize(
    ("state", "model"),
    [
        pytest.param({"weight": ONE}, None, id="no target"),
        pytest.param(nn.Linear(2, 2).state_dict(), nn.Linear(2, 2), id="nothing is wrapped"),
        pytest.param(compiled(nn.Linear(2, 2)).state_dict(), compiled(nn.Linear(2, 2)), id="both are wrapped alike"),
        pytest.param(
            {"weight": torch.ones(5)}, nn.DataParallel(nn.Linear(2, 2)), id="one name agrees, and its shape does not"
        ),
        pytest.param({"enc.weight": ONE}, Twins(), id="the place without a wrapper is there"),
        pytest.param(
            {"a.module.enc.weight": ONE, "module.a.enc.weight": ONE},
            nn.ModuleDict({"a": nn.ModuleDict({"enc": nn.Linear(2, 2, bias=False)})}),
            id="two keys for one place",
        ),
        pytest.param(
            {"stray": torch.ones(7)}, AveragedModel(nn.Linear(2, 2)), id="a counter for a file of something else"
        ),
    ],
)
def test_noop(state, model):
    check_noop(state, "KEY103", model)


@pytest.mark.parametrize(
    ("wrap", "keys"),
    [
        pytest.param(nn.DataParallel, ["module.weight", "module.bias"], id="DataParallel"),
        pytest.param(compiled, ["_orig_mod.weight", "_orig_mod.bias"], id="compile"),
        pytest.param(
            lambda model: nn.DataParallel(compiled(model)),
            ["module._orig_mod.weight", "module._orig_mod.bias"],
            id="both",
        ),
    ],
)
def test_repaired(wrap, keys):
    plain, wrapped = nn.Linear(2, 2), wrap(nn.Linear(2, 2))
    after = wrapped.state_dict()
    assert list(after) == keys
    for key, value in zip(keys, plain.state_dict().values(), strict=True):
        after[key] = value
    check_repaired(plain.state_dict(), after, "KEY103", wrapped)


INNER = nn.Sequential(nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "qk"}))


@pytest.mark.parametrize(
    ("state", "model", "said"),
    [
        (nn.Linear(2, 2).state_dict(), nn.DataParallel(nn.Linear(2, 2)), "without the wrapper segments that"),
        ({"0.module.q.weight": ONE, "0.module.k.weight": ONE}, INNER, "with different wrapper segments than"),
    ],
)
def test_the_message_names_the_wrapped_side(state, model, said):
    (finding,) = propose(missing_wrapper_prefix, state, model)
    assert finding.message == f"2 keys {said} the target's keys have"


def test_a_key_of_another_shape_follows():
    model = nn.DataParallel(nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 4, bias=False)))
    state = {"0.weight": torch.ones(3, 2), "1.weight": torch.ones(9, 3), "aux": ONE}
    assert list(repaired(missing_wrapper_prefix, state, model)) == ["module.0.weight", "module.1.weight", "aux"]


def test_entries_that_are_not_tensors_follow():
    class Stateful(nn.Linear):
        def get_extra_state(self):
            return {"steps": 7}

        def set_extra_state(self, state):
            self.steps = state["steps"]

    model = nn.DataParallel(Stateful(2, 2))
    ckptfix.load(model, Stateful(2, 2).state_dict())
    assert model.module.steps == 7


def test_a_fresh_counter_for_an_averaged_model():
    model = AveragedModel(nn.Linear(2, 2))
    (finding,) = propose(missing_wrapper_prefix, nn.Linear(2, 2).state_dict(), model)
    assert finding.level == Level.ERROR
    assert finding.fix is not None
    assert finding.fix.edits[-1] == Fill("n_averaged", "int64", (), "zeros")
    (finding,) = propose(missing_wrapper_prefix, {"module.weight": ONE, "module.bias": torch.ones(2)}, model)
    assert finding.keys == ("n_averaged",)


def test_a_stored_counter_is_kept():
    averaged = AveragedModel(nn.Linear(2, 2))
    averaged.n_averaged.fill_(9)
    model = compiled(AveragedModel(nn.Linear(2, 2)))
    repaired_state, report = ckptfix.repair_state_dict(averaged.state_dict(), model)
    assert repaired_state["_orig_mod.n_averaged"].item() == 9
    assert report.exit_code == 0


def test_a_plain_key_equals_another_wrapped_key():
    """In the wrapped model ``module.enc`` is the plain model's ``enc``."""
    torch.manual_seed(0)
    plain, wrapped = Twins(), nn.DataParallel(Twins())
    after = wrapped.state_dict()
    for key, value in zip(list(after), plain.state_dict().values(), strict=True):
        after[key] = value
    check_repaired(plain.state_dict(), after, "KEY103", wrapped)
