import io
import runpy
import sys

import click
import pytest

from ckptfix.cli.console import LIVE, SELDOM, Console, Meter, Stopped, time_text
from ckptfix.core.progress import Task, watched_by
from ckptfix.errors import HostileError, TargetError, UnreadableError, UsageError
from ckptfix.writing.atomic import deliver_file, temporary_beside


class Terminal(io.StringIO):
    def isatty(self):
        return True


def throw(error):
    raise error


def told(error, capsys, source="a.pth", **settings):
    console = Console(**settings)
    with console.reporting_errors(source):
        throw(error)
    out, err = capsys.readouterr()
    assert out == ""
    return console, err


def test_noop_no_error(capsys):
    console = Console()
    with console.exiting_on_error("a.pth"):
        pass
    assert console.failures == []
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        pytest.param(UnreadableError("a.pth: cut short"), "a.pth: cut short", id="names the file"),
        pytest.param(HostileError("runs code"), "a.pth: runs code", id="the name is added"),
        pytest.param(
            UnreadableError("two\nlines \x1b[31m"), "a.pth: two\\nlines \\x1b[31m", id="always one plain line"
        ),
        pytest.param(FileNotFoundError(2, "No such file", "b.pth"), "a.pth: b.pth: No such file", id="of the system"),
        pytest.param(FileNotFoundError(2, "gone"), "a.pth: the working directory: gone", id="of the system, nameless"),
        pytest.param(OSError("odd"), "a.pth: odd", id="of the system without a number"),
        pytest.param(MemoryError(), "a.pth: not enough memory for this file", id="memory"),
        pytest.param(
            RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 4 bytes"),
            "a.pth: not enough memory ([enforce fail] DefaultCPUAllocator: not enough memory: you tried"
            " to allocate 4 bytes)",
            id="memory of torch",
        ),
        pytest.param(
            ModuleNotFoundError("No module named 'torch'", name="torch"),
            "a.pth: this needs torch, which cannot be imported (No module named 'torch')",
            id="no torch",
        ),
    ],
)
def test_an_error_is_one_line(error, line, capsys):
    console, err = told(error, capsys)
    assert err == f"ckptfix: error: {line}\n"
    assert len(console.failures) == 1
    assert not console.is_fatal


def test_a_torch_whose_libraries_do_not_load_is_named(tmp_path, capsys):
    broken = tmp_path / "torch" / "__init__.py"
    broken.parent.mkdir()
    broken.write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    console = Console()
    with console.reporting_errors("a.pth"):
        runpy.run_path(str(broken))
    assert capsys.readouterr().err == (
        "ckptfix: error: a.pth: this needs torch, which cannot be imported "
        "(libcudart.so.12: cannot open shared object file)\n"
    )


@pytest.mark.parametrize(
    ("error", "hopeless"),
    [
        pytest.param(UsageError("a.pth: has no weights ema"), False, id="about this file"),
        pytest.param(UsageError("--for-torch x is no version"), True, id="about the command"),
        pytest.param(TargetError("--model m:f: no module m"), True, id="about the model"),
    ],
)
def test_errors_that_concern_every_file(error, hopeless, capsys):
    console, _ = told(error, capsys)
    assert console.is_fatal is hopeless


def test_a_short_file_name_is_not_found_in_other_words(capsys):
    console, err = told(UsageError("every rule is ignored"), capsys, source="e")
    assert console.is_fatal
    _, err = told(UnreadableError("the file is empty"), capsys, source="e")
    assert err == "ckptfix: error: e: the file is empty\n"


def test_an_error_about_another_file_names_that_file(capsys):
    with Console().reporting_errors("a.pth", "like.pth"):
        throw(UnreadableError("like.pth: cut short"))
    assert capsys.readouterr().err == "ckptfix: error: like.pth: cut short\n"


def test_errors_of_the_users_code_have_its_traceback(capsys):
    _, err = told(TargetError("--model m:f raised ValueError", traceback_text="Traceback: mine\n"), capsys)
    assert err == "Traceback: mine\nckptfix: error: --model m:f raised ValueError\n"


def test_a_bug_asks_for_a_report(capsys):
    console, err = told(KeyError("conv1"), capsys)
    assert err.count("\n") == 1
    assert "a.pth: this is a bug of ckptfix, please report it" in err
    assert "KeyError" in err
    assert len(console.failures) == 1


def test_a_bug_has_a_traceback_with_verbose(capsys):
    _, err = told(KeyError("conv1"), capsys, verbose=True)
    assert err.startswith("Traceback (most recent call last)")


@pytest.mark.parametrize(
    ("error", "code", "name"),
    [(KeyboardInterrupt(), 130, "Interrupt"), (Stopped(15), 143, "Terminated"), (Stopped(1), 129, "Hangup")],
)
def test_a_signal_ends_it_with_one_line(error, code, name, capsys):
    with pytest.raises(click.exceptions.Exit) as end, Console().exiting_on_error("a.pth"):
        raise error
    assert end.value.exit_code == code
    line = f"ckptfix: error: a.pth: stopped ({name}): no unfinished file is left, and no source was changed\n"
    assert capsys.readouterr() == ("", line)


def test_a_signal_after_the_file_is_in_place_says_so(capsys, tmp_path):
    def stopped() -> None:
        with temporary_beside(tmp_path / "a.pth") as temporary:
            deliver_file(temporary, tmp_path / "a.pth")
        raise KeyboardInterrupt

    with pytest.raises(click.exceptions.Exit), Console().exiting_on_error("a.pth"):
        stopped()
    assert f"no unfinished file is left, and {tmp_path}/a.pth is complete and in place\n" in capsys.readouterr().err


def test_a_closed_pipe_ends_silently(capsys, monkeypatch):
    monkeypatch.setattr("ckptfix.cli.console._close_quietly", lambda stream: None)
    with pytest.raises(click.exceptions.Exit) as end, Console().exiting_on_error("a.pth"):
        raise BrokenPipeError
    assert end.value.exit_code == 141
    assert capsys.readouterr() == ("", "")


def test_an_error_exits_with_code_2(capsys):
    with pytest.raises(click.exceptions.Exit) as end, Console().exiting_on_error("a.pth"):
        raise UnreadableError("a.pth: cut short")
    assert end.value.exit_code == 2
    assert capsys.readouterr().err == "ckptfix: error: a.pth: cut short\n"


@pytest.mark.parametrize(("quiet", "expected"), [(False, "ckptfix: a remark\n"), (True, "")])
def test_notes(quiet, expected, capsys):
    Console(quiet=quiet).note("a remark")
    assert capsys.readouterr().err == expected


def test_progress_is_for_terminals(capsys):
    Console().progress("checking a.pth")
    assert capsys.readouterr().err == ""


def test_progress_is_one_row(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "60")
    Console().progress("scanning values of a-file-with-a-very-long-name.safetensors: 62 %, 1.20 GB of 2.00 GB")
    assert len(screen.getvalue()) == 59
    assert screen.getvalue().endswith(" …")


def test_progress_is_cleared_before_other_output(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    console = Console()
    with console.reporting_errors("a.pth"):
        console.progress("checking a.pth")
        assert screen.getvalue() == "checking a.pth …"
    assert screen.getvalue() == "checking a.pth …\r\x1b[K"


def watch(seconds, every=LIVE):
    """Return what is shown for a gigabyte that takes this many seconds, in steps of one percent."""
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
    assert shown[0] == "writing a.pth: 20 %, 200 MB of 1.00 GB, 100 MB/s, 8 s left"
    assert shown[-1].endswith("0 s left")
    assert 20 < len(shown) <= 41


def test_a_file_gets_a_line_every_ten_seconds():
    assert watch(9.9, SELDOM) == []
    shown = watch(40.0, SELDOM)
    assert 3 <= len(shown) <= 4
    assert all(text.startswith("writing a.pth: ") and ", 25.0 MB/s, " in text for text in shown)


def test_the_first_bytes_give_no_rate():
    now, shown = 0.0, list[str]()
    with watched_by(Meter(shown.append, clock=lambda: now)):
        now = 10.0
        task = Task("writing a.pth", 10**9)
        task.advance(10**6)
        for now in (10.5, 11.0):  # noqa: B007 - the clock reads it
            task.advance(5 * 10**7)
    assert shown == [
        "writing a.pth: 0 %, 1.00 MB of 1.00 GB",
        "writing a.pth: 5 %, 51.0 MB of 1.00 GB",
        "writing a.pth: 10 %, 101 MB of 1.00 GB, 100 MB/s, 9 s left",
    ]


def test_a_second_pass_is_not_more_than_100_percent():
    now, shown = 0.0, list[str]()
    task = Task("scanning values", 10**9)
    with watched_by(Meter(shown.append, clock=lambda: now)):
        for now in (0.0, 10.0, 20.0):  # noqa: B007 - the clock reads it
            task.advance(9 * 10**8)
    assert shown[-1] == "scanning values: 100 %, 1.00 GB of 1.00 GB, 90.0 MB/s, 0 s left"


def test_a_small_task_shows_nothing():
    now, shown = 0.0, list[str]()
    with watched_by(Meter(shown.append, clock=lambda: now)):
        now = 60.0
        Task("scanning values", 999).advance(1)
    assert shown == []


def test_noop_without_a_watcher():
    task = Task("writing", 2)
    task.advance(1)
    assert task.done == 1


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (99, "99 s"), (600, "10 min"), (7200 * 12, "24 h")])
def test_times(seconds, text):
    assert time_text(seconds) == text


def test_a_terminal_that_cannot_erase_a_line_shows_no_progress(monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "dumb")
    console = Console()
    console.progress("checking a.pth")
    console.end_progress()
    assert terminal.getvalue() == ""
