"""VAL209: two weight matrices with the same values."""

import pytest
import torch

from ckptfix.core.finding import Level
from ckptfix.rules.val209_same_matrix import same_matrix
from tests.rules.healthy import HEALTHY
from tests.rules.proposals import propose

ONE = torch.randn(16, 16)


def test_noop_models_as_they_are_born():
    for name, make in HEALTHY.items():
        assert propose(same_matrix, make().state_dict()) == [], name


@pytest.mark.parametrize(
    "state",
    [
        pytest.param({"a.weight": ONE, "b.weight": ONE}, id="tied"),
        pytest.param({"a.weight": torch.zeros(16, 16), "b.weight": torch.zeros(16, 16)}, id="zeros"),
        pytest.param({"a.weight": ONE * torch.nan, "b.weight": ONE * torch.nan}, id="NaN throughout"),
        pytest.param({"a.weight": ONE, "b.weight": ONE.flip(0).contiguous()}, id="the same numbers in another order"),
        pytest.param({"a.weight": torch.randn(2, 2).expand(2, 2).clone(), "b.weight": torch.ones(2, 2)}, id="small"),
        pytest.param({"a.bias": torch.arange(99.0), "b.bias": torch.arange(99.0)}, id="vectors"),
        pytest.param(
            {f"{name}.{n}.weight": ONE + n for name in ("student", "teacher") for n in range(9)},
            id="a teacher that begins as its student",
        ),
    ],
)
def test_noop(state):
    if state.get("a.weight") is not ONE or state["b.weight"] is not ONE:
        state = {key: value.clone() for key, value in state.items()}
    assert propose(same_matrix, state) == []


def test_a_copied_layer_is_a_note():
    state = {"a.weight": ONE, "b.weight": ONE + 1, "c.weight": ONE.clone()}
    (finding,) = propose(same_matrix, state)
    assert (finding.level, finding.keys, finding.fix) == (Level.NOTE, ("a.weight", "c.weight"), None)
