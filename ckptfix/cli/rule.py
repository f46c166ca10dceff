"""``ckptfix rule``: the manual of a rule."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckptfix.cli.program import Argument, Run, rule_codes
from ckptfix.errors import Opt, UsageError
from ckptfix.report.style import Line, Span

if TYPE_CHECKING:
    import click
    from click.shell_completion import CompletionItem


class _Code(Argument):
    """A rule's code, which a shell completes."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the codes that begin so."""
        from click.shell_completion import CompletionItem

        return [CompletionItem(code) for code in rule_codes(incomplete)]


ARGUMENTS = (_Code("code", "CODE", "A rule's code or name, such as KEY101.", required=False),)


def rule(run: Run, code: str | None) -> int:
    """Print the manual of a rule.

    It says what the rule finds, why that matters, when the fix is safe, with an example and sources."""
    console, all = run.console, run.choices.get("all", False)
    with console.guarding():
        from ckptfix.rules import RULES

        if all == (code is not None):
            raise UsageError("name one rule, or list them with ", Opt("all"))
        begun = [entry for entry in RULES if entry.code.startswith((code or "").upper())]
        family = (code or "")[:3].upper()
        if len(begun) > 1:  # all, or those of a family
            console.write(f"{entry.code} {entry.name}: {_summary(entry.manual)}" for entry in begun)
            return 0
        known = {name: entry for entry in RULES for name in (entry.code.lower(), entry.name)}
        code = code or ""
        if code.lower() not in known:
            close = difflib.get_close_matches(code.lower(), known, 1)
            is_family = any(entry.code.startswith(family) for entry in RULES)
            if is_family and not (close and known[close[0]].name == close[0]):
                raise UsageError(f"there is no rule {code}; see the rules of its family: ckptfix rule {family}")
            hint = f"did you mean {known[close[0]].code} {known[close[0]].name}?" if close else "see ckptfix rule --all"
            raise UsageError(f"there is no rule {code}; {hint}")
        manual = known[code.lower()].manual
        console.write(_rendered(manual) if sys.stdout.isatty() else manual.splitlines())
    return 0


def _rendered(manual: str) -> Iterator[Line]:
    """Yield a manual as a terminal shows it: headings without their marks, whole paragraphs, code in bold."""
    for block in manual.split("\n\n"):
        heading, _, rest = block.partition("\n") if block.startswith("#") else ("", "", block)
        if heading:
            yield (Span(heading.lstrip("# "), "note"),)
        if rest.startswith(("```", "    ")):
            yield from (f"  {line}" for line in rest.splitlines() if not line.startswith("```"))
        elif rest:
            for item in re.split(r"\n(?=[-*] )", rest):
                parts = " ".join(map(str.strip, item.split("\n"))).split("`")
                yield ("  ", *(Span(part, "strong") if odd % 2 else part for odd, part in enumerate(parts)))
        yield ""


def _summary(manual: str) -> str:
    """Return the first line of a manual without the code and name that it begins with."""
    first = manual.partition("\n")[0]
    return first.partition(": ")[2] or first
