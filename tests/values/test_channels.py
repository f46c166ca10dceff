from __future__ import annotations

import numpy as np
import pytest
import torch

from ckptfix.reading.live import spec_of_tensor
from ckptfix.values.channels import channels_with


def zeros(values):
    return values == 0


def plain(tensor: torch.Tensor, least: int = 1) -> tuple[int, ...]:
    return channels_with(spec_of_tensor(tensor), zeros, least)


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.tensor(0.0), id="scalar"),
        pytest.param(torch.zeros(0, 4), id="empty"),
        pytest.param(torch.zeros(3).expand(4, 3), id="one-channel-repeated"),
        pytest.param(torch.zeros(2, 2).to_sparse(), id="sparse"),
        pytest.param(torch.zeros(2, dtype=torch.complex64), id="complex"),
        pytest.param(torch.ones(5, 5), id="none"),
    ],
)
def test_what_has_none(tensor):
    assert plain(tensor) == ()


@pytest.mark.parametrize(
    "view",
    [
        lambda tensor: tensor,
        lambda tensor: tensor.half(),
        lambda tensor: tensor.to(memory_format=torch.channels_last),
        lambda tensor: tensor.transpose(0, 1).contiguous().transpose(0, 1),
    ],
    ids=["row-major", "half", "channels-last", "transposed"],
)
def test_whatever_the_order_in_memory(view):
    tensor = torch.ones(6, 5, 3, 3)
    tensor[1, 2, 0, 0], tensor[4] = 0, 0
    assert plain(view(tensor)) == (1, 4)
    assert plain(view(tensor), least=45) == (4,)


def test_over_many_blocks():
    tensor = torch.ones(3, 1_500_000)
    tensor[2, -1] = 0
    assert channels_with(spec_of_tensor(tensor), zeros) == (2,)
    assert channels_with(spec_of_tensor(tensor * np.nan), np.isnan, 1_500_000) == (0, 1, 2)
