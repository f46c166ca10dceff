"""What an architecture is called, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Confidence(Enum):
    """How sure an architecture is."""

    EXACT = "exact"
    """Every name and shape is that of the model."""
    LIKELY = "likely"
    """Names, blocks and widths are those of the family; what cannot be seen from shapes is guessed."""
    GUESS = "guess"
    """Only words or parts say so."""
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Likeness:
    """An architecture. ``model`` and ``arguments`` are the lines of the table, ``code`` a factory to be put into a
    module of one's own.
    """

    title: str
    confidence: Confidence
    evidence: tuple[str, ...] = ()
    model: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    code: tuple[str, ...] = ()
    needs: str | None = None
    """The package of the factory."""
