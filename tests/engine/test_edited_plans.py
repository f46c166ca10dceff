"""Plans edited by hand: each field of each kind of edit with an unexpected value."""

import argparse
import json
import resource
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptfix
from ckptfix.core.edits import (
    BLOCKS,
    EDITS,
    MXFP4,
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
from ckptfix.core.plan import Plan
from ckptfix.errors import MissingFileError, PlanError, WriteError

LEAP = 1 << 20  # kilobytes that a plan may take in addition to the first repair

WEIGHTS = {
    "a": torch.arange(8.0).reshape(4, 2),
    "b": torch.arange(8.0).reshape(2, 4),
    "pos": torch.randn(1, 5, 2),
    "table": torch.randn(6, 2),
    "kernel": torch.randn(4, 3, 4, 4),
    "wide": torch.randn(40, 24),
    "lora_A": torch.randn(2, 24),
    "lora_B": torch.randn(40, 2),
    "codes": torch.ones(4, 2, dtype=torch.int8),
    "scales": torch.ones(4),
    "w_v": torch.randn(4, 2),
    "w_g": torch.ones(4, 1),
    "u": torch.ones(4),
    "v": torch.ones(2),
    "mask": torch.ones(4, 2, dtype=torch.bool),
    "blocks": torch.ones(2, 4, 1, 16, dtype=torch.uint8),
    "powers": torch.full((2, 4, 1), 127, dtype=torch.uint8),
    "square": torch.randn(4, 4),
    "lokr_w1": torch.randn(2, 2),
    "lokr_w2": torch.randn(2, 2),
    "n": torch.tensor(3),
}


def _adapt(key: str, recipe: str, shape: tuple[int, ...], **more: Any) -> Adapt:
    return Adapt(key, key, recipe, "float32", tuple(WEIGHTS[key].shape), shape, **more)


def _merged(key: str, form: str, *factors: str, **more: Any) -> MergeAdapter:
    return MergeAdapter(key, "float32", tuple(WEIGHTS[key].shape), (Delta("", form, factors, **more),))


GENUINE: tuple[tuple[Edit, ...], ...] = (
    (Rename("a", "c"), RenameModule("m", "k")),
    (Drop("b"), Tie("d", "a")),
    (Fill("z", "float32", (2, 3), "zeros"),),
    (Fill("z", "float32", (4, 2), "part", "ema:a"),),
    (Fill("z", "float32", (4, 2), "tie", ":a"),),
    (Replace("a", "float32", (4, 2), "twin", "a", "ema"), Zero("b", "float32", "non-finite")),
    (Replace("a", "float32", (4, 2), "ones"), Cast("b", "float32", "bfloat16")),
    (Dequantise("codes", "int8", "float32", "scales", BLOCKS),),
    (Dequantise("blocks", "uint8", "bfloat16", "powers", MXFP4),),
    (Fold("w_v", "float32", (4, 2), "weight_norm", ("w_g",)),),
    (Fold("w_v", "float32", (4, 2), "spectral_norm", ("u", "v")),),
    (Fold("w_v", "float32", (4, 2), "pruning", ("mask",)),),
    (_adapt("pos", "pos_embed=timm", (1, 10, 2), grids=(2, 2, 3, 3)),),
    (_adapt("table", "vocab=pad:zeros", (9, 2)),),
    (_adapt("table", "head", (2, 2), rows=(5, 6)),),
    (_adapt("kernel", "patch_embed=timm", (4, 3, 2, 2)),),
    (_adapt("kernel", "in_chans=timm", (4, 5, 4, 4)), _adapt("w_v", "norm", (4, 1))),
    (_adapt("kernel", "inflate=centre", (4, 3, 2, 4, 4)),),
    (Assemble("t", "float32", (4, 2), (Part("b", ((0, 2), (0, 4)), ((0, 4), (0, 2)), axes=(1, 0)),)),),
    (_merged("wide", "linear", "lora_A", "lora_B", scaling=0.5),),
    (_merged("wide", "linear", "lora_A", "lora_B", expert=(0, 1, 0, 20), within=(20, 40)),),
    (_merged("a", "bias", "w_v"), _merged("b", "rows", "b", rows=(1, 0)), _merged("w_v", "whole", "a")),
    (_merged("square", "hadamard", "w_v", "b", "w_v", "b"), _merged("square", "kronecker", "lokr_w1", "lokr_w2")),
    (Plain("args", "argparse.Namespace", "dict"), Retag("cuda:3"), Rewrite("is cut short"), Disarm("os.system")),
    (
        Regroup("optimizer", (0,), ("b", "a")),
        Moments("optimizer", 0, "b", "1"),
        Moments("optimizer", 0, "a", "0", (4, 2)),
    ),
    (
        Regroup("optimizer", (0,)),
        Moments("optimizer", 0, "a", None, (4, 2), (Part("1", ((0, 2), (0, 4)), ((0, 4), (0, 2)), axes=(1, 0)),)),
        Moments("optimizer", 0, "b", None, (2, 4)),
    ),
    (Omit("optimizer"),),
)

NUMBERS = st.sampled_from([-(1 << 63), -2, -1, 0, 1, 2, 3, 4, 7, 1 << 31, 1 << 40, (1 << 63) - 1, 10**30])
DTYPES = ("float16", "bfloat16", "float64", "int8", "bool", "quint8", "quint4x2", "complex64", "bits1x8", "int3")
FORMS = ("linear", "experts", "kronecker", "hadamard", "conv", "tucker", "scale", "bias", "rows", "whole", "pruning")
RECIPES = ("vocab=cut", "vocab=pad:mean", "pos_embed=linear", "window_bias=levit", "window_bias=beit", "depth", "norm")
ORIGINS = ("zeros", "ones", "target", "donor", "adapter", "tie", "part", "twin", "data", "subnormal")
OTHERS = ("", "x", "1", "7", "a.b", "ema", "optimizer", ":a", "ema:b", "bitsandbytes int8", "MXFP4, turned")
WORDS = st.sampled_from([*WEIGHTS, *DTYPES, *FORMS, *RECIPES, *ORIGINS, *OTHERS])
FLOATS = st.sampled_from([0.0, -1.0, 1e300, 1e400, float("nan")])
SHAPES = st.lists(NUMBERS | st.lists(NUMBERS, max_size=2), max_size=4)
OF_TYPE = {bool: st.booleans(), int: NUMBERS, float: FLOATS, str: WORDS, list: SHAPES, type(None): WORDS}
ANY = st.one_of(*OF_TYPE.values(), st.none())


def places_in(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each field and each item of JSON data."""
    for name, value in data.items() if isinstance(data, dict) else enumerate(data):
        yield (*path, name)
        if isinstance(value, (dict, list)):
            yield from places_in(value, (*path, name))


@st.composite
def edited(draw: st.DrawFn) -> dict[str, Any]:
    """Return a genuine plan in JSON with one field changed or removed, or one list item repeated."""
    edits = draw(st.sampled_from(GENUINE))
    data = json.loads(json.dumps([edit.to_json() for edit in edits]))
    *path, name = draw(st.sampled_from([place for place in places_in(data) if len(place) > 1]))
    inner = data
    for part in path:
        inner = inner[part]
    how = draw(st.sampled_from([*["other"] * 12, "gone", "twice", "unknown"]))
    if how == "other":
        inner[name] = draw(draw(st.sampled_from([*[OF_TYPE.get(type(inner[name]), ANY)] * 5, ANY])))
    elif how == "gone":
        del inner[name]
    elif isinstance(inner, list):
        inner.append(inner[name])
    else:
        inner[name if how == "twice" else "why"] = [inner[name]] * 2
    return {"ckptfix-plan": 1, "steps": [{"rule": "TST101", "edits": data}]}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    parameters = {key: torch.nn.Parameter(WEIGHTS[key].clone()) for key in "ab"}
    optimizer = torch.optim.Adagrad(parameters.values())
    torch.cat([tensor.flatten() for tensor in parameters.values()]).sum().backward()
    optimizer.step()
    path = tmp_path_factory.mktemp("plans") / "model.pth"
    whole = {
        "state_dict": WEIGHTS,
        "ema": {key: tensor + 0 for key, tensor in WEIGHTS.items()},
        "args": argparse.Namespace(lr=1),
    }
    torch.save({**whole, "optimizer": optimizer.state_dict()}, path)
    return path


def carried_out(file: Any, data: Any) -> None:
    out = file.with_name("new.pth")
    ckptfix.repair(file, plan=Plan.from_json(data), output=out, values=False, force=True, weights="state_dict")


@pytest.mark.parametrize("edits", [each for each in GENUINE if not isinstance(each[0], (Rename, Disarm))])
def test_each_genuine_plan_is_carried_out(file, edits):
    carried_out(file, {"ckptfix-plan": 1, "steps": [{"rule": "A", "edits": [edit.to_json() for edit in edits]}]})


def test_every_kind_of_edit_is_among_them():
    assert {type(edit) for edits in GENUINE for edit in edits} == {*EDITS.values()}


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=edited())
def test_changed_plans_are_refused_or_valid(file, data):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with suppress(PlanError, MissingFileError, WriteError):
        carried_out(file, data)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < LEAP


FOLD = Fold("w_v", "float32", (4, 2), "weight_norm", ("w_g",))
MERGE = _merged("wide", "linear", "lora_A", "lora_B")
TABLE = _adapt("table", "vocab=pad:zeros", (9, 2))


@pytest.mark.parametrize(
    ("edit", "wrong", "says"),
    [
        pytest.param(FOLD, {"form": "odd"}, "weight_norm|spectral_norm|pruning", id="an unknown form"),
        pytest.param(FOLD, {"dim": 2}, "2 axes has no axis 2", id="an axis that is not there"),
        pytest.param(FOLD, {"dim": -2}, ">= -1", id="a negative axis"),
        pytest.param(FOLD, {"sources": []}, "0 sources", id="no source"),
        pytest.param(FOLD, {"dtype": "floaty"}, "'floaty'", id="no dtype of torch"),
        pytest.param(MERGE, {"deltas": [{"adapter": "", "form": "odd", "factors": ["a"]}]}, "linear|", id="adapter"),
        pytest.param(
            MERGE, {"deltas": [{"adapter": "", "form": "linear", "factors": ["a"]}]}, "1 factors", id="factor"
        ),
        pytest.param(TABLE, {"shape": [1 << 40, 2]}, "elements cannot become one of", id="a huge table"),
        pytest.param(TABLE, {"grids": [9, 9, 1, 1]}, "the grids do not fit", id="a grid larger than the table"),
        pytest.param(GENUINE[2][0], {"shape": [1 << 40]}, "zeros has 134,217,728 elements at most", id="a huge fill"),
        pytest.param(GENUINE[2][0], {"origin": "odd"}, "zeros|target|donor", id="an unknown origin"),
    ],
)
def test_errors_in_a_plan_name_their_place(edit, wrong, says):
    steps = [{"rule": "A", "edits": []}, {"rule": "B", "edits": [edit.to_json() | wrong]}]
    with pytest.raises(PlanError) as caught:
        Plan.from_json({"ckptfix-plan": 1, "steps": steps})
    assert "$.steps[1].edits[0]" in str(caught.value)
    assert says in str(caught.value)


class Old(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Linear(4, 4) for _ in range(3))


class New(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b, self.a = (torch.nn.Linear(4, 4) for _ in range(2))


def _training(
    sizes: tuple[int, ...], is_named: bool = True, optimizer: Any = torch.optim.Adam, is_reversed: bool = False
) -> dict[str, Any]:
    model = Old()
    named = list(model.named_parameters())
    rest = iter(named[::-1] if is_reversed else named)
    groups = [[next(rest) for _ in range(size)] for size in sizes]
    given = [{"params": group if is_named else [each for _, each in group]} for group in groups]
    trained = optimizer(given, lr=0.1)
    for _, parameter in named:
        parameter.grad = torch.randn_like(parameter)
    trained.step()
    return {"state_dict": model.state_dict(), "optimizer": trained.state_dict()}


@pytest.mark.parametrize(
    ("other", "fits"),
    [
        (_training((6,)), True),
        (_training((2, 4)), False),
        (_training((6,), is_named=False), False),
        (_training((6,), is_reversed=True), False),
        (_training((6,), optimizer=torch.optim.SGD), False),
    ],
    ids=["of another epoch", "in other groups", "without names", "in another order", "with other states"],
)
def test_a_plan_moves_the_states_only_of_an_optimizer_like_its_own(tmp_path, other, fits):
    torch.save(_training((6,)), tmp_path / "first.pth")
    torch.save(other, tmp_path / "second.pth")
    plan = ckptfix.repair(tmp_path / "first.pth", New(), dry_run=True, unsafe_fixes=True).plan
    plan = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    if fits:
        repaired = ckptfix.repair(tmp_path / "second.pth", plan=plan, output=tmp_path / "out.pth")
        state = torch.load(tmp_path / "out.pth")["optimizer"]["state"]
        assert torch.equal(state[0]["exp_avg"], other["optimizer"]["state"][2]["exp_avg"])
        assert repaired.report.exit_code == 0
    else:
        with pytest.raises(PlanError, match="other groups, names or states than optimizer"):
            ckptfix.repair(tmp_path / "second.pth", plan=plan, output=tmp_path / "out.pth")
        assert not (tmp_path / "out.pth").exists()
