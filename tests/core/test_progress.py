"""Progress bars of the library: the calls that they get, and that nothing is shown without them."""

import io
import sys
from functools import partial

import pytest
import torch

import ckptfix
from ckptfix.core.progress import Task


class Recorder:
    """Makes progress bars that record their calls."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, *, total, desc, unit, unit_scale):
        self.lines.append(f"{desc}: {total} {unit}")
        return self

    def update(self, n):
        self.lines.append(f"+{n}")

    def close(self):
        self.lines.append("closed")


def test_each_task_has_a_progress_bar():
    bars = Recorder()
    with ckptfix.progress(bars):
        task, other = Task("writing a", 3_000_000), Task("writing b", 2_000_000)
        for each in (task, task, other, task):
            each.advance(1_500_000)
        Task("small", 10).advance(10)
    task.advance(1)
    assert bars.lines == [
        *("writing a: 3000000 B", "+1500000", "+1500000"),
        *("writing b: 2000000 B", "+1500000", "+0"),  # the first is read twice
        *("closed", "closed"),
    ]


def test_bars_are_closed_if_the_work_fails():
    def fail():
        with ckptfix.progress(bars):
            Task("writing a", 3_000_000).advance(1)
            raise ZeroDivisionError

    bars = Recorder()
    with pytest.raises(ZeroDivisionError):
        fail()
    assert bars.lines[-1] == "closed"


def test_a_check_and_a_repair_show_how_far_they_are(tmp_path, capsys):
    torch.save({f"module.{n}": torch.randn(1024, 1024) for n in range(3)}, tmp_path / "a.pth")
    for work in (ckptfix.check, partial(ckptfix.repair, output=tmp_path / "b.pth")):
        bars = Recorder()
        with ckptfix.progress(bars):
            work(tmp_path / "a.pth")
        assert sum(int(line[1:]) for line in bars.lines if line[0] == "+") >= 3 << 22
    assert capsys.readouterr() == ("", "")


def test_tqdm_is_the_default():
    tqdm = pytest.importorskip("tqdm.auto").tqdm
    shown = io.StringIO()
    with ckptfix.progress(partial(tqdm, file=shown)):
        Task("writing a", 3_000_000).advance(3_000_000)
    assert "writing a: 100%" in shown.getvalue()
    with ckptfix.progress():
        pass


def test_a_missing_tqdm_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ckptfix.UsageError, match="pip install tqdm"), ckptfix.progress():
        pass
