"""Outcomes in words. They are made by hand; the other tests of this folder have real ones."""

import pytest
from msgspec.structs import replace

from ckptfix.core.finding import Finding, Level
from ckptfix.core.smoke_result import Comparison
from ckptfix.report.advice import remedies_text
from ckptfix.smoke.outcome import ExamOutcome, Failure, FaultOrigin, Figures, Gradients
from ckptfix.smoke.run import findings_of

RAN = ExamOutcome("cpu", ("there is no CUDA device",), ("float32[2, 3]",), ("float32[2, 2]",), 0.5)
NAN = Figures("output", "float32[2, 2]", nan=4)
BROKEN = FaultOrigin(
    "bn", "BatchNorm2d", NAN, (), (Figures("weight", "float32[4]"), Figures("running_var", "float32[4]", nan=1))
)
SOUND = replace(
    BROKEN,
    weights=(Figures("running_mean", "float32[4]", low=0, high=1), Figures("running_var", "float32[4]", low=1, high=2)),
)


def only(outcome: ExamOutcome, level: Level = Level.ERROR) -> Finding:
    [finding] = findings_of(outcome)
    assert finding.level is level
    assert finding.fix is None
    assert remedies_text(finding.remedies)
    return finding


def test_a_good_outcome_has_no_findings() -> None:
    near = Comparison("cpu", difference=1e-5, scale=1.0, tolerance=1e-3)
    assert findings_of(RAN) == []
    assert findings_of(replace(RAN, training=replace(RAN, gradients=Gradients(finite=3, frozen=2)), devices=near)) == []
    assert findings_of(replace(RAN, devices=Comparison("cpu", unlike="left out"))) == []


def test_a_failure_says_whose_fault_it_is_and_where() -> None:
    failure = Failure("forward", "input", "RuntimeError: 3 channels", "conv", "Conv2d", "model.py:12 in forward")
    finding = only(replace(RAN, failure=failure))
    assert finding.message == (
        "the forward test failed in the forward pass, the input does not fit the model: RuntimeError: 3 channels"
        " in conv (Conv2d), at model.py:12 in forward"
    )
    assert "--input" in remedies_text(finding.remedies)


def test_the_finding_has_the_keys_of_the_strict_load() -> None:
    finding = only(ExamOutcome("cpu", failure=Failure("load", "checkpoint", "1 missing key", keys=("fc.bias",))))
    assert finding.keys == ("fc.bias",)


def test_an_error_after_nan_names_the_module_that_made_it() -> None:
    failure = Failure("forward", "checkpoint", "ValueError: NaN logits", "", "Net", origin=BROKEN)
    finding = only(replace(RAN, failure=failure))
    assert "(bn (BatchNorm2d) had made NaN before)" in finding.message
    assert finding.evidence["first_module"] == "bn"


def test_a_lack_of_memory_has_its_own_remedy() -> None:
    error = "OutOfMemoryError: CUDA out of memory."
    found = only(replace(RAN, failure=Failure("forward", "environment", error)))
    assert "smaller input" in remedies_text(found.remedies)


def test_an_output_that_is_not_finite_is_traced() -> None:
    finding = only(replace(RAN, non_finite=(NAN,), origin=BROKEN))
    assert (finding.code, finding.name) == ("RUN102", "forward-non-finite")
    assert finding.keys == ("bn.running_var",)
    assert finding.message == (
        "the model runs, but its output is not finite: output float32[2, 2]: 4 NaN; the first to turn finite values"
        " into NaN is bn (BatchNorm2d), whose running_var is not finite itself"
    )
    assert finding.evidence["first_weights"][0].startswith("running_var")  # what is broken comes first


def test_several_broken_tensors_are_named_in_the_plural() -> None:
    mean = Figures("running_mean", "float32[4]", nan=4)
    both = replace(BROKEN, weights=(mean, *BROKEN.weights))
    message = only(replace(RAN, non_finite=(NAN,), origin=both)).message
    assert message.endswith("whose running_mean and running_var are not finite themselves")


def test_noop_finite_weights_are_not_blamed() -> None:
    origin = replace(BROKEN, weights=(Figures("weight", "float32[4]", low=0, high=1),))
    finding = only(replace(RAN, non_finite=(NAN,), origin=origin))
    assert finding.keys == ()
    assert finding.message.endswith("whose own weights are finite")


def test_many_outputs_are_counted() -> None:
    message = only(replace(RAN, non_finite=(NAN,) * 5)).message
    assert message.count("4 NaN") == 3
    assert "and 2 more" in message


@pytest.mark.parametrize(
    ("outcome", "level", "said"),
    [
        pytest.param(
            replace(RAN, finite_in_float32=True), Level.WARNING, "the dtype is at fault, not the weights", id="dtype"
        ),
        pytest.param(replace(RAN, finite_in_float32=False), Level.ERROR, "so the dtype is not the cause", id="weights"),
        pytest.param(replace(RAN, shared=True), Level.WARNING, "the input or the code is at fault", id="code"),
        pytest.param(
            replace(RAN, training=RAN),
            Level.ERROR,
            "it is finite: the running statistics are at fault",
            id="statistics",
        ),
    ],
)
def test_the_cause_of_what_is_not_finite(outcome: ExamOutcome, level: Level, said: str) -> None:
    finding = only(replace(outcome, non_finite=(NAN,), origin=SOUND), level)
    assert finding.code == "RUN102"
    assert said in finding.message


def test_running_statistics_are_named_by_their_keys() -> None:
    finding = only(replace(RAN, non_finite=(NAN,), origin=SOUND, training=RAN))
    assert finding.keys == ("bn.running_mean", "bn.running_var")


def test_a_negative_variance_is_named_as_the_cause() -> None:
    origin = replace(SOUND, weights=(Figures("running_var", "float32[4]", low=-1, high=1),))
    finding = only(replace(RAN, non_finite=(NAN,), origin=origin))
    assert finding.keys == ("bn.running_var",)
    assert finding.message.endswith("whose running_var is negative")


@pytest.mark.parametrize(
    ("training", "level", "said"),
    [
        pytest.param(
            ExamOutcome(failure=Failure("forward", "model", "ValueError: no targets")),
            Level.WARNING,
            "no targets",
            id="error",
        ),
        pytest.param(
            ExamOutcome(non_finite=(NAN,), origin=SOUND),
            Level.WARNING,
            "finite in eval mode but not",
            id="not finite",
        ),
        pytest.param(
            ExamOutcome(gradients=Gradients(1, ("a", "b"), operator="SqrtBackward0", where="m.py:3 in forward")),
            Level.WARNING,
            "a non-finite gradient; the first operator to make one is SqrtBackward0, of m.py:3 in forward",
            id="gradients",
        ),
        pytest.param(ExamOutcome(gradients=Gradients(1, zero=("a",))), Level.NOTE, "a gradient of zeros", id="zeros"),
        pytest.param(ExamOutcome(gradients=Gradients(1, missing=("a",))), Level.NOTE, "no gradient", id="unused"),
        pytest.param(
            ExamOutcome(gradients=Gradients(missing=("a",))), Level.WARNING, "no gradient", id="nothing trains"
        ),
    ],
)
def test_training_mode(training: ExamOutcome, level: Level, said: str) -> None:
    finding = only(replace(RAN, training=training), level)
    assert finding.code == "RUN103"
    assert said in finding.message


def test_a_defect_in_both_modes_is_reported_once() -> None:
    broken = replace(RAN, non_finite=(NAN,), origin=BROKEN)
    assert only(replace(broken, training=broken)).code == "RUN102"


def test_devices_that_differ() -> None:
    far = Comparison("cpu", difference=3.0, scale=4.0, tolerance=1e-3, agreement=0.5)
    finding = only(replace(RAN, device="cuda:0", devices=far), Level.WARNING)
    assert finding.code == "RUN104"
    assert finding.message.endswith("cpu: largest difference 3 (rounding explains 0.004), argmax agrees in 50 %")


def test_an_odd_input_is_a_note_next_to_the_rest() -> None:
    assert only(replace(RAN, warnings=("x.npy: channel 1",)), Level.NOTE).code == "RUN105"
    both = findings_of(replace(RAN, warnings=("x.npy: channel 1",), non_finite=(NAN,)))
    assert [finding.code for finding in both] == ["RUN105", "RUN102"]
