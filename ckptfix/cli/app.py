"""The program: its commands, ``--version``, and nothing that takes time to import."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptfix.cli.console import heed_signals, open_streams, write_output
from ckptfix.cli.program import Program

# rich takes longer to import than all the rest, and plain text is what a pipe wants anyway.
app = typer.Typer(
    name="ckptfix",
    cls=Program,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from ckptfix import __version__

        write_output(f"ckptfix {__version__}\n")
        raise typer.Exit


@app.callback()
def ckptfix(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Make PyTorch checkpoints load again.

    ckptfix reads a checkpoint without running any of its code, finds what keeps it from loading or from working,
    repairs that by named rules, and proves the result.

    Exit codes: 0 clean, or all fixed and verified; 1 findings remain; 2 the file cannot be read, or the command is
    wrong.
    """


def run() -> None:
    """Run the program and exit."""
    open_streams()
    heed_signals()
    app()
