"""``ckptfix repair``: write a checkpoint that loads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ckptfix.cli import options
from ckptfix.cli.console import begin
from ckptfix.cli.output import ReportWriter, page_writer
from ckptfix.core.report import Report
from ckptfix.errors import PlanError, UsageError, WriteError
from ckptfix.report.arguments import library_arguments, repair_command
from ckptfix.report.telling import Mode, Telling

if TYPE_CHECKING:
    from ckptfix.core.plan import Plan

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
    typer.Option(metavar="auto|cpu|cuda|cuda:1|mps", help="Where the forward test runs.  [default: auto]"),
]
Timeout = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="Time limit of the forward test.  [default: 300]")
]
TrainMode = Annotated[
    bool | None, typer.Option("--train-mode", help="Also run the model in training mode, with a batch of at least 2.")
]
Backward = Annotated[
    bool | None,
    typer.Option("--backward", help="Also run it in training mode with a backward pass, and look at the gradients."),
]
Compare = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|source",
        help="Also run it with the weights of another checkpoint, or with those of the file that is repaired, and say"
        " how far the outputs are apart.",
    ),
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
    train_mode: TrainMode = None,
    backward: Backward = None,
    compare: Compare = None,
    fill: options.Fill = None,
    drop_mismatched: options.DropMismatched = None,
    replace: options.Replace = None,
    reset_running_stats: options.ResetRunningStats = None,
    recalibrate: options.Recalibrate = None,
    zero_non_finite: options.ZeroNonFinite = None,
    flush_subnormals: options.FlushSubnormals = None,
    dtype: options.Dtype = None,
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
    report: options.ReportFile = None,
    quiet: options.Quiet = None,
    verbose: options.Verbose = None,
) -> None:
    """Write a checkpoint that loads, and prove it."""
    console, choices = begin(context)
    with console.guarding():
        if backup and not in_place:
            raise UsageError("--backup goes with --in-place; without it the source stays as it is anyway")
        if "model" not in choices:
            # What the configuration file says is there for the commands that have a model.
            given = {"model-args": model_args, "input": input, "device": device, "timeout": timeout}
            _refuse_without_model({**given, "train-mode": train_mode, "backward": backward, "compare": compare})
        arguments = repair_arguments(choices)
        mode = Mode.DRY_RUN if arguments["dry_run"] else Mode.REPAIR
        telling = Telling(mode, console.verbose, repair_command(path, choices))
        page = page_writer(choices)
        writer = ReportWriter(console, choices.get("output_format", "full"), page)
        console.progress(f"repairing {path}")
        writer.account(path, telling, lambda: _repair(path, arguments, choices))
        writer.close()
    raise typer.Exit(writer.exit_code)


def _refuse_without_model(given: Mapping[str, object]) -> None:
    for name, value in given.items():
        if value:
            raise UsageError(f"--{name} has no meaning without a model; add --model PKG.MOD:FACTORY, or leave it out")


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
    from ckptfix.engine.destination import refuse_inputs

    if choices.get("plan") is not None:
        _check_plan_file(path, choices)
    if choices.get("output") is not None:
        refuse_inputs(choices["output"], _read_files(choices))
    plan = None if choices.get("apply") is None else _saved_plan(choices["apply"])
    result = ckptfix.repair(path, plan=plan, **arguments)
    if choices.get("plan") is not None:
        _save_plan(choices["plan"], result.plan)
    return result.report


def _saved_plan(file: str) -> Plan:
    from ckptfix.core.plan import Plan

    try:
        return Plan.from_json(json.loads(Path(file).read_bytes()))
    except OSError as error:
        raise PlanError(f"{file}: the plan cannot be read: {error.strerror}; write one with --plan FILE") from error
    except PlanError as error:
        raise PlanError(f"{file}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{file}: this is no plan of ckptfix ({error}); write one with --plan") from error


def _check_plan_file(source: str, choices: Mapping[str, Any]) -> None:
    """A plan may replace an older plan and nothing else: one slip of a name must not cost a checkpoint."""
    from ckptfix.engine.destination import refuse_inputs

    file = Path(choices["plan"])
    refuse_inputs(file, {"PATH": source, **_read_files(choices)})
    if choices.get("output") is not None and file.resolve() == Path(choices["output"]).resolve():
        raise UsageError(f"{file}: is where the checkpoint goes; name another file for the plan")
    if not _may_be_replaced(file):
        raise UsageError(f"{file}: is there already and is no plan of ckptfix; name another file")
    if not file.parent.is_dir():
        raise UsageError(f"{file}: the folder {file.parent} does not exist; make it, or name another file for the plan")


def _read_files(choices: Mapping[str, Any]) -> dict[str, str | None]:
    """The files that are read beside the source, by the option that names them."""
    fill, compare = choices.get("fill"), choices.get("compare")
    return {
        "--like": choices.get("like"),
        "--fill": None if fill in ("target", "twin") else fill,
        "--apply": choices.get("apply"),
        "--compare": None if compare == "source" else compare,
    }


def _may_be_replaced(file: Path) -> bool:
    """Whether nothing is lost where a plan goes: it is free or empty, or has a plan, of whatever version."""
    if not file.exists() or (file.is_file() and file.stat().st_size == 0):
        return True
    try:
        data = json.loads(file.read_bytes()) if file.is_file() else None
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(data, dict) and "ckptfix-plan" in data


def _save_plan(file: str, plan: Plan) -> None:
    from ckptfix.writing.output import deliver_file, temporary_beside

    goal = Path(file).resolve()  # a link keeps pointing at its file
    if not _may_be_replaced(goal):
        raise WriteError(f"{file}: is no plan any more; what was written is complete, name another file for the plan")
    try:
        with temporary_beside(goal, None) as temporary:
            temporary.write_text(json.dumps(plan.to_json(), indent=2) + "\n", encoding="utf-8")
            deliver_file(temporary, goal, None)
    except (OSError, WriteError) as error:
        raise WriteError(
            f"{file}: the plan cannot be written ({error.__cause__ or error}); name another place"
        ) from error
