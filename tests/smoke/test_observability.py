"""Which tensors could be exchanged without an output that shows it."""

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import ckptfix
from ckptfix.reading.opening import open_state_dict
from ckptfix.smoke.equivalence import TOLERANCE, _units
from ckptfix.smoke.observability import unobservable


def _exchanges(model: nn.Module, inputs: torch.Tensor) -> Iterator[tuple[set[str], bool]]:
    """Yield the keys of each exchange, and whether it shows: the slow way."""
    state = model.state_dict()
    before = model(inputs)
    like = [(a, b) for a, b in combinations(state, 2) if state[a].shape == state[b].shape]
    square = [(key, key) for key, value in state.items() if value.ndim == 2 and value.shape[0] == value.shape[1]]
    for one, other in like + square:
        kept = state[one].clone(), state[other].clone()
        state[one].copy_(kept[1].T if one == other else kept[1])
        if one != other:
            state[other].copy_(kept[0])
        apart = (model(inputs) - before).abs().max() / before.abs().max()
        yield {one, other}, bool(apart > TOLERANCE)
        state[one].copy_(kept[0])
        state[other].copy_(kept[1])


class Split(nn.Module):
    """Attention with a layer that is not used, and one that is used twice over."""

    query: Any
    key: Any
    value: Any
    output: Any
    also: Any

    def __init__(self) -> None:
        super().__init__()
        for name in ("query", "key", "value", "output", "unused", "also"):
            self.add_module(name, nn.Linear(8, 8))
        self.norm, self.bn = nn.LayerNorm(8), nn.BatchNorm1d(5)

    def forward(self, x: Any) -> Any:
        seen = self.norm(x)
        mixed = F.scaled_dot_product_attention(self.query(seen), self.key(seen), self.value(seen))
        return self.bn(x + F.relu(self.output(mixed)) + self.also(mixed))


def test_gradients_find_the_same_tensors_as_exchanges():
    torch.manual_seed(0)
    model, inputs = Split().double().eval(), torch.randn(2, 5, 8, dtype=torch.float64)
    state = model.state_dict()
    with torch.no_grad():
        for value in state.values():
            if value.is_floating_point():
                value.copy_(torch.rand(value.shape) + 0.5 if value.ndim == 1 else torch.randn(value.shape) / 8**0.5)
        units = _units(ckptfix.Plan(), open_state_dict(state), model)
        hidden = {unit.key for unit in unobservable(model, units, lambda: [model(inputs)], 0)}
        assert hidden == {"key.bias", "unused.bias", "unused.weight"}
        for keys, shows in _exchanges(model, inputs):
            if not keys & {"bn.num_batches_tracked"}:
                assert shows is not (keys <= hidden), keys
