"""The assignment problem."""

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from ckptfix.maps.trees import assign

ROWS = st.integers(1, 4).flatmap(
    lambda width: st.lists(st.lists(st.integers(-5, 5), min_size=width, max_size=width), min_size=1, max_size=4)
)


@given(ROWS)
def test_no_other_assignment_is_better(scores):
    pairs = assign(scores)
    rows, columns = range(len(scores)), range(len(scores[0]))
    assert len({row for row, _ in pairs}) == len({column for _, column in pairs}) == min(len(rows), len(columns))
    turned = scores if len(rows) <= len(columns) else [list(column) for column in zip(*scores, strict=True)]
    orders = permutations(range(len(turned[0])), len(turned))
    sums = [sum(row[at] for row, at in zip(turned, order, strict=True)) for order in orders]
    assert sum(scores[row][column] for row, column in pairs) == max(sums)


def test_noop_nothing_to_assign():
    assert assign([]) == assign([[]]) == []
