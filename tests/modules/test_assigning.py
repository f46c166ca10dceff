from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ckptfix.errors import TargetError
from ckptfix.modules.assigning import left_empty, prepare


class Twice(nn.Module):
    """One parameter under three names, one buffer under two."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.b = self.c = self.a
        self.x: torch.Tensor
        self.register_buffer("x", torch.zeros(2))
        self.register_buffer("y", self.x)
        self.own = nn.Parameter(torch.zeros(2))


def given(**changed: Any) -> dict[str, Any]:
    names = ("a", "b", "c", "x", "y", "own")
    return {name: torch.full((2,), float(index)) for index, name in enumerate(names)} | changed


def test_a_state_dict_without_ties_in_the_dtypes_of_the_model_is_left_alone():
    state_dict = given()
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in state_dict})
    before = dict(state_dict)
    assert prepare(model, state_dict, "f") == ()
    assert all(state_dict[key] is before[key] for key in before)


def test_what_is_one_tensor_in_the_model_becomes_one_with_the_last_value_as_a_copy_would_leave_it():
    assigned, copied, state_dict = Twice(), Twice(), given()
    copied.load_state_dict(state_dict)
    assert prepare(assigned, state_dict, "f") == ()
    assigned.load_state_dict(state_dict, assign=True)
    assert assigned.a is assigned.b is assigned.c
    assert assigned.x is assigned.y
    assert not assigned.a.requires_grad
    for key, value in copied.state_dict().items():
        assert torch.equal(assigned.state_dict()[key], value), key


def test_a_tie_of_which_the_state_dict_has_one_end_is_left_alone():
    state_dict = given()
    del state_dict["b"], state_dict["c"]
    before = state_dict["a"]
    prepare(Twice(), state_dict, "f")
    assert state_dict["a"] is before


@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        (torch.float16, "assign=True gave the model the dtypes of the file: float16 for float32"),
        (torch.float64, "assign=True gave the model the dtypes of the file: float64 for float32"),
    ],
)
def test_another_width_is_remarked_and_not_converted(dtype, said):
    state_dict = given(own=torch.ones(2, dtype=dtype))
    assert prepare(Twice(), state_dict, "f") == (said,)
    assert state_dict["own"].dtype == dtype


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_another_kind_of_numbers_is_refused(dtype):
    with pytest.raises(TargetError, match=rf"^f: own is of {str(dtype)[6:]} and the model of float32 there, which"):
        prepare(Twice(), given(own=torch.ones(2, dtype=dtype)), "f")


def test_what_the_meta_device_left_empty_is_named():
    assert left_empty(Twice()) == ()
    model = nn.Linear(2, 2)
    for name in ("a", "b", "c", "d"):
        model.register_buffer(name, torch.empty(1, device="meta"), persistent=False)
    (remark,) = left_empty(model)
    assert remark == (
        "the model has 4 tensors on the meta device still, which no state_dict holds: fill a, b, c … before use"
    )
