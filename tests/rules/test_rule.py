"""What a rule sees: the initial values of a model that has none, or is too large to be built for them."""

from collections.abc import Mapping

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from ckptfix.core.target import Target, target_from_module
from ckptfix.errors import TargetError
from ckptfix.rules.val101_non_finite import non_finite
from ckptfix.rules.val201_decayed import decayed
from ckptfix.rules.val202_all_zero import all_zero
from ckptfix.rules.val205_constant import constant
from ckptfix.rules.val206_outlier_scale import outlier_scale
from ckptfix.rules.val207_huge_value import huge_value
from ckptfix.rules.val208_misread_dtype import misread_dtype
from tests.rules.proposals import propose

LAYERS = [nn.Linear(32, 32) for _ in range(8)]


def without_values() -> Target:
    def fail() -> Mapping[str, torch.Tensor]:
        raise TargetError("builds a model on the meta device")

    return replace(target_from_module(nn.Sequential(*LAYERS)), initial=fail)


def broken(change) -> dict[str, torch.Tensor]:
    state = {key: value.clone() for key, value in nn.Sequential(*LAYERS).state_dict().items()}
    return state | {"1.weight": change(state["1.weight"])}


RULES = [
    pytest.param(decayed, lambda weight: 1e-7 * weight, id="decayed"),
    pytest.param(all_zero, torch.zeros_like, id="zeros"),
    pytest.param(constant, lambda weight: torch.full_like(weight, 0.25), id="constant"),
    pytest.param(outlier_scale, lambda weight: 1e4 * weight, id="large"),
    pytest.param(huge_value, lambda weight: 1e12 * weight, id="huge"),
    pytest.param(misread_dtype, lambda weight: (100 * weight).round() + 100, id="codes"),
    pytest.param(non_finite, lambda weight: float("nan") * weight, id="NaN"),
]


@pytest.mark.parametrize(("rule", "change"), RULES)
def test_a_model_without_values(rule, change):
    assert [finding.keys for finding in propose(rule, broken(change), without_values())] == [("1.weight",)]


@pytest.mark.parametrize(("rule", "change"), RULES)
def test_a_large_model_is_not_built_to_judge_a_file(rule, change):
    target = without_values()

    def build() -> Mapping[str, torch.Tensor]:
        pytest.fail("a large model was built")

    large = {"other.weight": replace(target.slots["1.weight"], shape=(1 << 16, 1 << 15))}
    target = replace(target, slots={**target.slots, **large}, initial=build, is_deferred=True)
    assert [finding.keys for finding in propose(rule, broken(change), target)] == [("1.weight",)]


def test_values_that_were_asked_for_are_not_left_out_silently():
    with pytest.raises(TargetError, match="meta device"):
        propose(all_zero, broken(torch.zeros_like), without_values(), fill="target", replace=("VAL202",))
