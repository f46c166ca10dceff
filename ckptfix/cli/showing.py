"""The commands that show something and write no checkpoint: ``inspect``, ``diff``, ``map`` and ``rule``."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckptfix.cli.console import write_output
from ckptfix.cli.program import Argument, Run, rule_codes
from ckptfix.core.option import DIFF, INSPECT, MAP
from ckptfix.core.options import library_settings
from ckptfix.core.wording import nearest
from ckptfix.errors import Opt, UsageError
from ckptfix.report.style import Line, Span

if TYPE_CHECKING:
    import click
    from click.shell_completion import CompletionItem

# The library is imported inside the functions because --help and --version do not need it.


class _Code(Argument):
    """A rule's code, with shell completion."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the codes that start with the typed text."""
        from click.shell_completion import CompletionItem

        return [CompletionItem(code) for code in rule_codes(incomplete)]


ARGUMENTS = {
    "inspect": (Argument("path", "PATH", "The checkpoint."),),
    "diff": (Argument("a", "A", "One checkpoint."), Argument("b", "B", "The other checkpoint.")),
    "map": (
        Argument("a", "A", "A checkpoint, or a model (pkg.mod:factory, whose code runs)."),
        Argument("b", "B", "The file or model with the names and layout you want."),
    ),
    "rule": (_Code("code", "CODE", "A rule's code or name, such as KEY101.", required=False),),
}


def inspect(run: Run, path: str) -> int:
    """Show what is in a checkpoint.

    It shows where the weights are, their names, shapes, dtypes, devices and ties, and what else the file holds. No
    tensor is read."""
    console, choices = run.console, run.choices
    form = choices.get("output_format", "full")
    with console.exiting_on_error(path, form), console.showing_progress():
        import ckptfix
        from ckptfix.report.advice import Presentation
        from ckptfix.report.inspection import inspect_checkpoint, inspection_lines, key_lines, size_on_disk

        checkpoint = ckptfix.open_checkpoint(path, **library_settings(choices, INSPECT))
        size = size_on_disk(path)
        if form == "json":
            write_output(json.dumps(inspect_checkpoint(checkpoint, size), indent=2, allow_nan=False) + "\n")
        elif form == "concise":
            console.write(key_lines(checkpoint), plain=True)
        else:
            console.write(inspection_lines(checkpoint, size, Presentation(verbose=console.verbose, choices=choices)))
    return 0


def diff(run: Run, a: str, b: str) -> int:
    """Show the differences between two checkpoints of any format.

    It compares keys, keys with the same bytes under another name, shapes, dtypes, values, ties, _metadata, and what the
    files hold beside the weights.

    Exit codes: 0 no difference; 1 differences; 2 a file cannot be read."""
    console, choices = run.console, run.choices
    form = choices.get("output_format", "full")
    with console.exiting_on_error(form=form), console.showing_progress():  # an error names the file that it is about
        from ckptfix.comparison import diff as compare_files
        from ckptfix.comparison.difference import difference_lines, difference_to_json

        difference = compare_files(a, b, **library_settings(choices, DIFF))
        if form == "json":
            write_output(json.dumps(difference_to_json(difference), indent=2, allow_nan=False) + "\n")
        elif not (console.quiet and difference.is_empty):
            console.write(difference_lines(difference, console.verbose))
        return difference.exit_code


def map(run: Run, a: str, b: str) -> int:
    """Infer the map from the names and the layout of A to those of B, and print it.

    No tensor is read, and nothing is written. With --output-format json, the result is a file for --rename-map, which
    applies to other sizes of the same family and may be edited; with python, a function that needs torch only. With
    --prove, A and B have to be models, and are run.

    Exit codes: 0 each key of B has a source; 1 some have none or several, or nothing is proved; 2 a file cannot be
    read."""
    console, choices = run.console, run.choices
    with console.exiting_on_error():
        import ckptfix
        from ckptfix.core.rename_map import AMBIGUOUS

        found = ckptfix.infer_map(a, b, **library_settings(choices, MAP))
        is_unproved = found.proof is not None and not found.proof.is_proved
        form = choices.get("output_format", "full")
        if form == "json":
            write_output(found.json_text())
        elif form == "python":
            from ckptfix.maps.code import python_code

            write_output(python_code(found))
        else:
            from ckptfix.maps.library import is_shipped
            from ckptfix.report.edits import map_lines

            console.write(map_lines(found))
            how = "write it to a file with --output-format json, and pass that to --rename-map"
            if is_shipped(found.name):
                how = f"--rename-map {found.name} (this map ships with ckptfix)"
            if not (found.rules or found.missing or found.unused):
                console.note("no map is needed: both have the same layers")
            elif found.rules and not is_unproved:
                console.note(f"to apply it: {how}")
        return int(is_unproved or bool(found.missing) or any(rule.label == AMBIGUOUS for rule in found.rules))


def rule(run: Run, code: str | None) -> int:
    """Print the manual of a rule.

    It says what the rule finds, why that matters, when the fix is safe, with an example and sources."""
    console, all = run.console, run.choices.get("all", False)
    with console.exiting_on_error():
        from ckptfix.rules import RULES

        if all == (code is not None):
            raise UsageError("name one rule, or list them with ", Opt("all"))
        begun = [entry for entry in RULES if entry.code.startswith((code or "").upper())]
        family = (code or "")[:3].upper()
        if len(begun) > 1:  # all, or those of a family
            for entry in begun:
                first = entry.manual.partition("\n")[0]  # starts with code and name
                console.write([f"{entry.code} {entry.name}: {first.partition(': ')[2] or first}"])
            return 0
        known = {name: entry for entry in RULES for name in (entry.code.lower(), entry.name)}
        code = code or ""
        if code.lower() not in known:
            close = nearest(code.lower(), known)
            is_family = any(entry.code.startswith(family) for entry in RULES)
            if is_family and not (close and known[close].name == close):
                raise UsageError(f"there is no rule {code}; see the rules of its family: ckptfix rule {family}")
            hint = f"did you mean {known[close].code} {known[close].name}?" if close else "see ckptfix rule --all"
            raise UsageError(f"there is no rule {code}; {hint}")
        manual = known[code.lower()].manual
        console.write(_rendered(manual) if sys.stdout.isatty() else manual.splitlines())
    return 0


def _rendered(manual: str) -> Iterator[Line]:
    """Yield a manual for a terminal: headings without ``#``, each paragraph as one line, code in bold."""
    for block in manual.split("\n\n"):
        heading, _, rest = block.partition("\n") if block.startswith("#") else ("", "", block)
        if heading:
            yield (Span(heading.lstrip("# "), "note"),)
        if rest.startswith(("```", "    ")):
            yield from (f"  {line}" for line in rest.splitlines() if not line.startswith("```"))
        elif rest:
            for item in re.split(r"\n(?=[-*] )", rest):
                parts = " ".join(line.strip() for line in item.split("\n")).split("`")
                yield ("  ", *(Span(part, "strong") if odd % 2 else part for odd, part in enumerate(parts)))
        yield ""
