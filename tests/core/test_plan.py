"""Plans: edits as data, applied in one place."""

import json
import re
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ckptfix
from ckptfix.core.edits import (
    EDITS,
    Adapt,
    Assemble,
    Cast,
    Delta,
    Dequantise,
    Disarm,
    Drop,
    Edit,
    Fill,
    Fold,
    MergeAdapter,
    Moments,
    Omit,
    Plain,
    Regroup,
    Rename,
    RenameModule,
    Replace,
    Retag,
    Rewrite,
    Tie,
    Zero,
)
from ckptfix.core.parts import Part
from ckptfix.core.plan import Plan, Step
from ckptfix.core.target import target_from_module
from ckptfix.core.wrappers import bare
from ckptfix.engine.applying import apply_plan
from ckptfix.engine.changes import ValueSources
from ckptfix.errors import PlanError
from ckptfix.reading.opening import open_state_dict
from tests.checks import assert_same

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def state() -> OrderedDict[str, Any]:
    made: OrderedDict[str, Any] = OrderedDict(
        (key, torch.full((2, 2), float(n))) for n, key in enumerate(("a.w", "b.w"))
    )
    made["b.n"] = torch.tensor(3)
    made["b.extra"] = {"plain": 1}
    return made


def apply(*edits: Edit, value_sources: ValueSources | None = None) -> dict[str, Any]:
    return apply_plan(Plan((Step("TST101", edits),)), open_state_dict(state()), value_sources).state_dict()


def keys_after(*edits: Edit) -> list[str]:
    return list(apply(*edits))


@pytest.mark.parametrize(
    ("edits", "keys"),
    [
        pytest.param([], ["a.w", "b.w", "b.n", "b.extra"], id="nothing"),
        pytest.param([Rename("a.w", "z.w")], ["z.w", "b.w", "b.n", "b.extra"], id="a renamed key keeps its place"),
        pytest.param([Rename("a.w", "b.w"), Rename("b.w", "a.w")], ["b.w", "a.w", "b.n", "b.extra"], id="swap"),
        pytest.param([Rename("a.w", "b.w"), Drop("b.w")], ["b.w", "b.n", "b.extra"], id="onto one that goes"),
        pytest.param([Rename("b.extra", "c")], ["a.w", "b.w", "b.n", "c"], id="an entry that is not a tensor"),
        pytest.param([Drop("a.w"), Drop("b.extra")], ["b.w", "b.n"], id="drop"),
        pytest.param(
            [Tie("a.v", "b.w")], ["a.w", "a.v", "b.w", "b.n", "b.extra"], id="a new key stands with its module"
        ),
        pytest.param([Tie("c.v", "b.w")], ["a.w", "b.w", "b.n", "b.extra", "c.v"], id="or at the end"),
        pytest.param(
            [Fill("c.v", "float32", (1,), "zeros"), Tie("c.t", "c.v")],
            ["a.w", "b.w", "b.n", "b.extra", "c.v", "c.t"],
            id="a tie to what was filled",
        ),
        pytest.param(
            [Rename("a.w", "c.w"), Tie("a.w", "c.w")],
            ["c.w", "b.w", "b.n", "b.extra", "a.w"],
            id="a tie to what was renamed",
        ),
    ],
)
def test_keys_and_their_order(edits, keys):
    assert keys_after(*edits) == keys


def test_values():
    after = apply(
        Cast("a.w", "float32", "float16"),
        Assemble.reshape("b.n", "int64", (), (1,)),
        Tie("c.t", "b.w"),
        Fill("c.z", "int64", (2,), "zeros"),
    )
    assert (after["a.w"].dtype, after["b.n"].shape) == (torch.float16, (1,))
    assert after["c.t"].data_ptr() == after["b.w"].data_ptr()
    assert after["c.z"].tolist() == [0, 0]


def test_edits_of_a_step_use_the_old_names():
    after = apply(Rename("a.w", "c"), Cast("a.w", "float32", "float64"))
    assert after["c"].dtype == torch.float64


@pytest.mark.parametrize(
    ("edits", "says"),
    [
        pytest.param([Rename("a.w", "b.w")], "gives b.w two sources", id="rename onto another"),
        pytest.param([Rename("a.w", "c"), Rename("b.w", "c")], "gives c two sources", id="two renames to one"),
        pytest.param([Rename("a.w", "c"), Rename("a.w", "d")], "renames a key twice", id="one to two"),
        pytest.param([Rename("a.w", "c"), Drop("a.w")], "both changes and drops a.w", id="rename and drop"),
        pytest.param(
            [Cast("a.w", "float32", "float16"), Drop("a.w")], "both changes and drops a.w", id="cast and drop"
        ),
        pytest.param([Rename("x", "c")], "the key x, which does not exist", id="no such key to rename"),
        pytest.param([Drop("x")], "the key x, which does not exist", id="no such key to drop"),
        pytest.param([Cast("x", "float32", "float16")], "the key x, which does not exist", id="no such key to cast"),
        pytest.param(
            [Cast("a.w", "float64", "float16")], "is float32 and not float64", id="another dtype than planned"
        ),
        pytest.param([Cast("b.extra", "float32", "float16")], "is not a tensor", id="cast of plain data"),
        pytest.param(
            [Assemble.reshape("a.w", "float32", (2, 2), (5,))], "cannot assemble a.w", id="another number of elements"
        ),
        pytest.param(
            [Assemble.reshape("a.w", "float32", (4,), (2, 2))], "cannot assemble a.w", id="another shape than planned"
        ),
        pytest.param([Fill("a.w", "float32", (2, 2), "zeros")], "which already exists", id="a fill overwrites nothing"),
        pytest.param(
            [Tie("c", "d"), Fill("c", "int8", (), "zeros")], "ties c to a key that is not there", id="tie to nothing"
        ),
        pytest.param([Tie("c", "a.w"), Tie("c", "b.w")], "which already exists", id="two ties for one key"),
        pytest.param([Tie("c", "b.extra")], "not there", id="tie to plain data"),
        pytest.param([Rename("b.extra", "z"), Tie("z", "a.w")], "which already exists", id="tie onto a renamed key"),
        pytest.param([Fill("c", "float32", (1,), "target")], "no model was given", id="fill without a model"),
        pytest.param([Fill("c", "float32", (1,), "donor")], "a donor that lacks it", id="fill without a donor"),
        pytest.param([RenameModule("x", "y")], "the row 'x' of _metadata", id="no such row"),
    ],
)
def test_conflicts_are_refused(edits, says):
    with pytest.raises(PlanError, match=says) as caught:
        apply(*edits)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], 'it has no "ckptfix-plan", its version'),
        ({"steps": []}, 'it has no "ckptfix-plan", its version'),
        ({"ckptfix-plan": 2, "steps": []}, "the plan has version 2"),
        ({"ckptfix-plan": 1}, "at `$.steps`"),
    ],
)
def test_a_plan_for_missing_keys_is_refused(data, said):
    with pytest.raises(PlanError, match=re.escape(said)):
        Plan.from_json(data)


@pytest.mark.parametrize(
    ("fill", "says"),
    [
        pytest.param(Fill("weight", "float32", (9, 9), "target"), "is (2, 2) in the model and not (9, 9)", id="shape"),
        pytest.param(Fill("head.weight", "float32", (2, 2), "target"), "the model has no head.weight", id="name"),
    ],
)
def test_a_fill_from_another_model_is_refused(fill, says):
    value_sources = ValueSources(target_from_module(nn.Linear(2, 2)))
    with pytest.raises(PlanError) as caught:
        apply(fill, value_sources=value_sources)
    assert says in str(caught.value)


def test_steps_follow_one_another():
    plan = Plan((Step("A", (Rename("a.w", "c"),)), Step("B", (Rename("c", "d"), Drop("b.w")))))
    assert list(apply_plan(plan, open_state_dict(state())).entries) == ["d", "b.n", "b.extra"]
    assert len(plan.edits) == 3
    assert not Plan()


EXAMPLES: dict[str, Edit] = {
    "rename": Rename("a", "b"),
    "rename-module": RenameModule("a", ""),
    "drop": Drop("a"),
    "fill": Fill("a", "float32", (2, 0), "donor", "b"),
    "replace": Replace("a", "float32", (2,), "twin", "b", "ema"),
    "zero": Zero("a", "float32", "non-finite"),
    "tie": Tie("a", "b"),
    "cast": Cast("a", "float32", "bfloat16"),
    "dequantise": Dequantise("a", "int8", "float32", "a.SCB", "bitsandbytes int8"),
    "fold": Fold("a.weight_v", "float32", (4, 2), "weight_norm", ("a.weight_g",)),
    "plain": Plain("args", "argparse.Namespace", "dict"),
    "adapt": Adapt("a", "b", "pos_embed=timm", "float16", (1, 5, 2), (1, 10, 2), (2, 2, 3, 3), (0, 1)),
    "assemble": Assemble("a", "float32", (4, 2), (Part("b", ((0, 2), (0, 4)), ((0, 4), (0, 2)), axes=(1, 0)),)),
    "merge-adapter": MergeAdapter(
        "a", "float32", (4, 2), (Delta("lora", "linear", ("b", "c"), 0.5), Delta("", "rows", ("d",), rows=(3,))), True
    ),
    "retag": Retag("cuda:3"),
    "rewrite": Rewrite("is cut short"),
    "disarm": Disarm("os.system"),
    "regroup": Regroup("optimizer", (0, 1)),
    "moments": Moments(
        "optimizer", 0, "a", None, (4, 2), (Part("3", ((0, 2), (0, 4)), ((0, 4), (0, 2)), axes=(1, 0)),)
    ),
    "omit": Omit("optimizer"),
}


def test_every_kind_of_edit_goes_to_json_and_back():
    assert EXAMPLES.keys() == EDITS.keys()
    plan = Plan((Step("A", tuple(EXAMPLES.values())), Step("B", ())))
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


SPLIT = {"edit": "assemble", "key": "a", "dtype": "int8", "shape": [2]}
PART = {"source": "b", "box": [[0, 2]], "place": [[0, 2]]}
MALFORMED_PARTS: tuple[Any, ...] = (
    3,
    ["b"],
    [{}],
    [{"source": "b"}],
    [PART | {"place": [[0, -2]]}],
    [PART | {"box": [[0]]}],
    [PART | {"axes": [1]}],
    [PART | {"view": [3]}],
    [PART | {"why": "c"}],
)


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        "plan",
        {"ckptfix-plan": 99, "steps": []},
        {"ckptfix-plan": 1},
        {"ckptfix-plan": 1, "steps": 5},
        {"ckptfix-plan": 1, "steps": [{"rule": "A"}]},
        {"ckptfix-plan": 1, "steps": [{"rule": "A", "edits": [{"edit": "explode"}]}]},
        {"ckptfix-plan": 1, "steps": [{"rule": "A", "edits": [{"edit": ["drop"]}]}]},
        {"ckptfix-plan": 1, "steps": [{"rule": "A", "edits": [{"edit": "drop"}]}]},
        {"ckptfix-plan": 1, "steps": [{"rule": "A", "edits": [{"edit": "drop", "key": 5}]}]},
        {"ckptfix-plan": 1, "steps": [{"rule": "A", "edits": [{"edit": "drop", "key": "a", "why": "b"}]}]},
        {"ckptfix-plan": 1, "steps": [{"rule": "A", "edits": [{"edit": "rename", "key": "a", "to": None}]}]},
        *(
            {"ckptfix-plan": 1, "steps": [{"rule": "A", "edits": [Fill("a", "int8", (), "zeros").to_json() | wrong]}]}
            for wrong in ({"shape": [-1]}, {"shape": [1.5]}, {"shape": "ab"}, {"dtype": "floaty"}, {"donor_key": 3})
        ),
        *(
            {"ckptfix-plan": 1, "steps": [{"rule": "A", "edits": [SPLIT | {"parts": parts}]}]}
            for parts in MALFORMED_PARTS
        ),
    ],
)
def test_invalid_plans_are_refused(data):
    with pytest.raises(PlanError) as caught:
        Plan.from_json(data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["drop", "cast", "plain", "retag", "rewrite", "disarm"])
def test_plans_without_an_inverse(name):
    with pytest.raises(PlanError, match=f"{name} cannot be undone"):
        Plan((Step("A", (EXAMPLES[name],)),)).inverse()


def test_the_inverse_removes_added_keys():
    plan = Plan(
        (Step("A", (Fill("c", "int8", (), "zeros"), Tie("d", "c"), Assemble.reshape("b.n", "int64", (), (1,)))),)
    )
    done = apply_plan(plan, open_state_dict(state()))
    assert_same(apply_plan(plan.inverse(), done).state_dict(), state())


# Properties, on random trees of modules under random wrappers.

Wrapping = list[str]


def leaf(kind: str) -> nn.Module:
    made = {
        "linear": lambda: nn.Linear(2, 3),
        "norm": lambda: nn.BatchNorm1d(2),
        "act": nn.ReLU,
        "embedding": lambda: nn.Embedding(3, 2),
    }
    return made[kind]()


NAMES = st.sampled_from(["a", "b", "conv1", "module", "backbone_module", "modules", "0", "model", "head"])
LEAVES = st.sampled_from(["linear", "norm", "act", "embedding"]).map(leaf)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.dictionaries(
        NAMES.filter(lambda name: name not in {"modules"}), inner, min_size=1, max_size=3
    ).map(lambda children: _module(children)),
    max_leaves=6,
)
WRAPPINGS = st.lists(st.sampled_from(["parallel", "compiled", "averaged", "inner"]), max_size=3)


def _module(children: dict[str, nn.Module]) -> nn.Module:
    made = nn.Module()
    for name, child in children.items():
        made.add_module(name, child)
    return made


def wrapped(model: nn.Module, wrapping: Wrapping) -> nn.Module:
    for name in wrapping:
        if name == "parallel":
            model = nn.DataParallel(model)
        elif name == "averaged":
            model = AveragedModel(model)
        elif name == "compiled":
            model = _compiled(model)
        else:
            for child_name, child in list(model.named_children())[:1]:
                model.add_module(child_name, _compiled(child))
    return model


def _compiled(model: nn.Module) -> nn.Module:
    """Return the wrapped model; torch turns a model that is wrapped already into a plain function."""
    made = torch.compile(model, backend="eager")
    return made if isinstance(made, nn.Module) else model


@st.composite
def cases(draw: st.DrawFn) -> tuple[nn.Module, nn.Module, dict[str, Any]]:
    """Return a model, the same model wrapped, and what the wrapped one saves."""
    import copy

    model = draw(TREES.filter(lambda tree: bool(tree.state_dict())))
    for number, tensor in enumerate(model.state_dict().values()):
        tensor.fill_(number)
    other = wrapped(copy.deepcopy(model), draw(WRAPPINGS))
    return model, other, other.state_dict()


@QUICK
@given(cases())
def test_a_wrapped_save_fits_the_plain_model_again(case):
    model, _, saved = case
    repaired, report = ckptfix.repair_state_dict(saved, model, values=False)
    assert_same(repaired, model.state_dict())
    assert report.exit_code == 0


@QUICK
@given(cases(), st.booleans())
def test_keys_out_are_keys_in_less_drops_and_fills_and_a_second_pass_is_idle(case, with_target):
    model, _, saved = case
    repair = ckptfix.repair(saved, model if with_target else None, values=False, smoke=False)
    renames = [edit for edit in repair.plan.edits if isinstance(edit, Rename)]
    drops = [edit for edit in repair.plan.edits if isinstance(edit, Drop)]
    fills = [edit for edit in repair.plan.edits if isinstance(edit, (Fill, Tie))]
    after = repair.state_dict()
    assert len(after) == len(saved) - len(drops) + len(fills)
    for step in repair.plan.steps:
        names = [edit.to for edit in step.edits if isinstance(edit, Rename)]
        assert len(set(names)) == len(names)
    assert bool(renames) == (list(after) != [key for key in saved if key not in {edit.key for edit in drops}])
    again = ckptfix.repair(after, model if with_target else None, values=False)
    assert not again.plan
    assert_same(again.state_dict(), after)


@QUICK
@given(cases())
def test_a_plan_survives_json_and_does_the_same(case):
    model, _, saved = case
    repair = ckptfix.repair(saved, model, values=False)
    plan = Plan.from_json(json.loads(json.dumps(repair.plan.to_json())))
    assert plan == repair.plan
    assert_same(ckptfix.repair(saved, model, plan=plan, values=False).state_dict(), repair.state_dict())


@QUICK
@given(cases())
def test_the_inverse_undoes_renames(case):
    model, _, saved = case
    plan = ckptfix.repair(saved, model, values=False).plan
    assume(not any(isinstance(edit, Drop) for edit in plan.edits))  # the counter of averages is lost
    done = apply_plan(plan, open_state_dict(saved))
    assert_same(apply_plan(plan.inverse(), done).state_dict(), saved)


@QUICK
@given(cases())
def test_a_plain_save_fits_the_wrapped_model(case):
    model, other, saved = case
    names = [bare(key) for key in model.state_dict()]
    assume(len(set(names)) == len(names))  # `a` next to `module.a` may have two places in a model wrapped inside
    repaired, report = ckptfix.repair_state_dict(model.state_dict(), other, values=False)
    assert set(repaired) == set(saved)
    assert report.exit_code == 0
