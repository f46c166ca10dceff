"""How a report is told, and the words that the forms for people share."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from msgspec import Struct, field

from ckptfix.core.finding import Finding, counted
from ckptfix.core.report import Report

# The rules that find the values of a tensor broken, and not its name or its shape.
ABOUT_VALUES = ("VAL", "FIL2", "RUN")


class Mode(Enum):
    """What the user asked for."""

    CHECK = "check"
    REPAIR = "repair"


class Telling(Struct, frozen=True):
    """How to tell a report.

    ``verbose`` shows every key and all evidence. ``choices`` are the options that the user gave, by their Python
    names; the commands of the advice repeat them."""

    mode: Mode = Mode.CHECK
    verbose: bool = False
    choices: Mapping[str, Any] = field(default_factory=dict)

    @property
    def limit(self) -> int | None:
        """The most lines that a key list takes, None for all."""
        return None if self.verbose else 12


def message_with_count(finding: Finding) -> str:
    """Return the message and the number of keys, unless the message tells that number itself."""
    number = len(finding.keys)
    if not number or str(number) in finding.message.replace("`", " ").split():
        return finding.message
    return f"{finding.message} ({counted(number, 'key')})"


def mark(finding: Finding, report: Report) -> str:
    """``[fixed]``, ``[fixable]`` or nothing."""
    if finding in report.fixed:
        return "[would be fixed]" if report.is_withheld else "[fixed]"
    if report.is_accepted(finding):
        return "[accepted]"
    if finding.needs_unsafe:
        switches = [name for remedy in finding.remedies for name, value in remedy.options if value is True]
        return f"[fixable with --{(switches or ['unsafe_fixes'])[0].replace('_', '-')}]"
    return "[fixable]" if finding.is_fixable else ""
