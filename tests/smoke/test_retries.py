"""Second tries, on the whole test in-process. A limit of memory for a whole process is in test_launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ckptfix.explain import explain
from ckptfix.smoke.exam import Job, examine
from ckptfix.smoke.findings import findings_of
from ckptfix.smoke.forward import Subject
from ckptfix.smoke.inputs import Arguments
from ckptfix.smoke.outcome import ENVIRONMENT, MODEL, Outcome
from ckptfix.smoke.retries import attempt
from tests.smoke import models, second_tries
from tests.smoke.conftest import Save

IMAGES = ("4x3x16x16",)


def run(save: Save, factory: str, inputs: tuple[str, ...] = IMAGES) -> Outcome:
    model = getattr(second_tries, factory)()
    return examine(Job(save(model), f"tests.smoke.second_tries:{factory}", inputs=inputs, device="cpu"))


def test_what_runs_at_once_is_run_once_and_needs_no_words() -> None:
    calls: list[Any] = []
    model = models.Net().eval()
    model.register_forward_hook(lambda *call: calls.append(call))
    done = attempt(Subject(model, torch.device("cpu"), torch.float32), Arguments((torch.ones(1, 3, 8, 8),)), Outcome())
    assert done.outcome.is_good
    assert (len(calls), done.outcome.notes) == (1, ())


def test_a_model_that_minds_its_dtypes_itself_is_left_to_it(save: Save) -> None:
    outcome = run(save, "HalfInPart")
    assert outcome.is_good
    assert (outcome.inputs, outcome.notes) == (("float16[4, 3, 16, 16]",), ())


@pytest.mark.parametrize(
    ("factory", "inputs", "note"),
    [
        pytest.param(
            "Hungry", "float32[1, 3, 16, 16]", "a batch of 4 did not fit into memory, so it was cut to 1", id="memory"
        ),
        pytest.param(
            "FailsInCudnn",
            "float32[4, 3, 16, 16]",
            "cuDNN failed (RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED), so it was turned off",
            id="cudnn",
        ),
        pytest.param(
            "Mixed",
            "float64[4, 3, 16, 16]",
            "the model's float32, float64 parameters met another dtype, so all were converted to float64",
            id="two dtypes in the model",
        ),
        pytest.param(
            "LacksHalf",
            "float32[4, 3, 16, 16]",
            "the model's float16, float32 parameters met another dtype, so all were converted to float32",
            id="no half version",
        ),
    ],
)
def test_a_second_try_that_helps_is_told(save: Save, factory: str, inputs: str, note: str) -> None:
    outcome = run(save, factory)
    assert outcome.is_good
    assert outcome.inputs == (inputs,)
    assert outcome.notes == (note,)
    assert torch.backends.cudnn.enabled


@pytest.mark.parametrize(
    ("factory", "blame", "error", "note"),
    [
        pytest.param(
            "Insatiable", ENVIRONMENT, "can't allocate memory", "a batch of 1 in bfloat16 did not fit", id="memory"
        ),
        pytest.param(
            "MakesDoubles", MODEL, "same dtype", "the other dtype comes from the model's code", id="a dtype of the code"
        ),
        pytest.param("AlwaysFailsInCudnn", ENVIRONMENT, "CUDNN_STATUS", "with cuDNN turned off too", id="cudnn"),
    ],
)
def test_where_nothing_helps_the_first_failure_stands(
    save: Save, factory: str, blame: str, error: str, note: str
) -> None:
    outcome = run(save, factory)
    assert outcome.failure is not None
    assert outcome.failure.blame == blame
    assert error in outcome.failure.error
    assert outcome.inputs == ("float32[4, 3, 16, 16]",)
    assert note in outcome.notes[-1]


def test_a_derived_input_finds_less_memory_too(save: Save) -> None:
    outcome = run(save, "Hungry", ())
    assert outcome.is_good
    assert outcome.inputs == ("float32[1, 3, 64, 64]",)


def test_half_weights_that_meet_floats_of_the_code_are_widened() -> None:
    class Scales(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * torch.ones(2))  # a float32 of its own

    subject = Subject(Scales(2, 2).half(), torch.device("cpu"), torch.float16)
    done = attempt(subject, Arguments((torch.ones(1, 2, dtype=torch.float16),)), Outcome())
    assert done.outcome.is_good
    assert (subject.dtype, subject.is_converted) == (torch.float32, True)
    assert "all were converted to float32" in done.outcome.notes[0]


@pytest.mark.parametrize(
    ("factory", "inputs", "record"),
    [
        pytest.param("MakesDoubles", IMAGES, "dtype-mismatch", id="dtypes"),
        pytest.param("Insatiable", IMAGES, "machine-memory", id="memory"),
        pytest.param("AlwaysFailsInCudnn", IMAGES, "cudnn", id="cudnn"),
        pytest.param("IllegalAccess", IMAGES, "illegal-access", id="illegal access"),
        pytest.param("Hungry", ("1x1x16x16",), "input-channels", id="input"),
    ],
)
def test_what_a_failure_says_is_known_to_explain(
    save: Save, factory: str, inputs: tuple[str, ...], record: str
) -> None:
    [finding] = findings_of(run(save, factory, inputs))
    assert finding.code == "RUN101"
    explanation = explain(finding.message)
    assert explanation is not None
    assert explanation.name == record
