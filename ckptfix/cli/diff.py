"""``ckptfix diff``: say what is different between two checkpoints."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import typer

from ckptfix.cli import options
from ckptfix.cli.console import begin, write_output
from ckptfix.errors import UsageError

DiffFormat = Annotated[
    Literal["full", "json"] | None,
    typer.Option("--output-format", help="How it is written.  [default: full]"),
]


# The options are declared here for typer; their values come from the context, merged with the configuration file.
def diff(
    context: typer.Context,
    a: Annotated[str, typer.Argument(metavar="A", help="One checkpoint.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The other one.")],
    weights: options.Weights = None,
    other_weights: Annotated[
        str | None, typer.Option(metavar="NAME", help="The state_dict of B, where it is another one than that of A.")
    ] = None,
    atol: Annotated[
        float | None, typer.Option(metavar="X", help="Differences up to X + rtol·|b| count as none.  [default: 0]")
    ] = None,
    rtol: Annotated[float | None, typer.Option(metavar="X", help="See --atol.  [default: 0]")] = None,
    no_values: options.NoValues = None,
    salvage: options.Salvage = None,
    output_format: DiffFormat = None,
    quiet: options.Quiet = None,
    verbose: options.Verbose = None,
) -> None:
    """Say what is different between two checkpoints, whatever their formats.

    Keys that only one has, keys with the same bytes under another name, shapes, dtypes, values, ties, _metadata, and
    what lies beside the weights. Exit code 0: no difference; 1: some; 2: a file cannot be read.
    """
    console, choices = begin(context)
    with console.guarding():  # an error names the file of the two that it is about
        # Here and not above: --help and --version need nothing of the library.
        from ckptfix.comparison import diff as compare_files
        from ckptfix.comparison.difference import difference_to_json
        from ckptfix.comparison.lines import difference_lines

        form = choices.get("output_format", "full")
        if form not in ("full", "json"):
            raise UsageError(f"diff has no output format {form}; use --output-format full or json")
        difference = compare_files(
            a,
            b,
            weights=choices.get("weights"),
            other_weights=choices.get("other_weights"),
            salvage=choices.get("salvage", False),
            values=not choices.get("no_values", False),
            atol=choices.get("atol", 0.0),
            rtol=choices.get("rtol", 0.0),
            progress=console.progress,
        )
        if form == "json":
            write_output(json.dumps(difference_to_json(difference), indent=2, allow_nan=False) + "\n")
        elif not (console.quiet and difference.is_empty):
            console.write(difference_lines(difference, console.verbose))
    if difference.exit_code:
        raise typer.Exit(difference.exit_code)
