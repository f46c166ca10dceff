"""From how the child ended to the result and the findings. The endings are made by hand; test_launch has real ones."""

import pytest
from msgspec.structs import replace

from ckptfix.core.finding import Finding, Level
from ckptfix.core.settings import Settings
from ckptfix.core.smoke_result import Comparison, SmokeResult
from ckptfix.errors import UsageError
from ckptfix.report.advice import remedies_text
from ckptfix.smoke.launch import DONE, Ending
from ckptfix.smoke.outcome import ExamOutcome, Failure, FaultOrigin, Figures, Gradients
from ckptfix.smoke.reference import Reference
from ckptfix.smoke.run import judge, lost_the_gpu, run_smoke
from tests.smoke import models
from tests.smoke.conftest import Save
from tests.smoke.second_tries import ASSERT_PRINTED

RAN = ExamOutcome("cpu", ("there is no CUDA device",), ("float32[2, 3]",), ("float32[2, 2]",), 0.5)
NAN = Figures("output", "float32[2, 2]", nan=4)
STACK = """Fatal Python error: Aborted

Thread 0x01 (most recent call first):
  File "/home/me/other.py", line 1 in wait

Current thread 0x02 (most recent call first):
  File "<frozen importlib>", line 3 in load
  File "/home/me/model.py", line 12 in forward
  File "/home/me/model.py", line 3 in call
"""


def answer(outcome: ExamOutcome, returncode: int = 0) -> Ending:
    return Ending(returncode, False, DONE, outcome, "", "")


def death(returncode: int, stage: str = "forward", timed_out: bool = False) -> Ending:
    return Ending(returncode, timed_out, stage, ExamOutcome("cpu"), STACK, "last words")


def only(ending: Ending) -> Finding:
    result, findings = judge(ending, 5)
    assert result.passed is False
    [finding] = findings
    assert finding.level is Level.ERROR
    assert finding.fix is None
    assert remedies_text(finding.remedies)
    return finding


def test_run_smoke_end_to_end(save: Save) -> None:
    settings = Settings(device="cpu", backward=True)
    file = save(models.Net())
    result, findings = run_smoke(file, "tests.smoke.models:Net", {}, settings, None, Reference(file, "itself"))
    assert findings == []
    assert result.compared is not None
    assert result.compared.identical
    assert result.checks[0].startswith("training mode: finite")
    assert replace(result, seconds=0, checks=result.checks[1:], compared=None) == SmokeResult(
        True,
        "cpu",
        inputs=("float32[2, 3, 64, 64]",),
        outputs=("logits: float32[2, 2]",),
        checks=("gradients: 6 finite", "outputs against itself: bit-equal"),
    )


def test_a_second_child_names_the_true_line(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two real children; the illegal access is a stand-in that raises CUDA's own message."""
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    factory = "tests.smoke.second_tries:IllegalAccess"
    result, [finding] = run_smoke(save(models.Net()), factory, {}, Settings(device="cpu"))
    assert result.passed is False
    assert finding.evidence["blame"] == "environment"
    assert finding.evidence["where"].endswith("in _true_line")
    assert "CUDA_LAUNCH_BLOCKING=1" in result.note


def test_an_invalid_input_starts_no_child() -> None:
    with pytest.raises(UsageError, match="input="):
        run_smoke("absent.pth", "absent:absent", {}, Settings(input=("2x",)))


def test_a_pass_is_reported_with_its_device() -> None:
    result, findings = judge(answer(RAN), 5)
    assert findings == []
    assert result == SmokeResult(True, "cpu", "there is no CUDA device", RAN.inputs, RAN.outputs, 0.5)


def test_an_answer_counts_if_the_process_crashes_while_exiting() -> None:
    assert judge(answer(RAN, returncode=-11), 5)[0].passed is True


UNDECIDED = ExamOutcome(
    "cpu", ("there is no CUDA device",), derived=True, undecided="no derived input works for the model"
)


@pytest.mark.parametrize(
    "ending",
    [
        pytest.param(answer(UNDECIDED), id="the control did not run either"),
        pytest.param(replace(answer(UNDECIDED, -6), stage="control"), id="the control crashed"),
    ],
)
def test_an_undecided_test_has_not_passed(ending: Ending) -> None:
    result, findings = judge(ending, 5)
    assert result.passed is None
    assert result.note == "no derived input works for the model. There is no CUDA device"
    [finding] = findings
    assert (finding.code, finding.level) == ("RUN101", Level.WARNING)
    assert finding.message == "the forward test could not be run: no derived input works for the model"
    assert "--input" in remedies_text(finding.remedies)
    assert "--no-smoke" in remedies_text(finding.remedies)


@pytest.mark.parametrize(
    ("ending", "blame", "said"),
    [
        pytest.param(death(-6), "model", "crashed with SIGABRT", id="abort"),
        pytest.param(death(-11, "load"), "checkpoint", "crashed with SIGSEGV", id="segmentation fault in the load"),
        pytest.param(death(-9), "environment", "ran out of memory", id="killed"),
        pytest.param(death(-7), "environment", "SIGBUS", id="bus error of the shared memory"),
        pytest.param(death(3, "build"), "model", "exited with status 3", id="left by itself"),
        pytest.param(death(1, "start"), "environment", "exited with status 1", id="never started"),
        pytest.param(
            death(-9, timed_out=True), "model", "or waiting for something: no answer within 5 s", id="time-out"
        ),
    ],
)
@pytest.mark.skipif("sys.platform == 'win32'", reason="signals are of POSIX")
def test_a_child_that_dies_is_a_finding(ending: Ending, blame: str, said: str) -> None:
    finding = only(ending)
    assert (finding.code, finding.name) == ("RUN101", "forward-fails")
    assert finding.evidence["blame"] == blame
    assert said in finding.message
    assert finding.evidence["where"] == "model.py:12 in forward"
    assert finding.evidence["printed"] == "last words"
    assert finding.evidence["device"] == "cpu"


@pytest.mark.parametrize("returncode", [-6, -9])
def test_a_crash_after_the_verdict_changes_nothing(returncode: int) -> None:
    result, findings = judge(replace(answer(RAN, returncode), stage="devices"), 5)
    assert (result.passed, findings) == (True, [])
    assert result.note == "there is no CUDA device; the comparison with the CPU did not finish"


def test_a_crash_with_the_weights_of_another_file_is_a_note() -> None:
    unfinished = replace(RAN, compared=Comparison("b.pth", unlike="the model crashed or hung with its weights"))
    result, [finding] = judge(replace(answer(unfinished, -6), stage="compare"), 5)
    assert result.passed is True
    assert result.compared == unfinished.compared
    assert result.checks == ("outputs against b.pth: not comparable, the model crashed or hung with its weights",)
    assert (finding.code, finding.level) == ("RUN106", Level.NOTE)


@pytest.mark.skipif("sys.platform == 'win32'", reason="signals are of POSIX")
def test_a_crash_in_training_mode_leaves_the_verdict_of_eval_mode() -> None:
    result, [finding] = judge(replace(answer(RAN, -11), stage="training"), 5)
    assert result.passed is True
    assert result.checks == ("training mode: failed",)
    assert (finding.code, finding.level) == ("RUN103", Level.WARNING)
    assert "SIGSEGV" in finding.message


def test_each_further_check_has_a_line() -> None:
    trained = ExamOutcome(notes=("a note",), seconds=0.25, gradients=Gradients(finite=5, frozen=1))
    compared = Comparison("cpu", difference=1e-4, scale=2.0, tolerance=1e-3, agreement=1.0)
    result, findings = judge(answer(replace(RAN, device="cuda:0", training=trained, devices=compared)), 5)
    assert findings == []
    assert result.passed is True
    assert result.checks == (
        "training mode: finite (a note), 0.25 s",
        "gradients: 5 finite, 1 frozen",
        "cuda:0 against cpu: largest difference 0.0001 (rounding explains 0.002), argmax agrees in 100 %",
    )


@pytest.mark.parametrize(
    ("outcome", "passed"),
    [
        pytest.param(replace(RAN, non_finite=(NAN,)), False, id="not finite"),
        pytest.param(replace(RAN, non_finite=(NAN,), shared=True), None, id="nor with its own weights"),
        pytest.param(replace(RAN, non_finite=(NAN,), finite_in_float32=True), True, id="a limit of the dtype"),
        pytest.param(replace(RAN, non_finite=(NAN,), finite_in_float32=False), False, id="in any dtype"),
    ],
)
def test_non_finite_outputs_are_graded_by_their_cause(outcome: ExamOutcome, passed: bool | None) -> None:
    result, [finding] = judge(answer(outcome), 5)
    assert result.passed is passed
    assert finding.code == "RUN102"
    assert finding.level is (Level.ERROR if passed is False else Level.WARNING)


@pytest.mark.parametrize(("weights", "offers"), [((Figures("bias", "float32[2]", nan=2),), False), ((), True)])
def test_no_other_input_is_suggested_for_broken_weights(weights: tuple[Figures, ...], offers: bool) -> None:
    origin = FaultOrigin("bn", "BatchNorm2d", NAN, (), weights)
    _, [finding] = judge(answer(replace(RAN, non_finite=(NAN,), origin=origin)), 5)
    assert ("--input SPEC" in remedies_text(finding.remedies)) is offers


LOST = replace(RAN, failure=Failure("forward", "environment", "RuntimeError: CUDA error: device-side assert triggered"))


@pytest.mark.parametrize(
    ("ending", "lost"),
    [
        pytest.param(answer(RAN), False, id="it ran"),
        pytest.param(death(-6), False, id="a crash of another kind"),
        pytest.param(answer(replace(RAN, notes=("an illegal memory access was encountered",))), False, id="mere words"),
        pytest.param(answer(LOST), True, id="an assert"),
        pytest.param(answer(replace(RAN, training=LOST)), True, id="in training mode"),
        pytest.param(
            replace(death(-6), printed="terminate called: CUDA error: an illegal memory access was encountered"),
            True,
            id="the process died of it",
        ),
    ],
)
def test_failures_that_need_a_second_child(ending: Ending, lost: bool) -> None:
    assert lost_the_gpu(ending) is lost


@pytest.mark.parametrize(
    ("derived", "printed", "blame"),
    [
        pytest.param(False, "", "environment", id="nothing was printed"),
        pytest.param(False, ASSERT_PRINTED, "input", id="an index of the given input"),
        pytest.param(True, ASSERT_PRINTED, None, id="an index of a guess proves nothing"),
    ],
)
def test_an_assert_of_a_kernel_is_read_from_what_it_printed(derived: bool, printed: str, blame: str | None) -> None:
    outcome = replace(LOST, derived=derived)
    result, [finding] = judge(replace(answer(outcome), printed=printed), 5)
    assert result.passed is (None if blame is None else False)
    assert finding.evidence.get("blame") == blame


@pytest.mark.parametrize(
    ("second", "passed", "note", "where"),
    [
        pytest.param(
            LOST.failure, False, "run again with CUDA_LAUNCH_BLOCKING=1", "true.py:1 in f", id="it comes again"
        ),
        pytest.param(None, False, "did not recur with CUDA_LAUNCH_BLOCKING=1", "", id="it does not"),
    ],
)
def test_a_lost_gpu_is_tried_in_a_second_child(
    monkeypatch: pytest.MonkeyPatch, second: Failure | None, passed: bool, note: str, where: str
) -> None:
    asked: list[object] = []

    def launch(job: object, timeout: float, variables: object = None) -> Ending:
        asked.append(variables)
        if variables is None:
            return answer(LOST)
        return answer(replace(RAN, failure=second and replace(second, where="true.py:1 in f")))

    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    monkeypatch.setattr("ckptfix.smoke.run.launch", launch)
    result, [finding] = run_smoke("w.pth", "m:f", {}, Settings())
    assert asked == [None, {"CUDA_LAUNCH_BLOCKING": "1"}]
    assert result.passed is passed
    assert note in result.note
    assert finding.evidence.get("where", "") == where
