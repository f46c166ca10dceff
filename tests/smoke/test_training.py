from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckptfix.smoke.device import compute_dtype
from ckptfix.smoke.exam import Job, examine
from ckptfix.smoke.forward import Subject
from ckptfix.smoke.inputs import Arguments
from ckptfix.smoke.outcome import Outcome
from ckptfix.smoke.training import train
from tests.smoke import models
from tests.smoke.conftest import Save

IMAGES = torch.linspace(-1, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8)


def outcome_of(model: nn.Module, given: Tensor = IMAGES, backward: bool = False) -> Outcome:
    with torch.no_grad():
        subject = Subject(model.eval(), torch.device("cpu"), compute_dtype(model))
        return train(subject, Arguments((given,)), backward, Outcome("cpu"))


class Roots(models.Net):
    """Its output holds the root of zero, whose derivative is infinite, times zero."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = super().forward(x)["logits"]
        return {"logits": torch.sqrt(logits * 0) * 0}


class Parts(nn.Module):
    """A part that is used, one that is multiplied by zero, one that is not used, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.silent, self.unused, self.frozen = (nn.Linear(2, 2, bias=False) for _ in range(4))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        return self.used(self.frozen(x)) + self.silent(x) * 0


class Leaks(models.Net):
    """Breaks in training mode alone."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if self.training:
            raise ValueError("targets must be given in training mode")
        return super().forward(x)


class Masked(nn.Linear):
    """Puts -Inf in the place of its last value."""

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        return output.masked_fill(torch.arange(output.shape[-1]) == output.shape[-1] - 1, -torch.inf)


def test_training_mode_leaves_the_model_as_it_was() -> None:
    model = models.Net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    outcome = outcome_of(model, backward=True)
    assert outcome.is_good
    assert outcome.notes == ()
    assert not model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_batch_of_one_is_doubled() -> None:
    flat = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    outcome = outcome_of(flat, torch.ones(1, 4), backward=True)
    assert outcome.is_good
    assert outcome.inputs == ("float32[2, 4]",)
    assert "doubled" in outcome.notes[0]


def test_the_input_follows_a_model_that_was_converted_since() -> None:
    subject = Subject(nn.Linear(4, 4).bfloat16().eval(), torch.device("cpu"), torch.bfloat16)
    arguments = Arguments((torch.ones(2, 4, dtype=torch.bfloat16),))
    subject.convert(torch.float32)
    assert train(subject, arguments, False, Outcome("cpu")).inputs == ("float32[2, 4]",)


def test_a_model_that_takes_no_batch_trains_on_one() -> None:
    class Single(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 1:
                raise ValueError("one at a time")
            return super().forward(x)

    outcome = outcome_of(Single(4, 4), torch.ones(1, 4))
    assert outcome.is_good
    assert outcome.inputs == ("float32[1, 4]",)
    assert outcome.notes == ()


def test_an_error_of_training_mode_is_its_outcome() -> None:
    failure = outcome_of(Leaks()).failure
    assert failure is not None
    assert "targets must be given" in failure.error


@pytest.mark.parametrize(
    ("model", "shape", "seen"),
    [
        pytest.param(models.Net(), (2, 3, 8, 8), (6, 0, (), ()), id="all are finite"),
        pytest.param(nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1)), (2, 2), (2, 0, (), ()), id="a softmax hides none"),
        pytest.param(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), (2, 2), (4, 0, (), ()), id="a norm hides none"),
        pytest.param(
            Parts(), (2, 2), (1, 1, ("silent.weight",), ("unused.weight",)), id="zeros, none and frozen are told apart"
        ),
        pytest.param(nn.Embedding(4, 2, sparse=True), None, (1, 0, (), ()), id="sparse"),
        pytest.param(nn.Linear(2, 2, dtype=torch.complex64), (2, 2), (2, 0, (), ()), id="complex"),
        pytest.param(Masked(2, 2), (2, 2), (2, 0, (), ()), id="behind a mask of -Inf"),
        pytest.param(nn.Linear(2, 2).half().double().requires_grad_(False), (2, 2), (0, 2, (), ()), id="all frozen"),
    ],
)
def test_gradients_are_counted(model: nn.Module, shape: tuple[int, ...] | None, seen: tuple[Any, ...]) -> None:
    dtype = next(model.parameters()).dtype
    given = torch.tensor([[1, 2]]) if shape is None else torch.linspace(-1, 1, 384)[: torch.Size(shape).numel()]
    gradients = outcome_of(model, given if shape is None else given.view(shape).to(dtype), backward=True).gradients
    assert gradients is not None
    assert (gradients.finite, gradients.frozen, gradients.zero, gradients.missing) == seen
    assert gradients.non_finite == ()


def test_a_gradient_that_is_not_finite_is_traced_to_its_line() -> None:
    gradients = outcome_of(Roots(), backward=True).gradients
    assert gradients is not None
    assert gradients.operator == "SqrtBackward0"
    assert gradients.where.startswith("test_training.py:")
    assert gradients.where.endswith("in forward")
    assert set(gradients.non_finite) == {name for name, _ in Roots().named_parameters()}
    assert not torch.is_anomaly_enabled()


def test_an_output_without_a_gradient_trains_nothing() -> None:
    class Picks(models.Tied):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens).argmax(-1)

    gradients = outcome_of(Picks(), torch.tensor([[1, 2]]), backward=True).gradients
    assert gradients is not None
    assert gradients.missing == ("embed.weight",)


VAR = torch.tensor([1.0, torch.nan, 1.0, 1.0])


@pytest.mark.parametrize(
    ("changes", "is_good"),
    [
        pytest.param({}, True, id="sound"),
        pytest.param({"bn.running_var": VAR}, False, id="fine in training mode alone"),
    ],
)
def test_both_modes_of_one_file(save: Save, changes: dict[str, Tensor], is_good: bool) -> None:
    job = Job(save(models.Net(), changes), "tests.smoke.models:Net", device="cpu", train_mode=True)
    outcome = examine(job)
    assert outcome.is_good is is_good
    assert outcome.training is not None
    assert outcome.training.is_good
    assert outcome.training.gradients is None


def test_training_mode_is_not_run_unasked(save: Save) -> None:
    assert examine(Job(save(models.Net()), "tests.smoke.models:Net", device="cpu")).training is None
