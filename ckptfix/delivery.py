"""The last step of a repair: a temporary file, the comparison with the plan, the forward test, and only then the
rename.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptfix.checkpoint import IN_MEMORY, Checkpoint, path_name
from ckptfix.coverage import obstacles
from ckptfix.errors import UsageError, WriteError
from ckptfix.finding import Finding
from ckptfix.formats.output import (
    PTH,
    SAFETENSORS,
    deliver_file,
    output_format,
    temporary_beside,
    verify,
    write_to,
    writer_for,
)
from ckptfix.formats.safetensors_write import lost_extras
from ckptfix.report import Report, SmokeResult
from ckptfix.settings import Settings
from ckptfix.target import Target

SUFFIXES = {".safetensors": SAFETENSORS, ".pth": PTH, ".pt": PTH, ".ckpt": PTH, ".bin": PTH, ".tar": PTH}


@dataclass(frozen=True)
class Destination:
    """Where the result goes; ``backup_of`` is the source whose old content is kept, ``source`` the file whose
    permissions it gets.
    """

    output: Path
    source: Path | None = None
    backup_of: Path | None = None

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        output: str | os.PathLike[str] | None,
        beside: bool,
        in_place: bool,
        backup: bool,
        changes: bool,
    ) -> Destination | None:
        """The destination that was asked for; None where nothing is to be written."""
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
            return cls(goal, source)
        if not changes or not (beside or in_place):
            return None
        if source is None:
            raise UsageError("a state_dict in memory has no place of its own; name an output")
        if in_place:
            # A link keeps pointing at its file: it is the file that is replaced.
            real = source.resolve()
            return cls(real, real, real if backup else None)
        return cls(source.with_name(f"{source.stem}.fixed{source.suffix}"), source)

    def format_for(self, checkpoint: Checkpoint, settings: Settings) -> str:
        """What to write: the format asked for, else that of the suffix, else that of the source."""
        return output_format(checkpoint, settings.format or SUFFIXES.get(self.output.suffix.lower()))


@dataclass(frozen=True)
class Delivery:
    """What came of the delivery: the file, where there is one, and what the forward test said."""

    output: str | None = None
    smoke: SmokeResult | None = None
    findings: tuple[Finding, ...] = ()
    remarks: tuple[str, ...] = ()


def deliver(
    result: Checkpoint,
    target: Target | None,
    report: Report,
    destination: Destination | None,
    settings: Settings,
    factory: tuple[str, Any] | None,
) -> Delivery:
    """Write the result and prove it, or write nothing and say why.

    Where nothing has to be written, the forward test runs on the source.
    """
    if any(finding.code == "FIL901" for finding in report.remaining):
        return Delivery(remarks=("nothing is written from a file that is built to run code",))
    left = obstacles(result, target) if target is not None else []
    if left:
        return Delivery(remarks=(f"nothing is written: a strict load would still fail on {len(left)} keys",))
    if destination is None:
        if result.format == IN_MEMORY or report.edits:
            return Delivery()
        smoke, findings = _smoke(Path(result.path), result, settings, factory)
        return Delivery(None, smoke, tuple(findings))
    form = destination.format_for(result, settings)
    remarks: tuple[str, ...] = ()
    if form == SAFETENSORS and (lost := lost_extras(result)):
        remarks = (
            f"safetensors cannot carry, and the new file does not have: {', '.join(lost)}; --format pth keeps it",
        )
    if not destination.output.parent.is_dir():
        raise WriteError(
            f"{destination.output}: the folder {destination.output.parent} does not exist; make it, or choose another "
            "place with -o"
        )
    with temporary_beside(destination.output, destination.source) as temporary:
        write_to(temporary, result, writer_for(form, settings.for_torch if form == PTH else None), destination.output)
        verify(temporary, result, destination.output)
        smoke, findings = _smoke(temporary, result, settings, factory)
        if smoke is not None and smoke.passed is False:
            return Delivery(None, smoke, tuple(findings), remarks)
        deliver_file(temporary, destination.output, destination.backup_of)
    return Delivery(str(destination.output), smoke, tuple(findings), remarks)


def _smoke(
    file: Path, result: Checkpoint, settings: Settings, factory: tuple[str, Any] | None
) -> tuple[SmokeResult | None, list[Finding]]:
    if factory is None:
        if settings.smoke:
            raise UsageError("the forward test needs a factory: give --model pkg.mod:factory")
        return None, []
    if settings.smoke is False:
        return None, []
    from ckptfix.smoke import run_smoke

    model, arguments = factory
    return run_smoke(str(file), model, arguments, settings.smoke_settings, path_name(result.container))
