"""The counts of a migration."""

from __future__ import annotations

import pytest

from ckptfix.zoo.record import Outcome
from ckptfix.zoo.summary import Summary


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ((), 0),
        ((Outcome.FINE, Outcome.REPAIRED, Outcome.OTHER), 0),
        ((Outcome.FINE, Outcome.DECISION), 1),
        ((Outcome.DECISION, Outcome.UNREADABLE), 2),
        ((Outcome.FAILED,), 2),
    ],
)
def test_the_worst_outcome_is_the_exit_code(outcomes, code):
    summary = Summary(files=len(outcomes))
    for outcome in outcomes:
        summary.count(outcome, 10, None)
    assert summary.exit_code == summary.to_json()["exit_code"] == code
    assert summary.done_files == len(outcomes)


def test_time_left_is_judged_by_this_run(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("ckptfix.zoo.summary.time.monotonic", lambda: clock[0])
    summary = Summary(files=10, bytes=1000, began=100.0)
    assert summary.seconds_left is None
    summary.count(Outcome.FINE, 500, 500, earlier=True)
    summary.count(Outcome.FINE, 100, 100)
    clock[0] = 110.0
    assert summary.rate == 10.0
    assert str(summary.seconds_left) == "80.0"  # 8 files of 10 s each
