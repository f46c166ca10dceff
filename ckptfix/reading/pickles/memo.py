"""The memo of a pickle: what is kept under a number to be named again.

Python's picklers count from 0 (or 1, in Python 2) without a gap, so that a list holds it in a tenth of a dict's memory.
A crafted pickle may use any numbers; those lie in a dict beside it, and a large number costs no more than a small one.
"""

from __future__ import annotations

from typing import Any

from ckptfix.bytes.limits import SLOT

FAR = 120
"""Bytes of a place outside of the row."""


class Memo:
    """Values by number, as PUT and MEMOIZE keep them and GET recalls them."""

    __slots__ = ("far", "first", "row")

    def __init__(self) -> None:
        self.first = 0
        self.row: list[Any] = []
        self.far: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.row) + len(self.far)

    @property
    def following(self) -> int:
        """The number under which a value goes to the end of the row, and nothing else is to be asked; -1 where none
        does.
        """
        return self.first + len(self.row) if self.row and not self.far else -1

    def keep(self, index: int, value: Any) -> int:
        """Keep a value under a number, in the place of one that may be there. Gives the bytes that its place takes."""
        row, far = self.row, self.far
        if not row and index == 1 and not far:
            self.first = 1
        place = index - self.first
        if place == len(row) and (not far or index not in far):
            row.append(value)
            return SLOT
        if 0 <= place < len(row):
            row[place] = value
            return 0
        count = len(far)
        far[index] = value
        return FAR * (len(far) - count)

    def recall(self, index: int) -> Any:
        """The value under a number. Raises ``KeyError`` where there is none."""
        place = index - self.first
        return self.row[place] if 0 <= place < len(self.row) else self.far[index]
