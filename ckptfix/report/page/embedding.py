"""Data inside of a page: whatever a checkpoint is named, it stays data.

JSON goes into ``<script type="application/json">`` elements, which no browser runs. Only ASCII is written, and no
``<``, ``>`` or ``&``, so that nothing in it can end the element, open a comment, or mean another thing in another
encoding; a lone surrogate stays what it is, as ``\\ud800``.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

_HARMLESS = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def script_json(data: Any) -> str:
    """Plain data as JSON that is safe within a script element. Raises ``ValueError`` for NaN and infinities."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).translate(_HARMLESS)


def data_element(name: str, text: str) -> str:
    """The element that holds JSON from ``script_json`` under an id."""
    return f'<script type="application/json" id="{name}">{text}</script>\n'


def digest(text: str) -> bytes:
    """What tells texts apart in little memory."""
    return blake2b(text.encode("ascii"), digest_size=16).digest()


class Budget:
    """How many more characters may go into the page."""

    def __init__(self, characters: int) -> None:
        self._left = characters

    def take(self, text: str) -> bool:
        """Whether the text still fits; then it counts as taken."""
        if len(text) > self._left:
            return False
        self._left -= len(text)
        return True
