"""The story of a migration, from an old zoo to one that loads. Start reading here.

    list      items       the files and folders of the zoo that are checkpoints, and the other files
    plan      planning    what zoo.toml says about each, its output's name, and what an earlier run has done
    run       engine      the jobs, the largest first, each in a process that may crash
    (a job)   performing  repair or copy into a scratch folder, and compute digests
    commit    committing  flush the outputs, rename them, and only then record them in the manifest
    close     workspace   sort the manifest, write renames.json, remove temporary files

The driver reads no checkpoint. If it is killed, the same command continues where the manifest ends, with the same
result."""

import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from ckptfix.bytes.threads import processors
from ckptfix.errors import UsageError
from ckptfix.zoo.committing import Committer
from ckptfix.zoo.engine import Engine, LocalEngine, check_models
from ckptfix.zoo.items import ABSENT, Item, list_zoo
from ckptfix.zoo.job import Done, Others
from ckptfix.zoo.manifest import Outcome, Record, read_manifest
from ckptfix.zoo.performing import perform
from ckptfix.zoo.places import Place, open_place, walk_if_there
from ckptfix.zoo.planning import MigrationPlan
from ckptfix.zoo.resources import Budget, memory_at_hand, room_at
from ckptfix.zoo.workspace import Workspace, opened
from ckptfix.zoo.zoo_toml import Table

BAD = (Outcome.UNREADABLE, Outcome.FAILED)

# No estimate is shown in the first seconds; one is shown after so many seconds, or that share of the work.
_QUIET, _LONG, _SHARE = 5.0, 60.0, 0.03
_EACH = 1_000_000  # bytes that take as long as the fixed work for each file


class Summary(Struct):
    """The counts of a migration, while it runs and afterwards. ``bytes`` are those of the sources."""

    files: int = 0
    bytes: int = 0
    done_files: int = 0
    done_bytes: int = 0
    earlier_files: int = 0  # done by an earlier run
    earlier_bytes: int = 0
    running: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    sizes: Counter[Outcome] = field(default_factory=Counter)
    written: int = 0  # bytes of the outputs
    began: float = field(default_factory=time.monotonic)
    seconds: float = 0.0

    def count(self, outcome: Outcome, size: int, output_size: int | None, *, earlier: bool = False) -> None:
        """Count a finished file. ``size`` and ``output_size`` are in bytes."""
        self.done_files += 1
        self.done_bytes += size
        self.outcomes[outcome] += 1
        self.sizes[outcome] += size
        self.written += output_size or 0
        if earlier:
            self.earlier_files += 1
            self.earlier_bytes += size

    def pace(self) -> tuple[float, float] | None:
        """Return the bytes of sources per second, and the seconds left; None while too little is done to tell."""
        seconds = time.monotonic() - self.began
        nbytes, files = self.done_bytes - self.earlier_bytes, self.done_files - self.earlier_files
        done = nbytes + _EACH * files
        left = self.bytes - self.done_bytes + _EACH * (self.files - self.done_files)
        if not done or seconds < _QUIET or (done < _SHARE * (done + left) and seconds < _LONG):
            return None
        return nbytes / seconds, seconds * left / done

    @property
    def exit_code(self) -> int:
        """0 if all are fine or repaired, 1 if some need a decision, 2 if some are unreadable or failed."""
        if any(self.outcomes[outcome] for outcome in BAD):
            return 2
        return int(self.outcomes[Outcome.DECISION] > 0)

    def to_json(self) -> dict[str, object]:
        """Return the counts as JSON data."""
        return {
            "files": self.files,
            "bytes": self.bytes,
            "bytes_written": self.written,
            "outcomes": {outcome.value: self.outcomes[outcome] for outcome in Outcome},
            "of_an_earlier_run": self.earlier_files,
            "seconds": round(self.seconds, 3),
            "exit_code": self.exit_code,
        }


MakeEngine = Callable[[Path], Engine]  # returns an engine that has its temporary files in this folder


class Migration(Struct, frozen=True):
    """The result of a migration: the counts, and the manifest and weights of the whole zoo, line by line."""

    source: str
    destination: str
    summary: Summary
    workspace: Workspace
    chosen: Container[str]  # the sources that this run was for
    remarks: tuple[str, ...] = ()
    again: tuple[str, ...] = ()  # the command of this migration, as words

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of the manifest, including those of earlier runs, sorted by source."""
        return self.workspace.manifest.lines()

    def chosen_records(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of the sources that this run was for."""
        return (line for line in self.records() if line["source"] in self.chosen)

    def weights(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of ``weights.jsonl``, sorted by source."""
        return self.workspace.weights.lines()


@contextmanager
def migrate(
    source: str,
    destination: str,
    table: Table | None = None,
    *,
    patterns: Sequence[str] = (),
    listed: Sequence[str] | None = None,
    decided: Table | None = None,
    again: Sequence[str] = (),
    others: Others = Others.COPY,
    dry_run: bool = False,
    resume: bool = True,
    verify: bool = False,
    jobs: int | None = None,
    memory: int | None = None,
    temporary: int | None = None,
    engine: MakeEngine | None = None,
    watch: Callable[[Summary], None] = lambda summary: None,
) -> Iterator[Migration]:
    """Migrate a zoo: repair every checkpoint of ``source`` into ``destination``, or copy it if it is fine.

    ``source`` and ``destination`` are folders or fsspec URLs. ``patterns`` and ``listed`` choose files, and
    ``decided`` is the table with the decisions about these. ``again`` is the command as the user typed it. ``jobs`` is
    the number that run at the same time, ``memory`` and ``temporary`` are the bytes that all of them may take together.
    ``watch`` is called a few times a second with the counts. The body of the ``with`` gets the finished migration; the
    manifest of a dry run is removed after it."""
    table = table or Table()
    old, new = open_place(source), open_place(destination)
    _refuse_overlap(old, new)
    items = [item for item in list_zoo(old, patterns, listed) if not table.excludes(item.name)]
    _check_chosen(source, items, patterns, listed, decided)
    if engine is None:  # the nodes of a cluster may have packages that this machine lacks
        check_models(table.models() | (decided.models() if decided is not None else {}))
    summary = Summary(files=len(items), bytes=sum(item.size for item in items))
    with opened(new, dry_run) as workspace:
        budget = Budget(memory or memory_at_hand(), temporary or room_at(workspace.scratch))
        runs = (
            engine(workspace.scratch)
            if engine
            else LocalEngine(workspace.scratch, count=jobs or processors(), budget=budget)
        )
        known = {record.source: record for record in read_manifest(workspace.manifest)}
        workspace.weights.index()
        outputs = {name: record.output for name, record in known.items()}
        tags = {name for name, record in known.items() if record.is_tag}
        plan = MigrationPlan(
            items,
            known,
            table,
            source,
            destination,
            outputs,
            tags,
            decided,
            tuple(again),
            others,
            dry_run,
            resumes=resume,
            is_grouped=runs.is_grouped and new.root is not None,
            verifies=verify,
        )
        _run(runs, plan, workspace, summary, outputs, tags, watch)
        if not dry_run:
            workspace.close_journals(outputs)
        summary.seconds = time.monotonic() - summary.began
        names = {item.name for item in items}
        is_part = bool(patterns) or listed is not None
        idle = tuple(table.idle(names)) if table.treatments and not is_part else ()
        yield Migration(source, destination, summary, workspace, names, idle, plan.command)


def _run(
    engine: Engine,
    plan: MigrationPlan,
    workspace: Workspace,
    summary: Summary,
    outputs: dict[str, str | None],
    tags: set[str],
    watch: Callable[[Summary], None],
) -> None:
    def done_before(item: Item, before: Record) -> None:
        summary.count(before.outcome, item.size, before.output_size, earlier=True)

    def written(done: Done) -> None:
        source = done.record.source
        outputs[source] = done.record.output
        (tags.add if plan.makes_tag(done.record) else tags.discard)(source)
        summary.count(done.record.outcome, done.record.size, done.record.output_size, earlier=done.is_known)
        workspace.publish()

    def waiting(running: int) -> None:
        committer.commit()
        summary.running = running
        watch(summary)

    watch(summary)  # files may be in place before the first counts
    size_of = _sizes_at(workspace.destination)
    left_over = plan.left_over if not plan.dry_run else lambda record: ()
    journals = workspace.manifest, workspace.weights
    with Committer(workspace.destination, workspace.scratch, *journals, written, left_over) as committer:
        engine.run_jobs(plan.todo(workspace.manifest, size_of, done_before), committer.add, waiting)
        committer.commit()
        for job in plan.todo(workspace.manifest, size_of, done_before, is_second=True):
            committer.add(perform(job, workspace.scratch))
    waiting(0)


def _sizes_at(destination: Place) -> Callable[[str], int | None]:
    """Return a function from the name of a file in the destination to its size, None if it does not exist.

    A remote store is listed once, with one request per thousand files instead of one for each."""
    if destination.root is not None:
        return lambda name: None if (entry := destination.entry(name)) is None else entry.size
    return {entry.name: entry.size for entry in walk_if_there(destination)}.get


def _check_chosen(
    source: str, items: Sequence[Item], patterns: Sequence[str], listed: Sequence[str] | None, decided: Table | None
) -> None:
    if patterns and not items:
        raise UsageError(f"{source}: no file in it matches {' or '.join(patterns)}; correct the pattern")
    absent = sorted(item.name for item in items if item.fault == ABSENT) if listed else []
    if absent and (decided is not None or len(absent) == len(items)):
        raise UsageError(f"{source}: has no {absent[0]}; name it as the manifest does")


def _refuse_overlap(source: Place, destination: Place) -> None:
    """Raise ``UsageError`` if an output could overwrite a source, or be taken for one next time."""
    if (source.root is None) != (destination.root is None):
        return
    old, new = (
        place.name.rstrip("/") if place.root is None else str(place.root.resolve()) for place in (source, destination)
    )
    if old == new:
        raise UsageError(f"{destination.name}: is the source itself, which is never modified; name another folder")
    if new.startswith(f"{old}/"):
        raise UsageError(f"{destination.name}: is inside the source; name a folder outside {source.name}")
    if old.startswith(f"{new}/"):
        raise UsageError(f"{destination.name}: contains the source; name a folder next to {source.name}")
