"""How much of the target came from the file, and what a strict load would reject."""

import pytest
import torch
from torch import nn

from ckptfix.core.coverage import measure_coverage, obstacles
from ckptfix.core.edits import Fill
from ckptfix.core.target import target_from_module
from ckptfix.reading.opening import open_state_dict


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2, bias=False)
        self.b = nn.Linear(2, 2, bias=False)
        self.b.weight = self.a.weight


def coverage(state, model, filled=()):
    fills = {key: Fill(key, "float32", (), "target") for key in filled}
    return measure_coverage(open_state_dict(state), target_from_module(model), fills)


def test_parameters_and_buffers_are_counted_apart_by_numel():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    state = model.state_dict()
    del state["0.weight"], state["1.running_var"]
    got = coverage(state, model)
    assert (got.parameters, got.parameters_from_file) == (6 + 3 + 3 + 3, 3 + 3 + 3)
    assert (got.buffers, got.buffers_from_file) == (7, 4)
    assert got.share == pytest.approx(9 / 15)


def test_filled_parameters_are_not_covered():
    model = nn.Linear(2, 3)
    got = coverage(model.state_dict(), model, filled=["weight"])
    assert (got.parameters_from_file, dict(got.filled)) == (3, {"target": 6})


class Untied(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Linear(2, 2, bias=False)


@pytest.mark.parametrize(("model", "parameters"), [(Tied(), 4), (Untied(), 8)])
@pytest.mark.parametrize("filled", ["a.weight", "b.weight"])
def test_a_name_that_is_tied_to_a_filled_tensor_is_not_from_the_file(filled, model, parameters):
    one = torch.ones(2, 2)
    got = coverage({"a.weight": one, "b.weight": one}, model, filled=[filled])
    assert (got.parameters, got.parameters_from_file, dict(got.filled)) == (parameters, 0, {"target": parameters})


@pytest.mark.parametrize("keys", [("a.weight", "b.weight"), ("a.weight",), ("b.weight",)])
def test_a_tie_counts_once(keys):
    got = coverage({key: torch.ones(2, 2) for key in keys}, Tied())
    assert (got.parameters, got.parameters_from_file) == (4, 4)


def test_another_shape_covers_nothing():
    assert coverage({"weight": torch.ones(9), "bias": torch.ones(3)}, nn.Linear(2, 3)).parameters_from_file == 3


def test_a_model_without_parameters_is_covered():
    assert coverage({}, nn.ReLU()).share == 1.0


class Stateful(nn.Linear):
    def get_extra_state(self):
        return {"steps": 7}

    def set_extra_state(self, state):
        pass


@pytest.mark.parametrize(
    ("change", "left"),
    [
        pytest.param({}, [], id="fits"),
        pytest.param({"weight": None}, ["weight"], id="missing"),
        pytest.param({"_extra_state": None}, ["_extra_state"], id="a missing entry that is no tensor"),
        pytest.param({"x": torch.ones(1)}, ["x"], id="unexpected"),
        pytest.param({"x": 5}, ["x"], id="unexpected plain data"),
        pytest.param({"bias": torch.ones(7)}, ["bias"], id="another shape"),
        pytest.param({"bias": 5.0}, ["bias"], id="a number in the place of a tensor"),
        pytest.param({"_extra_state": torch.ones(3)}, [], id="an extra state may be a tensor"),
    ],
)
def test_obstacles_are_the_keys_that_torch_refuses(change, left):
    model = Stateful(2, 3)
    state = {key: value for key, value in {**model.state_dict(), **change}.items() if value is not None}
    assert obstacles(open_state_dict(state), target_from_module(model)) == left
    if left:
        with pytest.raises((RuntimeError, AttributeError, TypeError)):
            model.load_state_dict(state)
    else:
        model.load_state_dict(state)


def test_an_old_torch_wants_no_counter():
    state = nn.BatchNorm1d(2).state_dict()
    del state["num_batches_tracked"]
    target = target_from_module(nn.BatchNorm1d(2))
    assert obstacles(open_state_dict(state), target) == ["num_batches_tracked"]
    assert obstacles(open_state_dict(state), target, is_uncounted=True) == []
