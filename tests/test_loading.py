from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.loading import load_strictly


@pytest.mark.parametrize(
    ("map_location", "said"),
    [
        pytest.param("cuda:99", "map_location='cuda:99' does not work here (", id="a device that is not there"),
        pytest.param("here", "map_location='here' does not work here (", id="no device"),
        pytest.param({"cuda:0": "cpu"}, "is of type dict, but all tensors go to one device", id="a mapping"),
        pytest.param(lambda storage, place: storage, "is of type function, but", id="a function"),
    ],
)
def test_a_map_location_that_is_no_device_is_refused_in_one_line(map_location: Any, said: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ckptfix.UsageError) as caught:
        ckptfix.load(model, model.state_dict(), map_location=map_location)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


class Stubborn(nn.Linear):
    """Raises what it was told to from its own hook."""

    def __init__(self, error: Exception) -> None:
        super().__init__(2, 2)
        self.error = error

    def _load_from_state_dict(self, *given: Any) -> None:
        raise self.error


@pytest.mark.parametrize(
    "error",
    [KeyError("0.weight"), RuntimeError("no\nroom\nhere"), ValueError("odd"), AttributeError("x"), AssertionError()],
    ids=lambda error: type(error).__name__,
)
def test_what_the_load_raises_is_an_error_of_one_line(error: Exception) -> None:
    with pytest.raises(ckptfix.TargetError, match=r"^state_dict: torch fails to load it into Stubborn \(") as caught:
        ckptfix.load(Stubborn(error), nn.Linear(2, 2).state_dict())
    assert type(error).__name__ in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is error


def test_a_load_goes_by_way_of_the_device() -> None:
    model, source = nn.Linear(2, 2), nn.Linear(2, 2)
    load_strictly(model, dict(source.state_dict()), torch.device("cpu"), "memory")
    assert torch.equal(model.weight, source.weight)
