from __future__ import annotations

import pytest
import torch

from ckptfix.smoke.arguments import Arguments
from ckptfix.smoke.forward import Subject, forward
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
