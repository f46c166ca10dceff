"""What a rule found: a finding, and perhaps the fix for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from ckptfix.core.edits import Edit


class Applicability(IntEnum):
    """How far a fix can be trusted, in order."""

    DISPLAY_ONLY = 0
    """Shown, never applied: the user has to decide."""
    UNSAFE = 1
    """A value is invented, dropped or cast, or nothing confirms the guess. Applied on ``--unsafe-fixes``, or when asked
    for by its own flag.
    """
    SAFE = 2
    """Every stored value stays bit for bit, or is what torch itself would supply."""


class Level(IntEnum):
    """How bad a finding is, in order. A note never changes the exit code."""

    NOTE = 0
    WARNING = 1
    ERROR = 2


@dataclass(frozen=True)
class Fix:
    """Edits that cure a finding. ``asked`` means that the user's own flag asked for exactly this, whatever its
    applicability.
    """

    edits: tuple[Edit, ...]
    applicability: Applicability
    asked: bool = False


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth knowing, about a checkpoint.

    ``message`` is one sentence without the key list (the report folds ``keys``); ``evidence`` holds the figures that it
    rests on, plain JSON data; ``remedy`` is what to do where no fix was applied, a command or flag where there is one.
    """

    code: str
    name: str
    level: Level
    message: str
    keys: tuple[str, ...] = ()
    evidence: Mapping[str, Any] = field(default_factory=dict)
    fix: Fix | None = None
    remedy: str = ""


def counted(number: int, noun: str) -> str:
    """A number and its noun, for messages: ``1 key``, ``3 keys``, ``2 entries``."""
    if number == 1:
        return f"1 {noun}"
    many = noun[:-1] + "ies" if noun.endswith("y") and noun[-2] not in "aeiou" else noun + "s"
    return f"{number} {many}"
