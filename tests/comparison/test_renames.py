"""Which keys hold the same bytes under another name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ckptfix.comparison.renames import find_renames, rename_modules
from ckptfix.reading.memory import open_state_dict

ONE, TWO = torch.randn(2, 3), torch.randn(2, 3)


def renames(a: dict[str, Any], b: dict[str, Any]) -> dict[str, str]:
    return dict(find_renames(open_state_dict(a).specs, open_state_dict(b).specs))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        pytest.param({}, {}, id="nothing"),
        pytest.param({"a": ONE}, {"b": TWO}, id="other bytes"),
        pytest.param({"a": ONE}, {"b": ONE.reshape(3, 2).clone()}, id="another shape"),
        pytest.param({"a": ONE}, {"b": ONE.view(torch.int32).clone()}, id="another dtype of the same bytes"),
        pytest.param({"a": ONE}, {"b": ONE.to_sparse()}, id="another layout"),
    ],
)
def test_no_rename(a: dict[str, Any], b: dict[str, Any]):
    assert renames(a, b) == {}


def test_the_same_bytes_are_found_in_any_memory_order():
    assert renames({"a": ONE, "b": TWO}, {"x": TWO.T.contiguous().T, "y": ONE.clone()}) == {"a": "y", "b": "x"}


def test_equal_tensors_are_paired_by_the_end_of_their_names():
    zeros = {"module.b.bias": torch.zeros(2), "module.a.bias": torch.zeros(2), "module.c.beta": torch.zeros(2)}
    others = {"a.bias": torch.zeros(2), "b.bias": torch.zeros(2), "norm.gamma": torch.zeros(2)}
    expected = {"module.b.bias": "b.bias", "module.a.bias": "a.bias", "module.c.beta": "norm.gamma"}
    assert renames(zeros, others) == expected


def test_one_side_has_fewer_of_the_same():
    assert renames({"x.a": ONE, "y.b": ONE.clone()}, {"b": ONE.clone()}) == {"y.b": "b"}


def test_empty_tensors_are_paired():
    assert renames({"a": torch.empty(0)}, {"b": torch.empty(0)}) == {"a": "b"}


def test_modules_follow_their_keys():
    assert rename_modules({"module.bn.weight": "bn.weight", "a.conv1.weight": "a.conv2.weight"}) == {
        "module.bn": "bn",
        "module": "",
        "a.conv1": "a.conv2",
    }
