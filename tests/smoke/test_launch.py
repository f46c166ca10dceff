"""How the child is started, and how it may end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from msgspec import to_builtins

from ckptfix.errors import UsageError
from ckptfix.smoke.exam import Exam
from ckptfix.smoke.launch import Ending, death, launch
from ckptfix.smoke.outcome import ENVIRONMENT, MODEL, ExamOutcome
from tests.smoke import models
from tests.smoke.conftest import Save


def start(file: str, factory: str, timeout: float = 120) -> Ending:
    return launch(to_builtins(Exam(file, f"tests.smoke.models:{factory}", device="cpu")), timeout)


def is_running(pid: int) -> bool:
    """Whether the process is there and no mere entry in the table of its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_ends(pid: int) -> None:
    """It was killed, which takes a moment."""
    patience = time.monotonic() + 120
    while is_running(pid):
        assert time.monotonic() < patience
        time.sleep(0.05)


@pytest.mark.usefixtures("real_child")
def test_what_the_model_prints_is_not_an_answer(
    save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("random.py").write_text("raise SystemError('a file of the user, which torch must not import')")
    ending = start(save(models.Net()), "Chatty")
    assert ending.answered
    assert ending.outcome.failure is None
    assert ending.outcome.outputs == ("logits: float32[2, 2]",)
    assert '"from the factory"' in ending.printed
    assert '"from forward"' in ending.printed
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(os.name != "posix", reason="signals are of POSIX")
def test_a_control_that_crashes_leaves_the_test_undecided(save: Save) -> None:
    ending = start(save(models.Guards(), {"index": torch.ones(1)}), "GuardsThenAborts")
    assert not ending.answered
    assert ending.stage == "control"
    assert "the index is corrupt" in ending.outcome.undecided


@pytest.mark.skipif(os.name != "posix", reason="signals are of POSIX")
def test_a_crash_reports_stage_stack_and_output(save: Save) -> None:
    ending = start(save(models.Net()), "Aborts")
    assert not ending.answered
    assert (ending.returncode, ending.timed_out, ending.stage) == (-6, False, "forward")
    assert "models.py" in ending.stack
    assert ending.printed == "last words"
    assert ending.outcome.device == "cpu"


@pytest.mark.usefixtures("real_child")
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the limit is set from /proc")
def test_a_limit_of_memory_is_met_with_a_smaller_batch_and_half_precision(save: Save) -> None:
    job = Exam(save(models.Net()), "tests.smoke.second_tries:Limited", inputs=("4x3x16x16",), device="cpu")
    outcome = launch(to_builtins(job), 120).outcome
    assert outcome.is_good
    assert outcome.inputs == ("bfloat16[1, 3, 16, 16]",)
    assert outcome.notes == (
        "a batch of 4 did not fit into memory, so it was cut to 1 and float32 reduced to bfloat16",
    )


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_processes_left_by_the_model_are_killed(save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PID_FILE", str(tmp_path / "pid"))
    ending = start(save(models.Net()), "Lingers")
    assert ending.answered
    assert not ending.timed_out
    assert ending.outcome.is_good
    assert_ends(int((tmp_path / "pid").read_text()))


@pytest.mark.usefixtures("real_child")
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_a_time_out_kills_the_child_and_its_processes(
    save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PID_FILE", str(tmp_path / "pid"))
    file = save(models.Net())
    # On a busy machine the shorter times may be over before torch is there.
    ending = next(ending for timeout in (4, 20, 120) if (ending := start(file, "Hangs", timeout)).stage == "forward")
    assert not ending.answered
    assert ending.timed_out
    assert ending.stage == "forward"
    assert "in forward" in ending.stack
    assert_ends(int((tmp_path / "pid").read_text()))


def test_arguments_that_are_not_json_are_refused() -> None:
    with pytest.raises(UsageError, match="model_args="):
        launch({"factory_args": {"x": object()}}, 1)


ORPHAN = """
import os, subprocess, sys
os.mkfifo("answer")  # which nobody reads: the child waits there for ever
child = subprocess.Popen([sys.executable, "-m", "ckptfix.smoke.child"], stdin=-1, stdout=-3, stderr=-3)
order = '{"parent": %d, "answer": "answer", "stack": "stack", "timeout": 1000, "cwd": ".", "job": {}}'
child.stdin.write(order.encode() % os.getpid())
child.stdin.close()
print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it ends when its time is up")
def test_the_child_ends_with_its_parent(tmp_path: Path) -> None:
    parent = subprocess.run([sys.executable, "-c", ORPHAN], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert parent.returncode == -signal.SIGKILL
    assert "Error" not in parent.stderr
    assert_ends(int(parent.stdout))


def ending(returncode: int, stage: str = "forward", timed_out: bool = False, printed: str = "") -> Ending:
    return Ending(returncode, timed_out, stage, ExamOutcome("cpu"), "", printed)


@pytest.mark.parametrize(
    ("given", "blame", "error"),
    [
        pytest.param(ending(-9, timed_out=True), MODEL, "no answer within 5 s", id="time-out"),
        pytest.param(ending(-9, "read", timed_out=True), ENVIRONMENT, "no answer within 5 s", id="a slow disk"),
        pytest.param(ending(-11, "training"), MODEL, "the process crashed with SIGSEGV", id="crash in training mode"),
        pytest.param(
            ending(1, "start", printed="Traceback\nImportError: libtorch.so"),
            ENVIRONMENT,
            "the process exited with status 1 (ImportError: libtorch.so)",
            id="the last words of Python",
        ),
    ],
)
@pytest.mark.skipif("sys.platform == 'win32'", reason="signals are of POSIX")
def test_the_failure_of_a_process(given: Ending, blame: str, error: str) -> None:
    failure = death(given, 5)
    assert (failure.stage, failure.blame, failure.error, failure.where) == (given.stage, blame, error, "")
