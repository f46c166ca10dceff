"""Tries again what may work the next time, with growing pauses."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ckptfix.zoo.places.errors import TransferError
from ckptfix.zoo.places.faults import explained, failures, is_passing

T = TypeVar("T")


@dataclass(frozen=True)
class Patience:
    """How often something is tried, and how many seconds lie between the tries: about ``first``, twice that, and so on,
    ``longest`` at most.

    The pauses are by chance up to half longer or shorter: workers that were throttled together come back one by one."""

    attempts: int = 6
    first: float = 0.5
    longest: float = 30.0

    def pause(self, tried: int) -> float:
        """The pause after so many tries, in seconds."""
        return float(min(self.first * 2 ** (tried - 1), self.longest) * random.uniform(0.5, 1.5))


PATIENCE = Patience()
"""About 15 seconds in all. Backends try a few times by themselves before any of these tries fails."""


def persistently(action: Callable[[], T], where: str, verb: str) -> T:
    """What the action gives, which is tried again where its failure may pass.

    Raises a ``PlaceError`` at once where it cannot (no right, not there, no space), and ``TransferError`` where it
    failed as often as it may."""
    for tried in range(1, PATIENCE.attempts + 1):
        try:
            return action()
        except failures() as error:
            if not is_passing(error):
                raise explained(error, where, verb) from error
            if tried == PATIENCE.attempts:
                said = str(explained(error, where, verb))
                raise TransferError(f"{said} ({tried} tries); run it again later") from error
        time.sleep(PATIENCE.pause(tried))
    raise AssertionError("nothing was tried")
