"""Bounded reading and the way back to logical indices."""

import math
import random

import pytest
import torch

from ckptfix.values.walk import CHUNK, Walk, _pieces, _span
from tests.values.memory import MemorySource, spec_of


def walk_of(tensor: torch.Tensor) -> Walk:
    return Walk(spec_of(tensor, {}))


@pytest.mark.parametrize(
    ("tensor", "whole"),
    [
        pytest.param(torch.arange(24.0).view(2, 3, 4), True, id="contiguous"),
        pytest.param(torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1), True, id="permuted"),
        pytest.param(torch.arange(6.0).view(3, 1, 2).expand(3, 5, 2), True, id="zero-stride"),
        pytest.param(torch.arange(24.0).view(4, 6)[1:3], True, id="rows"),
        pytest.param(torch.tensor(3.0), True, id="0-d"),
        pytest.param(torch.arange(24.0).view(4, 6)[:, 1::2], False, id="columns"),
        pytest.param(torch.arange(8.0).unfold(0, 4, 2), False, id="overlapping"),
    ],
)
def test_blocks_hold_the_distinct_elements(tensor, whole):
    walk = walk_of(tensor)
    blocks = list(walk.blocks())
    values = [x for block in blocks for x in torch.frombuffer(bytearray(block), dtype=tensor.dtype).tolist()]
    assert sorted(values * walk.repetition) == sorted(tensor.reshape(-1).tolist())
    storage = walk.spec.storage
    assert storage is not None
    assert isinstance(storage.source, MemorySource)
    assert isinstance(blocks[0].obj, bytes)
    assert (blocks[0].obj is storage.source.data) is whole, "a whole range is not copied"


def test_a_large_tensor_is_read_in_bounded_pieces():
    tensor = torch.zeros(3 * CHUNK // 4 + 5)
    walk = walk_of(tensor)
    sizes = [block.nbytes for block in walk.blocks()]
    assert sum(sizes) == tensor.nbytes
    assert max(sizes) <= CHUNK


def test_pieces_cover_a_view_once():
    generator = random.Random(0)
    for _ in range(200):
        dims = []
        stride = generator.randint(1, 3)
        for _ in range(generator.randint(0, 4)):
            size = generator.randint(2, 5)
            dims.append((size, stride))
            stride *= size + generator.randint(0, 2)
        view = tuple(reversed(dims))
        limit = generator.randint(1, 40)
        pieces = list(_pieces(7, view, limit))
        assert all(_span(inner) <= limit for _, inner in pieces)
        assert sum(math.prod(size for size, _ in inner) for _, inner in pieces) == math.prod(s for s, _ in view)
        starts = [offset for offset, _ in pieces]
        assert starts == sorted(set(starts))


@pytest.mark.parametrize("seed", range(20))
def test_flat_index_is_that_of_the_first_in_logical_order(seed):
    generator = random.Random(seed)
    tensor = torch.zeros(3, 1, 4, 5)
    for _ in range(3):
        tensor.view(-1)[generator.randrange(60)] = 1.0
    axes = list(range(4))
    generator.shuffle(axes)
    view = tensor.expand(3, 6, 4, 5).permute(axes)
    walk = walk_of(view)
    found = torch.frombuffer(bytearray(b"".join(walk.blocks())), dtype=torch.float32).nonzero().flatten().numpy()
    assert walk.flat_index(int(walk.logical_order(found).min())) == view.reshape(-1).nonzero()[0].item()


def test_a_view_that_repeats_its_storage_too_often_is_not_bounded():
    assert not walk_of(torch.zeros(2000).as_strided((1000, 1000), (1, 1))).is_bounded
    assert walk_of(torch.zeros(1).expand(10**6, 10**6)).is_bounded


def test_blocks_of_an_overlapping_view_are_bounded_too():
    walk = walk_of(torch.zeros(1 << 20).unfold(0, 32, 1))
    assert max(block.nbytes for block in walk.blocks()) <= 2 * CHUNK
