"""Parts of tensors: each element is used exactly once, and every part can be reversed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import convert, to_builtins

from ckptfix.core.parts import Part, PartsError, check_bijection, extent, full, inverse, merged, shape_of, used_in_full

ROWS = ((0, 2), (0, 3))


def put_together(parts: dict[str, tuple[Part, ...]], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Apply the parts with torch, as the docstring of the module says."""
    made = {}
    for key, pieces in parts.items():
        made[key] = torch.full(shape_of(pieces), -1)
        for part in pieces:
            piece = tensors[part.source][tuple(slice(*bounds) for bounds in part.box)]
            piece = piece.reshape(part.view or piece.shape)
            piece = piece.permute(part.axes) if part.axes else piece
            made[key][tuple(slice(*bounds) for bounds in part.place)] = piece.reshape(extent(part.place))
    return made


@st.composite
def maps(draw: st.DrawFn) -> tuple[dict[str, tuple[int, int]], dict[str, tuple[Part, ...]]]:
    """Tensors divided into boxes along both axes; each box, possibly permuted or viewed, is a separate tensor."""
    sources: dict[str, tuple[int, int]] = {}
    parts: dict[str, tuple[Part, ...]] = {}
    for name in draw(st.lists(st.sampled_from("abc"), min_size=1, unique=True)):
        cuts = [sorted(draw(st.sets(st.integers(1, 5), max_size=2))) for _ in range(2)]
        sources[name] = (6, 6)
        for row, (top, bottom) in enumerate(zip([0, *cuts[0]], [*cuts[0], 6], strict=True)):
            for column, (left, right) in enumerate(zip([0, *cuts[1]], [*cuts[1], 6], strict=True)):
                shape = (bottom - top, right - left)
                view = draw(st.sampled_from([(), shape[::-1], (*shape, 1)]))
                axes = tuple(draw(st.permutations(range(len(view or shape))))) if draw(st.booleans()) else ()
                place = tuple((view or shape)[axis] for axis in axes) if axes else shape
                box = ((top, bottom), (left, right))
                parts[f"{name}{row}{column}"] = (Part(name, box, full(place), view, axes),)
    return sources, parts


@given(maps())
def test_the_inverse_gives_the_source_back(given):
    sources, parts = given
    numbered = {key: torch.arange(36).reshape(shape) + 100 * at for at, (key, shape) in enumerate(sources.items())}
    check_bijection(parts, sources, {key: shape_of(pieces) for key, pieces in parts.items()})
    made = put_together(parts, numbered)
    back = put_together(inverse(parts), made)
    assert all(torch.equal(back[key], tensor) for key, tensor in numbered.items())
    again = put_together(inverse(inverse(parts)), numbered)
    assert all(torch.equal(again[key], tensor) for key, tensor in made.items())


@given(maps())
def test_json_and_back(given):
    for (part,) in given[1].values():
        assert convert(to_builtins(part), Part) == part


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        pytest.param([Part("x", ROWS, ROWS)], "not a key of the source", id="no such key"),
        pytest.param([Part("a", ROWS, ((0, 3), (0, 3)))], "different numbers", id="sizes differ"),
        pytest.param([Part("a", ROWS, ((3, 5), (0, 3)))], "outside", id="beyond the shape"),
        pytest.param([Part("a", ROWS, ROWS)], "have 6 of the 12 elements", id="a place without a source"),
        pytest.param([Part("a", ROWS, ROWS), Part("a", ROWS, ((2, 4), (0, 3)))], "overlap", id="one element twice"),
        pytest.param([Part("a", ROWS, ROWS), Part("a", ((2, 4), (0, 3)), ROWS)], "overlap", id="two for one place"),
    ],
)
def test_parts_that_are_no_bijection_are_refused(parts, problem):
    with pytest.raises(PartsError, match=problem):
        check_bijection({"k": tuple(parts)}, {"a": (4, 3)}, {"k": (4, 3)})


def test_adjacent_parts_are_merged():
    parts = [Part("a", ((at, at + 2), (0, 3)), ((at, at + 2), (0, 3))) for at in (2, 0, 4)]
    assert merged(parts) == (Part("a", ((0, 6), (0, 3)), ((0, 6), (0, 3))),)
    assert len(merged([*parts[:2], Part("b", ((4, 6), (0, 3)), ((4, 6), (0, 3)))])) == 2


def test_a_tensor_of_which_a_part_is_left_over_is_left_unchanged():
    halves = {"x": (Part("a", ((0, 1),), ((0, 1),)),), "y": (Part("b", ((0, 2),), ((0, 2),)),)}
    assert used_in_full(halves, {"a": (2,), "b": (2,)}).keys() == {"y"}
