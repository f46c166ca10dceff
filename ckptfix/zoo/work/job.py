"""What is to be done with one item of a zoo, and what came of it: plain data, for a worker or another node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from ckptfix.zoo.books.record import Outcome, Record
from ckptfix.zoo.books.versions import now, versions
from ckptfix.zoo.items.listing import Item, Kind
from ckptfix.zoo.treatment import Treatment
from ckptfix.zoo.work.staging import Staged
from ckptfix.zoo.work.workplace import Workplace


class Others(str, Enum):
    """What becomes of files that are no checkpoints."""

    COPY = "copy"
    SKIP = "skip"


@dataclass(frozen=True)
class Job:
    """What is to be done with one item."""

    number: int
    """Names its temporary files; no two jobs of a run have the same."""
    item: Item
    source: str
    """The place of the source, by its name."""
    destination: str
    treatment: Treatment
    output: str
    """The wanted name below the destination."""
    settings: str
    """Digest of the treatment, for the record."""
    taken: tuple[str, ...] = ()
    """Names that the output may not have, because another source has it."""
    others: Others = Others.COPY
    dry_run: bool = False
    is_grouped: bool = False
    """Whether the driver flushes and renames the output: it is on the same machine, and does so for many at once."""
    known: Record | None = None
    """The record of an earlier run that is to be verified: if both digests still hold, nothing is done."""
    adopts: bool = False
    """Whether the output was put there by hand since a decision was asked for: it is looked at, and kept."""
    decision: Mapping[str, Any] | None = None
    """The flags that were given for this item alone."""
    again: tuple[str, ...] = ()
    """The command of this migration, word by word, for the one that carries a decision out."""
    attempt: int = 1

    @property
    def runs_model(self) -> bool:
        """Whether the user's code is run: with torch, and as much memory as the model needs."""
        return self.treatment.model is not None and self.item.kind is not Kind.OTHER

    @property
    def fetches(self) -> bool:
        """Whether bytes come from, or go to, another machine."""
        return "://" in self.source or "://" in self.destination

    @property
    def written_name(self) -> str:
        """The name of the output where the checkpoint is written anew: a folder becomes one file."""
        if self.item.kind is Kind.FOLDER:
            return self.treatment.output_name(self.item.name, is_folder=True)
        return self.output

    def shown(self, text: str, workplace: Workplace) -> str:
        """A message with the names of the zoo in place of paths that only this run knows."""
        return workplace.hidden(text).replace(f"{Path(self.source)}/", "")

    def record(self, outcome: Outcome, **more: Any) -> Record:
        """A record of this job's item."""
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


@dataclass(frozen=True)
class Done:
    """What came of a job. ``staged`` are the files that the driver still has to put in place.

    ``weights`` is the line of ``weights.jsonl``, as ``journal.line_of`` gives it: the driver only writes it."""

    number: int
    record: Record
    weights: bytes | None = None
    staged: tuple[Staged, ...] = ()
    is_known: bool = False
    """Whether the record of an earlier run was verified, and there is nothing new to write down."""
    is_exhausted: bool = False
    """Whether memory ran out, so that the process is to do nothing more: its heap may be in pieces, and what it keeps
    from job to job half made."""


def failed(job: Job, reason: str) -> Done:
    """What came of a job that could not be done."""
    return Done(job.number, job.record(Outcome.FAILED, error=reason))
