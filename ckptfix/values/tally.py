"""The figures of a run of numbers, which can be joined with those of another run."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class Tally:
    """What was counted in ``numel`` numbers. ``minimum`` to ``rms`` are over the finite ones; the moments are kept as
    averages, which cannot overflow. ``first`` is the index of the first element that is not finite.
    """

    numel: int = 0
    nan: int = 0
    pos_inf: int = 0
    neg_inf: int = 0
    zeros: int = 0
    subnormals: int = 0
    overflowing: int = 0
    vanishing: int = 0
    minimum: float = math.inf
    maximum: float = -math.inf
    mean: float = 0.0
    rms: float = 0.0
    first: int | None = None

    @property
    def nonfinite(self) -> int:
        """How many numbers are NaN or infinite."""
        return self.nan + self.pos_inf + self.neg_inf

    @property
    def finite(self) -> int:
        """How many are neither."""
        return self.numel - self.nonfinite

    def add(self, other: Tally) -> None:
        """Join the figures of another run; indices count from one place."""
        if not self.numel:
            vars(self).update(vars(other))
            return
        before, here = self.finite, other.finite
        if not before:
            self.mean, self.rms = other.mean, other.rms
        elif here:
            before_share, share = before / (before + here), here / (before + here)
            self.mean = self.mean * before_share + other.mean * share
            self.rms = math.hypot(self.rms * math.sqrt(before_share), other.rms * math.sqrt(share))
        self.numel += other.numel
        self.nan += other.nan
        self.pos_inf += other.pos_inf
        self.neg_inf += other.neg_inf
        self.zeros += other.zeros
        self.subnormals += other.subnormals
        self.overflowing += other.overflowing
        self.vanishing += other.vanishing
        self.minimum = min(self.minimum, other.minimum)
        self.maximum = max(self.maximum, other.maximum)
        if other.first is not None:
            self.first = other.first if self.first is None else min(self.first, other.first)
