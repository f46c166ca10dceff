"""The counts of a migration."""

import pytest

from ckptfix.zoo.manifest import Outcome
from ckptfix.zoo.migrating import Summary


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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("ckptfix.zoo.migrating.time.monotonic", lambda: now[0])
    return now


MB = 1 << 20


def run(summary: Summary, clock: list[float], sizes: list[int], seconds: float) -> list[float | None]:
    """The remaining times that are predicted after each of these files, which take this many seconds each."""
    told = []
    for size in sizes:
        clock[0] += seconds
        summary.count(Outcome.FINE, size, size)
        pace = summary.pace()
        told.append(None if pace is None else pace[1])
    return told


def test_noop_nothing_is_foretold_before_something_is_done(clock):
    summary = Summary(files=10, bytes=10 * MB, began=0.0)
    clock[0] = 100.0
    assert summary.pace() is None
    summary.count(Outcome.FINE, MB, MB, earlier=True)  # by another run, in no time
    assert summary.pace() is None


def test_the_first_seconds_foretell_nothing(clock):
    summary = Summary(files=100, bytes=100 * MB, began=0.0)
    assert run(summary, clock, [MB] * 9, 0.5) == [None] * 9
    assert run(summary, clock, [MB], 0.5) == pytest.approx([45.0])


def test_a_small_share_foretells_nothing_except_for_a_very_long_run(clock):
    summary = Summary(files=1000, bytes=1000 * MB, began=0.0)
    assert run(summary, clock, [MB] * 5, 10.0) == [None] * 5
    assert run(summary, clock, [MB], 10.0) == pytest.approx([9940.0])


def test_what_an_earlier_run_has_done_counts_for_nothing(clock):
    summary = Summary(files=10, bytes=10 * MB, began=0.0)
    for _ in range(5):
        summary.count(Outcome.FINE, MB, MB, earlier=True)
    assert run(summary, clock, [MB], 10.0) == pytest.approx([40.0])


def test_the_largest_first_do_not_foretell_hours(clock):
    """Ten large files and a thousand small ones: the large ones take ten seconds each, the small ones a tenth."""
    summary = Summary(files=1010, bytes=10 * 100 * MB, began=0.0)
    first = run(summary, clock, [100 * MB] * 10, 10.0)
    assert all(10 <= left <= 200 for left in first if left is not None)
    *_, soon = run(summary, clock, [0] * 50, 0.1)
    assert soon == pytest.approx(95, rel=0.5)
    *_, last = run(summary, clock, [0] * 450, 0.1)
    assert last == pytest.approx(50, rel=0.1)  # half of them are left
