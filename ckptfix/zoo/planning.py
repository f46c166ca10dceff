"""The jobs of a migration: what is to be done with each item, under which name, and what is done already."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from sys import intern

from ckptfix.errors import UsageError
from ckptfix.zoo.books.journal import Journal
from ckptfix.zoo.books.manifest import OWN_NAMES, Known, Standing, free_name, standing
from ckptfix.zoo.books.record import Record
from ckptfix.zoo.books.versions import version
from ckptfix.zoo.items.listing import Item, Kind
from ckptfix.zoo.table import Table, with_decision
from ckptfix.zoo.treatment import Treatment
from ckptfix.zoo.work.job import Job, Others

_NOTHING = object()


@dataclass
class Plan:
    """What a migration does with the items of a zoo."""

    items: Sequence[Item]
    """The largest first."""
    table: Table
    source: str
    destination: str
    decided: Table | None = None
    """The table with the flags that were given for these items alone: they are a decision, and no other settings."""
    again: tuple[str, ...] = ()
    others: Others = Others.COPY
    dry_run: bool = False
    is_grouped: bool = False
    known: Mapping[str, Known] = field(default_factory=dict)
    resumes: bool = True
    verifies: bool = False
    _claimed: set[str] = field(default_factory=set)
    _contested: set[str] = field(default_factory=set)
    _digests: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._claimed.update(OWN_NAMES)
        own = {item.name for item in self.items}
        for source, before in self.known.items():
            if source not in own:  # a run for some of the files must not write over what the others came to
                self._claimed.update(before.parts or ((before.output,) if before.output is not None else ()))
        for item in self.items:
            if item.kind is Kind.OTHER and self.others is Others.SKIP:
                continue
            for name in self._names(item):
                (self._contested if name in self._claimed else self._claimed).add(name)

    def todo(
        self, journal: Journal | None, size_of: Callable[[str], int | None], on_standing: Callable[[Item, Known], None]
    ) -> Iterator[Job]:
        """The jobs that are left. ``journal`` is the manifest, for those that are verified; ``on_standing`` hears of
        the items that an earlier run has done, before there is any job: how much is left is then known from the start.
        """
        verified = journal if self.verifies else None
        found = bytearray(len(self.items))
        for number, item in enumerate(self.items):
            if (before := self._before(item)) is not None:
                found[number] = standing(before, self._job(number, item), size_of)
                if found[number] == Standing.DONE and verified is None:
                    on_standing(item, before)
        for number, item in enumerate(self.items):
            if found[number] == Standing.NEW:
                yield self._job(number, item)
            elif found[number] == Standing.DECIDED:
                yield replace(self._job(number, item), adopts=True)
            elif verified is not None:
                yield replace(self._job(number, item), known=Record.from_json(verified.entry(item.name)))

    def _before(self, item: Item) -> Known | None:
        """What an earlier run knows of an item."""
        return self.known.get(item.name) if self.resumes else None

    def left_over(self, record: Record) -> list[str]:
        """The outputs of an earlier run that a new record of their source makes stale: it has another name now, or
        none."""
        before = self.known.get(record.source)
        if before is None or before.output_size is None:
            return []
        new = {*record.output_parts, record.output}
        old = before.parts or (before.output,)
        return [name for name in old if name is not None and name not in new and name not in self._claimed]

    def _job(self, number: int, item: Item) -> Job:
        common = self.table.treatment_of(item.name)
        treatment = self._treatment_of(item)
        changed = {
            name: value for name, value in treatment.choices.items() if common.choices.get(name, _NOTHING) != value
        }
        return Job(
            number,
            item,
            self.source,
            self.destination,
            treatment,
            self._output(item, treatment),
            self._digest(common, item),
            taken=tuple(self._taken(item, treatment)),
            others=self.others,
            dry_run=self.dry_run,
            is_grouped=self.is_grouped,
            decision=changed or None,
            again=self.again or ("ckptfix", "migrate", self.source, self.destination),
        )

    def _treatment_of(self, item: Item) -> Treatment:
        """What was decided for an item, now or in an earlier run, as long as it is the same file; else the table's."""
        if self.decided is not None:
            return self.decided.treatment_of(item.name)
        common = self.table.treatment_of(item.name)
        before = self._before(item)
        if before is None or not before.decision or (before.size, before.stamp) != (item.size, item.stamp):
            return common
        try:
            return with_decision(common, json.loads(before.decision))
        except UsageError:  # it named a file that is gone since: the item needs a decision again, and says so
            return common

    def _names(self, item: Item) -> Iterable[str]:
        """The names in the destination that an item certainly claims."""
        if item.kind is Kind.FOLDER:
            return [part.name for part in item.parts]
        return [self._output(item, self._treatment_of(item))]

    def _taken(self, item: Item, treatment: Treatment) -> Iterator[str]:
        """Of the names that the output may get, those that it may not have."""
        for name in self._names(item):
            if name in self._contested:
                yield name
        if item.kind is Kind.FOLDER:
            name = treatment.output_name(item.name, is_folder=True)
            if name in self._claimed and name not in {part.name for part in item.parts}:
                yield name

    def _output(self, item: Item, treatment: Treatment) -> str:
        if item.kind is not Kind.FILE:
            return free_name(item.name)
        name = treatment.output_name(item.name)
        return item.name if name == item.name else name  # one text for both: there may be a million

    def _digest(self, treatment: Treatment, item: Item) -> str:
        """What the result of an item depends on besides its bytes."""
        key = id(treatment)
        if key not in self._digests:
            self._digests[key] = treatment.digest(version())
        return f"{self.others.value}" if item.kind is Kind.OTHER else self._digests[key]


def largest_first(items: Iterable[Item]) -> list[Item]:
    """The order in which they are done: what takes longest begins first, so that nothing is waited for at the end."""
    items = list(items)
    for item in items:
        intern(item.name), intern(item.stamp)  # the manifest has the same texts: one of each is kept
    return sorted(items, key=lambda item: (-item.size, item.name))
