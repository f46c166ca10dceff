"""How a report is told, and the words that the forms for people share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ckptfix.core.finding import Applicability, Finding, counted
from ckptfix.core.report import Report


class Mode(Enum):
    """What the user asked for."""

    CHECK = "check"
    REPAIR = "repair"
    DRY_RUN = "dry run"


@dataclass(frozen=True)
class Telling:
    """How to tell a report.

    ``verbose`` shows every key and all evidence. ``command`` is the repair of this file as the user would type it,
    word by word; the advice adds flags to it. Empty: ``ckptfix repair`` and the source.
    """

    mode: Mode = Mode.CHECK
    verbose: bool = False
    command: tuple[str, ...] = ()

    @property
    def limit(self) -> int | None:
        """The most lines that a key list takes, None for all."""
        return None if self.verbose else 12


def message_with_count(finding: Finding) -> str:
    """The message and the number of keys, unless the message tells that number itself."""
    number = len(finding.keys)
    if not number or str(number) in finding.message.replace("`", " ").split():
        return finding.message
    return f"{finding.message} ({counted(number, 'key')})"


def is_fixable(finding: Finding) -> bool:
    """Whether a repair can cure the finding, if perhaps only with ``--unsafe-fixes``."""
    return finding.fix is not None and finding.fix.applicability > Applicability.DISPLAY_ONLY


def needs_unsafe(finding: Finding) -> bool:
    """Whether the repair happens only with ``--unsafe-fixes``."""
    fix = finding.fix
    return fix is not None and fix.applicability is Applicability.UNSAFE and not fix.asked


def mark(finding: Finding, report: Report, mode: Mode) -> str:
    """``[fixed]``, ``[fixable]`` or nothing."""
    if finding in report.fixed:
        return "[would be fixed]" if mode is Mode.DRY_RUN else "[fixed]"
    if needs_unsafe(finding):
        return "[fixable with --unsafe-fixes]"
    return "[fixable]" if is_fixable(finding) else ""
