from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfix.bytes.limits import SLOT
from ckptfix.reading.pickles.memo import FAR, Memo


@pytest.mark.parametrize("first", [0, 1])
def test_numbers_without_a_gap_lie_in_a_row(first):
    memo = Memo()
    for index in range(first, 1000):
        assert memo.keep(index, index) == SLOT
        assert memo.keep(index, index) == 0
    assert [memo.recall(index) for index in range(first, 1000)] == list(range(first, 1000))


def test_a_large_number_costs_no_more_than_a_small_one():
    memo = Memo()
    assert memo.keep(1 << 32, "far") == FAR
    assert memo.keep(1 << 32, "again") == 0
    assert memo.recall(1 << 32) == "again"


@given(st.lists(st.tuples(st.integers(-2, 12), st.integers())))
def test_it_is_a_dict(kept):
    memo, model = Memo(), {}
    for index, value in kept:
        memo.keep(index, value)
        model[index] = value
        assert len(memo) == len(model)
    for index in range(-3, 14):
        if index in model:
            assert memo.recall(index) == model[index]
        else:
            with pytest.raises(KeyError):
                memo.recall(index)
