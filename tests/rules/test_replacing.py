"""Nothing is replaced unless asked, and nothing by tensors that are broken too."""

from typing import Any

import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.core.edits import Replace
from ckptfix.core.plan import Plan, Step
from ckptfix.engine.applying import apply_plan
from ckptfix.errors import PlanError, UsageError
from ckptfix.rules.replacing import Replacements, reset_edits
from tests.checks import assert_same
from tests.rules.proposals import context

STATE = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}


def is_finite(figures):
    return not figures.nonfinite


def is_never_sound(figures):
    return False


@pytest.mark.parametrize(
    ("settings", "is_sound"),
    [
        pytest.param({}, is_finite, id="not-asked"),
        pytest.param({"fill": "donor.pth"}, is_finite, id="a-fill-alone-is-for-what-is-missing"),
        pytest.param({"fill": "donor.pth", "replace": ("VAL2", "bias")}, is_finite, id="another-rule-and-key"),
        pytest.param({"fill": "donor.pth", "replace": ("VAL101",)}, is_never_sound, id="the-donor-is-broken-too"),
        pytest.param({"fill": "target", "replace": ("VAL101",)}, is_finite, id="there-is-no-target"),
        pytest.param({"fill": "twin", "replace": ("VAL101",)}, is_finite, id="there-is-no-twin"),
    ],
)
def test_noop(settings, is_sound):
    donor = {"weight": torch.zeros(2, 2)}
    assert Replacements(context(STATE, None, donor, **settings)).of("VAL101", "weight", is_sound) == ()


@pytest.mark.parametrize("name", ["VAL101", "VAL", "weight", "w*"])
def test_values_are_taken_from_a_donor(name):
    seen = context(STATE, None, {"weight": torch.zeros(2, 2).half()}, fill="donor.pth", replace=(name,))
    (edit,) = Replacements(seen).of("VAL101", "weight", is_finite)
    assert edit == Replace("weight", "float32", (2, 2), "donor", "weight")


def test_a_donor_of_another_shape_is_not_used():
    seen = context(STATE, None, {"weight": torch.zeros(3, 2)}, fill="donor.pth", replace=("VAL",))
    assert Replacements(seen).of("VAL101", "weight", is_finite) == ()


def test_a_donor_that_overflows_in_the_dtype_of_the_key_is_not_used():
    half = {"weight": torch.ones(2, 2).half()}
    seen = context(half, None, {"weight": torch.full((2, 2), 1e6)}, fill="donor.pth", replace=("VAL",))
    assert Replacements(seen).of("VAL101", "weight", is_finite) == ()


def test_all_statistics_of_a_norm_are_reset_together():
    state = nn.BatchNorm1d(3).state_dict(prefix="bn.")
    assert reset_edits("bn.running_var", context(state)) == ()
    edits = reset_edits("bn.running_var", context(state, reset_running_stats=True))
    assert {edit.key: edit.origin for edit in edits} == {
        "bn.num_batches_tracked": "zeros",
        "bn.running_mean": "zeros",
        "bn.running_var": "ones",
    }


def test_replace_without_fill_is_refused():
    with pytest.raises(UsageError, match="fill='twin', fill='target' or fill= with a file"):
        ckptfix.repair_state_dict(STATE, replace="VAL101")


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (Replace("weight", "float16", (2, 2), "zeros"), "belongs to another file"),
        (Replace("weight", "float32", (2, 2), "twin", "weight", "ema"), "taken from ema"),
        (Replace("weight", "float32", (2, 2), "donor", "weight"), "filled from a donor"),
        (Replace("other", "float32", (2, 2), "zeros"), "which does not exist"),
    ],
)
def test_a_plan_of_another_file_is_refused(edit, said):
    with pytest.raises(PlanError, match=said):
        apply_plan(Plan((Step("VAL101", (edit,)),)), context(STATE).checkpoint)
    with pytest.raises(PlanError, match="cannot be undone"):
        Plan((Step("VAL101", (edit,)),)).inverse()
    assert Plan.from_json(Plan((Step("VAL101", (edit,)),)).to_json()).edits == (edit,)


def test_all_fixes_together_leave_no_finding():
    """Law 2 of the engine, over the flags that change values."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), *(nn.Linear(16, 16) for _ in range(6)))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    state["0.weight"][2, 3], state["1.running_var"][0] = float("nan"), -1.0
    state["2.weight"] *= 1e-9
    state["3.weight"], state["4.weight"] = torch.zeros(16, 16), torch.full((16, 16), 0.3)
    state["5.weight"] *= 1e5
    state["6.weight"][0] = 1e-41
    settings: Any = {"reset_running_stats": True, "flush_subnormals": True, "zero_non_finite": True, "dtype": "bf16"}
    settings |= {"replace": ("VAL2",), "fill": "target", "select": ("VAL",)}
    repaired, report = ckptfix.repair_state_dict(state, model, **settings)
    assert [finding.code for finding in report.remaining if finding.level] == []
    assert {"VAL101", "VAL103", "VAL201", "VAL202", "VAL203", "VAL205", "VAL206", "VAL102"} == {
        finding.code for finding in report.fixed
    }
    again, second = ckptfix.repair_state_dict(repaired, model, **settings)
    assert (second.edits, second.exit_code) == ((), 0)
    assert_same(again, repaired)
