"""What rules say where the file holds several sets of weights and only the user can know which is meant."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ckptfix.reading.weights.prefixed_sets import PLAIN, copied_under, is_follower

MOST = 6
"""Sets that are named."""


def choice(names: Sequence[str]) -> str:
    """The remedy that names the flag for each set, those that follow another one last; the report makes a command of
    each.
    """
    ordered = sorted(names, key=is_follower)
    first, *others = (f"--weights {name}" for name in ordered[:MOST])
    rest = f", {', '.join(others)} that one" if others else ""
    more = " or another one with --weights NAME" if len(names) > MOST else ""
    return f"{first} takes this set alone{rest}{more}"


def choice_of_copies(keys: Collection[str]) -> str:
    """The same for sets of which one stands under the plain names, and the others under a prefix each."""
    copies = copied_under(keys)
    names = [PLAIN, *(prefix[:-1] for prefix in copies)]
    return choice(names) if copies else "remove one of the two sets of weights"
