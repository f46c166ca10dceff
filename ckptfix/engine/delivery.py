"""The last step of a repair: a temporary file, the comparison with the plan, the forward test, and only then the
rename.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ckptfix.core.checkpoint import IN_MEMORY, Checkpoint, path_name
from ckptfix.core.finding import Finding, Level, counted
from ckptfix.core.report import Report
from ckptfix.core.settings import Settings
from ckptfix.core.smoke_result import SmokeResult
from ckptfix.engine.verification import verify
from ckptfix.errors import UsageError, WriteError
from ckptfix.reading.folders import sharded
from ckptfix.rules.not_weights_only import TAKEN_APART
from ckptfix.writing.output import (
    PTH,
    SAFETENSORS,
    Write,
    deliver_file,
    flushing,
    output_format,
    temporary_beside,
    write_to,
    writer_for,
)
from ckptfix.writing.shards import deliver_shards, temporary_shards

SUFFIXES = {".safetensors": SAFETENSORS, ".pth": PTH, ".pt": PTH, ".ckpt": PTH, ".bin": PTH, ".tar": PTH}


ForwardTest = Callable[[Path, Checkpoint], tuple[SmokeResult | None, list[Finding]]]
"""Runs a model on a file that holds this checkpoint; None for a test that was not asked for."""


@dataclass(frozen=True)
class Destination:
    """Where the result goes, and as what: ``form`` is ``pth`` or ``safetensors``.

    ``backup_of`` is the source whose old content is kept, ``source`` the file whose permissions it gets. With
    ``only_changes`` nothing is written where there is nothing to repair. Without ``flush`` the file is not on the disk
    yet when it is delivered: the caller flushes many in one go. ``state`` is that of the file to be replaced before it
    was read (``state_of``)."""

    output: Path
    form: str
    source: Path | None = None
    backup_of: Path | None = None
    only_changes: bool = False
    flush: bool = True
    state: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        output: str | os.PathLike[str] | None,
        beside: bool,
        in_place: bool,
        backup: bool,
        asked: str | None,
    ) -> Destination | None:
        """The destination that was asked for; None where nothing is to be written.

        ``asked`` is the format; without one it is that of the output's suffix, else that of the source.
        """
        if output is not None and (in_place or beside):
            raise UsageError("an output and --in-place exclude each other: name another file, or replace the source")
        if backup and not in_place:
            raise UsageError("--backup goes with --in-place: without it the source stays as it is anyway")
        source = Path(checkpoint.path) if checkpoint.format != IN_MEMORY else None
        if output is not None:
            goal = Path(output)
            if goal.is_dir():
                raise UsageError(f"{goal}: is a folder; name the file to write")
            if source is not None and goal.exists() and goal.samefile(source):
                raise UsageError(f"{goal}: is the source itself; use --in-place to replace it")
            return cls(goal, output_format(checkpoint, asked or SUFFIXES.get(goal.suffix.lower())), source)
        if not (beside or in_place):
            return None
        if source is None:
            raise UsageError("a state_dict in memory has no place of its own; name an output")
        form = output_format(checkpoint, asked)
        is_conversion = form != output_format(checkpoint, None)
        in_pieces = source.is_dir() or checkpoint.format.startswith(sharded.NAME)
        if in_place:
            if checkpoint.member or in_pieces:
                whole = "a folder" if source.is_dir() else "in several files"
                inside = f"{checkpoint.member} in it" if checkpoint.member else whole
                raise UsageError(f"{source}: --in-place replaces a file, but the checkpoint is {inside}; use -o OUT")
            # A link keeps pointing at its file: it is the file that is replaced.
            real = source.resolve()
            if is_conversion:
                raise UsageError(
                    f"{real}: --in-place keeps the name, and --format {form} needs another; name an output"
                )
            return cls(real, form, real, real if backup else None, only_changes=True)
        like = None if in_pieces else source
        # What was in an archive lies beside it under its own name; a folder's checkpoint becomes one file.
        named = Path(checkpoint.member or source.name.removesuffix(".index.json"))
        # The dot of a folder named v1.5 begins no suffix; that of model.pth, unpacked, does.
        stem = named.name if source.is_dir() and named.suffix.lower() not in SUFFIXES else named.stem
        suffix = named.suffix if like is not None and not is_conversion and named.suffix else f".{form}"
        return cls(source.with_name(f"{stem}.fixed{suffix}"), form, like, only_changes=not is_conversion)


@dataclass(frozen=True)
class Delivery:
    """What came of the delivery: the file, where there is one, and what the forward test said."""

    output: str | None = None
    smoke: SmokeResult | None = None
    findings: tuple[Finding, ...] = ()
    remarks: tuple[str, ...] = ()


def refuse_inputs(output: str | os.PathLike[str], inputs: Mapping[str, str | os.PathLike[str] | None]) -> None:
    """Raises ``UsageError`` where an output is one of the files that are read, or a part of one, by whatever name."""
    for option, given in inputs.items():
        if given is not None and _is_part(Path(output), Path(given)):
            raise UsageError(f"{output}: is the file of {option}, which is only read; name another output")


def _is_part(file: Path, given: Path) -> bool:
    """Whether a file is the given one or lies in the given folder. One that is not there yet counts by its name."""
    if given.is_dir():
        return file.exists() and given.resolve() in file.resolve().parents
    if file.exists() and given.exists():
        return file.samefile(given)
    return file.resolve() == given.resolve()


def refusal(report: Report, settings: Settings) -> str:
    """Why no file may be written, whatever was asked for; empty where one may."""
    if any(finding.code == "FIL901" for finding in report.remaining):
        return "nothing is written from a file that is built to run code"
    if not settings.salvage and any(finding.code == "FIL201" for finding in report.remaining):
        return "nothing is written while a storage fails its checksum; --salvage leaves its tensors out"
    if any(finding.code == "FIL104" and finding.level == Level.ERROR for finding in report.remaining):
        return "nothing is written: safetensors cannot hold all of the state_dict; --format pth does"
    if any(finding.code == "FIL102" and TAKEN_APART in finding.evidence for finding in report.remaining):
        return "nothing is written: tensors would be taken apart that no model loads then; --ignore FIL102 does so"
    if report.obstacles:
        return f"nothing is written: a strict load would still fail on {counted(len(report.obstacles), 'key')}"
    return ""


def deliver(
    result: Checkpoint,
    report: Report,
    destination: Destination | None,
    settings: Settings,
    forward_test: ForwardTest,
) -> Delivery:
    """Write the result and prove it, or write nothing and say why.

    Where nothing has to be written, the forward test runs on the source.
    """
    if reason := refusal(report, settings):
        return Delivery(remarks=(reason,))
    if destination is None:
        if result.format == IN_MEMORY or report.edits:
            return Delivery()
        smoke, findings = forward_test(Path(result.path), result)
        return Delivery(None, smoke, tuple(findings))
    form = destination.form
    if form == SAFETENSORS:
        _refuse_loss(result)
    if not destination.output.parent.is_dir():
        raise WriteError(
            f"{destination.output}: the folder {destination.output.parent} does not exist; make it, or choose another "
            "place with -o"
        )
    write = writer_for(form, settings.for_torch if form == PTH else None)
    if settings.shard_bytes is not None:
        return _deliver_in_shards(result, destination, write, forward_test, settings.shard_bytes)
    with temporary_beside(destination.output, destination.source) as temporary:
        written = write_to(temporary, result, write, destination.output)
        with flushing([written], destination.output, destination.flush):
            verify(temporary, result, destination.output, [written])
        smoke, findings = forward_test(temporary, result)
        if smoke is not None and smoke.passed is False:
            return Delivery(None, smoke, tuple(findings))
        _refuse_replaced(destination)
        deliver_file(temporary, destination.output, destination.backup_of, destination.flush)
    return Delivery(str(destination.output), smoke, tuple(findings))


def state_of(file: str | os.PathLike[str]) -> tuple[int, ...] | None:
    """What is another once somebody writes to a file, or renames another one over it; None where there is none."""
    try:
        found = Path(file).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _refuse_replaced(destination: Destination) -> None:
    """Raise ``WriteError`` where the file to be replaced is not the one that was read: a training run that saves anew
    renames its file over the old one, and that one would be lost.
    """
    if destination.state is not None and state_of(destination.output) != destination.state:
        raise WriteError(
            f"{destination.output}: is another file than the one that was read, or is gone; run the same command again"
        )


def _refuse_loss(result: Checkpoint) -> None:
    """Raise ``WriteError`` where weights have no form in safetensors. FIL104 says so before, unless it was left out."""
    from ckptfix.core.tree import holds_tensors
    from ckptfix.writing.safetensors import lost_extras  # nobody else needs it

    for place in lost_extras(result):
        if holds_tensors(result.entries.get(place)):
            raise WriteError(
                f"{result.path}: safetensors cannot hold {place}, an entry with tensors in it; use --format pth"
            )


def _deliver_in_shards(
    result: Checkpoint,
    destination: Destination,
    write: Write,
    forward_test: ForwardTest,
    limit: int,
) -> Delivery:
    """The same for shards with an index, which hold a state_dict and nothing around it."""
    if destination.output == destination.source:
        raise UsageError(
            f"{destination.output}: --in-place replaces one file, and --shard-size writes several; name an output"
        )
    flat = replace(result, container=(), root=dict(result.entries))
    if destination.form == SAFETENSORS:
        from ckptfix.writing.safetensors import lost_extras  # nobody else needs it

        # What has no form there (FIL104) is not promised by the index either.
        lost = set(lost_extras(flat)) - set(flat.specs)
        kept = OrderedDict((key, entry) for key, entry in flat.entries.items() if key not in lost)
        flat = replace(flat, entries=kept, root=dict(kept))
    remarks: tuple[str, ...] = ()
    if result.container:
        place = path_name(result.container)
        remarks = (f"the shards hold the state_dict of {place}, and nothing of what lies around it",)
    with temporary_shards(destination.output, flat, limit, write, verify) as (index, names):
        smoke, findings = forward_test(index, flat)
        if smoke is not None and smoke.passed is False:
            return Delivery(None, smoke, tuple(findings), remarks)
        deliver_shards(index, names)
    return Delivery(str(names.index), smoke, tuple(findings), remarks)
