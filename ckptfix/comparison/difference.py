"""The outcome of a comparison, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ckptfix.core.display import Displayed
from ckptfix.core.report import REPORT_VERSION, plain
from ckptfix.core.spec import TensorSpec

Ties = tuple[tuple[str, ...], ...]
"""Groups of keys that are one tensor."""

Texts = Mapping[str, tuple[str | None, str | None]]
"""What stands at a place in A and in B, in words; None where a side has nothing there."""


@dataclass(frozen=True)
class Side:
    """One of the two checkpoints, in figures.

    ``damaged`` are the keys whose bytes fail their checksum: what is said of their values is not about what was saved.
    ``lost`` are the keys whose bytes are gone from a file that was opened to be salvaged."""

    source: str
    format: str
    container: str
    tensors: int
    numel: int
    damaged: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gap:
    """How far the numbers of two tensors of one shape are apart.

    ``differing`` of ``numel`` elements have other bytes, or other values where the dtypes differ; ``first`` is the
    row-major index of the first of them. ``absolute`` is the greatest |a - b|, ``relative`` the greatest
    |a - b| / max(|a|, |b|), both over the elements that are finite on both sides; ``ulp`` counts the representable
    numbers between two floats of one dtype, None for all others. ``nonfinite`` counts the elements that are NaN or
    infinite on one side and not the same thing on the other. ``is_close`` says that every element is within the
    tolerance that was asked for. ``unread`` says why the values could not be compared."""

    numel: int
    differing: int = 0
    first: int | None = None
    absolute: float = 0.0
    relative: float = 0.0
    ulp: int | None = None
    nonfinite: int = 0
    is_close: bool = False
    unread: str = ""

    @property
    def is_equal(self) -> bool:
        """Whether no element differs."""
        return not self.differing and not self.unread


@dataclass(frozen=True)
class Pair:
    """A tensor that both sides have under one name."""

    key: str
    a: TensorSpec
    b: TensorSpec


@dataclass(frozen=True)
class Difference(Displayed):
    """All that is different between checkpoint A and checkpoint B.

    ``renamed`` maps keys of A to the keys of B that hold the same bytes, ``shapes`` and ``dtypes`` are pairs of one
    name whose specs differ, ``values`` those whose numbers differ (a cast shows under ``dtypes`` and, where it
    rounded, here). ``entries`` are entries of the state_dicts that are no tensors, ``metadata`` rows of ``_metadata``,
    ``extras`` what lies beside the state_dicts, each with the text of both sides, None for what one side does not have.
    ``equal`` counts the tensors that are equal bit for bit under one name, ``cast`` those of the same values in another
    dtype, ``close`` those within the tolerance.
    ``values_compared`` is False under ``--no-values``: then only names and specs were compared."""

    a: Side
    b: Side
    only_a: Mapping[str, TensorSpec]
    only_b: Mapping[str, TensorSpec]
    renamed: Mapping[str, str] = field(default_factory=dict)
    shapes: tuple[Pair, ...] = ()
    dtypes: tuple[Pair, ...] = ()
    values: tuple[tuple[Pair, Gap], ...] = ()
    ties_a: Ties = ()
    ties_b: Ties = ()
    entries: Texts = field(default_factory=dict)
    metadata: Texts = field(default_factory=dict)
    extras: Texts = field(default_factory=dict)
    equal: int = 0
    close: int = 0
    cast: int = 0
    values_compared: bool = True

    def __repr__(self) -> str:
        names = ("only_a", "only_b", "renamed", "shapes", "dtypes", "values", "entries", "metadata", "extras")
        found = ", ".join(f"{len(getattr(self, name))} {name}" for name in names if getattr(self, name))
        return f"<Difference of {self.a.source} and {self.b.source}: {found or ('none' if self.is_empty else 'ties')}>"

    @property
    def is_empty(self) -> bool:
        """Whether the two hold the same."""
        parts: tuple[Any, ...] = (self.only_a, self.only_b, self.renamed, self.shapes, self.dtypes, self.values)
        return not any((*parts, self.ties_a, self.ties_b, self.entries, self.metadata, self.extras))

    @property
    def exit_code(self) -> int:
        """0 where nothing differs, 1 where something does, as ``diff`` has it."""
        return 0 if self.is_empty else 1


def difference_to_json(difference: Difference) -> dict[str, Any]:
    """The comparison as a JSON object of plain data."""
    return {
        "version": REPORT_VERSION,
        "exit_code": difference.exit_code,
        "a": asdict(difference.a),
        "b": asdict(difference.b),
        "values_compared": difference.values_compared,
        "equal": difference.equal,
        "close": difference.close,
        "cast": difference.cast,
        "only_a": {key: _spec(spec) for key, spec in difference.only_a.items()},
        "only_b": {key: _spec(spec) for key, spec in difference.only_b.items()},
        "renamed": dict(difference.renamed),
        "shapes": {pair.key: _pair(pair) for pair in difference.shapes},
        "dtypes": {pair.key: _pair(pair) for pair in difference.dtypes},
        "values": {pair.key: _gap(gap) for pair, gap in difference.values},
        "ties_a": [list(group) for group in difference.ties_a],
        "ties_b": [list(group) for group in difference.ties_b],
        "entries": _texts(difference.entries),
        "metadata": _texts(difference.metadata),
        "extras": _texts(difference.extras),
    }


def _spec(spec: TensorSpec) -> Any:
    return {"dtype": spec.dtype, "shape": list(spec.shape), "layout": spec.layout}


def _pair(pair: Pair) -> Any:
    return {"a": _spec(pair.a), "b": _spec(pair.b)}


def _gap(gap: Gap) -> Any:
    return plain({name: value for name, value in asdict(gap).items() if name != "is_close"})


def _texts(texts: Texts) -> Any:
    return {place: {"a": a, "b": b} for place, (a, b) in texts.items()}
