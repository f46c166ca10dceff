"""The steps of a rule: the generated function of the same map gives the expected result in torch."""

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfix.core.parts import check_bijection
from ckptfix.core.plan import Plan
from ckptfix.core.rename_map import MapRule, RenameMap
from ckptfix.engine.applying import apply_plan
from ckptfix.errors import PlanError, UsageError
from ckptfix.maps.code import python_code
from ckptfix.maps.layout import Steps
from ckptfix.maps.resolving import inverse, resolve
from ckptfix.repairing import repair, repair_state_dict


def pasted(rename_map: RenameMap, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what the generated function gives in a repository without ckptfix."""
    namespace: dict[str, Any] = {}
    exec(python_code(rename_map), namespace)
    result: dict[str, torch.Tensor] = namespace["convert"](dict(state))
    return result


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert value.shape == other[key].shape, key
        assert torch.equal(value, other[key]), key


def numbered(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Return tensors in which every element has a different value."""
    start, result = 0, []
    for shape in shapes:
        numel = torch.Size(shape).numel()
        result.append(torch.arange(start, start + numel, dtype=torch.float32).reshape(shape))
        start += numel
    return result


def a_map(source: str, target: str, *steps: str) -> RenameMap:
    return RenameMap((MapRule(source, target, steps),))


A, B, C = numbered((4, 3), (4, 3), (4, 3))
BIG = numbered((12, 3))[0]
CASES = [
    pytest.param(a_map("x.{n}.w", "y.{n+1}.v"), {"x.0.w": A, "x.7.w": B}, {"y.1.v": A, "y.8.v": B}, id="rename"),
    pytest.param(a_map("x.{2n+1}", "y.{n}"), {"x.1": A, "x.3": B, "x.2": C}, {"y.0": A, "y.1": B, "x.2": C}, id="odd"),
    pytest.param(a_map("{a,b}.w", "n.{c,d}.w"), {"a.w": A, "b.w": B}, {"n.c.w": A, "n.d.w": B}, id="pairs"),
    pytest.param(a_map("a.*", "b.*"), {"a.x.y": A, "a.z": B}, {"b.x.y": A, "b.z": B}, id="any text"),
    pytest.param(a_map("{q,k,v}.w", "qkv.w", "concat"), {"k.w": B, "q.w": A, "v.w": C},
                 {"qkv.w": torch.cat([A, B, C])}, id="concat"),
    pytest.param(a_map("{a,b}", "c", "concat dim 1"), {"a": A, "b": B}, {"c": torch.cat([A, B], 1)}, id="concat dim 1"),
    pytest.param(a_map("qkv", "{q,k,v}", "split 3"), {"qkv": BIG}, dict(zip("qkv", BIG.chunk(3), strict=True)),
                 id="split"),
    pytest.param(a_map("qkv", "{q,k,v}", "split 4:1:1"), {"qkv": BIG},
                 dict(zip("qkv", BIG.split([8, 2, 2]), strict=True)), id="grouped queries"),
    pytest.param(a_map("e.{n}.w", "e.w", "stack"), {"e.1.w": B, "e.0.w": A}, {"e.w": torch.stack([A, B])}, id="stack"),
    pytest.param(a_map("e.{n}.{g,u}", "e", "concat", "stack"), {"e.0.g": A, "e.0.u": B, "e.1.g": C, "e.1.u": A + 50},
                 {"e": torch.stack([torch.cat([A, B]), torch.cat([C, A + 50])])}, id="experts"),
    pytest.param(a_map("w", "w.t", "transpose"), {"w": A}, {"w.t": A.t()}, id="transpose"),
    pytest.param(a_map("w", "{a,b,c}", "transpose", "split 3"), {"w": A}, dict(zip("abc", A.t().split(1), strict=True)),
                 id="transpose and split"),
    pytest.param(a_map("w", "p", "(h d t) ... -> (h t d) ... with d=3 t=2"), {"w": BIG},
                 {"p": BIG.view(2, 3, 2, 3).transpose(1, 2).reshape(12, 3)}, id="rotary embeddings"),
    pytest.param(a_map("w", "{g,u}", "(f 2) i -> (2 f) i", "split"), {"w": BIG}, {"g": BIG[::2], "u": BIG[1::2]},
                 id="interleaved"),
    pytest.param(a_map("w", "{q,k,v}", "(n 3 d) i -> (3 n d) i with d=2", "split"), {"w": BIG},
                 dict(zip("qkv", BIG.view(2, 3, 2, 3).transpose(0, 1).reshape(3, 4, 3), strict=True)),
                 id="heads, each with its query, key and value"),
    pytest.param(a_map("w", "{q,k,v}", "split", "(d t) ... -> (t d) ... with t=2 for q,k"), {"w": BIG},
                 {"q": BIG[[0, 2, 1, 3]], "k": BIG[[4, 6, 5, 7]], "v": BIG[8:]}, id="permuted in part"),
    pytest.param(a_map("{n}.{q,k}", "w", "a b -> b a for k", "concat", "stack"), {"0.q": A, "0.k": C.reshape(3, 4)},
                 {"w": torch.cat([A, C.reshape(3, 4).t()])[None]}, id="transposed in part"),
    pytest.param(a_map("w", "c", "o (i h w) -> o i h w with h=1 w=3"), {"w": A}, {"c": A.view(4, 1, 1, 3)}, id="conv"),
    pytest.param(a_map("w", "c", "o i -> 1 o 1 i"), {"w": A}, {"c": A.view(1, 4, 1, 3)}, id="axes of one element"),
    pytest.param(a_map("w", "v", "swap"), {"w": A}, {"v": A[[2, 3, 0, 1]]}, id="halves exchanged"),
    pytest.param(a_map("l.{n}.e.{m}.w", "l.{n}.w", "stack"),
                 {"l.0.e.0.w": A, "l.0.e.1.w": B, "l.5.e.0.w": C, "l.5.e.1.w": A + 50},
                 {"l.0.w": torch.stack([A, B]), "l.5.w": torch.stack([C, A + 50])}, id="experts of each layer"),
    pytest.param(a_map("{g,u}.{m}.w", "all.{g,u}", "stack"), {"g.0.w": A, "g.1.w": B, "u.0.w": C, "u.1.w": A + 50},
                 {"all.g": torch.stack([A, B]), "all.u": torch.stack([C, A + 50])}, id="experts by a text"),
    pytest.param(a_map("s.{n}.b.{n}", "s.{n}"), {"s.1.b.1": A, "s.1.b.2": B}, {"s.1": A, "s.1.b.2": B}, id="twice"),
    pytest.param(RenameMap((MapRule("w", "v", (), optional=True), MapRule("a", "b"))), {"a": A}, {"b": A},
                 id="a key that need not be there"),
]  # fmt: skip


@pytest.mark.parametrize(("rename_map", "before", "after"), CASES)
def test_steps(rename_map, before, after):
    assert_equal(pasted(rename_map, before), after)
    done, _ = repair_state_dict(before, rename_map=rename_map, values=False)
    assert_equal(done, after)


@pytest.mark.parametrize(("rename_map", "before", "after"), CASES)
def test_a_map_applied_backwards_and_the_inverse_plan_give_the_source_back(rename_map, before, after):
    shapes = {key: tuple(value.shape) for key, value in before.items()}
    moves = resolve(inverse(rename_map), {key: tuple(value.shape) for key, value in after.items()}, shapes)
    assert {key: move.shape for key, move in moves.items()} == {key: shapes[key] for key in moves}
    forth = repair(before, rename_map=rename_map, values=False)
    back = apply_plan(Plan.from_json(forth.plan.inverse().to_json()), forth.checkpoint)
    assert_equal(back.state_dict(), before)


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        (("turn",), "there is no step 'turn'"),
        (("split 3", "concat"), "comes too late"),
        (("a b -> a c",), "same axes on both sides"),
        (("a a -> a a",), "each once"),
        (("a b -> b a with c=2",), "sizes of its axes"),
        (("split 0",), "there is no step"),
        (("a b -> b a for q",), "need a concat"),
        (("a b -> b a for q", "split"), "need a concat|comes too late"),
        (("swap", "split"), "swap is a step by itself"),
    ],
)
def test_invalid_steps_are_refused(steps, says):
    with pytest.raises(ValueError, match=says):
        Steps.parse(steps)


@pytest.mark.parametrize(
    ("source", "target", "steps", "says"),
    [
        ("e.{2n}", "e", ("stack",), "cannot be computed in a function; number from 0"),
        ("e.x", "e.{n}", (), "{n} depends on the target"),
    ],
)
def test_a_function_that_needs_a_target_is_refused(source, target, steps, says):
    with pytest.raises(UsageError, match=says):
        python_code(a_map(source, target, *steps))


# ---- any composition of the steps is a bijection or is refused


@dataclass(frozen=True)
class Made:
    rename_map: RenameMap
    state: dict[str, torch.Tensor] = field(hash=False)


@st.composite
def compositions(draw: st.DrawFn) -> Made:
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3)))
    names = draw(st.sampled_from([("",), ("a", "b"), ("a", "b", "c")]))
    number = draw(st.integers(0, 3))
    steps, source = [], "x"
    if len(names) > 1:
        source += f".{{{','.join(names)}}}"
        some = draw(st.booleans())
        steps += ["(u 2) ... -> (2 u) ... for a"] * some
        steps.append(f"concat{draw(st.sampled_from(['', ' dim 1', ' 1:1', ' 2:1:1']))}")
    if number:
        source += ".{e}"
        steps.append("stack")
    if draw(st.booleans()):
        rank = len(shape) + bool(number)
        axes = "abcd"[:rank]
        order = "".join(draw(st.permutations(axes)))
        steps.append(draw(st.sampled_from([
            f"{' '.join(axes)} -> {' '.join(order)}",
            "(a 2) ... -> (2 a) ...",
            "(a b 2) ... -> (a 2 b) ... with b=3",
            f"{' '.join(axes)} -> ({' '.join(order)})",
            f"{' '.join(axes)} -> 1 {' '.join(order)} 1",
        ])))  # fmt: skip
    target = "y"
    if draw(st.booleans()):
        target += ".{f}"
        steps.append("unstack")
    if draw(st.booleans()):
        target += ".{p,q}"
        steps.append(f"split{draw(st.sampled_from(['', ' 2', ' 2:1', ' dim 1']))}")
        if len(names) == 1 and draw(st.booleans()):
            steps.append(draw(st.sampled_from(["a b -> b a for q", "(u 2) ... -> (2 u) ... for p,q"])))
    ends = [f".{at}" for at in range(number)] or [""]
    keys = [f"x{'.' * bool(name)}{name}{end}" for name in names for end in ends]
    return Made(a_map(source, target, *steps), dict(zip(keys, numbered(*[shape] * len(keys)), strict=True)))


@given(compositions())
@settings(max_examples=150, deadline=None)
def test_any_composition_is_a_bijection_or_refused(made):
    shapes = {key: tuple(value.shape) for key, value in made.state.items()}
    try:
        moves = resolve(made.rename_map, shapes)
    except PlanError:
        return
    parts = {key: move.parts for key, move in moves.items()}
    wanted = {key: move.shape for key, move in moves.items()}
    check_bijection(parts, shapes, wanted)
    forth = repair(made.state, rename_map=made.rename_map, values=False)
    assert_equal(forth.state_dict(), pasted(made.rename_map, made.state))
    assert_equal(apply_plan(forth.plan.inverse(), forth.checkpoint).state_dict(), made.state)
    with suppress(PlanError):  # sizes that are merged into one axis do not always follow from the target
        back = resolve(inverse(made.rename_map), wanted, shapes)
        assert {key: move.shape for key, move in back.items()} == shapes
