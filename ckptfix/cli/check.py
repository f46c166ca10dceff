"""``ckptfix check``: say what is wrong with checkpoints and change nothing."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import typer

from ckptfix.cli import options
from ckptfix.cli.console import begin
from ckptfix.cli.output import ReportWriter, page_writer
from ckptfix.core.report import Report
from ckptfix.report.arguments import library_arguments, repair_command
from ckptfix.report.telling import Mode, Telling


# The options are declared here for typer; their values come from the context, merged with the configuration file.
def check(
    context: typer.Context,
    paths: Annotated[list[str], typer.Argument(metavar="PATH", help="The checkpoints.")],
    model: options.Model = None,
    model_args: options.ModelArgs = None,
    like: options.Like = None,
    select: options.Select = None,
    ignore: options.Ignore = None,
    weights: options.Weights = None,
    member: options.Member = None,
    salvage: options.Salvage = None,
    for_torch: options.ForTorch = None,
    no_values: options.NoValues = None,
    unsafe_fixes: options.UnsafeFixes = None,
    fill: options.Fill = None,
    drop_mismatched: options.DropMismatched = None,
    replace: options.Replace = None,
    reset_running_stats: options.ResetRunningStats = None,
    zero_non_finite: options.ZeroNonFinite = None,
    flush_subnormals: options.FlushSubnormals = None,
    dtype: options.Dtype = None,
    seed: options.Seed = None,
    output_format: options.ReportFormat = None,
    report: options.ReportFile = None,
    quiet: options.Quiet = None,
    verbose: options.Verbose = None,
) -> None:
    """Say what is wrong with checkpoints, and change nothing.

    Without --model or --like only defects that show in the file itself are found.
    """
    console, choices = begin(context)
    with console.guarding():
        arguments = library_arguments(choices)
        page = page_writer(choices)
        writer = ReportWriter(console, choices.get("output_format", "full"), page)
        for number, path in enumerate(paths, 1):
            console.progress(f"checking {path}{f' ({number} of {len(paths)})' if len(paths) > 1 else ''}")
            telling = Telling(Mode.CHECK, console.verbose, repair_command(path, choices))
            writer.account(path, telling, partial(_check, path, arguments))
            if console.is_hopeless:
                break
        writer.close()
    raise typer.Exit(writer.exit_code)


def _check(path: str, arguments: Mapping[str, Any]) -> Report:
    # Here and not above: --help and --version need nothing of the library.
    import ckptfix

    return ckptfix.check(path, **arguments)
