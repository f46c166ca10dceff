"""The last step of a repair: write a temporary file, compare it with the plan, run the forward test, and only then
rename it, together with the files of the optimizer and scheduler that a trainer saved next to the checkpoint."""

from __future__ import annotations

import filecmp
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.core.checkpoint import IN_MEMORY, Checkpoint, path_name
from ckptfix.core.edits import Regroup
from ckptfix.core.finding import Blocks, Finding, Level, Subject, counted
from ckptfix.core.objects import holds_tensors
from ckptfix.core.report import Report
from ckptfix.core.settings import PTH, SAFETENSORS, UNIVERSAL, Settings
from ckptfix.core.smoke_result import SmokeResult
from ckptfix.core.spec import Regions
from ckptfix.core.wording import first_names
from ckptfix.engine.destination import Destination
from ckptfix.engine.verification import verify, verify_tree
from ckptfix.errors import CkptfixError, Opt, WriteError
from ckptfix.reading.opening import MODELS, OF_TRAINERS
from ckptfix.writing.atomic import (
    deliver_file,
    deliver_folder,
    flush_file,
    has_backup,
    refuse_output,
    temporary_beside,
    unwritten,
)
from ckptfix.writing.output import deliver_shards, flushing, temporary_shards, without_state_dict, write_to, writer_for
from ckptfix.writing.plain import plain_root
from ckptfix.writing.safetensors import lost_extras, tied_keys, untied
from ckptfix.writing.universal import temporary_universal, universal_form

ForwardTest = Callable[[Path, Checkpoint], tuple[SmokeResult | None, list[Finding]]]
"""Runs a model on a file with this checkpoint and returns the result and findings; a result of None: not tested."""

LEAST_COVERAGE = 0.5  # minimum share of the parameters that come from the file, unless ``allow_untrained`` is set

SHARDS = "shards"  # the form of an output of several files and an index


def refusal(report: Report, settings: Settings) -> str:
    """Return why no file may be written; empty if one may."""
    blocking = [finding for finding in report.remaining if Blocks.WRITING in finding.blocks]
    if blocking:
        return f"nothing is written because of {blocking[0].code} {blocking[0].name}"
    if report.obstacles:
        return f"nothing is written: a strict load would still fail on {counted(len(report.obstacles), 'key')}"
    coverage = report.coverage if not settings.allow_untrained else None
    if coverage is not None and coverage.parameters - coverage.untrained < LEAST_COVERAGE * coverage.parameters:
        return "nothing is written: less than half of the model's parameters come from the file"
    return ""


def with_blocking_warnings(report: Report) -> Report:
    """Return the report for a result that is to be written: findings that block writing become warnings at least."""
    findings = (
        replace(each, level=max(each.level, Level.WARNING)) if Blocks.WRITING in each.blocks else each
        for each in report.findings
    )
    return replace(report, findings=tuple(findings))


def deliver(
    result: Checkpoint,
    report: Report,
    destination: Destination | None,
    settings: Settings,
    forward_test: ForwardTest | None,
    drafts: Drafts,
) -> Report:
    """Write, verify and test the result, and put it in place unless something is wrong; return the report with the
    outcome.

    If nothing has to be written, the forward test runs on the source.
    """
    test = forward_test or (lambda file, result: (None, []))
    if destination is not None and destination.backup_of is not None:
        has_backup(destination.backup_of)  # raises if it would replace another file
    if reason := refusal(report, settings):
        return replace(report, remarks=(*report.remarks, reason), is_refused=True)
    if destination is None:
        if result.format == IN_MEMORY or report.edits:
            return report
        return _tested(report, *test(Path(result.path), result))
    draft = drafts.of(result)
    report = replace(report, remarks=(*report.remarks, *draft.remarks))
    report = _tested(report, *test(draft.path, draft.result))
    if report.failed_forward:
        return report
    destination.refuse_replaced(settings.force)
    with _trainer_files(draft.result, report, destination, settings) as files:
        # Before the weights: if the run is killed in between, the next run finds an optimizer that fits the repaired
        # weights, and can continue.
        for file, goal in files.items():
            deliver_file(file, goal, goal if destination.backup_of is not None else None, destination.flush)
        draft.put_in_place()
    remarks = (*report.remarks, *(f"also written: {goal}" for goal in files.values()))
    tied = tuple(tied_keys(draft.result)) if draft.form == SAFETENSORS else ()
    return replace(report, output=str(draft.output), remarks=remarks, written_as=draft.form, tied=tied)


def _tested(report: Report, smoke: SmokeResult | None, findings: Iterable[Finding]) -> Report:
    return replace(report, smoke=smoke, findings=(*report.findings, *findings))


class Draft(Struct, frozen=True):
    """A result that was written to temporary files and verified. ``result`` is the checkpoint in this ``form``,
    ``path`` the temporary file or folder, ``output`` its final path."""

    form: str
    path: Path
    output: Path
    result: Checkpoint
    put_in_place: Callable[[], None]
    remarks: tuple[str, ...] = ()


class Drafts:
    """A context manager that keeps the latest draft for a destination, and removes its temporary files at the end.

    Without a destination, no draft can be written."""

    def __init__(self, destination: Destination | None, settings: Settings) -> None:
        self._destination, self._settings = destination, settings
        self._files = ExitStack()
        self._latest: tuple[Checkpoint, Draft] | None = None

    def __enter__(self) -> Drafts:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def of(self, result: Checkpoint) -> Draft:
        """Return the draft of a result, writing it unless it is the latest one."""
        if self._latest is None or self._latest[0] is not result:
            assert self._destination is not None, "there is something to write"
            self._latest = None
            self._files.close()
            self._latest = (result, self._files.enter_context(_drafted(result, self._destination, self._settings)))
        return self._latest[1]

    def attempt(self, result: Checkpoint) -> None:
        """Write a draft of what may become the result, if there is a destination. Errors are ignored here; they are
        raised again on delivery."""
        if self._destination is not None:
            with suppress(CkptfixError):
                self.of(result)


@contextmanager
def _drafted(result: Checkpoint, destination: Destination, settings: Settings) -> Iterator[Draft]:
    form, output = destination.form, destination.output
    if form == UNIVERSAL:
        result = universal_form(result)
        with temporary_universal(output, result) as (folder, files):
            with flushing(files, output, destination.flush):
                verify(folder, result, output, files)
            yield Draft(form, folder, output, result, lambda: deliver_folder(folder, output))
        return
    remarks: tuple[str, ...] = ()
    if form == SAFETENSORS:
        _refuse_loss(result)
        result = untied(result) if settings.untie else result
        remarks = tuple(_lost_ties(result))
    write = writer_for(form, settings.for_torch if form == PTH else None)
    if settings.shard_bytes is not None:
        if result.container:
            place = path_name(result.container)
            remarks += (f"the shards hold only the state_dict of {place}, not the rest of the container",)
        flat = _without_container(result, form)
        with temporary_shards(output, flat, settings.shard_bytes, write, verify) as (index, names):
            yield Draft(SHARDS, index, names.index, flat, lambda: deliver_shards(index, names), remarks)
        return
    with temporary_beside(output, destination.like) as temporary:
        written = write_to(temporary, result, write, output)
        with flushing([written], output, destination.flush):
            verify(temporary, result, output, [written])

        def put_in_place() -> None:
            deliver_file(temporary, output, destination.backup_of, destination.flush)

        yield Draft(form, temporary, output, result, put_in_place, remarks)


def _without_container(result: Checkpoint, form: str) -> Checkpoint:
    """Return the checkpoint as shards hold it: the state_dict without the container."""
    flat = replace(result, container=(), root=dict(result.entries))
    if form != SAFETENSORS:
        return flat
    # Entries that the format cannot hold (FIL104) are not in the index either.
    lost = set(lost_extras(flat)) - set(flat.specs)
    kept = OrderedDict((key, entry) for key, entry in flat.entries.items() if key not in lost)
    return replace(flat, entries=kept, root=dict(kept))


def _lost_ties(result: Checkpoint) -> Iterator[str]:
    """Yield remarks on tensors that share memory, which safetensors cannot express."""
    if tied := tied_keys(result):
        yield (
            f"safetensors stores a tied tensor once, so a plain load_file lacks {counted(len(tied), 'key')} "
            f"({first_names(list(tied))}); ckptfix reads all of them, and --untie writes each"
        )
    regions = Regions(result.specs.values())
    views: dict[int, dict[tuple[object, ...], str]] = {}
    for key, spec in result.specs.items():
        if spec.storage is not None and spec.numel:
            views.setdefault(id(regions.of(spec)[0]), {}).setdefault(spec.view, key)
    if parted := [key for found in views.values() if len(found) > 1 for key in found.values()]:
        yield (
            f"{counted(len(parted), 'tensor')} that share memory ({first_names(parted)}) become separate tensors in "
            "safetensors; a .pth keeps them shared"
        )


def _refuse_loss(result: Checkpoint) -> None:
    """Raise ``WriteError`` if safetensors cannot hold some weights. FIL104 reports it earlier, unless it is ignored."""
    for place in lost_extras(result):
        if holds_tensors(result.entries.get(place)):
            raise WriteError(
                f"{result.path}: safetensors cannot hold {place}, an entry that contains tensors; use ",
                Opt("format", "pth"),
            )


@contextmanager
def _trainer_files(
    result: Checkpoint, report: Report, destination: Destination, settings: Settings
) -> Iterator[dict[Path, Path]]:
    """Write the trainer's files that have to change with the checkpoint, and yield the target path of each temporary
    file.

    In another folder they keep their names; next to the source they are named like the checkpoint. A trainer resumes
    from all files of a folder, so a folder with the model gets the unchanged files too, unless an optimizer does not
    fit."""
    if destination.form == UNIVERSAL:  # contains the optimizer
        yield {}
        return
    regroups = [edit for edit in report.edits if isinstance(edit, Regroup)]
    changed = {name for name in result.beside for edit in regroups if edit.where.startswith(name)}
    source = Path(result.path)
    folder = source if source.is_dir() else source.parent
    is_elsewhere = folder.resolve() != destination.output.parent.resolve()
    if changed and (is_elsewhere or any(edit.like != tuple(range(len(edit.like))) for edit in regroups)):
        changed |= {name for name in result.beside if name.startswith("scheduler")}  # trainers load both or neither
    is_in_place = destination.like == destination.output
    with ExitStack() as stack:
        files: dict[Path, Path] = {}
        is_resumed = is_elsewhere and destination.output.name in MODELS and bool(result.beside)
        is_unfit = any(each.subject is Subject.OPTIMIZER and each.level is Level.ERROR for each in report.left)
        if is_resumed and not settings.drop_optimizer and not is_unfit:
            for old in sorted(folder.iterdir()):
                if old.name in changed or not OF_TRAINERS.fullmatch(old.name) or not old.is_file():
                    continue
                goal = destination.output.with_name(old.name)
                if goal.is_file() and filecmp.cmp(old, goal, shallow=False):
                    continue
                refuse_output(goal, settings.force)
                temporary = stack.enter_context(temporary_beside(goal, old))
                _copy(old, temporary, goal)
                files[temporary] = goal
        for name in sorted(changed):
            root = result.beside[name]
            fixed = f"{Path(name).stem}.fixed{Path(name).suffix}"
            goal = destination.output.with_name(name if is_elsewhere or is_in_place else fixed)
            if not is_in_place:
                refuse_output(goal, settings.force)
            tree = replace(without_state_dict(result, root), path=str(folder / name))
            temporary = stack.enter_context(temporary_beside(goal, folder / name))
            written = write_to(temporary, tree, writer_for(PTH, None), goal)
            with flushing([written], goal, destination.flush):
                verify_tree(temporary, plain_root(tree)[0], goal)
            files[temporary] = goal
        yield files


def _copy(old: Path, temporary: Path, goal: Path) -> None:
    try:
        shutil.copyfile(old, temporary)
        flush_file(temporary)
    except OSError as error:
        raise unwritten(goal, error) from error
    if not filecmp.cmp(old, temporary, shallow=False):
        raise WriteError(f"{goal}: differs from {old}, although it is a copy; the disk or memory is faulty")
