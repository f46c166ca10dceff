"""``ckptfix inspect``: say what is in a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from ckptfix.cli import options
from ckptfix.cli.console import begin, write_output
from ckptfix.errors import UsageError

InspectionFormat = Annotated[
    Literal["full", "concise", "json"] | None,
    typer.Option("--output-format", help="How it is written; concise is one line for each tensor.  [default: full]"),
]


# The options are declared here for typer; their values come from the context, merged with the configuration file.
def inspect(
    context: typer.Context,
    path: Annotated[str, typer.Argument(metavar="PATH", help="The checkpoint.")],
    weights: options.Weights = None,
    member: options.Member = None,
    salvage: options.Salvage = None,
    output_format: InspectionFormat = None,
    quiet: options.Quiet = None,
    verbose: options.Verbose = None,
) -> None:
    """Say what is in a checkpoint.

    Where its weights are, their names, shapes, dtypes, devices and ties, and what else the file holds. No tensor is
    read.
    """
    console, choices = begin(context)
    with console.guarding(path):
        # Here and not above: --help and --version need nothing of the library.
        import ckptfix
        from ckptfix.report.inspection import inspect_checkpoint, inspection_lines, key_lines, size_on_disk

        form = choices.get("output_format", "full")
        checkpoint = ckptfix.open_checkpoint(
            path,
            weights=choices.get("weights"),
            member=choices.get("member"),
            salvage=choices.get("salvage", False),
        )
        size = size_on_disk(Path(path))
        if form == "json":
            write_output(json.dumps(inspect_checkpoint(checkpoint, size), indent=2, allow_nan=False) + "\n")
        elif form == "concise":
            console.write_plain(key_lines(checkpoint))
        elif form == "full":
            console.write(inspection_lines(checkpoint, size, console.verbose))
        else:
            raise UsageError(f"inspect has no output format {form}; use --output-format full, concise or json")
