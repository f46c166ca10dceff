import pytest

from ckptfix.cli.meter import LIVE, SELDOM, Meter, bytes_text, time_text
from ckptfix.core.progress import Task, tell_slower, watched_by


def watch(seconds, every=LIVE):
    """What is shown of a gigabyte that takes so many seconds, a hundredth after another."""
    now, shown = 0.0, list[str]()
    task = Task("writing a.pth", 10**9)
    with watched_by(Meter(shown.append, every, lambda: now)):
        for _ in range(100):
            now += seconds / 100
            task.advance(10**7)
    return shown


@pytest.mark.parametrize("seconds", [0.1, 1.0, 1.9])
def test_work_below_two_seconds_shows_nothing(seconds):
    assert watch(seconds) == []


def test_longer_work_shows_bytes_rate_and_time_left():
    shown = watch(10.0)
    assert shown[0] == "writing a.pth: 20 %, 200 MB of 1.0 GB, 100 MB/s, 8 s left"
    assert shown[-1].endswith("0 s left")
    assert 20 < len(shown) <= 41


def test_a_file_gets_a_line_every_ten_seconds():
    assert watch(9.9, SELDOM) == []
    shown = watch(40.0, SELDOM)
    assert 3 <= len(shown) <= 4
    assert all(text.startswith("writing a.pth: ") and ", 25.0 MB/s, " in text for text in shown)


def test_the_first_bytes_of_a_task_foretell_nothing():
    now, shown = 0.0, list[str]()
    with watched_by(Meter(shown.append, clock=lambda: now)):
        now = 10.0
        task = Task("writing a.pth", 10**9)
        task.advance(10**6)
        for now in (10.5, 11.0):  # noqa: B007 - the clock reads it
            task.advance(5 * 10**7)
    assert shown == [
        "writing a.pth: 0 %, 1.0 MB of 1.0 GB",
        "writing a.pth: 5 %, 51.0 MB of 1.0 GB",
        "writing a.pth: 10 %, 101 MB of 1.0 GB, 100 MB/s, 9 s left",
    ]


def test_a_second_pass_over_the_bytes_is_not_more_than_all():
    now, shown = 0.0, list[str]()
    task = Task("scanning values", 10**9)
    with watched_by(Meter(shown.append, clock=lambda: now)):
        for now in (0.0, 10.0, 20.0):  # noqa: B007 - the clock reads it
            task.advance(9 * 10**8)
    assert shown[-1] == "scanning values: 100 %, 1.0 GB of 1.0 GB, 90.0 MB/s, 0 s left"


def test_a_small_task_shows_nothing():
    now, shown = 0.0, list[str]()
    with watched_by(Meter(shown.append, clock=lambda: now)):
        now = 60.0
        Task("scanning values", 999).advance(1)
    assert shown == []


def test_nobody_has_to_watch():
    task = Task("writing", 2)
    task.advance(1)
    tell_slower("cast", 1)
    assert task.done == 1


def test_reasons_are_added_up_the_largest_first():
    meter = Meter(print)
    with watched_by(meter):
        for reason, nbytes in (("cast", 10), ("compressed", 3000), ("cast", 20)):
            tell_slower(reason, nbytes)
    tell_slower("cast", 5)
    assert meter.lines() == [
        "slower than a plain copy: 3.0 kB compressed",
        "slower than a plain copy: 30 bytes cast",
    ]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (99_900_000, "99.9 MB"), (4_240_000_000, "4.2 GB")],
)
def test_bytes(nbytes, text):
    assert bytes_text(nbytes) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (99, "99 s"), (600, "10 min"), (7200 * 12, "24 h")])
def test_times(seconds, text):
    assert time_text(seconds) == text
