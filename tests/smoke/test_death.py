"""Endings made by hand; test_launch has real ones, and test_run has what becomes of them."""

from __future__ import annotations

import pytest

from ckptfix.smoke.death import death
from ckptfix.smoke.launch import Ending
from ckptfix.smoke.outcome import ENVIRONMENT, MODEL, Outcome


def ending(returncode: int, stage: str = "forward", timed_out: bool = False, printed: str = "") -> Ending:
    return Ending(returncode, timed_out, stage, Outcome("cpu"), False, "", printed)


@pytest.mark.parametrize(
    ("given", "blame", "error"),
    [
        pytest.param(ending(-9, timed_out=True), MODEL, "no answer within 5 s", id="time-out"),
        pytest.param(ending(-9, "read", timed_out=True), ENVIRONMENT, "no answer within 5 s", id="a slow disk"),
        pytest.param(ending(-11, "training"), MODEL, "the process crashed with SIGSEGV", id="crash in training mode"),
        pytest.param(
            ending(1, "start", printed="Traceback\nImportError: libtorch.so"),
            ENVIRONMENT,
            "the process ended by itself with exit status 1 (ImportError: libtorch.so)",
            id="the last words of Python",
        ),
    ],
)
@pytest.mark.skipif("sys.platform == 'win32'", reason="signals are of POSIX")
def test_the_failure_of_a_process(given: Ending, blame: str, error: str) -> None:
    failure = death(given, 5)
    assert (failure.stage, failure.blame, failure.error, failure.where) == (given.stage, blame, error, "")
