"""``ckptfix repair``: write a checkpoint that loads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptfix.cli.output import ReportWriter
from ckptfix.cli.program import Argument, Run
from ckptfix.core.option import REPAIR
from ckptfix.core.options import library_settings
from ckptfix.core.report import Report
from ckptfix.errors import Opt, PlanError, UsageError
from ckptfix.report.advice import Presentation
from ckptfix.writing.atomic import OwnFile

if TYPE_CHECKING:
    from ckptfix.core.plan import Plan

ARGUMENTS = {"repair": (Argument("path", "PATH", "The checkpoint. It is never changed without --in-place."),)}


def repair(run: Run, path: str) -> int:
    """Write a checkpoint that loads, and prove it."""
    console, choices = run.console, run.choices
    with console.exiting_on_error():
        output, in_place = choices.get("output"), choices.get("in_place", False)
        if choices.get("plan") and choices.get("apply"):
            why = " exclude each other: a plan is either written or applied"
            raise UsageError(Opt("plan"), " and ", Opt("apply"), why)
        arguments = {
            **library_settings(choices),
            "beside": output is None and not in_place,
            "backup": (in_place or "backup" in run.given) and choices.get("backup", False),
            "dry_run": choices.get("dry_run", False),
        }
        presentation = Presentation(REPAIR, console.verbose, choices)
        writer = ReportWriter(console, choices)
        console.progress(f"repairing {path}")
        writer.write_report(path, presentation, lambda: _repair(path, arguments, choices))
        writer.close()
    return writer.exit_code


def _repair(path: str, arguments: Mapping[str, Any], choices: Mapping[str, Any]) -> Report:
    # Imported here because --help and --version do not need it.
    import ckptfix
    from ckptfix.engine.destination import refuse_inputs

    if choices.get("plan") is not None:
        _check_plan_file(path, choices)
    if choices.get("output") is not None:
        refuse_inputs(choices["output"], _read_files(choices))
    plan = None if choices.get("apply") is None else _saved_plan(choices["apply"])
    result = ckptfix.repair(path, plan=plan, **arguments)
    if choices.get("plan") is not None:
        with _plan_file(choices["plan"]).writing() as file:
            file.write(json.dumps(result.plan.to_json(), indent=2) + "\n")
    return result.report


def _saved_plan(file: str) -> Plan:
    from ckptfix.core.plan import Plan

    try:
        return Plan.from_json(json.loads(Path(file).read_bytes()))
    except OSError as error:
        raise PlanError(f"{file}: cannot read the plan: {error.strerror}; write one with --plan FILE") from error
    except PlanError as error:
        raise PlanError(f"{file}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{file}: not a ckptfix plan ({error}); write one with --plan") from error


def _check_plan_file(source: str, choices: Mapping[str, Any]) -> None:
    """Raise ``UsageError`` if the plan would overwrite an input, the output, or a file that is not a plan."""
    from ckptfix.engine.destination import refuse_inputs

    file = Path(choices["plan"])
    refuse_inputs(file, _read_files(choices))
    if file.resolve() == Path(source).resolve():
        raise UsageError(f"{file}: is the checkpoint itself; name another file for the plan")
    if choices.get("output") is not None and file.resolve() == Path(choices["output"]).resolve():
        raise UsageError(f"{file}: is the output; name another file for the plan")
    _plan_file(file).refuse()


def _plan_file(file: str | Path) -> OwnFile:
    return OwnFile(Path(file), "plan", b'"ckptfix-plan"')


def _read_files(choices: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the option and the path of each input file besides the source."""
    from ckptfix.engine.destination import files_read

    yield from files_read(library_settings(choices))
    if "apply" in choices:
        yield "apply", choices["apply"]
