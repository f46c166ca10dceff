"""How far a migration is, and what came of it: counts, never a list of files."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from ckptfix.zoo.manifest import Outcome

BAD = (Outcome.UNREADABLE, Outcome.FAILED)

_QUIET, _LONG, _SHARE = 5.0, 60.0, 0.03
"""Seconds before an estimate is shown; and seconds, or the share of the work, after which it is."""

_EACH = 1_000_000
"""Bytes that take as long as opening a file and writing its record."""


@dataclass(frozen=True)
class Pace:
    """How fast a migration is: bytes of sources a second, and the seconds that are left."""

    rate: float
    seconds_left: float


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

    def count(self, outcome: Outcome, size: int, output_size: int | None, *, earlier: bool = False) -> None:
        """Count a file that has come to its outcome."""
        with self._lock:
            self.done_files += 1
            self.done_bytes += size
            self.outcomes[outcome] += 1
            self.sizes[outcome] += size
            self.written += output_size or 0
            if earlier:
                self.earlier_files += 1
                self.earlier_bytes += size

    def pace(self) -> Pace | None:
        """Return how fast it goes; None as long as too little is done to say."""
        with self._lock:
            seconds = time.monotonic() - self.began
            nbytes, files = self.done_bytes - self.earlier_bytes, self.done_files - self.earlier_files
            done = nbytes + _EACH * files
            left = self.bytes - self.done_bytes + _EACH * (self.files - self.done_files)
        if not done or seconds < _QUIET or (done < _SHARE * (done + left) and seconds < _LONG):
            return None
        return Pace(nbytes / seconds, seconds * left / done)

    @property
    def exit_code(self) -> int:
        """0: all are fine or repaired; 1: some need a decision; 2: some are unreadable or failed."""
        if any(self.outcomes[outcome] for outcome in BAD):
            return 2
        return int(self.outcomes[Outcome.DECISION] > 0)

    def to_json(self) -> dict[str, object]:
        """Return the counts as plain data."""
        return {
            "files": self.files,
            "bytes": self.bytes,
            "bytes_written": self.written,
            "outcomes": {outcome.value: self.outcomes[outcome] for outcome in Outcome},
            "of_an_earlier_run": self.earlier_files,
            "seconds": round(self.seconds, 3),
            "exit_code": self.exit_code,
        }
