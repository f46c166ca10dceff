"""What other numbers and a second model say of a failure, on the whole test in-process."""

from typing import Any

import pytest
import torch

from ckptfix.smoke.exam import CONTRAST, NO_FIT, Exam, examine
from ckptfix.smoke.outcome import CHECKPOINT, MODEL, ExamOutcome
from ckptfix.smoke.run import findings_of
from tests.smoke import models, second_tries
from tests.smoke.conftest import Save

IMAGES = ("2x3x16x16",)
OVERFLOWING = {"conv.weight": torch.full((4, 3, 3, 3), 3e38)}


def run(save: Save, factory: str, inputs: tuple[str, ...] = (), changes: dict[str, Any] | None = None) -> ExamOutcome:
    source = second_tries if hasattr(second_tries, factory) else models
    job = Exam(save(getattr(source, factory)(), changes), f"{source.__name__}:{factory}", inputs=inputs, device="cpu")
    return examine(job)


def threshold(value: float) -> dict[str, Any]:
    return {"threshold": torch.full((1,), value)}


def test_noop_a_model_that_runs_on_noise(save: Save) -> None:
    assert run(save, "Detector").notes == ()


@pytest.mark.parametrize(
    ("factory", "changes", "went_wrong"),
    [
        pytest.param("Gamma", {}, "gave non-finite values", id="a root of negative noise is NaN"),
        pytest.param("Asserts", {}, "failed (ValueError: the logits are not finite)", id="and the model raises at it"),
        pytest.param(
            "Detector", threshold(0.3), "failed (ValueError: there is no object in the image)", id="noise is rejected"
        ),
    ],
)
def test_other_numbers_are_tried_if_a_model_rejects_noise(
    save: Save, factory: str, changes: dict[str, Any], went_wrong: str
) -> None:
    outcome = run(save, factory, changes=changes)
    assert outcome.is_good
    assert outcome.undecided == ""
    assert outcome.notes == (f"normal random numbers {went_wrong}; numbers from 0 to 1 worked",)


def test_noop_a_trained_model_that_rejects_all_noise(save: Save) -> None:
    outcome = run(save, "Detector", changes=threshold(3.0))
    assert outcome.failure is None
    assert outcome.undecided.startswith(f"{NO_FIT} (float32[2, 3, 64, 64] gave ValueError: there is no object")
    assert outcome.undecided.endswith(CONTRAST)


def test_noop_minus_infinity_from_a_mask(save: Save) -> None:
    outcome = run(save, "Masks", IMAGES)
    assert outcome.is_good
    assert "comes from the model" in outcome.notes[-1]


def test_noop_minus_infinity_from_a_mask_in_training_mode(save: Save) -> None:
    file = save(second_tries.Masks())
    outcome = examine(Exam(file, "tests.smoke.second_tries:Masks", device="cpu", train_mode=True, backward=True))
    assert outcome.training is not None
    assert outcome.training.is_good
    assert outcome.training.gradients is not None
    assert not outcome.training.gradients.non_finite
    assert findings_of(outcome) == []


@pytest.mark.parametrize("inputs", [pytest.param((), id="derived"), pytest.param(IMAGES, id="given")])
def test_nan_with_initial_weights_too_is_not_blamed_on_the_file(save: Save, inputs: tuple[str, ...]) -> None:
    outcome = run(save, "AlwaysNan", inputs)
    assert outcome.non_finite
    assert outcome.shared


def test_the_control_has_the_dtype_of_the_model(save: Save) -> None:
    outcome = run(save, "MixedNan", IMAGES)
    assert any("converted to float64" in note for note in outcome.notes)
    assert outcome.shared


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"bn.running_var": torch.full((4,), torch.nan)}, id="not finite"),
        pytest.param({"bn.running_var": torch.full((4,), -1.0)}, id="negative variance"),
        pytest.param(OVERFLOWING, id="finite, and overflows"),
    ],
)
def test_broken_weights_are_blamed_on_the_file(save: Save, changes: dict[str, Any]) -> None:
    outcome = run(save, "Net", changes=changes)
    assert outcome.non_finite
    assert not outcome.shared


def test_an_error_after_nan_with_initial_weights_too_is_blamed_on_the_code(save: Save) -> None:
    failure = run(save, "Asserts", IMAGES).failure
    assert failure is not None
    assert failure.blame == MODEL


def test_an_error_after_an_overflow_is_blamed_on_the_file_if_the_control_runs(save: Save) -> None:
    failure = run(save, "Checks", IMAGES, OVERFLOWING).failure
    assert failure is not None
    assert failure.blame == CHECKPOINT
    assert failure.origin is not None
