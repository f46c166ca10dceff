"""``ckptfix repair``: write a checkpoint that loads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ckptfix.cli import options
from ckptfix.cli.choices import library_arguments, repair_command
from ckptfix.cli.console import begin
from ckptfix.cli.output import ReportWriter
from ckptfix.errors import PlanError, UsageError, WriteError
from ckptfix.report import Report
from ckptfix.report.telling import Mode, Telling

if TYPE_CHECKING:
    from ckptfix.plan import Plan

Output = Annotated[
    str | None,
    typer.Option("--output", "-o", metavar="OUT", help="The file to write.  [default: <stem>.fixed<suffix>]"),
]
InPlace = Annotated[bool | None, typer.Option("--in-place", help="Replace the file itself.")]
Backup = Annotated[bool | None, typer.Option("--backup", help="With --in-place: keep the old file as <name>.bak.")]
FileFormat = Annotated[
    Literal["pth", "safetensors"] | None,
    typer.Option("--format", help="The format to write.  [default: that of the output's suffix, else of the source]"),
]
ShardSize = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Write numbered shards of at most this size (5GB, 500MB) with an index.  [default: one file]",
    ),
]
DryRun = Annotated[bool | None, typer.Option("--dry-run", "-n", help="Say what would be done, and write nothing.")]
PlanFile = Annotated[
    str | None, typer.Option("--plan", metavar="FILE", help="Write the edits as JSON, to read or to apply later.")
]
Apply = Annotated[str | None, typer.Option(metavar="FILE", help="Carry out the edits of a saved plan, and no others.")]
Smoke = Annotated[
    bool | None,
    typer.Option(
        "--smoke/--no-smoke",
        help="Load the result into the model and run a forward pass, in a process of its own.  [default: with --model]",
    ),
]
Input = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SPEC",
        help="Input of the forward test, once for each argument: 2x3x224x224, input_ids=2x16:int:0:1000, or a file"
        " (.npy, .pt, .safetensors).  [default: derived from the model]",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(metavar="auto|cpu|cuda...", help="Where the forward test runs.  [default: auto]"),
]
Timeout = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="Time limit of the forward test.  [default: 300]")
]

Disarm = Annotated[
    bool | None,
    typer.Option(
        "--disarm", help="Of a file that is built to run code, write the tensors of the state_dict and nothing else."
    ),
]


# The options are declared here for typer; their values come from the context, merged with the configuration file.
def repair(
    context: typer.Context,
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="The checkpoint. It is never changed without --in-place.")
    ],
    output: Output = None,
    in_place: InPlace = None,
    backup: Backup = None,
    format: FileFormat = None,
    shard_size: ShardSize = None,
    dry_run: DryRun = None,
    plan: PlanFile = None,
    apply: Apply = None,
    model: options.Model = None,
    model_args: options.ModelArgs = None,
    like: options.Like = None,
    smoke: Smoke = None,
    input: Input = None,
    device: Device = None,
    timeout: Timeout = None,
    fill: options.Fill = None,
    drop_mismatched: options.DropMismatched = None,
    unsafe_fixes: options.UnsafeFixes = None,
    select: options.Select = None,
    ignore: options.Ignore = None,
    weights: options.Weights = None,
    member: options.Member = None,
    salvage: options.Salvage = None,
    disarm: Disarm = None,
    for_torch: options.ForTorch = None,
    no_values: options.NoValues = None,
    seed: options.Seed = None,
    output_format: options.ReportFormat = None,
    quiet: options.Quiet = None,
    verbose: options.Verbose = None,
) -> None:
    """Write a checkpoint that loads, and prove it."""
    console, choices = begin(context)
    with console.guarding():
        if backup and not in_place:
            raise UsageError("--backup goes with --in-place; without it the source stays as it is anyway")
        arguments = repair_arguments(choices)
        mode = Mode.DRY_RUN if arguments["dry_run"] else Mode.REPAIR
        telling = Telling(mode, console.verbose, repair_command(path, choices))
        writer = ReportWriter(console, choices.get("output_format", "full"))
        console.progress(f"repairing {path}")
        writer.account(path, telling, lambda: _repair(path, arguments, choices))
        writer.close()
    raise typer.Exit(writer.exit_code)


def repair_arguments(choices: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of ``ckptfix.repair``, but for a saved plan."""
    in_place, output = choices.get("in_place", False), choices.get("output")
    if in_place and output is not None:
        raise UsageError("--output and --in-place exclude each other: name another file, or replace the source")
    if choices.get("apply") is not None and choices.get("plan") is not None:
        raise UsageError("--plan and --apply exclude each other: a plan is either made or carried out")
    return {
        **library_arguments(choices),
        "output": output,
        "beside": output is None and not in_place,
        "in_place": in_place,
        "backup": in_place and choices.get("backup", False),
        "dry_run": choices.get("dry_run", False),
    }


def _repair(path: str, arguments: Mapping[str, Any], choices: Mapping[str, Any]) -> Report:
    # Here and not above: --help and --version need nothing of the library.
    import ckptfix

    plan = None if choices.get("apply") is None else _saved_plan(choices["apply"])
    result = ckptfix.repair(path, plan=plan, **arguments)
    if choices.get("plan") is not None:
        _save_plan(choices["plan"], result.plan)
    return result.report


def _saved_plan(file: str) -> Plan:
    from ckptfix.plan import Plan

    try:
        return Plan.from_json(json.loads(Path(file).read_bytes()))
    except PlanError as error:
        raise PlanError(f"{file}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{file}: this is no plan of ckptfix ({error}); write one with --plan") from error


def _save_plan(file: str, plan: Plan) -> None:
    try:
        Path(file).write_text(json.dumps(plan.to_json(), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise WriteError(f"{file}: the plan cannot be written: {error.strerror}") from error
