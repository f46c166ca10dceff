"""How far a migration is, and what came of it: counts, never a list of files."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field

from ckptfix.zoo.books.record import Outcome
from ckptfix.zoo.effort import Effort

BAD = (Outcome.UNREADABLE, Outcome.FAILED)

_QUIET, _LONG, _TELLING = 5.0, 60.0, 0.03
"""Seconds before anything is foretold; and seconds, or the share of the work, after which the rest is."""

_WINDOW = 60.0
"""Seconds that the present pace is judged by."""


@dataclass(frozen=True)
class Pace:
    """How fast a migration is: bytes of sources a second, and the seconds that are left."""

    rate: float
    seconds_left: float


@dataclass(frozen=True)
class Mark:
    """What this run had done after so many seconds."""

    seconds: float = 0.0
    files: int = 0
    nbytes: int = 0


@dataclass
class Summary:
    """The counts of a migration, while it runs and afterwards. ``bytes`` are those of the sources."""

    files: int = 0
    bytes: int = 0
    done_files: int = 0
    done_bytes: int = 0
    earlier_files: int = 0
    """Done by an earlier run."""
    earlier_bytes: int = 0
    running: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    sizes: Counter[Outcome] = field(default_factory=Counter)
    written: int = 0
    """Bytes of the outputs."""
    began: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _effort: Effort = field(default_factory=Effort, repr=False)
    _marks: deque[Mark] = field(default_factory=lambda: deque([Mark()]), repr=False)
    """About one a second, back to the last in front of the window."""

    def count(
        self, outcome: Outcome, size: int, output_size: int | None, seconds: float = 0.0, *, earlier: bool = False
    ) -> None:
        """A file has come to its outcome, after so many seconds of work."""
        with self._lock:
            self.done_files += 1
            self.done_bytes += size
            self.outcomes[outcome] += 1
            self.sizes[outcome] += size
            self.written += output_size or 0
            if earlier:
                self.earlier_files += 1
                self.earlier_bytes += size
                return
            self._effort.learn(size, seconds)
            if (now := self._now()).seconds - self._marks[-1].seconds >= 1:
                self._before(now.seconds)
                self._marks.append(now)

    def pace(self) -> Pace | None:
        """How fast it goes at present; None as long as that is anybody's guess."""
        with self._lock:
            now = self._now()
            then = self._before(now.seconds)
            files, nbytes = self.files - self.done_files, self.bytes - self.done_bytes
            left, done = self._effort.of(files, nbytes), self._effort.of(now.files, now.nbytes)
            if now.files == then.files:  # all workers are at large files: then the whole run has to tell
                then = Mark()
            lately = self._effort.of(now.files - then.files, now.nbytes - then.nbytes)
        if not lately or now.seconds < _QUIET or (done < _TELLING * (done + left) and now.seconds < _LONG):
            return None
        seconds = now.seconds - then.seconds
        return Pace((now.nbytes - then.nbytes) / seconds, left * seconds / lately)

    def _now(self) -> Mark:
        done = self.done_files - self.earlier_files, self.done_bytes - self.earlier_bytes
        return Mark(time.monotonic() - self.began, *done)

    def _before(self, seconds: float) -> Mark:
        """The last mark in front of the window; it forgets those before it."""
        while len(self._marks) > 1 and self._marks[1].seconds <= seconds - _WINDOW:
            self._marks.popleft()
        return self._marks[0]

    @property
    def exit_code(self) -> int:
        """0: all are fine or repaired; 1: some need a decision; 2: some are unreadable or failed."""
        if any(self.outcomes[outcome] for outcome in BAD):
            return 2
        return int(self.outcomes[Outcome.DECISION] > 0)

    def to_json(self) -> dict[str, object]:
        """As plain data."""
        return {
            "files": self.files,
            "bytes": self.bytes,
            "bytes_written": self.written,
            "outcomes": {outcome.value: self.outcomes[outcome] for outcome in Outcome},
            "of_an_earlier_run": self.earlier_files,
            "seconds": round(self.seconds, 3),
            "exit_code": self.exit_code,
        }
