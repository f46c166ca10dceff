"""Reading numbers off names and shapes."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ckptfix.zoo.drafting.known import Shapes


def find(shapes: Shapes, pattern: str) -> set[str]:
    """What the first group of the pattern is in the names that match it as a whole."""
    return {match[1] for key in shapes if (match := re.fullmatch(pattern, key))}


def depths(shapes: Shapes, pattern: str) -> tuple[int, ...]:
    """How many blocks each stage has, where the pattern's groups are the numbers of stage and block."""
    stages: dict[int, set[str]] = {}
    for key in shapes:
        if match := re.fullmatch(pattern, key):
            stages.setdefault(int(match[1]), set()).add(match[2])
    return tuple(len(stages[stage]) for stage in sorted(stages))


def matrix(shapes: Shapes, key: str) -> tuple[int, int] | None:
    """The shape of a matrix; None where there is none of this name."""
    shape = shapes.get(key, ())
    return (shape[0], shape[1]) if len(shape) == 2 else None


def kernel(shapes: Shapes, key: str) -> tuple[int, int, int, int] | None:
    """The shape of a two-dimensional convolution's weight; None where there is none of this name."""
    shape = shapes.get(key, ())
    return (shape[0], shape[1], shape[2], shape[3]) if len(shape) == 4 else None


def classes_of(shapes: Shapes, *heads: str) -> int | None:
    """How many classes the first of the heads that is there has."""
    found = (shapes.get(f"{head}.weight") for head in heads)
    return next((shape[0] for shape in found if shape is not None and len(shape) in (2, 4)), None)


def dashed(numbers: Iterable[int]) -> str:
    """``3-4-6-3``."""
    return "-".join(map(str, numbers))
