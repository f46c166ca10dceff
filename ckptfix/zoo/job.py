"""What is to be done with one item of a zoo, and what came of it: plain data, for a worker or another node."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from msgspec import Struct

from ckptfix.zoo.items import Item, ItemKind
from ckptfix.zoo.manifest import Outcome, Record, now, versions
from ckptfix.zoo.zoo_toml import Treatment

SOURCE = "source"  # the folder for a source that is not on this machine: files in it have the names of the zoo


class Others(str, Enum):
    """What becomes of files that are not checkpoints."""

    COPY = "copy"
    SKIP = "skip"


class Workplace(Struct, frozen=True):
    """Where one job has its temporary files: all begin with its number, so that they are found if it dies.

    Most jobs write one file, and a folder for it would cost more than the file."""

    scratch: Path
    number: int

    def file(self, name: str) -> Path:
        """Return the path of a file of the job."""
        return self.scratch / f"{self.number}.{name}"

    def folder(self, name: str) -> Path:
        """Make a folder of the job."""
        folder = self.file(name)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def clear(self) -> None:
        """Remove all of it; also what a killed writer left, which begins with a dot."""
        for left in [*self.scratch.glob(f"{self.number}.*"), *self.scratch.glob(f".{self.number}.*")]:
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


class Job(Struct, frozen=True):
    """What is to be done with one item."""

    number: int  # names its temporary files; unique in a run
    item: Item
    source: str  # the place of the source, by its name
    destination: str
    treatment: Treatment
    output: str  # the wanted name below the destination
    settings: str  # digest of the treatment, for the record
    taken: tuple[str, ...] = ()  # names that the output may not have, because another source has them
    others: Others = Others.COPY
    dry_run: bool = False
    # Whether the driver flushes and renames the output: it is on the same machine, and does so for many at once.
    is_grouped: bool = False
    # The record of an earlier run that is to be verified: if both digests still hold, nothing is done.
    known: Record | None = None
    # Whether the output was put there by hand since a decision was asked for: it is checked, and kept.
    adopts: bool = False
    decision: Mapping[str, Any] | None = None  # the options that were given for this item only
    again: tuple[str, ...] = ()  # the command of this migration, word by word, for the one that carries a decision out
    attempt: int = 1

    @property
    def runs_model(self) -> bool:
        """Whether the user's code is run: with torch, and as much memory as the model needs."""
        return self.treatment.model is not None and self.item.kind is not ItemKind.OTHER

    @property
    def fetches(self) -> bool:
        """Whether bytes come from, or go to, another machine."""
        return "://" in self.source or "://" in self.destination

    @property
    def written_name(self) -> str:
        """The name of the output if the checkpoint is written again: a folder becomes one file."""
        if self.item.kind is ItemKind.FOLDER:
            return self.treatment.output_name(self.item.name, is_folder=True)
        return self.output

    def shown(self, text: str, workplace: Workplace) -> str:
        """Return a message with the names of the zoo in place of paths that only this run knows."""
        own = f"{workplace.scratch}/{workplace.number}."
        for prefix in (f"{own}{SOURCE}/", own, f"{Path(self.source)}/"):
            if prefix != "./":  # a path below "." has no such prefix, and one in "../" is not ours
                text = re.sub(rf"(?<![\w./-]){re.escape(prefix)}", "", text)
        return text

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
    """A finished file of the scratch folder, and its name below the destination."""

    path: str
    name: str
    is_flushed: bool = False


class Done(Struct, frozen=True):
    """What came of a job. ``staged`` are the files that the driver still has to put in place.

    ``weights`` is the line of ``weights.jsonl``, as ``manifest.line_of`` gives it: the driver only writes it."""

    number: int
    record: Record
    weights: bytes | None = None
    staged: tuple[Staged, ...] = ()
    is_known: bool = False  # whether the record of an earlier run was verified, and there is nothing new to write down
    # Whether memory ran out, so that the process must not do more: what it keeps from job to job may be half made.
    is_exhausted: bool = False


def failed(job: Job, reason: str) -> Done:
    """Return what came of a job that could not be done."""
    return Done(job.number, job.record(Outcome.FAILED, error=reason))
