"""``ckptfix diff``: show the differences between two checkpoints."""

from __future__ import annotations

import json

from ckptfix.cli.console import write_output
from ckptfix.cli.program import Argument, Run

ARGUMENTS = (Argument("a", "A", "One checkpoint."), Argument("b", "B", "The other one."))


def diff(run: Run, a: str, b: str) -> int:
    """Show the differences between two checkpoints of any format.

    It compares keys, keys with the same bytes under another name, shapes, dtypes, values, ties, _metadata, and what the
    files hold beside the weights.

    Exit codes: 0 no difference; 1 differences; 2 a file cannot be read."""
    console, choices = run.console, run.choices
    with console.guarding():  # an error names which of the two files it is about
        # Here and not above: --help and --version need nothing of the library.
        from ckptfix.comparison import diff as compare_files
        from ckptfix.comparison.difference import difference_lines, difference_to_json

        names = ("weights", "other_weights", "salvage", "values", "atol", "rtol")
        settings = {name: choices[name] for name in names if name in choices}
        difference = compare_files(a, b, **settings, progress=console.progress)
        if choices.get("output_format") == "json":
            write_output(json.dumps(difference_to_json(difference), indent=2, allow_nan=False) + "\n")
        elif not (console.quiet and difference.is_empty):
            console.write(difference_lines(difference, console.verbose))
        return difference.exit_code
