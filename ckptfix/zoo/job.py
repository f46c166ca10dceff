"""A job on one item of a zoo and its result, as plain data for a worker or another node."""

import re
import shutil
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from posixpath import basename, splitext
from typing import Any

from msgspec import Struct

from ckptfix.zoo.items import Item, ItemKind
from ckptfix.zoo.manifest import Outcome, Record, now, versions
from ckptfix.zoo.zoo_toml import Treatment

DRAFT = "draft"  # the repaired file, before it is in place
_COMMAND = r"\bckptfix \w+ '?"  # what is before a path in a command
SOURCE = "source"  # the folder for copies of a remote source, under their names in the zoo


class Others(str, Enum):
    """What to do with files that are not checkpoints."""

    COPY = "copy"
    SKIP = "skip"


class JobFiles(Struct, frozen=True):
    """The temporary files of one job. Their names start with its number, so that they can be removed if it dies.

    A folder for each job would cost more than the one small file that most jobs write."""

    scratch: Path
    number: int

    def file(self, name: str) -> Path:
        """Return the path of a temporary file of the job."""
        return self.scratch / f"{self.number}.{name}"

    def folder(self, name: str) -> Path:
        """Create a temporary folder of the job and return its path."""
        folder = self.file(name)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def clear(self) -> None:
        """Remove all of them, including hidden ones that a killed writer left."""
        for left in [*self.scratch.glob(f"{self.number}.*"), *self.scratch.glob(f".{self.number}.*")]:
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


class Job(Struct, frozen=True):
    """What to do with one item."""

    number: int  # unique in a run; names the temporary files
    item: Item
    source: str  # the name of the place of the source
    destination: str
    treatment: Treatment
    output: str  # the wanted name below the destination
    settings: str  # digest of the treatment, for the manifest
    taken: tuple[str, ...] = ()  # names that the output must not have, as another source has them
    others: Others = Others.COPY
    dry_run: bool = False
    # Whether the driver, on the same machine, flushes and renames the output together with many others.
    is_grouped: bool = False
    # The record of an earlier run to verify: if both digests are still right, nothing is done.
    known: Record | None = None
    # Whether the output was added by hand after a decision was asked for: it is checked and kept.
    adopts: bool = False
    decision: Mapping[str, Any] | None = None  # options given for this item only
    again: tuple[str, ...] = ()  # the command of this migration as words, for commands that carry out a decision
    attempt: int = 1

    @property
    def runs_model(self) -> bool:
        """Whether a model is built and run, which takes torch and the memory of the model."""
        return self.treatment.model is not None and self.item.kind is not ItemKind.OTHER

    @property
    def fetches(self) -> bool:
        """Whether the source or the destination is a URL."""
        return "://" in self.source or "://" in self.destination

    @property
    def written_name(self) -> str:
        """The name of the output if the checkpoint is rewritten: a folder becomes one file."""
        if self.item.kind is ItemKind.FOLDER:
            return self.treatment.output_name(self.item.name, is_folder=True)
        return self.output

    def shown(self, text: str, files: JobFiles) -> str:
        """Return a message with temporary paths replaced by names in the zoo, and in commands by paths."""
        own = f"{files.scratch}/{files.number}."
        goal = self.written_name
        text = text.replace(f"{own}{DRAFT}s/{basename(goal)}", goal).replace(f"{own}{DRAFT}{splitext(goal)[1]}", goal)
        for prefix in (f"{own}{SOURCE}/", own, f"{Path(self.source)}/"):
            if prefix != "./":  # paths below "." have no prefix, and "../" must stay
                text = re.sub(rf"({_COMMAND})?(?<![\w./-]){re.escape(prefix)}", self._begun, text)
        return text

    def _begun(self, found: re.Match[str]) -> str:
        """Return what replaces the beginning of a path: nothing, or the source in a command."""
        return f"{found[1]}{self.source.rstrip('/')}/" if found[1] else ""

    def record(self, outcome: Outcome, **more: Any) -> Record:
        """Return a record of this job's item."""
        item = self.item
        return Record(
            item.name,
            item.size,
            item.stamp,
            self.settings,
            outcome,
            decision=self.decision,
            attempts=self.attempt,
            finished=now(),
            versions=versions(),
            **more,
        )


class Staged(Struct, frozen=True):
    """A finished file in the scratch folder, and its name in the destination."""

    path: str
    name: str
    is_flushed: bool = False


class Done(Struct, frozen=True):
    """The result of a job. ``staged`` are the files that the driver still has to put in place.

    ``weights`` is the line of ``weights.jsonl``, encoded by ``manifest.line_of``."""

    number: int
    record: Record
    weights: bytes | None = None
    staged: tuple[Staged, ...] = ()
    is_known: bool = False  # whether the record of an earlier run was verified, with nothing new to record
    # Whether memory ran out, so that the process must end: what it caches may be incomplete.
    is_exhausted: bool = False


def failed(job: Job, reason: str) -> Done:
    return Done(job.number, job.record(Outcome.FAILED, error=reason))
