"""How far the work is, on one line of a terminal or now and then in a file, and what took a slower way, for ``-v``."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from ckptfix.core.progress import SMALL, Task

QUIET = 2.0
"""Seconds of work before anything is shown: most of it is done by then."""

LIVE, SELDOM = 0.2, 10.0
"""Seconds from one text to the next: on a terminal, where it takes the place of the last one, and in a file."""

_SETTLED = 1.0
"""Seconds of a task after which its rate says how long the rest takes."""


@dataclass
class Meter:
    """Watches the work on one file. ``show`` takes a text ``every`` so many seconds; ``clock`` counts them."""

    show: Callable[[str], None]
    every: float = LIVE
    clock: Callable[[], float] = time.monotonic
    slower: Counter[str] = field(default_factory=Counter)
    _shown: float = 0.0
    _began: dict[int, tuple[Task, float, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._shown = self.clock() + max(QUIET, self.every) - self.every

    def advanced(self, task: Task) -> None:
        """Show the task anew, if it is time to."""
        now = self.clock()
        # The task is kept beside its start, or its id could become that of another one.
        _, began, before = self._began.setdefault(id(task), (task, now, task.done))
        if now - self._shown < self.every or task.total < SMALL:
            return
        self._shown = now
        done = min(task.done, task.total)  # a tensor may be read twice, so more than the total can pass
        share = 100 * done // max(task.total, 1)
        text = f"{task.name}: {share} %, {bytes_text(done)} of {bytes_text(task.total)}"
        if now - began >= _SETTLED and task.done > before:
            rate = (task.done - before) / (now - began)
            text += f", {bytes_text(rate)}/s, {time_text((task.total - done) / rate)} left"
        self.show(text)

    def slowed(self, reason: str, nbytes: int) -> None:
        """Add the bytes to those of the same reason."""
        self.slower[reason] += nbytes

    def lines(self) -> list[str]:
        """What took a slower way, the most bytes first."""
        return [
            f"slower than a plain copy: {bytes_text(nbytes)} {reason}" for reason, nbytes in self.slower.most_common()
        ]


def bytes_text(nbytes: float) -> str:
    """``812 bytes``, ``4.2 GB``."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}" if round(nbytes / size, 1) < 100 else f"{nbytes / size:.0f} {unit}"
    return f"{nbytes:.0f} bytes"


def time_text(seconds: float) -> str:
    """``4 s``, ``2 min``, ``30 h``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.0f} h"
