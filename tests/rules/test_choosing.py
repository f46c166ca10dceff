"""The remedies that name a set of weights each."""

from __future__ import annotations

import pytest

from ckptfix.core.finding import Placeholder, advise
from ckptfix.rules.choosing import MOST, choice, choice_of_copies


def named(remedies):
    return [dict(remedy.options).get("weights") for remedy in remedies]


@pytest.mark.parametrize(
    ("names", "first"),
    [(["encoder_k", "encoder_q"], "encoder_q"), (["b", "a"], "b"), (["ema"], "ema")],
    ids=["a follower comes last", "else their order stays", "a single one"],
)
def test_the_likeliest_first(names, first):
    assert named(choice(names))[0] == first


def test_many_are_cut_short():
    names = named(choice([f"n{at}" for at in range(MOST + 1)]))
    assert names == [*(f"n{at}" for at in range(MOST)), Placeholder("NAME")]


def test_copies_and_none():
    assert named(choice_of_copies(["a.b", "a.c", "ema.a.b", "ema.a.c"])) == ["plain", "ema"]
    assert choice_of_copies(["a.b", "module.a.c"]) == advise("remove one of the two sets of weights")
