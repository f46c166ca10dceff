"""The same operations are applied to ``Elements`` and to arrays; the parts of the former then give the latter."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfix.core.parts import extent
from ckptfix.maps.elements import Elements, UntraceableError

Array = Any
SHAPES = {"a": (4, 6), "b": (4, 3), "c": (2, 6)}
VALUES = {key: np.arange(np.prod(shape)).reshape(shape) + 100 * at for at, (key, shape) in enumerate(SHAPES.items())}


def rebuilt(elements: Elements) -> Array:
    """Return the array that the parts of some elements describe."""
    made = np.full(elements.shape, -1)
    for part in elements.parts(SHAPES):
        box = VALUES[part.source][tuple(slice(*bounds) for bounds in part.box)]
        if part.axes:
            box = box.reshape(part.view or box.shape).transpose(part.axes)
        made[tuple(slice(*bounds) for bounds in part.place)] = box.reshape(extent(part.place))
    return made


@pytest.mark.parametrize("key", SHAPES)
def test_noop_a_tensor_is_one_part(key):
    (part,) = Elements.of(key, SHAPES[key]).parts(SHAPES)
    assert (part.view, part.axes) == ((), ())
    assert np.array_equal(rebuilt(Elements.of(key, SHAPES[key])), VALUES[key])


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_elements_move_like_arrays(data):
    keys = data.draw(st.sampled_from([("a",), ("a", "b"), ("a", "c"), ("b", "a", "b")]))
    axis = 0 if "c" in keys else 1
    elements = Elements.joined([Elements.of(key, SHAPES[key]) for key in keys], axis)
    array = np.concatenate([VALUES[key] for key in keys], axis)
    for _ in range(data.draw(st.integers(1, 4))):
        match data.draw(st.sampled_from(["permute", "view", "slice", "stack", "select"])):
            case "permute":
                order = data.draw(st.permutations(range(array.ndim)))
                elements, array = elements.permuted(order), array.transpose(order)
            case "view":
                size = array.size
                rows = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
                columns = data.draw(st.sampled_from([n for n in range(1, size // rows + 1) if size // rows % n == 0]))
                shape = (rows, columns, size // rows // columns)
                try:
                    elements, array = elements.viewed(shape), array.reshape(shape)
                except UntraceableError:  # sizes that do not divide
                    return
            case "slice" | "select" as kind:
                at = data.draw(st.integers(0, array.ndim - 1))
                start = data.draw(st.integers(0, array.shape[at] - 1))
                if kind == "select" and array.ndim > 1:
                    elements, array = elements.selected(at, start), array.take(start, at)
                else:
                    stop = data.draw(st.integers(start + 1, array.shape[at]))
                    elements, array = elements.sliced(at, start, stop), array.take(range(start, stop), at)
            case "stack":
                elements, array = Elements.stacked([elements]), np.stack([array])
        assert elements.shape == array.shape
    assert np.array_equal(rebuilt(elements), array)


def test_rows_that_meet_across_columns_stay_apart():
    """The last element of a row and the first of the next are adjacent in the place, but not in the source."""
    elements = Elements.joined([Elements.of(key, SHAPES[key]) for key in "bab"], 1).viewed((16, 1, 3))
    array = np.concatenate([VALUES[key] for key in "bab"], 1).reshape(16, 1, 3).transpose(1, 2, 0)
    assert np.array_equal(rebuilt(elements.permuted((1, 2, 0))), array)
