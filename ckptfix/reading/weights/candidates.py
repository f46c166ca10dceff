"""Which of the state_dicts of a file is meant, where nobody says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptfix.core.checkpoint import Candidate, PathPart
from ckptfix.core.facts import Fact, Kind

PREFERRED = tuple(
    "state_dict model_state_dict model model_state module net network net_state_dict weights params_ema params blobs "
    "generator backbone".split()
)
"""Names under which trainers keep the weights to load, the most explicit first."""

AVERAGED = ("ema", "averaged", "swa", "shadow", "teacher")
"""Parts of names that mark a second, averaged set of weights."""

SHARE = 20
"""Part of the weights, one in so many elements, from which on what lies beside them may be weights as well."""


def rank(candidate: Candidate) -> tuple[bool, int, int, int]:
    """Raw weights before averaged ones, then by the name's place among the preferred, then the larger, then the less
    deep.
    """
    names = [str(part).lower() for part in candidate.path]
    averaged = any(mark in name for name in names for mark in AVERAGED)
    known = [PREFERRED.index(name) for name in names if name in PREFERRED]
    return (averaged, min(known, default=len(PREFERRED)), -candidate.tensors, len(names))


def plausible(ranked: list[Candidate]) -> tuple[Candidate, ...]:
    """The candidates that could be meant: not a random state or a table of means beside the weights."""
    largest = max((candidate.tensors for candidate in ranked), default=0)
    return tuple(candidate for candidate in ranked if 4 * candidate.tensors >= largest)


def beside(ranked: list[Candidate], found: Mapping[tuple[PathPart, ...], Mapping[Any, Any]]) -> Iterator[Fact]:
    """Facts about what has too few tensors for a set that could be meant, and yet many elements, and the names that
    layers give to theirs: the parts of one model, where its state_dict is nested, or the smaller network of two.

    ``found`` are the state_dicts themselves. Others are batches, tables of words, or what an optimizer keeps.
    """
    sets = set(plausible(ranked))
    for candidate in ranked:
        is_large = SHARE * candidate.numel >= ranked[0].numel
        if candidate not in sets and is_large and any(map(_is_of_layer, found[candidate.path])):
            yield Fact.of(Kind.WEIGHTS_BESIDE, candidate.name, tensors=candidate.tensors, numel=candidate.numel)


def _is_of_layer(key: Any) -> bool:
    return isinstance(key, str) and key.rpartition(".")[2] in ("weight", "bias")
