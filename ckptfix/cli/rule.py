"""``ckptfix rule``: the manual of a rule."""

from __future__ import annotations

import difflib
from typing import Annotated

import typer

from ckptfix.cli.console import begin
from ckptfix.errors import UsageError


def rule(
    context: typer.Context,
    code: Annotated[str | None, typer.Argument(metavar="CODE", help="A rule's code or name, such as KEY101.")] = None,
    all: Annotated[bool, typer.Option("--all", help="List every rule with one line each.")] = False,
) -> None:
    """Print the manual of a rule.

    What it finds, why that matters, when the fix is safe, an example, and sources.
    """
    console, _ = begin(context)
    with console.guarding():
        from ckptfix.rules import RULES

        if all == (code is not None):
            raise UsageError("name one rule, or list them with --all")
        if code is None:
            console.write(f"{entry.code} {entry.name}: {_summary(entry.manual)}" for entry in RULES)
            return
        known = {name: entry for entry in RULES for name in (entry.code.lower(), entry.name)}
        if code.lower() not in known:
            close = difflib.get_close_matches(code.lower(), known, 1)
            hint = f"did you mean {known[close[0]].code} {known[close[0]].name}?" if close else "see ckptfix rule --all"
            raise UsageError(f"there is no rule {code}; {hint}")
        console.write(known[code.lower()].manual.splitlines())


def _summary(manual: str) -> str:
    """The first line of a manual without the code and name that it begins with."""
    first = manual.partition("\n")[0]
    return first.partition(": ")[2] or first
