"""Plans the jobs of a migration: what to do with each item, its output's name, and what is done already."""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from functools import cached_property
from posixpath import basename, dirname, join
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.core.settings import UNIVERSAL
from ckptfix.errors import UsageError
from ckptfix.reading.folders.ranks.names import LATEST, LATEST_UNIVERSAL, OF_DEEPSPEED
from ckptfix.zoo.items import Item, ItemKind
from ckptfix.zoo.job import Job, Others
from ckptfix.zoo.manifest import OWN_NAMES, Journal, Outcome, Record, free_name, version
from ckptfix.zoo.zoo_toml import Table, Treatment, with_decision

_NOTHING = object()


class Status(Enum):
    """What an earlier run means for an item."""

    NEW = "to do"
    DONE = "done"
    BY_HAND = "an output was put in its place by hand"


class MigrationPlan(Struct, dict=True):
    """What a migration does with the items of a zoo. ``known`` are the records of an earlier run, by source."""

    items: list[Item]
    known: Mapping[str, Record]
    table: Table
    source: str
    destination: str
    outputs: Mapping[str, str | None] = {}  # of all sources, in earlier runs and this one so far
    tags: Container[str] = ()  # the sources whose outputs are tags of universal checkpoints
    # The table with options given only for these items, which are decisions and not changed settings.
    decided: Table | None = None
    again: tuple[str, ...] = ()
    others: Others = Others.COPY
    dry_run: bool = False
    is_grouped: bool = False
    resumes: bool = True
    verifies: bool = False

    def __post_init__(self) -> None:
        # The largest begin first, so that the run does not end with one long job.
        self.items = sorted(self.items, key=lambda item: (-item.size, item.name))

    @cached_property
    def _claims(self) -> Counter[str]:
        """The number of outputs that claim each name in the destination."""
        names = {item.name for item in self.items}
        # A run for some of the files must not write over the outputs of the others.
        beside = (
            name
            for source, record in self.known.items()
            if source not in names
            for name in record.output_parts or ((record.output,) if record.output is not None else ())
        )
        claims = Counter({*OWN_NAMES, *beside})
        for item in self.items:
            if item.kind is not ItemKind.OTHER or self.others is not Others.SKIP:
                claims.update(_names(item, self._output(item, self._treatment_of(item))))
        return claims

    @cached_property
    def _old_outputs(self) -> Counter[str | None]:
        """The number of sources with each output of an earlier run: copies named by their hash share one."""
        return Counter(record.output for record in self.known.values())

    @property
    def command(self) -> tuple[str, ...]:
        """The command of this migration, as words."""
        return self.again or ("ckptfix", "migrate", self.source, self.destination)

    def todo(
        self,
        journal: Journal | None,
        size_of: Callable[[str], int | None],
        on_done: Callable[[Item, Record], None],
        is_second: bool = False,
    ) -> Iterator[Job]:
        """Yield the jobs that are left. ``journal`` is the manifest, to verify what is done.

        ``on_done`` gets the items that an earlier run has done, all before the first job, so that progress is right
        from the start. The files that name a checkpoint come in a second call, when ``outputs`` has the checkpoints."""
        items = [each for each in enumerate(self.items) if (each[1].names is not None) is is_second]
        statuses = [Status.NEW] * len(items)
        for at, (number, item) in enumerate(items) if self.resumes else ():
            if (known := self.known.get(item.name)) is not None:
                statuses[at] = status = status_of(known, self._job(number, item), size_of)
                if status is Status.DONE and not self.verifies:
                    on_done(item, known)
        for (number, item), status in zip(items, statuses, strict=True):
            if status is Status.DONE and not (self.verifies and journal is not None):
                continue
            job = self._job(number, item)
            if status is Status.BY_HAND:
                job = replace(job, adopts=True)
            elif status is Status.DONE and journal is not None:
                job = replace(job, known=Record.from_json(journal.entry(item.name)))
            yield job

    def left_over(self, record: Record) -> list[str]:
        """Return the outputs of an earlier run that a new record, with another output or none, makes stale."""
        before = self.known.get(record.source)
        if before is None or before.output_size is None:
            return []
        new = {*record.output_parts, record.output}
        # Its own claims: of a file that names a checkpoint, which is not copied after all, or under another name, and
        # of a folder that was written in another format.
        own = {
            name
            for item in self.items
            if item.name == record.source and (item.names or (item.kind is ItemKind.FOLDER and record.output))
            for name in _names(item, item.name)
        }
        return [
            name
            for name in before.written
            if name not in new
            and self._claims[name] <= (name in own)
            and self._old_outputs[name] <= (name == before.output)
        ]

    def makes_tag(self, record: Record) -> bool:
        """Return whether an output is the tag of a universal checkpoint; in a dry run, whether it would be."""
        is_universal = self.table.treatment_of(record.source).settings.get("format") == UNIVERSAL
        is_to_be = self.dry_run and is_universal and record.format in OF_DEEPSPEED and record.output is not None
        return record.is_tag or is_to_be

    def _job(self, number: int, item: Item) -> Job:
        common, treatment = self.table.treatment_of(item.name), self._treatment_of(item)
        changed = {
            name: value for name, value in treatment.choices.items() if common.choices.get(name, _NOTHING) != value
        }
        output = self._output(item, treatment)
        settings = self.others.value if item.kind is ItemKind.OTHER else common.digest(version())
        if item.names is not None and self.outputs.get(item.names, item.names) != item.names:
            item = replace(item, fault=f"names {item.names}, which the destination does not have under this name")
            settings = Others.SKIP.value
        elif basename(item.name) == LATEST and item.names in self.tags:
            output = join(dirname(item.name), LATEST_UNIVERSAL)
            settings += f" {LATEST_UNIVERSAL}"
            if self._claims[output]:
                item = replace(item, fault=f"names {item.names}, and another source is written as {output}")
        return Job(
            number,
            item,
            self.source,
            self.destination,
            treatment,
            output,
            settings,  # what the result depends on besides the source
            taken=tuple(self._taken(item, treatment, output)),
            others=self.others,
            dry_run=self.dry_run,
            is_grouped=self.is_grouped,
            decision=changed or None,
            again=self.command,
        )

    def _treatment_of(self, item: Item) -> Treatment:
        """Return the treatment decided for an item, now or earlier for the unchanged file, otherwise the table's."""
        if self.decided is not None:
            return self.decided.treatment_of(item.name)
        common, before = self.table.treatment_of(item.name), self.known.get(item.name)
        is_same = before is not None and (before.size, before.stamp) == (item.size, item.stamp)
        if self.resumes and before is not None and is_same and before.decision:
            with suppress(UsageError):  # it names a file that is gone: a decision is needed again
                return with_decision(common, before.decision)
        return common

    def _taken(self, item: Item, treatment: Treatment, output: str) -> Iterator[str]:
        """Yield the names that the output must not have."""
        yield from (name for name in _names(item, output) if self._claims[name] > 1)
        if item.kind is ItemKind.FOLDER:
            name = treatment.output_name(item.name, is_folder=True)
            if name in self._claims and name not in {part.name for part in item.parts}:
                yield name

    def _output(self, item: Item, treatment: Treatment) -> str:
        return free_name(item.name if item.kind is not ItemKind.FILE else treatment.output_name(item.name))


def status_of(known: Record, job: Job, size_of: Callable[[str], int | None]) -> Status:
    """Return the status of an item after an earlier run. It is done if size and stamp of the source and the settings
    are unchanged, and the output exists with its size. Failed items are new again.

    A decision of an earlier run holds until there is another. A file added by hand in place of an output that could not
    be written is a decision too."""
    if (known.size, known.stamp, known.settings) != (job.item.size, job.item.stamp, job.settings):
        return Status.NEW
    if job.decision and _plain(job.decision) != _plain(known.decision or {}):
        return Status.NEW
    if known.is_to_be_tried_again:
        return Status.NEW
    sizes = [size_of(name) for name in known.written]
    is_there = None not in sizes and (not sizes or sum(size or 0 for size in sizes) == known.output_size)
    if known.outcome not in (Outcome.DECISION, Outcome.UNREADABLE) or job.item.kind is ItemKind.OTHER:
        return Status.DONE if is_there else Status.NEW
    if not sizes:
        is_free = job.written_name not in job.taken  # otherwise it is another source's output
        return Status.BY_HAND if is_free and size_of(job.written_name) is not None else Status.DONE
    if is_there:
        return Status.DONE
    return Status.BY_HAND if len(sizes) == 1 and sizes[0] is not None else Status.NEW


def _plain(decision: Mapping[str, Any]) -> dict[str, Any]:
    """Return a decision as it comes back from JSON."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in decision.items()}


def _names(item: Item, output: str) -> Iterable[str]:
    """Return the names in the destination that an item claims in any case."""
    if item.kind is ItemKind.FOLDER:
        return (part.name for part in item.parts)
    return (output, *(join(dirname(output), basename(entry.name)) for entry in item.beside))
