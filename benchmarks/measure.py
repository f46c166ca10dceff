"""Runs alternative ways of doing one thing in turn, each as a process of its own, and computes medians."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.speed_files import warm

CKPTFIX = [str(Path(sys.executable).with_name("ckptfix"))]

ROUNDS = 5
SLOW = 20.0
"""Seconds above which a way runs three times instead of five, as some peers take ten times as long as the others."""

SAMPLES_PER_SECOND = 200

REST = 10.0
"""Seconds after which a virtual machine has returned freed memory to its host."""

FETCHED_ROUNDS = 3
"""Rounds with memory that the machine has to fetch first."""


@dataclass(frozen=True)
class Way:
    """One way: a command that reads ``source`` and writes into the folder ``out``, which is removed after each run."""

    name: str
    command: Sequence[str]
    source: Path | None = None
    out: Path | None = None
    rounds: int = ROUNDS
    is_peer: bool = False


@dataclass
class Runs:
    """The runs of a way: seconds, and peaks of anonymous memory in bytes."""

    seconds: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The median in seconds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """The fastest and the slowest run, in seconds."""
        return min(self.seconds), max(self.seconds)

    @property
    def peak(self) -> int:
        """The largest peak of anonymous memory, in bytes."""
        return max(self.memory)


def environment() -> dict[str, str]:
    """Return the environment of an installed program, whose modules are compiled once and not at every start."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def measure(ways: Sequence[Way], rounds: int = ROUNDS, rest: float = 0.0) -> dict[str, Runs]:
    """Run the ways in turn, round by round, so that noise on the machine affects all of them.

    A virtual machine gets memory from its host when it is first used, and returns it seconds after it was freed. Each
    way runs with the memory that the run before has freed or, after ``REST`` seconds of ``rest``, with memory that has
    to be fetched."""
    runs = {way.name: Runs() for way in ways}
    for _ in range(rounds):
        for way in ways:
            done = runs[way.name]
            if len(done.seconds) >= way.rounds or (len(done.seconds) >= 3 and done.median > SLOW):
                continue
            if way.source is not None:
                warm(way.source)
            time.sleep(rest)
            seconds, memory = run(way)
            done.seconds.append(seconds)
            done.memory.append(memory)
    return runs


def fetched_ratios(ways: Sequence[Way]) -> dict[str, str]:
    """Return the ratio of each way to the first one, with memory that has to be fetched; peers are left out."""
    own = [replace(way, rounds=FETCHED_ROUNDS) for way in ways if not way.is_peer]
    runs = measure(own, FETCHED_ROUNDS, REST)
    first = runs[own[0].name].median
    return {name: f"{done.median / first:.2f}" for name, done in runs.items()}


def run(way: Way) -> tuple[float, int]:
    """Run a way once. Return seconds and peak of anonymous memory in bytes. Raises ``SystemExit`` if it fails."""
    if way.out is not None:
        shutil.rmtree(way.out, ignore_errors=True)
        way.out.mkdir()
        os.sync()
    began = time.perf_counter()
    child = subprocess.Popen(way.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment())
    peak = 0
    try:
        while child.poll() is None:
            peak = max(peak, _anonymous(child.pid))
            time.sleep(1 / SAMPLES_PER_SECOND)
        seconds = time.perf_counter() - began
    finally:
        if child.poll() is None:
            child.kill()
        output, _ = child.communicate()
    # 1 means that findings remain, as with random numbers for weights.
    if child.returncode not in (0, 1) or (way.out is not None and not any(way.out.iterdir())):
        raise SystemExit(f"{way.name}: ended with {child.returncode}\n{output.decode()[-2000:]}")
    if way.out is not None:
        shutil.rmtree(way.out)
    return seconds, peak


def _anonymous(process: int) -> int:
    """Return ``RssAnon`` of a process and its descendants in bytes, without mapped files and the page cache."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        return 0
    line = next((line for line in status.splitlines() if line.startswith("RssAnon:")), None)
    return (int(line.split()[1]) << 10 if line else 0) + sum(_anonymous(int(child)) for child in children)


def time_answer(command: Sequence[str], rounds: int = 11) -> float:
    """Return the median seconds of a short process."""
    seconds = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, env=environment(), check=False)
        seconds.append(time.perf_counter() - began)
        if done.returncode not in (0, 1):
            raise SystemExit(f"{' '.join(command)}: ended with {done.returncode}\n{done.stderr.decode()[-2000:]}")
    return statistics.median(seconds[1:])  # the first run warms the caches


def ask(module: str, *arguments: str) -> list[float]:
    """Run a module as a program in a new process, and return the numbers that it prints."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, env=environment(), check=False, text=True
    )
    if done.returncode:
        raise SystemExit(f"{module} {' '.join(arguments)}: {done.stderr[-2000:]}")
    return [float(number) for number in done.stdout.split()]
