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


def test_a_model_that_runs_on_noise_gets_no_other_numbers(save: Save) -> None:
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
def test_noise_that_a_sound_model_rejects_is_replaced(
    save: Save, factory: str, changes: dict[str, Any], went_wrong: str
) -> None:
    outcome = run(save, factory, changes=changes)
    assert outcome.is_good
    assert outcome.undecided == ""
    assert outcome.notes == (f"normal random numbers {went_wrong}; numbers from 0 to 1 worked",)


def test_a_trained_model_that_rejects_all_noise_is_not_a_defect(save: Save) -> None:
    outcome = run(save, "Detector", changes=threshold(3.0))
    assert outcome.failure is None
    assert outcome.undecided.startswith(f"{NO_FIT} (float32[2, 3, 64, 64] gave ValueError: there is no object")
    assert outcome.undecided.endswith(CONTRAST)


def test_minus_infinity_by_design_is_not_a_defect(save: Save) -> None:
    outcome = run(save, "Masks", IMAGES)
    assert outcome.is_good
    assert "comes from the model" in outcome.notes[-1]


def test_minus_infinity_by_design_is_none_in_training_either(save: Save) -> None:
    file = save(second_tries.Masks())
    outcome = examine(Exam(file, "tests.smoke.second_tries:Masks", device="cpu", train_mode=True, backward=True))
    assert outcome.training is not None
    assert outcome.training.is_good
    assert outcome.training.gradients is not None
    assert not outcome.training.gradients.non_finite
    assert findings_of(outcome) == []


@pytest.mark.parametrize("inputs", [pytest.param((), id="derived"), pytest.param(IMAGES, id="given")])
def test_nan_with_any_weights_is_not_the_files(save: Save, inputs: tuple[str, ...]) -> None:
    outcome = run(save, "AlwaysNan", inputs)
    assert outcome.non_finite
    assert outcome.shared


def test_the_control_is_converted_as_the_model_was(save: Save) -> None:
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
def test_broken_weights_stay_the_files_fault(save: Save, changes: dict[str, Any]) -> None:
    outcome = run(save, "Net", changes=changes)
    assert outcome.non_finite
    assert not outcome.shared


def test_an_error_at_nan_that_any_weights_make_is_the_codes(save: Save) -> None:
    failure = run(save, "Asserts", IMAGES).failure
    assert failure is not None
    assert failure.blame == MODEL


def test_an_error_at_an_overflow_is_the_files_where_the_control_runs(save: Save) -> None:
    failure = run(save, "Checks", IMAGES, OVERFLOWING).failure
    assert failure is not None
    assert failure.blame == CHECKPOINT
    assert failure.origin is not None
