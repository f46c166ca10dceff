"""How many jobs run at the same time: as many as memory and temporary space have room for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MEBI = 1 << 20

_PROCESS = 64 * MEBI
"""Python and ckptfix, and the block that bytes go through."""

_PARSING = 4
"""How often the size of a file parsing it may take, up to ``_MOST_PARSING``."""

_MOST_PARSING = 64 * MEBI
_TORCH = 450 * MEBI
"""A process that has torch."""


@dataclass(frozen=True)
class Cost:
    """What a job may take: bytes of memory, and of temporary space."""

    memory: int
    temporary: int = 0


def cost_of(size: int, runs_model: bool, fetches: bool) -> Cost:
    """The most that a file of this size is expected to take.

    Bytes are copied and scanned in blocks, so that the size of a file hardly counts; where a model is built, both the
    worker and the forward test have torch, and the test holds model and weights. What is not on this machine comes
    and goes through a temporary file each.
    """
    memory = _PROCESS + min(_PARSING * size, _MOST_PARSING)
    if runs_model:
        memory += 2 * _TORCH + 3 * size
    return Cost(memory, 2 * size if fetches else 0)


@dataclass
class Budget:
    """The room that is left. A job that is larger than all of it runs when no other does."""

    memory: int
    temporary: float = math.inf
    _taken: list[Cost] = field(default_factory=list)

    def fits(self, cost: Cost) -> bool:
        """Whether a job may begin beside those that run."""
        if not self._taken:
            return True
        memory = sum(taken.memory for taken in self._taken) + cost.memory
        return (
            memory <= self.memory and sum(taken.temporary for taken in self._taken) + cost.temporary <= self.temporary
        )

    def take(self, cost: Cost) -> None:
        """A job begins."""
        self._taken.append(cost)

    def give_back(self, cost: Cost) -> None:
        """A job is over."""
        self._taken.remove(cost)
