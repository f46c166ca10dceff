"""What rules say where the file holds several sets of weights and only the user can know which is meant."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ckptfix.core.finding import NAME, Remedy, advise
from ckptfix.reading.weights.prefixed_sets import PLAIN, copied_under, is_follower

MOST = 6
"""Sets that are named."""


def choice(names: Sequence[str]) -> tuple[Remedy, ...]:
    """Return a remedy for each set, which takes only that set; those that follow another one last."""
    ordered = sorted(names, key=is_follower)
    named = tuple(Remedy((("weights", name),), "takes only this set") for name in ordered[:MOST])
    rest = (Remedy((("weights", NAME),), "takes another one"),) if len(names) > MOST else ()
    return (*named, *rest)


def choice_of_copies(keys: Collection[str]) -> tuple[Remedy, ...]:
    """Return the same for sets of which one has the plain names, and each of the others a prefix."""
    copies = copied_under(keys)
    names = [PLAIN, *(prefix[:-1] for prefix in copies)]
    return choice(names) if copies else advise("remove one of the two sets of weights")
