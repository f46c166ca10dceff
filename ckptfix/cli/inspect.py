"""``ckptfix inspect``: show what is in a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

from ckptfix.cli.console import write_output
from ckptfix.cli.program import Argument, Run

ARGUMENTS = (Argument("path", "PATH", "The checkpoint."),)


def inspect(run: Run, path: str) -> int:
    """Show what is in a checkpoint.

    It shows where the weights are, their names, shapes, dtypes, devices and ties, and what else the file holds. No
    tensor is read."""
    console, choices = run.console, run.choices
    with console.guarding(path):
        # Here and not above: --help and --version need nothing of the library.
        import ckptfix
        from ckptfix.bytes.files import is_url
        from ckptfix.report.inspection import inspect_checkpoint, inspection_lines, key_lines, size_on_disk

        form = choices.get("output_format", "full")
        names = ("weights", "member", "salvage")
        checkpoint = ckptfix.open_checkpoint(path, **{name: choices[name] for name in names if name in choices})
        size = None if is_url(path) else size_on_disk(Path(path))
        if form == "json":
            write_output(json.dumps(inspect_checkpoint(checkpoint, size), indent=2, allow_nan=False) + "\n")
        elif form == "concise":
            console.write_plain(key_lines(checkpoint))
        else:
            console.write(inspection_lines(checkpoint, size, console.verbose, choices))
    return 0
