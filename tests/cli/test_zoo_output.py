"""The progress and the summary of a migration."""

from collections import Counter
from typing import Any

import pytest

from ckptfix.cli.console import Console
from ckptfix.cli.zoo_output import MigrationMeter, _DecisionGroup, _entry, _reason, progress_text
from ckptfix.zoo.manifest import Outcome
from ckptfix.zoo.migrating import Summary


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_the_line_tells_files_bytes_rate_time_and_outcomes(clock):
    summary = Summary(files=4, bytes=4_000_000, began=0.0)
    assert progress_text(summary) == "0 of 4 files, 0 B of 4.00 MB"
    summary.count(Outcome.REPAIRED, 1_000_000, 1_000_000)
    clock[0] = 2.0
    assert progress_text(summary) == "1 of 4 files, 1.00 MB of 4.00 MB: 1 repaired"
    clock[0] = 10.0
    assert progress_text(summary) == "1 of 4 files, 1.00 MB of 4.00 MB, 100 kB/s, 30 s left: 1 repaired"


def test_without_a_terminal_there_is_a_line_every_ten_seconds(clock, capsys):
    meter, summary = MigrationMeter(Console()), Summary(files=1, began=0.0)
    for second in range(31):
        clock[0] = float(second)
        meter.show(summary)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == ["ckptfix: 0 of 1 files, 0 B of 0 B"] * 3


def test_quiet_shows_nothing(clock, capsys):
    meter = MigrationMeter(Console(quiet=True))
    clock[0] = 100.0
    meter.show(Summary(files=1))
    assert capsys.readouterr().err == ""


def test_a_decision_that_no_option_makes_is_shown_as_text():
    findings = [{"code": f"FIT10{n}", "message": "m", "fixed": False, "level": "error"} for n in range(4)]
    ways: list[dict[str, Any]] = [{"options": {}, "text": "name the model that the file belongs to", "command": None}]
    record = {"error": None, "findings": findings, "smoke": None, "remarks": [], "decision": None, "decisions": ways}
    reason = _reason(record)
    assert reason.endswith("FIT102 m; and 1 more finding")
    *_, last = _entry(_DecisionGroup(record, ["a.pth"], {reason}), Counter(), ["ckptfix", "migrate", "old", "new"])
    assert last == "    name the model that the file belongs to"
