"""A tensor in boxes reads as the whole tensor, for any boxes and any start of a read."""

from itertools import pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptfix.bytes.sources import stream
from ckptfix.core.parts import Box, box_at, lies_in
from ckptfix.errors import UnreadableError
from ckptfix.reading.folders.chunks import agree, check_tiling, is_same, merge_parts
from ckptfix.reading.tensors import spec_of_tensor
from tests.attacks.outcomes import bounded


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, and the boxes that cuts along each of its dimensions leave."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    spans = []
    for size in shape:
        cuts = sorted({0, size, *draw(st.lists(st.integers(1, size), max_size=2))})
        spans.append([*pairwise(cuts)])
    return shape, draw(st.permutations([*product(*spans)]))


@given(tilings(), st.data())
def test_any_range_of_any_tiling(tiling: tuple[tuple[int, ...], list[Box]], data: st.DataObject) -> None:
    shape, boxes = tiling
    whole = torch.arange(int(torch.Size(shape).numel()), dtype=torch.int16).reshape(shape)
    check_tiling(boxes, shape, "w")
    parts = {box: [spec_of_tensor(whole[tuple(slice(*ends) for ends in box)].clone())] for box in boxes}
    made = merge_parts("w", "int16", shape, parts, "memory")
    assert made.storage is not None
    source = made.storage.source
    expected = whole.numpy().tobytes()
    assert source.nbytes == len(expected)
    start = data.draw(st.integers(0, len(expected)))
    stop = data.draw(st.integers(start, len(expected)))
    assert bytes(source.read(start, stop)) == expected[start:stop]
    assert b"".join(map(bytes, stream(source, start, stop))) == expected[start:stop]


@pytest.mark.parametrize(
    ("boxes", "shape"),
    [
        pytest.param([box_at((), ())], (), id="0-d"),
        pytest.param([], (0, 3), id="empty-without-chunks"),
        pytest.param([box_at((0, 0), (0, 3)), box_at((0, 0), (2, 3))], (2, 3), id="a-rank-without-rows"),
        pytest.param([box_at((0, 0), (2, 1)), box_at((0, 1), (2, 2))], (2, 3), id="columns"),
    ],
)
def test_boxes_that_fill_a_shape(boxes: list[Box], shape: tuple[int, ...]) -> None:
    check_tiling(boxes, shape, "w")


@pytest.mark.parametrize(
    ("boxes", "shape"),
    [
        pytest.param([], (2, 3), id="no-chunk"),
        pytest.param([box_at((), ()), box_at((), ())], (), id="0-d-twice"),
        pytest.param([box_at((0, 0), (1, 3))], (2, 3), id="a-row-short"),
        pytest.param([box_at((0, 0), (2, 3)), box_at((1, 0), (1, 3))], (2, 3), id="a-row-twice"),
        pytest.param([box_at((0, 0), (2, 2)), box_at((0, 1), (2, 1))], (2, 3), id="right-number-but-a-column-twice"),
        pytest.param([box_at((1, 0), (2, 3))], (2, 3), id="outside"),
        pytest.param([box_at((0,), (6,))], (2, 3), id="other-rank"),
    ],
)
def test_boxes_that_do_not_are_damage(boxes: list[Box], shape: tuple[int, ...]) -> None:
    with pytest.raises(UnreadableError, match="chunk"):
        check_tiling(boxes, shape, "w")


@given(st.lists(st.tuples(*[st.integers(0, 2)] * 4), max_size=6))
def test_boxes_fill_a_shape_if_they_have_each_element_once(parts: list[tuple[int, ...]]) -> None:
    boxes = [box_at((row, column), (1 + height, 1 + width)) for row, column, height, width in parts]
    boxes = [box for box in boxes if lies_in(box, (3, 3))]
    held = torch.zeros(3, 3)
    for box in boxes:
        held[tuple(slice(*ends) for ends in box)] += 1
    if bool((held == 1).all()):
        check_tiling(boxes, (3, 3), "w")
    else:
        with pytest.raises(UnreadableError):
            check_tiling(boxes, (3, 3), "w")


def test_staggered_boxes_are_checked_in_bounded_time() -> None:
    """Any line through them crosses the largest possible number of boxes."""
    size = 10_000
    boxes = [box_at((start, row), (stop - start, 1)) for row in range(size) for start, stop in ((0, row), (row, size))]
    with bounded():
        check_tiling(boxes, (size, size), "w")


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("place", [0, 5000])
def test_copies_without_checksums_agree_as_far_as_they_are_read(place: int, reads: bool) -> None:
    value = torch.arange(10_000.0)
    other = value.clone()
    one, same = spec_of_tensor(value), spec_of_tensor(value.clone())
    other[place] = -1
    assert agree([one, same], "f", reads=reads)
    assert agree([one, spec_of_tensor(other)], "f", reads=reads) is (place > 0 and not reads)


SCALES = [torch.tensor([0.5, 0.5]), torch.tensor([0.5, 0.25])]
CODES = torch.ones(2, 3)
QUANTISED = [
    *(torch.quantize_per_tensor(CODES * scale, scale, 0, torch.qint8) for scale in (0.5, 0.25)),
    *(
        torch.quantize_per_channel(CODES * scale[:, None], scale, torch.zeros(2, dtype=torch.int64), 0, torch.qint8)
        for scale in SCALES
    ),
]


@pytest.mark.parametrize("reads", [False, True])
def test_equal_codes_of_other_quantisers_are_other_tensors(reads: bool) -> None:
    assert all(torch.equal(each.int_repr(), QUANTISED[0].int_repr()) for each in QUANTISED)
    for at, one in enumerate(QUANTISED):
        for other_at, other in enumerate(QUANTISED):
            first, second = spec_of_tensor(one), spec_of_tensor(other.clone())
            assert agree([first, second], "f", reads=reads) is is_same(first, second, "f") is (at == other_at)
