"""``ckptfix migrate``: a whole zoo of checkpoints becomes one that loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ckptfix.cli import options, repair
from ckptfix.cli.console import Console, begin
from ckptfix.cli.zoo_table import draft, given_here, table_name, tables
from ckptfix.core.settings import parse_size
from ckptfix.core.shell import no_option, typed
from ckptfix.errors import UsageError

if TYPE_CHECKING:
    from ckptfix.zoo.migrating import MakeEngine

Source = Annotated[
    str,
    typer.Argument(
        metavar="SRC",
        help="The old zoo: a folder, a file, a glob ('old/**/*.pth'), or a URL (s3://bucket/zoo). It is never written.",
    ),
]
Destination = Annotated[
    str | None, typer.Argument(metavar="[DST]", help="The new zoo: a folder or a URL. Its tree mirrors the old one.")
]
Init = Annotated[
    bool | None,
    typer.Option("--init", help="Look at the files of SRC, draft zoo.toml, which says what belongs to what, and stop."),
]
TableFile = Annotated[
    str | None,
    typer.Option("--table", metavar="FILE", help="The table of the zoo.  [default: zoo.toml in the working directory]"),
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Only this file of the zoo, by its path below SRC. Flags of a repair beside it are a decision about it,"
        " which later runs keep to.",
    ),
]
ListFile = Annotated[
    str | None, typer.Option("--list", metavar="FILE", help="Only the files that this file names, one a line.")
]
WhatOthers = Annotated[
    Literal["copy", "skip"] | None,
    typer.Option("--others", help="What to do with files that are no checkpoints.  [default: copy]"),
]
DryRun = Annotated[
    bool | None, typer.Option("--dry-run", "-n", help="Look at every file, say what would become of it, write nothing.")
]
Resume = Annotated[
    bool | None,
    typer.Option("--resume/--no-resume", help="Leave out what an earlier run has done.  [default: resume]"),
]
Verify = Annotated[
    bool | None,
    typer.Option("--verify", help="Hash what an earlier run has done, sources and outputs, and redo what differs."),
]
Jobs = Annotated[
    int | None, typer.Option("--jobs", "-j", metavar="N", min=1, help="Files at the same time.  [default: one a core]")
]
Memory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Memory for all jobs together, such as 4GB.  [default: 80 % of what is free]"),
]
Temporary = Annotated[
    str | None,
    typer.Option(
        "--temp-space",
        metavar="SIZE",
        help="Disk for temporary files, which URLs need.  [default: 80 % of what is free]",
    ),
]
EngineName = Annotated[
    Literal["local", "ray"] | None,
    typer.Option(
        "--engine", help="What runs the jobs: processes of this machine, or tasks of a Ray cluster.  [default: local]"
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="With --engine ray: the cluster, such as host:6379 or auto.  [default: one of this machine]",
    ),
]
ReportFile = Annotated[
    str | None, typer.Option("--report", metavar="FILE", help="Write the account of all files as one HTML page.")
]
OutputFormat = Annotated[
    Literal["full", "json"] | None,
    typer.Option("--output-format", help="How the result is written to stdout.  [default: full]"),
]

_LIST_LIMIT = 10


# The options are declared here for typer; their values come from the context, merged with the configuration file.
def migrate(
    context: typer.Context,
    source: Source,
    destination: Destination = None,
    init: Init = None,
    table: TableFile = None,
    only: Only = None,
    listed: ListFile = None,
    others: WhatOthers = None,
    dry_run: DryRun = None,
    resume: Resume = None,
    verify: Verify = None,
    jobs: Jobs = None,
    memory: Memory = None,
    temporary: Temporary = None,
    engine: EngineName = None,
    address: Address = None,
    report: ReportFile = None,
    format: repair.FileFormat = None,
    shard_size: repair.ShardSize = None,
    model: options.Model = None,
    model_args: options.ModelArgs = None,
    like: options.Like = None,
    smoke: repair.Smoke = None,
    input: repair.Input = None,
    device: repair.Device = None,
    timeout: repair.Timeout = None,
    train_mode: repair.TrainMode = None,
    backward: repair.Backward = None,
    compare: repair.Compare = None,
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
    disarm: repair.Disarm = None,
    for_torch: options.ForTorch = None,
    no_values: options.NoValues = None,
    seed: options.Seed = None,
    output_format: OutputFormat = None,
    quiet: options.Quiet = None,
    verbose: options.Verbose = None,
) -> None:
    """Repair a whole zoo of checkpoints into a new one, and say what became of each file.

    The same command again goes on where it was stopped, however that was. Exit code: 0 all are fine or repaired, 1
    some need a decision, 2 some could not be read or failed.
    """
    console, choices = begin(context)
    with console.guarding():
        if init:
            code = draft(console, source, destination, Path(table or table_name()), choices)
        elif destination is None:
            raise UsageError("name the folder or URL that the new zoo goes to: ckptfix migrate SRC DST")
        else:
            code = _migrate(console, source, destination, choices, given_here(context, choices))
    raise typer.Exit(code)


def _migrate(
    console: Console, source: str, destination: str, choices: Mapping[str, Any], given: Mapping[str, Any]
) -> int:
    from ckptfix.cli.migration import MigrationMeter, PageOfZoo, closing_lines, write_json
    from ckptfix.report.arguments import repair_command
    from ckptfix.zoo.items.listing import read_list
    from ckptfix.zoo.migrating import migrate as run
    from ckptfix.zoo.places.opening import split_source
    from ckptfix.zoo.work.job import Others

    place, pattern = split_source(source)
    table, decided = tables(console, choices, given)
    page = PageOfZoo(choices["report"]) if "report" in choices else None
    listed: Sequence[str] | None = choices.get("only")
    if "listed" in choices:
        listed = [*(listed or ()), *read_list(_read(choices["listed"]))]
    is_dry = bool(choices.get("dry_run"))
    if is_dry and any(each.model for each in (*table.treatments, table.rest)):
        console.note("a dry run makes no forward test: what it calls repaired or fine may still fail one")
    meter = MigrationMeter(console, is_dry)
    console.progress(f"listing {place}")
    again = [
        "ckptfix",
        "migrate",
        no_option(place),
        no_option(destination),
        *(("--table", str(choices["table"])) if "table" in choices else ()),
        *(repair_command(place, given)[3:] if decided is None else ()),
    ]
    try:
        with run(
            place,
            destination,
            table,
            patterns=() if pattern is None else (pattern,),
            listed=listed,
            decided=decided,
            again=again,
            others=Others(choices.get("others", "copy")),
            dry_run=is_dry,
            resume=choices.get("resume", True),
            verify=choices.get("verify", False),
            jobs=choices.get("jobs"),
            memory=_size("--memory", choices.get("memory")),
            temporary=_size("--temp-space", choices.get("temporary")),
            engine=_engine(choices),
            watch=meter.show,
        ) as migration:
            console.end_progress()
            for remark in migration.remarks if migration.chosen is None else ():
                console.note(remark)
            if page is not None:
                page.save(migration, typed(again))
            if choices.get("output_format") == "json":
                write_json(migration)
            else:
                console.write(closing_lines(migration, None if console.verbose else _LIST_LIMIT, is_dry))
            return migration.summary.exit_code
    except KeyboardInterrupt:
        console.end_progress()
        console.note(meter.how_to_go_on())
        raise


def _engine(choices: Mapping[str, Any]) -> MakeEngine | None:
    """What makes the engine that was asked for; None for that of this machine."""
    if choices.get("engine") != "ray":
        if "address" in choices:
            raise UsageError("--address names a Ray cluster; add --engine ray")
        return None
    for name, option in (("memory", "--memory"), ("temporary", "--temp-space")):
        if name in choices:
            raise UsageError(f"{option} is a budget of one machine; a Ray cluster knows what its nodes have")
    from ckptfix.zoo.engines.ray import RayEngine

    return lambda scratch: RayEngine(scratch, choices.get("address"), choices.get("jobs"))


def _read(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise UsageError(f"--list {file}: cannot be read: {error.strerror}") from error


def _size(option: str, text: str | None) -> int | None:
    return None if text is None else parse_size(option, text)
