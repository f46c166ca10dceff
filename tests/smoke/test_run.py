"""From how the child ended to the result and the findings. The endings are made by hand; test_launch has real ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptfix.errors import UsageError
from ckptfix.finding import Finding, Level
from ckptfix.settings import SmokeSettings
from ckptfix.smoke.launch import Ending
from ckptfix.smoke.outcome import Failure, Figures, Origin, Outcome
from ckptfix.smoke.result import SmokeResult
from ckptfix.smoke.run import judge, run_smoke
from tests.smoke import models
from tests.smoke.conftest import Save

RAN = Outcome("cpu", ("there is no CUDA device",), ("float32[2, 3]",), ("float32[2, 2]",), 0.5)
NAN = Figures("output", "float32[2, 2]", nan=4)
BROKEN = Origin(
    "bn", "BatchNorm2d", NAN, (), (Figures("weight", "float32[4]"), Figures("running_var", "float32[4]", nan=1))
)
STACK = """Fatal Python error: Aborted

Thread 0x01 (most recent call first):
  File "/home/me/other.py", line 1 in wait

Current thread 0x02 (most recent call first):
  File "<frozen importlib>", line 3 in load
  File "/home/me/model.py", line 12 in forward
  File "/home/me/model.py", line 3 in call
"""


def answer(outcome: Outcome, returncode: int = 0) -> Ending:
    return Ending(returncode, False, "forward", outcome, True, "", "")


def death(returncode: int, stage: str = "forward", timed_out: bool = False) -> Ending:
    return Ending(returncode, timed_out, stage, Outcome("cpu"), False, STACK, "last words")


def only(ending: Ending) -> Finding:
    result, findings = judge(ending, 5)
    assert result.passed is False
    [finding] = findings
    assert finding.level is Level.ERROR
    assert finding.fix is None
    assert finding.remedy
    return finding


def test_run_smoke_end_to_end(save: Save) -> None:
    result, findings = run_smoke(save(models.Net()), "tests.smoke.models:Net", {}, SmokeSettings(device="cpu"))
    assert findings == []
    assert replace(result, seconds=0) == SmokeResult(
        True, "cpu", inputs=("float32[2, 3, 64, 64]",), outputs=("logits: float32[2, 2]",)
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        pytest.param(SmokeSettings(inputs=("2x",)), "--input", id="input"),
        pytest.param(SmokeSettings(device="gpu"), "--device", id="device"),
    ],
)
def test_settings_without_meaning_start_nothing(settings: SmokeSettings, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run_smoke("absent.pth", "absent:absent", {}, settings)


def test_a_pass_is_reported_with_its_device() -> None:
    result, findings = judge(answer(RAN), 5)
    assert findings == []
    assert result == SmokeResult(True, "cpu", "there is no CUDA device", RAN.inputs, RAN.outputs, 0.5)


def test_an_answer_stands_though_the_process_crashes_on_its_way_out() -> None:
    assert judge(answer(RAN, returncode=-11), 5)[0].passed is True


UNDECIDED = Outcome("cpu", ("there is no CUDA device",), derived=True, undecided="no derived input suits the model")


@pytest.mark.parametrize(
    "ending",
    [
        pytest.param(answer(UNDECIDED), id="the control did not run either"),
        pytest.param(replace(answer(UNDECIDED, -6), stage="control", answered=False), id="the control crashed"),
    ],
)
def test_no_verdict_is_not_passed_and_asks_for_an_input(ending: Ending) -> None:
    result, findings = judge(ending, 5)
    assert result.passed is None
    assert result.note == "no derived input suits the model. There is no CUDA device"
    [finding] = findings
    assert (finding.code, finding.level) == ("RUN101", Level.WARNING)
    assert finding.message == "the forward test could not be run: no derived input suits the model"
    assert "--input" in finding.remedy
    assert "--no-smoke" in finding.remedy


def test_a_failure_by_contrast_says_so() -> None:
    failure = Failure("forward", "checkpoint", "ValueError: corrupt", contrast="with its own initial weights it runs")
    finding = only(answer(replace(RAN, failure=failure)))
    assert finding.message == (
        "the forward test failed in the forward pass, the file is at fault (with its own initial weights it runs):"
        " ValueError: corrupt"
    )
    assert finding.evidence["contrast"]
    assert "--input" in finding.remedy


@pytest.mark.parametrize(
    ("ending", "blame", "said"),
    [
        pytest.param(death(-6), "model", "crashed with SIGABRT", id="abort"),
        pytest.param(death(-11, "load"), "checkpoint", "crashed with SIGSEGV", id="segmentation fault in the load"),
        pytest.param(death(-9), "environment", "ran out of memory", id="killed"),
        pytest.param(death(-7), "environment", "SIGBUS", id="bus error of the shared memory"),
        pytest.param(death(3, "build"), "model", "exit status 3", id="left by itself"),
        pytest.param(death(1, "start"), "environment", "exit status 1", id="never started"),
        pytest.param(death(-9, timed_out=True), "model", "no answer within 5 s", id="time-out"),
    ],
)
@pytest.mark.skipif("sys.platform == 'win32'", reason="signals are of POSIX")
def test_a_death_is_a_finding(ending: Ending, blame: str, said: str) -> None:
    finding = only(ending)
    assert (finding.code, finding.name) == ("RUN101", "forward-fails")
    assert finding.evidence["blame"] == blame
    assert said in finding.message
    assert finding.evidence["where"] == "model.py:12 in forward"
    assert finding.evidence["printed"] == "last words"
    assert finding.evidence["device"] == "cpu"


def test_a_failure_says_whose_fault_it_is_and_where() -> None:
    failure = Failure("forward", "input", "RuntimeError: 3 channels", "conv", "Conv2d", "model.py:12 in forward")
    finding = only(answer(replace(RAN, failure=failure)))
    assert finding.message == (
        "the forward test failed in the forward pass, the input does not suit the model: RuntimeError: 3 channels"
        " in conv (Conv2d), at model.py:12 in forward"
    )
    assert "--input" in finding.remedy


def test_keys_of_the_strict_load_are_the_findings() -> None:
    finding = only(answer(Outcome("cpu", failure=Failure("load", "checkpoint", "1 missing key", keys=("fc.bias",)))))
    assert finding.keys == ("fc.bias",)


def test_an_error_after_nan_names_the_module_that_made_it() -> None:
    failure = Failure("forward", "checkpoint", "ValueError: NaN logits", "", "Net", origin=BROKEN)
    finding = only(answer(replace(RAN, failure=failure)))
    assert "(bn (BatchNorm2d) had made NaN before)" in finding.message
    assert finding.evidence["first_module"] == "bn"


def test_a_lack_of_memory_has_its_own_remedy() -> None:
    error = "OutOfMemoryError: CUDA out of memory."
    assert "smaller input" in only(answer(replace(RAN, failure=Failure("forward", "environment", error)))).remedy


def test_an_output_that_is_not_finite_is_traced() -> None:
    finding = only(answer(replace(RAN, non_finite=(NAN,), origin=BROKEN)))
    assert (finding.code, finding.name) == ("RUN102", "forward-non-finite")
    assert finding.keys == ("bn.running_var",)
    assert finding.message == (
        "the model runs, but its output is not finite: output float32[2, 2]: 4 NaN; the first to make NaN of finite"
        " values is bn (BatchNorm2d), whose running_var is not finite itself"
    )


def test_finite_weights_are_not_accused() -> None:
    origin = replace(BROKEN, weights=(Figures("weight", "float32[4]", low=0, high=1),))
    finding = only(answer(replace(RAN, non_finite=(NAN,), origin=origin)))
    assert finding.keys == ()
    assert finding.message.endswith("whose own weights are finite")


def test_many_outputs_are_counted() -> None:
    message = only(answer(replace(RAN, non_finite=(NAN,) * 5))).message
    assert message.count("4 NaN") == 3
    assert "and 2 more" in message
