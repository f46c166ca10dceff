"""A worker and its pipes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from ckptfix.zoo.engines.budget import Cost
from ckptfix.zoo.engines.child import Child, Order
from ckptfix.zoo.work.job import Job

ORPHAN = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-m", "ckptfix.zoo.engines.worker", str(os.getpid())], stdin=subprocess.PIPE)
print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""


class Leaving:
    """What a job runs may end the process."""

    def __reduce__(self) -> Any:
        return exec, ("import os; os.write(2, b'cannot go on\\n'); os._exit(3)",)


def test_a_worker_without_jobs_ends_when_its_pipe_does(tmp_path):
    child = Child(tmp_path, 1)
    child.end()
    assert child.process.returncode == 0


def test_a_worker_dies_with_its_driver():
    # Its stdout is inherited: it reads as closed when the last of the two is gone.
    driver = subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE)
    assert driver.stdout is not None
    printed = driver.stdout.read()
    assert driver.wait() == -signal.SIGKILL
    assert int(printed) != os.getpid()


def test_how_it_ended_is_told(tmp_path):
    for number, told in ((signal.SIGKILL, "memory"), (signal.SIGSEGV, "crashed with SIGSEGV")):
        child = Child(tmp_path, 1)
        child.process.send_signal(number)
        assert child.take() is None
        assert told in child.cause_of_death()
        child.kill()


def test_the_last_words_of_one_that_leaves_are_told(tmp_path):
    child = Child(tmp_path, 1)
    child.give(Order(cast(Job, Leaving()), Cost(0, 0)))
    assert child.take() is None
    assert "by itself with exit status 3 (cannot go on)" in child.cause_of_death()
    child.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what a process was started with")
def test_its_temporary_files_go_with_the_scratch_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("scratch").mkdir()
    child = Child(Path("scratch"), 1)
    environ = b""
    while not environ and child.process.poll() is None:  # the kernel shows it a little later than it starts
        environ = Path(f"/proc/{child.process.pid}/environ").read_bytes()
    child.end()
    assert f"TMPDIR={tmp_path}/scratch".encode() in environ.split(b"\0")
