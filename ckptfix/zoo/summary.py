"""How far a migration is, and what came of it: counts, never a list of files."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from ckptfix.zoo.record import Outcome

BAD = (Outcome.UNREADABLE, Outcome.FAILED)


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

    def count(self, outcome: Outcome, size: int, output_size: int | None, earlier: bool = False) -> None:
        """A file has come to its outcome."""
        with self._lock:
            self.done_files += 1
            self.done_bytes += size
            self.outcomes[outcome] += 1
            self.sizes[outcome] += size
            self.written += output_size or 0
            if earlier:
                self.earlier_files += 1
                self.earlier_bytes += size

    @property
    def rate(self) -> float:
        """Bytes a second of this run, 0 before the first is through."""
        elapsed = time.monotonic() - self.began
        return (self.done_bytes - self.earlier_bytes) / elapsed if elapsed > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Judged by bytes and by files, whichever is the longer way."""
        elapsed = time.monotonic() - self.began
        done, files = self.done_bytes - self.earlier_bytes, self.done_files - self.earlier_files
        if not files:
            return None
        by_files = (self.files - self.done_files) * elapsed / files
        return max(by_files, (self.bytes - self.done_bytes) * elapsed / done) if done else by_files

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
