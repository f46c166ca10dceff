"""Origins: what each tensor of the result is made of, after any steps of a plan."""

from collections import OrderedDict

import pytest
import torch

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.edits import Assemble, Cast, Drop, Edit, Fill, Rename, Replace, Tie, Zero
from ckptfix.core.parts import Part
from ckptfix.core.plan import Plan, Step
from ckptfix.reading.opening import open_state_dict
from ckptfix.rules.origins import NEW, Change, Origin, trace

HALVES = (Part("a", ((0, 2),), ((0, 2),)), Part("b", ((0, 2),), ((2, 4),)))


def traced(*steps: list[Edit]) -> dict[str, Origin]:
    return trace(Plan(tuple(Step("X", tuple(step)) for step in steps)), ["a", "b"])


@pytest.mark.parametrize(
    ("steps", "origins"),
    [
        pytest.param([], {"a": Origin("a"), "b": Origin("b")}, id="nothing"),
        pytest.param([[Rename("a", "b"), Rename("b", "a")]], {"a": Origin("b"), "b": Origin("a")}, id="swap"),
        pytest.param([[Rename("a", "c")], [Rename("c", "d")]], {"d": Origin("a"), "b": Origin("b")}, id="twice"),
        pytest.param([[Drop("a")]], {"b": Origin("b")}, id="drop"),
        pytest.param([[Cast("a", "float32", "float16")]], {"a": Origin("a"), "b": Origin("b")}, id="cast"),
        pytest.param([[Zero("a", "float32", "subnormal")]], {"a": Origin("a"), "b": Origin("b")}, id="subnormal"),
        pytest.param(
            [[Zero("a", "float32", "non-finite")]], {"a": Origin("a", is_trained=False), "b": Origin("b")}, id="zero"
        ),
        pytest.param(
            [[Rename("a", "c")], [Replace("c", "float32", (2,), "zeros")]],
            {"c": Origin("a", is_trained=False), "b": Origin("b")},
            id="replace",
        ),
        pytest.param(
            [[Fill("c", "float32", (2,), "zeros")]], {"a": Origin("a"), "b": Origin("b"), "c": NEW}, id="fill"
        ),
        pytest.param(
            [[Drop("a")], [Fill("a", "float32", (3,), "zeros")]],
            {"b": Origin("b"), "a": Origin("a", is_trained=False)},
            id="drop-and-fill",
        ),
        pytest.param([[Tie("c", "a")]], {"a": Origin("a"), "b": Origin("b"), "c": Origin("a")}, id="tie"),
        pytest.param(
            [[Assemble.reshape("a", "float32", (2,), (2, 1))], [Rename("a", "c")]],
            {"c": Origin("a", (2, 1)), "b": Origin("b")},
            id="reshape",
        ),
        pytest.param(
            [[Rename("b", "b")], [Assemble("c", "float32", (4,), HALVES)]],
            {"c": Origin("", (4,), HALVES)},
            id="assemble",
        ),
        pytest.param(
            [[Assemble.reshape("a", "float32", (2,), (2, 1))], [Assemble("c", "float32", (4,), HALVES)]],
            {"c": Origin("", (4,), HALVES, is_trained=False)},
            id="assembled-of-what-was-reshaped",
        ),
    ],
)
def test_origins(steps, origins):
    assert traced(*steps) == origins


def state(*keys: str, modules: tuple[str, ...] = ()) -> Checkpoint:
    entries = OrderedDict((key, torch.zeros(2)) for key in keys)
    if modules:
        entries._metadata = OrderedDict((module, {"version": 1}) for module in modules)  # type: ignore[attr-defined]
    return open_state_dict(entries)


NUMBERED = sorted(f"{number}.w" for number in range(12))


@pytest.mark.parametrize(
    ("checkpoint", "is_ordered"),
    [
        pytest.param(state("a", "b", "c"), True, id="few names of a model may be alphabetical"),
        pytest.param(state("conv1.weight", "conv2.weight", "fc.weight"), True, id="layers without a bias"),
        pytest.param(
            state("0.bias", "0.weight_g", "0.weight_v", "1.weight"), True, id="weight_norm has its bias first"
        ),
        pytest.param(state("b.bias", "b.weight", "a.weight"), True, id="names in no order"),
        pytest.param(state("a.weight", "a.bias", "b.weight", "b.bias"), True, id="modules in order, and no sorting"),
        pytest.param(state("a.w", "b.w", modules=("", "a", "b")), True, id="_metadata in the same order"),
        pytest.param(state("a.bias", "a.weight"), False, id="a bias before its weight"),
        pytest.param(state("rnn.bias_hh_l0", "rnn.weight_hh_l0"), False, id="a recurrent bias before its weight"),
        pytest.param(state("attn.in_proj_bias", "attn.in_proj_weight"), False, id="a bias inside of a name"),
        pytest.param(state("blocks.0.w", "cls_token"), False, id="an own parameter after those of a module"),
        pytest.param(state("a.b.w", "a.c"), False, id="the same inside of a module"),
        pytest.param(state(*NUMBERED), False, id="10 before 2"),
        pytest.param(state(*(f"h.{key}" for key in NUMBERED)), False, id="the same inside of a module's list"),
        pytest.param(state("h.2.bias", "h.2.weight", "h.10.weight"), False, id="numbers sorted as numbers"),
        pytest.param(state("a.w", "b.w", modules=("", "b", "a")), False, id="_metadata in another order"),
    ],
)
def test_whether_a_file_has_the_order_of_a_model(checkpoint, is_ordered):
    assert Change.of(checkpoint, checkpoint, Plan(), None).is_ordered is is_ordered


class Merge(Edit, frozen=True, tag="merge"):
    """An edit of a later version, which says nothing of what it does."""

    key: str = "a"


def test_state_of_keys_of_an_unknown_edit_starts_anew():
    assert traced([Merge()]) == {"a": Origin("a", is_trained=False), "b": Origin("b")}
