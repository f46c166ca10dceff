"""Where one job has its temporary files: all of them begin with its number, so that whoever buries it finds them.

Most jobs write one file, and a folder for it would cost more than the file."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

SOURCE = "source"
"""The folder for a source that is not on this machine: what lies in it has the names of the zoo."""


@dataclass(frozen=True)
class Workplace:
    """The part of the scratch folder that belongs to a job."""

    scratch: Path
    number: int

    def file(self, name: str) -> Path:
        """A file of the job."""
        return self.scratch / f"{self.number}.{name}"

    def folder(self, name: str) -> Path:
        """A folder of the job, made now."""
        folder = self.scratch / f"{self.number}.{name}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def hidden(self, text: str) -> str:
        """A message without the paths of this place, which nobody else knows."""
        own = f"{self.scratch}/{self.number}."
        return text.replace(f"{own}{SOURCE}/", "").replace(own, "")

    def clear(self) -> None:
        """Remove all of it; also what a writer that was killed left, which begins with a dot."""
        for left in [*self.scratch.glob(f"{self.number}.*"), *self.scratch.glob(f".{self.number}.*")]:
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)
