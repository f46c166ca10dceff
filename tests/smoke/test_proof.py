from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from ckptfix.smoke.proof import NotLoadedError, load_strictly
from tests.smoke.models import Hider, Net, Tied

NAN = torch.full((2, 4), torch.nan)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(nn.Identity(), id="nothing to load"),
        pytest.param(Net(), id="parameters and buffers"),
        pytest.param(Tied(), id="tied"),
        pytest.param(weight_norm(nn.Linear(2, 2)), id="parametrised"),
        pytest.param(nn.ParameterList([torch.ones(2, dtype=torch.complex64)]), id="complex"),
        pytest.param(nn.Linear(2, 2).half(), id="half"),
    ],
)
def test_a_models_own_state_dict_loads_and_arrives(model: nn.Module) -> None:
    state = {key: value.clone() for key, value in model.state_dict().items()}
    load_strictly(model, state)
    loaded = model.state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in state.items())


def test_a_lazy_model_is_made_by_the_load() -> None:
    lazy = nn.LazyLinear(2)
    load_strictly(lazy, nn.Linear(3, 2).state_dict())
    assert lazy.weight.shape == (2, 3)


def test_a_model_without_memory_gets_its_tensors_from_the_load() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    state = nn.Linear(3, 2).state_dict()
    load_strictly(model, state)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in state.items())
    assert model.weight.requires_grad


def test_nan_of_the_file_is_no_proof_against_the_load() -> None:
    load_strictly(Net(), {**Net().state_dict(), "fc.weight": NAN})


@pytest.mark.parametrize(
    ("change", "said", "keys"),
    [
        pytest.param({"fc.bias": None}, "1 missing key", ("fc.bias",), id="missing"),
        pytest.param({"a": NAN, "b": NAN}, "2 unexpected keys", ("a", "b"), id="unexpected"),
        pytest.param({"fc.bias": NAN, "bn.bias": NAN}, "2 size mismatches", ("bn.bias", "fc.bias"), id="shapes"),
        pytest.param({"fc.bias": None, "a": NAN}, "1 missing key, 1 unexpected key", ("fc.bias", "a"), id="both"),
    ],
)
def test_a_strict_load_that_fails_is_counted(change: dict[str, Any], said: str, keys: tuple[str, ...]) -> None:
    state = {key: value for key, value in {**Net().state_dict(), **change}.items() if value is not None}
    with pytest.raises(NotLoadedError) as caught:
        load_strictly(Net(), state)
    assert str(caught.value) == f"the strict load found {said}"
    assert caught.value.keys == keys


def test_a_parameter_that_the_strict_load_cannot_miss_is_found() -> None:
    state = Hider().state_dict()
    assert "hidden" not in state
    with pytest.raises(NotLoadedError, match="passed over 1 parameter") as caught:
        load_strictly(Hider(), state)
    assert caught.value.keys == ("hidden",)
