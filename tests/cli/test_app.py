import os
import re
import signal
import subprocess
import sys

import pytest
import torch

from ckptfix import __version__
from tests.cli.programs import ROOT, command, environment, run

SLOW = ("torch", "numpy", "rich", "safetensors")


def test_version(tmp_path):
    done = run("--version", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"ckptfix {__version__}\n", "")


def test_the_version_is_that_of_the_package():
    assert re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE) == [__version__]


@pytest.mark.parametrize(
    "words", [["--help"], ["check", "-h"], ["repair", "-h"], ["inspect", "-h"], ["rule", "-h"], ["explain", "-h"]]
)
def test_help(tmp_path, words):
    done = run(*words, cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: ")
    assert "\x1b" not in done.stdout


def test_help_says_that_the_model_is_code(tmp_path):
    assert "This runs your code" in run("check", "--help", cwd=tmp_path).stdout.replace("\n", " ").replace("  ", "")


@pytest.mark.parametrize(
    "words",
    [
        ["--version"],
        ["--help"],
        ["check", "--help"],
        ["rule", "--all"],
        ["inspect", "good.pth"],
        ["check", "wrapped.pth", "--like", "good.pth", "--no-values"],
    ],
    ids=" ".join,
)
def test_work_on_names_imports_nothing_slow(folder, words):
    program = (
        "import sys, atexit\n"
        f"atexit.register(lambda: sys.stderr.write('imported ' + str([n for n in {SLOW} if n in sys.modules])))\n"
        "from ckptfix.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words], cwd=folder, env=environment(), capture_output=True, encoding="utf-8"
    )
    assert done.stderr == "imported []"


@pytest.mark.skipif(os.name != "posix", reason="signals and pipes of POSIX")
def test_a_closed_pipe_is_quiet(tmp_path):
    torch.save({f"k{'x' * n}.w": torch.zeros(1) for n in range(2000)}, tmp_path / "many.pth")
    program = subprocess.Popen(
        command("inspect", "many.pth", "--output-format", "concise"),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert program.stdout is not None
    assert program.stderr is not None
    assert program.stdout.readline().startswith(b"k.w ")
    program.stdout.close()
    assert program.stderr.read() == b""
    assert program.wait(60) == 141


@pytest.mark.skipif(os.name != "posix", reason="signals and pipes of POSIX")
@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGINT, "Interrupt"), (signal.SIGTERM, "Terminated"), (signal.SIGHUP, "Hangup")]
)
def test_a_signal_ends_it_with_one_line(number, name, tmp_path):
    (tmp_path / "slow.py").write_text(
        "import time, sys\n\ndef model():\n    print('ready', flush=True)\n    time.sleep(60)\n"
    )
    torch.save({"w": torch.zeros(1)}, tmp_path / "a.pth")
    program = subprocess.Popen(
        command("check", "a.pth", "--model", "slow:model"),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert program.stdout is not None
    assert program.stderr is not None
    assert program.stderr.readline() == b"ready\n"  # what a factory prints goes to stderr
    program.send_signal(number)
    line = f"ckptfix: error: a.pth: stopped ({name}): no unfinished file is left, and no source was changed\n"
    assert program.stderr.read().decode() == line
    assert program.stdout.read() == b""
    assert program.wait(60) == 128 + number


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_while_an_object_is_cleared_up_is_not_lost(number, tmp_path):
    (tmp_path / "slow.py").write_text(
        "import os, time\n\nclass Held:\n    def __del__(self):\n"
        f"        os.kill(os.getpid(), {int(number)})\n        time.sleep(0)\n\n"
        "def model():\n    Held()\n    time.sleep(60)\n"
    )
    torch.save({"w": torch.zeros(1)}, tmp_path / "a.pth")
    done = run("check", "a.pth", "--model", "slow:model", cwd=tmp_path)
    assert done.returncode == 128 + number
    (line,) = done.stderr.splitlines()
    assert line.startswith("ckptfix: error: a.pth: stopped (")


@pytest.mark.skipif(os.name != "posix", reason="the shell of POSIX")
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_swallows_what_is_written_to_it(closed, tmp_path):
    torch.save({"module.w": torch.ones(3)}, tmp_path / "a.pth")
    words = " ".join(map(str, command("repair", "a.pth", "-o", "b.pth")))
    done = subprocess.run(["sh", "-c", f"{words} {closed}"], cwd=tmp_path, env=environment(), capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert torch.load(tmp_path / "b.pth")["w"].tolist() == [1, 1, 1]
    assert done.stdout == b"" or ">&-" not in closed.replace("2>&-", "")
