from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckptfix.smoke.forward import Subject, Trace, forward
from ckptfix.smoke.inputs import Arguments
from ckptfix.smoke.outcome import CHECKPOINT, INPUT, Failure, Figures, Outcome
from tests.smoke.models import Net

CPU = torch.device("cpu")


def subject() -> Subject:
    return Subject(Net().eval(), CPU, torch.float32)


def images(channels: int) -> Arguments:
    return Arguments((torch.ones(2, channels, 8, 8),), {}, ("a note of the input",), ("a warning of the input",))


def test_a_pass_keeps_its_outputs_and_what_was_known_before() -> None:
    done = forward(subject(), images(3), Outcome("cpu", ("a note",)))
    assert [(name, tuple(tensor.shape)) for name, tensor in done.outputs] == [("logits", (2, 2))]
    assert done.outcome.is_good
    assert done.outcome.device == "cpu"
    assert done.outcome.notes == ("a note", "a note of the input")
    assert done.outcome.warnings == ("a warning of the input",)
    assert done.noting("more").outcome.notes[-1] == "more"


def test_an_error_is_an_outcome() -> None:
    failure = forward(subject(), images(1), Outcome()).outcome.failure
    assert failure is not None
    assert (failure.blame, failure.module) == (INPUT, "conv")


@pytest.mark.parametrize("channels", [3, 1])
def test_what_another_pass_came_to_is_not_taken_over(channels: int) -> None:
    before = Outcome(failure=Failure("forward", CHECKPOINT, "ValueError: no"), non_finite=(Figures("x", "float32[2]"),))
    outcome = forward(subject(), images(channels), before).outcome
    assert outcome.non_finite == ()
    assert outcome.failure is None or outcome.failure.blame == INPUT


def test_a_subject_in_another_dtype_is_converted_as_a_whole() -> None:
    made = subject()
    made.convert(torch.float64)
    assert {tensor.dtype for tensor in made.model.state_dict().values()} == {torch.float64, torch.int64}
    assert made.is_converted
    assert made.arguments([]).args == ()


def trace_of(model: nn.Module, value: Tensor) -> Trace:
    with Trace(model.eval()) as trace, torch.no_grad():
        model(value)
    return trace


class Log(nn.Module):
    """Makes NaN without weights, in the forward of a container."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.head = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.log(-self.body(x).abs() - 1))


class Masks(nn.Module):
    """Makes -Inf, which its softmax takes away again, and then breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = nn.Threshold(100.0, -torch.inf)
        self.broken = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        return self.broken(torch.nan_to_num(self.mask(x), neginf=0.0))


class Catches(nn.Module):
    """Catches the error of one branch and runs on."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(9, 9)
        self.second = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        try:
            return self.first(x)
        except RuntimeError:
            return self.second(x)


def _with_nan(model: nn.Module, key: str) -> nn.Module:
    with torch.no_grad():
        model.state_dict()[key].view(-1)[0] = torch.nan
    return model


def test_a_finite_pass_has_no_origin_and_leaves_no_hooks() -> None:
    model = Net()
    trace = trace_of(model, torch.ones(1, 3, 8, 8))
    assert trace.origin is None
    assert trace.running is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("model", "shape", "module"),
    [
        pytest.param(_with_nan(Net(), "bn.running_var"), (1, 3, 8, 8), "bn", id="running_var"),
        pytest.param(_with_nan(Net(), "conv.weight"), (1, 3, 8, 8), "conv", id="the first of several"),
        pytest.param(
            _with_nan(nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True)), "0.bias"),
            (1, 2),
            "0",
            id="overwritten later",
        ),
        pytest.param(Log(), (1, 2), "", id="an operator of the container"),
        pytest.param(_with_nan(Masks(), "broken.weight"), (1, 2), "broken", id="a mask of -Inf is not blamed"),
    ],
)
def test_the_origin_is_the_innermost_first(model: nn.Module, shape: tuple[int, ...], module: str) -> None:
    origin = trace_of(model, torch.ones(shape)).origin
    assert origin is not None
    assert origin.module == module
    assert origin.output.nan > 0
    assert not any(figures.non_finite for figures in origin.inputs)


def test_the_origin_shows_its_weights() -> None:
    origin = trace_of(_with_nan(Net(), "bn.running_var"), torch.ones(1, 3, 8, 8)).origin
    assert origin is not None
    assert {figures.tensor: figures.nan for figures in origin.weights} == {
        "weight": 0,
        "bias": 0,
        "running_mean": 0,
        "running_var": 1,
    }


def test_an_input_that_is_not_finite_has_no_origin() -> None:
    assert trace_of(Net(), torch.full((1, 3, 8, 8), torch.nan)).origin is None


def test_after_an_error_the_innermost_module_is_still_running() -> None:
    with Trace(Net()) as trace, pytest.raises(RuntimeError, match="channels"):
        Net.__call__(trace._model, torch.ones(1, 1, 8, 8))
    assert trace.running == ("conv", "Conv2d")
    assert trace.depth == 2


def test_an_error_that_the_model_catches_is_left_behind() -> None:
    trace = trace_of(Catches(), torch.ones(1, 2))
    assert trace.running is None


class Borrows(nn.Module):
    """Uses the weight of its child directly; the child has no part in the pass."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(2, 2)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    def forward(self, x: Tensor) -> Any:
        return x @ self.child.weight


def test_a_weight_that_is_borrowed_from_a_child_is_named_and_a_mask_is_not() -> None:
    origin = trace_of(_with_nan(Borrows(), "child.weight"), torch.ones(1, 2)).origin
    assert origin is not None
    assert [figures.tensor for figures in origin.weights] == ["child.weight", "mask"]
    assert origin.broken == ("child.weight",)
