"""The assignment problem: the pairs of rows and columns with the largest sum of scores (shortest augmenting paths)."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf


def assign(scores: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """Return the pairs (row, column) of the best assignment; each row or each column has one, whichever are fewer."""
    if not scores or not scores[0]:
        return []
    if len(scores) > len(scores[0]):
        return sorted((row, column) for column, row in assign(list(zip(*scores, strict=True))))
    best = [max(range(len(row)), key=row.__getitem__) for row in scores]
    if len(set(best)) == len(best):  # each row has its favourite: nothing can be better
        return list(enumerate(best))
    return sorted((row, column) for column, row in _augment(scores).items())


def _augment(scores: Sequence[Sequence[float]]) -> dict[int, int]:
    width = len(scores[0])
    gains, prices = [0.0] * len(scores), [0.0] * (width + 1)
    holder = [-1] * (width + 1)  # the row of each column; the last column is where a search starts
    for start in range(len(scores)):
        holder[width], here = start, width
        slack, before, seen = [inf] * width, [width] * width, [False] * (width + 1)
        while holder[here] != -1:
            seen[here] = True
            row, delta, following = holder[here], inf, -1
            for column in range(width):
                if not seen[column]:
                    cost = -scores[row][column] - gains[row] - prices[column]
                    if cost < slack[column]:
                        slack[column], before[column] = cost, here
                    if slack[column] < delta:
                        delta, following = slack[column], column
            for column in range(width + 1):
                if seen[column]:
                    gains[holder[column]] += delta
                    prices[column] -= delta
                elif column < width:
                    slack[column] -= delta
            here = following
        while here != width:
            holder[here] = holder[before[here]]
            here = before[here]
    return {column: holder[column] for column in range(width) if holder[column] != -1}
