"""Bytes go into a model without torch only where torch would do the same with them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.bytes.compiled import copy, library
from ckptfix.modules import transfer as module
from ckptfix.modules.transfer import Transfer
from ckptfix.reading.memory import open_state_dict
from tests.checks import bytes_of

pytestmark = pytest.mark.skipif(library() is None, reason="no library was built for this machine")


class Net(nn.Module):
    """A parameter, a buffer and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(50, 30))
        self.count: torch.Tensor
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("scale", torch.zeros(7, dtype=torch.float16))


def given() -> dict[str, Any]:
    return {"weight": torch.randn(50, 30), "count": torch.tensor(3), "scale": torch.randn(7).half()}


def transferred(model: nn.Module, state_dict: dict[str, Any], keys: Iterable[str] | None = None) -> list[str]:
    """The keys whose values a transfer has put into the model."""
    transfer = Transfer(model, open_state_dict(state_dict), state_dict if keys is None else keys)
    transfer.run()
    return list(transfer.own)


def untouched(model: nn.Module, state_dict: dict[str, Any]) -> bool:
    """Whether a transfer leaves all to torch."""
    before = [bytes_of(value) for value in model.state_dict().values()]
    return not transferred(model, state_dict) and before == [bytes_of(value) for value in model.state_dict().values()]


class Subclass(torch.Tensor):
    pass


NOT_ALIKE: dict[str, Callable[[], Any]] = {
    "another dtype": lambda: torch.randn(50, 30).double(),
    "another shape": lambda: torch.randn(1500),
    "another order": lambda: torch.randn(30, 50).t(),
    "the meta device": lambda: torch.empty(50, 30, device="meta"),
    "sparse": lambda: torch.eye(50, 30).to_sparse(),
    "negated when it is read": lambda: torch._neg_view(torch.randn(50, 30)),
    "no tensor": lambda: "weights",
}


@pytest.mark.parametrize("value", NOT_ALIKE.values(), ids=NOT_ALIKE)
def test_what_is_not_alike_is_left_to_torch(value: Callable[[], Any]) -> None:
    assert untouched(Net(), {"weight": value()})


@pytest.mark.parametrize("weight", [torch.randn(30, 50).t(), torch.randn(50, 30).as_subclass(Subclass)])
def test_what_is_not_alike_in_the_model_is_left_to_torch(weight: torch.Tensor) -> None:
    model = Net()
    model.weight = nn.Parameter(weight)
    assert untouched(model, {"weight": torch.randn(50, 30)})


def test_tied_tensors_are_left_to_torch() -> None:
    model = Net()
    model.other = model.weight
    assert untouched(model, {"weight": torch.randn(50, 30), "other": torch.randn(50, 30)})
    model.other = nn.Parameter(model.weight.detach().t())
    assert untouched(model, {"weight": torch.randn(50, 30), "other": torch.randn(30, 50)})


def test_what_may_be_a_part_of_the_model_is_left_to_torch() -> None:
    model = Net()
    assert untouched(model, model.state_dict())
    whole = torch.randn(1501)
    model.weight.data = whole[1:].view(50, 30)
    assert untouched(model, {"weight": whole[:-1].view(50, 30)})


def test_keys_that_nobody_asked_for_are_left_to_torch() -> None:
    model = Net()
    assert transferred(model, given(), ["count", "unknown"]) == ["count"]
    assert (int(model.count), float(model.weight.detach().abs().sum())) == (3, 0.0)


class LoadsItself(Net):
    def load_state_dict(self, *given: Any, **more: Any) -> Any:
        return super().load_state_dict(*given, **more)


def test_a_model_that_loads_in_its_own_way_is_left_to_it() -> None:
    assert untouched(LoadsItself(), given())
    model = Net()
    vars(model)["load_state_dict"] = model.load_state_dict
    assert untouched(model, given())
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        assert untouched(Net(), given())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_tensors_that_no_one_may_write_are_left_to_torch() -> None:
    with torch.inference_mode():
        model = Net()
    assert untouched(model, given())


@pytest.mark.parametrize("piece", [module.PIECE, 64])
def test_the_model_has_the_values_and_torch_nothing_to_do(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(module, "PIECE", piece)
    model, values = Net(), given()
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    versions = {key: tensor._version for key, tensor in own.items()}
    transfer = Transfer(model, open_state_dict(values), values)
    assert {key: transfer.own[key] is tensor for key, tensor in own.items()} == dict.fromkeys(values, True)
    assert not model.weight.any(), "nothing changes before the run"
    transfer.run()
    model.load_state_dict(transfer.own)
    assert all(torch.equal(tensor, values[key]) for key, tensor in own.items())
    assert all(tensor is own[key] for key, tensor in model.state_dict(keep_vars=True).items())
    assert all(tensor._version > versions[key] for key, tensor in own.items()), "autograd looks at it"


def test_a_file_that_is_cut_off_while_it_is_copied_is_said_in_one_line(tmp_path: Path, monkeypatch: Any) -> None:
    path, model = tmp_path / "model.pth", nn.Linear(3000, 1000)
    torch.save(nn.Linear(3000, 1000).state_dict(), path)

    def cut(goal: int, source: int, nbytes: int) -> None:
        os.truncate(path, 1 << 16)
        copy(goal, source, nbytes)

    monkeypatch.setattr(module, "copy", cut)
    with pytest.raises(ckptfix.UnreadableError) as caught:
        ckptfix.load(model, path)
    assert re.search(r"model\.pth: was cut off while it was copied into Linear; .* build the model", str(caught.value))
    assert "\n" not in str(caught.value)
