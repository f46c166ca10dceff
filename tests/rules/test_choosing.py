"""The remedies that name a flag for each set of weights."""

from __future__ import annotations

import pytest

from ckptfix.rules.choosing import MOST, choice, choice_of_copies


@pytest.mark.parametrize(
    ("names", "first"),
    [(["encoder_k", "encoder_q"], "encoder_q"), (["b", "a"], "b"), (["ema"], "ema")],
    ids=["a follower comes last", "else their order stays", "one alone"],
)
def test_the_likeliest_first(names, first):
    assert choice(names).startswith(f"--weights {first} takes this set alone")


def test_many_are_cut_short():
    text = choice([f"n{at}" for at in range(MOST + 1)])
    assert f"n{MOST}" not in text
    assert text.endswith("or another one with --weights NAME")


def test_copies_and_none():
    assert choice_of_copies(["a.b", "a.c", "ema.a.b", "ema.a.c"]).startswith("--weights plain takes this set alone")
    assert choice_of_copies(["a.b", "module.a.c"]) == "remove one of the two sets of weights"
