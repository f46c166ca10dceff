"""``ckptfix map``: infer which layers of one implementation are which of another."""

from __future__ import annotations

from ckptfix.cli.console import write_output
from ckptfix.cli.program import Argument, Run

ARGUMENTS = (
    Argument("a", "A", "A checkpoint, or a model (pkg.mod:factory, whose code runs)."),
    Argument("b", "B", "The file or model whose names and layout are wanted."),
)


def map(run: Run, a: str, b: str) -> int:
    """Infer the map from the names and the layout of A to those of B, and print it.

    No tensor is read, and nothing is written. With --output-format json, the result is a file for --rename-map, which
    applies to other sizes of the same family and may be edited; with python, a function that needs torch only. With
    --prove, A and B have to be models, and are run.

    Exit codes: 0 each key of B has a source; 1 some have none or several, or nothing is proved; 2 a file cannot be
    read."""
    console, choices = run.console, run.choices
    with console.guarding():
        # Here and not above: --help and --version need nothing of the library.
        import ckptfix
        from ckptfix.core.rename_map import AMBIGUOUS

        names = ("weights", "other_weights", "prove", "input", "timeout")
        found = ckptfix.infer_map(a, b, **{name: choices[name] for name in names if name in choices})
        is_unproved = found.proof is not None and not found.proof.is_proved
        form = choices.get("output_format", "full")
        if form == "json":
            write_output(found.json_text())
        elif form == "python":
            from ckptfix.maps.code import python_code

            write_output(python_code(found))
        else:
            from ckptfix.maps.library import names as shipped
            from ckptfix.report.edits import map_lines

            console.write(map_lines(found))
            how = "write it to a file with --output-format json, and give that to --rename-map"
            if found.name in shipped():
                how = f"--rename-map {found.name} (this map ships with ckptfix)"
            if not is_unproved:
                console.note(f"to apply it: {how}")
        return int(is_unproved or bool(found.missing) or any(rule.label == AMBIGUOUS for rule in found.rules))
