from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from ckptfix.smoke.outputs import describe, figures_of, tensors_in

ONE = torch.ones(1)
Pair = namedtuple("Pair", "left right")


@dataclass
class Box:
    inner: Any
    label: str = "box"


@pytest.mark.parametrize(
    ("value", "names"),
    [
        pytest.param(None, [], id="nothing"),
        pytest.param("text", [], id="no tensors"),
        pytest.param(ONE, [""], id="a tensor"),
        pytest.param((ONE, [ONE]), ["[0]", "[1][0]"], id="nested"),
        pytest.param(OrderedDict(logits=ONE, hidden=(ONE, ONE)), ["logits", "hidden[0]", "hidden[1]"], id="a mapping"),
        pytest.param(Pair(ONE, None), ["left"], id="a named tuple"),
        pytest.param([Box({"x": ONE})], ["[0].inner.x"], id="a dataclass"),
        pytest.param(Box, [], id="a class is no instance"),
        pytest.param(pack_sequence([ONE]), ["data", "batch_sizes"], id="a packed sequence"),
    ],
)
def test_every_tensor_is_found(value: Any, names: list[str]) -> None:
    assert [name for name, _ in tensors_in(value)] == names


def test_a_cycle_ends() -> None:
    loop: list[Any] = [ONE]
    loop.append(loop)
    assert len(list(tensors_in(loop))) > 1


BAD = [1.0, torch.nan, torch.inf, -torch.inf, -2.0, torch.nan]


@pytest.mark.parametrize(
    ("make", "counts", "span"),
    [
        pytest.param(lambda: torch.ones(2, 2), (0, 0, 0), (1, 1), id="finite"),
        pytest.param(lambda: torch.empty(0, 3), (0, 0, 0), (None, None), id="empty"),
        pytest.param(lambda: torch.arange(3), (0, 0, 0), (None, None), id="integers are finite"),
        pytest.param(lambda: torch.ones(2, device="meta"), (0, 0, 0), (None, None), id="meta"),
        pytest.param(lambda: torch.tensor(BAD), (2, 1, 1), (-2, 1), id="float32"),
        pytest.param(lambda: torch.tensor(BAD).half(), (2, 1, 1), (-2, 1), id="float16"),
        pytest.param(lambda: torch.tensor(BAD).bfloat16(), (2, 1, 1), (-2, 1), id="bfloat16"),
        pytest.param(lambda: torch.tensor(BAD).to(torch.float8_e5m2), (2, 1, 1), (-2, 1), id="float8"),
        pytest.param(lambda: torch.full((), torch.nan), (1, 0, 0), (None, None), id="a NaN of no dimension"),
        pytest.param(lambda: torch.tensor([complex(torch.nan, 3)]), (1, 0, 0), (3, 3), id="complex: its parts count"),
        pytest.param(lambda: torch.tensor([0, torch.inf]).to_sparse(), (0, 1, 0), (None, None), id="sparse"),
        pytest.param(
            lambda: torch.tensor([[0, torch.inf]]).to_sparse_csr(), (0, 1, 0), (None, None), id="compressed sparse"
        ),
        pytest.param(lambda: torch.nested.nested_tensor([ONE, ONE * torch.nan]), (1, 0, 0), (1, 1), id="nested"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning", "ignore:The PyTorch API of nested:UserWarning")
def test_figures(make: Callable[[], torch.Tensor], counts: tuple[int, ...], span: tuple[float | None, ...]) -> None:
    figures = figures_of("x", make())
    assert (figures.nan, figures.positive_inf, figures.negative_inf) == counts
    assert (figures.low, figures.high) == span


def test_the_report_shows_dtype_and_shape() -> None:
    assert describe("", torch.ones(2, 3)) == "float32[2, 3]"
    assert describe("logits", torch.ones((), dtype=torch.int64)) == "logits: int64[]"
