"""Following: which position of a saved optimizer each parameter of the result gets its state from."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import ckptfix
from ckptfix.core.edits import Assemble, Drop, Edit, Fill, Regroup
from ckptfix.core.parts import Part
from ckptfix.core.plan import Plan, Step
from ckptfix.core.target import target_from_module
from ckptfix.engine.applying import apply_plan
from ckptfix.maps.optimizer_states import optimizers_of
from ckptfix.rules.following import Followed, ways
from ckptfix.rules.origins import Change
from tests.rules.test_opt104_optimizer_of_another_model import run


def net(**layers: tuple[int, int] | int) -> nn.Module:
    """Linear layers; a number is the size of a square one without a bias."""
    return nn.Sequential(
        OrderedDict(
            (name, nn.Linear(*sizes) if isinstance(sizes, tuple) else nn.Linear(sizes, sizes, bias=False))
            for name, sizes in layers.items()
        )
    )


def followed(path: Path, trained: nn.Module, wanted: nn.Module, whole: dict[str, Any] | None = None) -> list[Followed]:
    """The ways to keep the optimizer of one model in step while its file becomes that of another one."""
    torch.save(run(trained) if whole is None else whole, path)
    repaired = ckptfix.repair(path, wanted, unsafe_fixes=True, fill="target", keep_optimizer=True)
    change = Change.of(ckptfix.open_checkpoint(path), repaired.checkpoint, repaired.plan, target_from_module(wanted))
    (optimizer,) = optimizers_of(repaired.checkpoint)
    return ways(optimizer, change)


def sources(way: Followed) -> list[object]:
    return [step.source for group in way.groups for step in group]


def test_noop(tmp_path):
    (way,) = followed(tmp_path / "run.pth", net(a=(3, 4), b=(4, 5)), net(a=(3, 4), b=(4, 5)))
    assert way.is_unchanged
    assert (sources(way), way.anew, way.added, way.gone) == ([0, 1, 2, 3], (), (), ())


@pytest.mark.parametrize(
    ("wanted", "taken", "added", "gone"),
    [
        pytest.param({"a": (3, 4), "c": (5, 2)}, [0, 1, 4, 5], (), ("b.weight", "b.bias"), id="a layer less"),
        pytest.param(
            {"a": (3, 4), "b": (4, 5), "x": (5, 5), "c": (5, 2)},
            [0, 1, 2, 3, None, None, 4, 5],
            ("x.weight", "x.bias"),
            (),
            id="a layer more",
        ),
        pytest.param({"c": (5, 2), "a": (3, 4), "b": (4, 5)}, [4, 5, 0, 1, 2, 3], (), (), id="another order"),
    ],
)
def test_positions_follow_the_order_of_the_result(wanted, taken, added, gone, tmp_path):
    (way,) = followed(tmp_path / "run.pth", net(a=(3, 4), b=(4, 5), c=(5, 2)), net(**wanted))
    assert not way.is_unchanged
    assert (sources(way), way.anew, way.added, way.gone) == (taken, (), added, gone)


@pytest.mark.parametrize(
    ("trained", "wanted"),
    [
        pytest.param(
            net(stem=(4, 4), mid=(4, 4), aux=(4, 4), body=(4, 4)),
            net(stem=(4, 4), mid=(4, 4), body=(4, 4)),
            id="biases",
        ),
        pytest.param(net(c=4, a=4, b=4), net(c=4, b=4), id="nothing but that the model has another order"),
    ],
)
def test_a_sorted_file_is_not_in_the_order_of_the_model(trained, wanted, tmp_path):
    """A group for each parameter, of equal shapes and without a state: only the order says whose rate is whose."""
    groups = [{"params": [parameter], "lr": 0.1 * place} for place, parameter in enumerate(trained.parameters())]
    weights = OrderedDict(sorted(trained.state_dict().items()))
    whole = {"model": weights, "optimizer": torch.optim.SGD(groups).state_dict()}
    assert len({way.like for way in followed(tmp_path / "run.pth", trained, wanted, whole)}) > 1


def ways_after(
    path: Path, groups: list[dict[str, Any]], *edits: Edit, state: dict[int, Any] | None = None
) -> list[Followed]:
    """The ways to keep named parameters in step with edits; each is a matrix of zeros, or a vector if it is a bias."""
    names = [name for group in groups for name in group["param_names"]]
    weights = {name: torch.zeros(2) if name.endswith("bias") else torch.zeros(2, 2) for name in names}
    ids = iter(range(len(names)))
    whole = [{**group, "params": [next(ids) for _ in group["param_names"]]} for group in groups]
    rows = {at: {"exp_avg": weights[name] + at} for at, name in enumerate(names)} if state is None else state
    torch.save({"model": weights, "optimizer": {"state": rows, "param_groups": whole}}, path)
    before = ckptfix.open_checkpoint(path)
    plan = Plan((Step("KEY106", edits),))
    after = apply_plan(plan, before)
    (optimizer,) = optimizers_of(before)
    return ways(optimizer, Change.of(before, after, plan, None))


def group(*names: str, **settings: float) -> dict[str, Any]:
    return {"param_names": list(names), "lr": 0.1, **settings}


FUSED = Assemble(
    "qk",
    "float32",
    (4, 2),
    tuple(Part(key, ((0, 2), (0, 2)), ((at, at + 2), (0, 2))) for key, at in (("q", 0), ("k", 2))),
)
FLAT = Assemble.reshape("q", "float32", (2, 2), (4,))
MOMENT = torch.ones(2, 2)


@pytest.mark.parametrize(
    ("groups", "edits"),
    [
        pytest.param(
            [group("a", "q", "d"), group("b", "k", "c", lr=0.2)], [FUSED], id="parts of groups of other settings"
        ),
        pytest.param(
            [group("a", "d"), group("b", "c", lr=0.2)],
            [*map(Drop, "abcd"), Fill("new", "float32", (2, 2), "zeros")],
            id="nothing of what was in several groups is left",
        ),
        pytest.param(
            [group("a.weight", "d.weight"), group("b.weight", "c.weight", lr=0.2)],
            [Fill("e.gain", "float32", (2, 2, 2), "zeros")],
            id="a new one like none",
        ),
        pytest.param([group("a", "d"), group("b", "c", lr=0.2)], [Drop("a")], id="another group is met first"),
        pytest.param(
            [group("a.bias", "b.bias", weight_decay=0.0), group("a.weight", "b.weight", weight_decay=0.1)],
            [Assemble.reshape(f"{name}.weight", "float32", (2, 2), (4,)) for name in "ab"],
            id="two groups would become one",
        ),
    ],
)
def test_the_group_of_a_new_parameter_is_not_guessed(groups, edits, tmp_path):
    assert ways_after(tmp_path / "run.pth", groups, *edits) == []


@pytest.mark.parametrize(
    ("edits", "state", "anew"),
    [
        pytest.param([FUSED], None, (), id="the same state of both parts"),
        pytest.param(
            [FUSED], {0: {"exp_avg": MOMENT}, 1: {"momentum": MOMENT}}, ("qk",), id="another state of one part"
        ),
        pytest.param([FLAT], None, (), id="a moment of the same shape"),
        pytest.param([FLAT], {0: {"exp_avg": MOMENT, "axes": [MOMENT]}}, ("q",), id="a list of one for each axis"),
    ],
)
def test_state_that_does_not_fit_starts_anew(edits, state, anew, tmp_path):
    (way,) = ways_after(tmp_path / "run.pth", [group("q", "k")], *edits, state=state)
    assert way.anew == anew


def test_a_missing_group_changes_an_optimizer_without_state(tmp_path):
    (way,) = ways_after(tmp_path / "run.pth", [group("q"), group("k", lr=0.2)], Drop("q"), state={})
    assert (way.like, way.is_unchanged) == ((1,), False)


def test_names_of_the_model_are_not_those_of_a_frozen_part(tmp_path):
    """``a.weight`` is a name of the student and, inside of the teacher, of a layer that is not trained."""
    trained, wanted = (net(a=(3, 3), b=(3, 2)) for _ in range(2))
    for model in (trained, wanted):
        model.add_module("teacher", net(a=(3, 3), b=(3, 2)).requires_grad_(requires_grad=False))
    del wanted.b
    optimizer = torch.optim.AdamW([(name, each) for name, each in trained.named_parameters() if each.requires_grad])
    whole = {"model": trained.state_dict(), "optimizer": optimizer.state_dict()}
    (way,) = followed(tmp_path / "run.pth", trained, wanted, whole)
    assert [step.key for group in way.groups for step in group] == ["a.weight", "a.bias"]


LAYERS = ("stem", "mid", "aux", "body", "head")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), is_named=st.booleans(), is_sorted=st.booleans())
def test_no_state_of_other_parameters_for_groups_in_another_order(tmp_path, data, is_named, is_sorted):
    """All layers have equal shapes, so that a moment at a wrong place would load."""
    names = data.draw(st.lists(st.sampled_from(LAYERS), min_size=2, unique=True))
    kept = data.draw(st.permutations(names))
    trained, wanted = (net(**dict.fromkeys(each, (3, 3))) for each in (names, kept))
    if gone := data.draw(st.sampled_from([None, *names])):
        delattr(wanted, gone)
    order = data.draw(st.permutations(list(trained.named_parameters())))
    first = data.draw(st.integers(1, len(order)))
    groups = [{"params": part, "lr": 0.1 * (at + 1)} for at, part in enumerate((order[:first], order[first:])) if part]
    bare = [{**each, "params": [tensor for _, tensor in each["params"]]} for each in groups]
    optimizer = torch.optim.AdamW(groups if is_named else bare)
    for at, (_, tensor) in enumerate(order):
        tensor.grad = torch.full_like(tensor, at + 1)
    optimizer.step()
    weights = OrderedDict(sorted(trained.state_dict().items())) if is_sorted else trained.state_dict()
    torch.save({"model": weights, "optimizer": optimizer.state_dict()}, tmp_path / "run.pth")
    given = {"unsafe_fixes": is_named, "values": False, "force": True}  # names are certain, so that nothing is guessed
    done = ckptfix.repair(tmp_path / "run.pth", wanted, output=tmp_path / "out.pth", **given)
    if any(isinstance(edit, Regroup) for edit in done.plan.edits):
        assert is_named, "without names, nothing is certain"
        state = torch.load(tmp_path / "out.pth")["optimizer"]
        place = {name: at for at, (name, _) in enumerate(order)}
        for each in state["param_groups"]:
            for name, number in zip(each["param_names"], each["params"], strict=True):
                assert each["lr"] == 0.1 * (1 + (place[name] >= first))
                assert torch.allclose(state["state"][number]["exp_avg"], torch.tensor(0.1 * (place[name] + 1)))
