"""What adapters of further types change, with peft's operations in their order.

For some types this is the product of two matrices, which are made from the adapter's tensors once."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ckptfix.core.lazy import torch

Pair = tuple["torch.Tensor", "torch.Tensor"]  # [rank, inputs] and [outputs, rank]


def _vera(
    size: tuple[int, int], one: torch.Tensor, two: torch.Tensor, outputs: torch.Tensor, ranks: torch.Tensor
) -> Pair:
    return ranks[:, None] * one[:, : size[1]], outputs[:, None] * two[: size[0]]


# By the form of a delta; called with the numbers of outputs and inputs, and the adapter's tensors.
PAIRS: Mapping[str, Callable[..., Pair]] = {
    "adalora": lambda size, one, two, values: (one * values, two),
    "vera": _vera,
    "hira": lambda size, one, two: (one, two),
}


def of_miss(block: torch.Tensor, first: int, last: int, inputs: int) -> torch.Tensor:
    """Return the change of some rows by MiSS or Bone, which repeat a block [rank, outputs] along the inputs."""
    rows = block.T[torch.arange(first, last) % block.shape[1]]
    return rows.repeat(1, -(-inputs // len(block)))[:, :inputs]


def of_bat(weight: torch.Tensor, blocks: torch.Tensor, first: int) -> torch.Tensor:
    """Return the change of some rows, beginning with row ``first``, by their own blocks [rank, rank]
    (``init_weights="bat"`` of MiSS and Bone)."""
    rank, inputs = blocks.shape[1], weight.shape[1]
    parts = weight.to(blocks.dtype).reshape(-1, rank, inputs // rank, rank).permute(2, 0, 1, 3)
    own = blocks[first // rank : first // rank + parts.shape[1]]
    return (parts @ own + own).permute(1, 2, 0, 3).reshape(weight.shape)


def of_shira(values: torch.Tensor, places: torch.Tensor, first: int, last: int, inputs: int) -> torch.Tensor:
    """Return the change of some rows by SHiRA, which changes single elements: -0 is no change for any other."""
    rows, columns = places.long()
    own = (rows >= first) & (rows < last)
    change = torch.full((last - first, inputs), -0.0, dtype=values.dtype)
    change[rows[own] - first, columns[own]] = values[own]
    return change
