"""Origins: what each tensor of the result is made of, whatever the steps of a plan were."""

from __future__ import annotations

import pytest

from ckptfix.core.edits import Assemble, Cast, Drop, Edit, Fill, Rename, Replace, Tie, Zero
from ckptfix.core.parts import Part
from ckptfix.core.plan import Plan, Step
from ckptfix.rules.origins import NEW, Origin, trace

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


class Merge(Edit, frozen=True, tag="merge"):
    """An edit of a later version, which says nothing of what it does."""

    key: str = "a"


def test_what_an_unknown_edit_touches_starts_anew():
    assert traced([Merge()]) == {"a": Origin("a", is_trained=False), "b": Origin("b")}
