"""The last step of a repair: write a temporary file, compare it with the plan, run the forward test, and only then
rename it."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.core.checkpoint import IN_MEMORY, Checkpoint, path_name
from ckptfix.core.finding import Blocks, Finding, Level, counted
from ckptfix.core.objects import holds_tensors
from ckptfix.core.report import Report
from ckptfix.core.settings import PTH, SAFETENSORS, UNIVERSAL, Settings
from ckptfix.core.smoke_result import SmokeResult
from ckptfix.core.spec import Regions
from ckptfix.core.wording import first_names
from ckptfix.engine.destination import Destination
from ckptfix.engine.trainer_files import trainer_files
from ckptfix.engine.verification import verify
from ckptfix.errors import CkptfixError, Opt, WriteError
from ckptfix.writing.atomic import deliver_file, deliver_folder, has_backup, temporary_beside
from ckptfix.writing.output import deliver_shards, flushing, temporary_shards, write_to, writer_for
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
    with trainer_files(draft.result, report, destination, settings) as files:
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
        self._files = contextlib.ExitStack()
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
            with contextlib.suppress(CkptfixError):
                self.of(result)


@contextlib.contextmanager
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
