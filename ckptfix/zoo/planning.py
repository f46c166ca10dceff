"""The jobs of a migration: what is to be done with each item, under which name, and what is done already."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from ckptfix.errors import UsageError
from ckptfix.zoo.books.journal import Journal
from ckptfix.zoo.books.manifest import OWN_NAMES, Known, Standing, free_name, standing
from ckptfix.zoo.books.record import Record
from ckptfix.zoo.books.versions import version
from ckptfix.zoo.catalogue import Catalogue
from ckptfix.zoo.items.claims import Claims
from ckptfix.zoo.items.listing import Item, Kind
from ckptfix.zoo.table import Table, with_decision
from ckptfix.zoo.treatment import Treatment
from ckptfix.zoo.work.job import Job, Others

_NOTHING = object()


@dataclass
class Plan:
    """What a migration does with the items of a zoo."""

    items: Catalogue
    table: Table
    source: str
    destination: str
    decided: Table | None = None
    """The table with the flags that were given for these items alone: they are a decision, and no other settings."""
    again: tuple[str, ...] = ()
    others: Others = Others.COPY
    dry_run: bool = False
    is_grouped: bool = False
    resumes: bool = True
    verifies: bool = False
    _digests: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._claims = Claims(self._reserved(), self._claimed())

    def __enter__(self) -> Plan:
        return self

    def __exit__(self, *_: object) -> None:
        self._claims.close()

    def _reserved(self) -> Iterator[str]:
        """The names that no output of this run may have."""
        yield from OWN_NAMES
        for before in self.items.known_beside():
            # A run for some of the files must not write over what the others came to.
            yield from before.parts or ((before.output,) if before.output is not None else ())

    def _claimed(self) -> Iterator[str]:
        """The names that the outputs of this run want."""
        for _, item, before in self.items.all():
            if item.kind is not Kind.OTHER or self.others is not Others.SKIP:
                yield from _names(item, self._output(item, self._treatment_of(item, before)))

    def todo(
        self, journal: Journal | None, size_of: Callable[[str], int | None], on_standing: Callable[[Item, Known], None]
    ) -> Iterator[Job]:
        """The jobs that are left. ``journal`` is the manifest, for those that are verified; ``on_standing`` hears of
        the items that an earlier run has done, before there is any job: how much is left is then known from the start.
        """
        verified = journal if self.verifies else None
        found = bytearray(len(self.items) + 1)
        for number, item, known in self.items.known_again() if self.resumes else ():
            found[number] = standing(known, self._job(number, item, known), size_of)
            if found[number] == Standing.DONE and verified is None:
                on_standing(item, known)
        for number, item, before in self.items.all(lambda number: found[number] != Standing.DONE or self.verifies):
            job = self._job(number, item, before)
            if found[number] == Standing.DECIDED:
                job = replace(job, adopts=True)
            elif found[number] == Standing.DONE and verified is not None:
                job = replace(job, known=Record.from_json(verified.entry(item.name)))
            yield job

    def left_over(self, record: Record) -> list[str]:
        """The outputs of an earlier run that a new record of their source makes stale: it has another name now, or
        none."""
        before = self.items.known(record.source)
        if before is None or before.output_size is None:
            return []
        new = {*record.output_parts, record.output}
        old = before.parts or (before.output,)
        return [
            name
            for name in old
            if name is not None
            and name not in new
            and name not in self._claims
            and not self.items.is_shared(name, record.source)
        ]

    def _job(self, number: int, item: Item, before: Known | None) -> Job:
        common = self.table.treatment_of(item.name)
        treatment = self._treatment_of(item, before)
        changed = {
            name: value for name, value in treatment.choices.items() if common.choices.get(name, _NOTHING) != value
        }
        output = self._output(item, treatment)
        return Job(
            number,
            item,
            self.source,
            self.destination,
            treatment,
            output,
            self._digest(common, item),
            taken=tuple(self._taken(item, treatment, output)),
            others=self.others,
            dry_run=self.dry_run,
            is_grouped=self.is_grouped,
            decision=changed or None,
            again=self.again or ("ckptfix", "migrate", self.source, self.destination),
        )

    def _treatment_of(self, item: Item, before: Known | None) -> Treatment:
        """What was decided for an item, now or in an earlier run, as long as it is the same file; else the table's."""
        if self.decided is not None:
            return self.decided.treatment_of(item.name)
        common = self.table.treatment_of(item.name)
        if not self.resumes or before is None or not before.decision:
            return common
        if (before.size, before.stamp) != (item.size, item.stamp):
            return common
        try:
            return with_decision(common, json.loads(before.decision))
        except UsageError:  # it named a file that is gone since: the item needs a decision again, and says so
            return common

    def _taken(self, item: Item, treatment: Treatment, output: str) -> Iterator[str]:
        """Of the names that the output may get, those that it may not have."""
        for name in _names(item, output):
            if self._claims.is_contested(name):
                yield name
        if item.kind is Kind.FOLDER:
            name = treatment.output_name(item.name, is_folder=True)
            if name in self._claims and name not in {part.name for part in item.parts}:
                yield name

    def _output(self, item: Item, treatment: Treatment) -> str:
        if item.kind is not Kind.FILE:
            return free_name(item.name)
        return free_name(treatment.output_name(item.name))

    def _digest(self, treatment: Treatment, item: Item) -> str:
        """What the result of an item depends on besides its bytes."""
        key = id(treatment)
        if key not in self._digests:
            self._digests[key] = treatment.digest(version())
        return f"{self.others.value}" if item.kind is Kind.OTHER else self._digests[key]


def _names(item: Item, output: str) -> Iterable[str]:
    """The names in the destination that an item certainly claims."""
    return (part.name for part in item.parts) if item.kind is Kind.FOLDER else (output,)
