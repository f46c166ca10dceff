"""The result of a comparison as data, as text and as JSON."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import asdict

from ckptfix.core.display import Displayed
from ckptfix.core.edits import Rename
from ckptfix.core.finding import counted
from ckptfix.core.report import REPORT_VERSION, plain
from ckptfix.core.spec import TensorSpec
from ckptfix.report.edits import edit_lines
from ckptfix.report.key_lists import folded_lines
from ckptfix.report.style import Line, Span, at_most, elements, spec_text

Ties = tuple[tuple[str, ...], ...]  # groups of keys that are one tensor

# Descriptions of what A and B have at each place; None if a side has nothing there.
Texts = Mapping[str, tuple[str | None, str | None]]


class Side(Struct, frozen=True):
    """A summary of one of the two checkpoints.

    ``damaged`` are the keys whose bytes fail their checksum, so that their values differ from what was saved. ``lost``
    are the keys whose bytes are gone from a file that was opened for salvage."""

    source: str
    format: str
    container: str
    tensors: int
    numel: int
    damaged: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


class Gap(Struct, frozen=True):
    """How far apart the values of two tensors of the same shape are.

    ``differing`` of ``numel`` elements have different bytes, or different values if the dtypes differ; ``first`` is the
    row-major index of the first of them. ``absolute`` is the maximum |a - b|, ``relative`` the maximum
    |a - b| / max(|a|, |b|), both over the elements that are finite on both sides; ``ulp`` is the maximum distance in
    representable numbers between floats of one dtype, None for other dtypes. ``nonfinite`` counts the elements that are
    NaN or infinite on one side and not the same on the other. ``is_close`` is whether every element is within the
    requested tolerance. ``unread`` says why the values could not be compared."""

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


class Pair(Struct, frozen=True):
    """The tensors of both sides under one name."""

    key: str
    a: TensorSpec
    b: TensorSpec


class Difference(Displayed, Struct, frozen=True):
    """All differences between checkpoint A and checkpoint B.

    ``renamed`` maps keys of A to the keys of B with the same bytes. ``shapes`` and ``dtypes`` are pairs whose specs
    differ, ``values`` those whose values differ (a cast is in ``dtypes`` and, if it rounded, here too). ``entries`` are
    entries of the state_dicts that are not tensors, ``metadata`` rows of ``_metadata``, ``extras`` what is outside the
    state_dicts, each with the text of both sides, None if a side has nothing. ``equal`` counts the pairs that are
    bit-identical, ``cast`` those with the same values in another dtype, ``close`` those within the tolerance.
    ``values_compared`` is False with ``--no-values``: then only names and specs were compared."""

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
        """Whether there are no differences."""
        parts: tuple[Any, ...] = (self.only_a, self.only_b, self.renamed, self.shapes, self.dtypes, self.values)
        return not any((*parts, self.ties_a, self.ties_b, self.entries, self.metadata, self.extras))

    @property
    def exit_code(self) -> int:
        """0 if nothing differs, else 1, like the ``diff`` command."""
        return 0 if self.is_empty else 1


def difference_to_json(difference: Difference) -> dict[str, Any]:
    """Return the comparison as a JSON object of plain data."""
    names = ("values_compared", "equal", "close", "cast", "renamed")
    data: dict[str, Any] = {"version": REPORT_VERSION, "exit_code": difference.exit_code}
    data |= {name: getattr(difference, name) for name in names}
    for name in ("a", "b"):
        data[name] = asdict(getattr(difference, name))
    for name in ("only_a", "only_b"):
        data[name] = {key: _spec(spec) for key, spec in getattr(difference, name).items()}
    for name in ("shapes", "dtypes"):
        data[name] = {pair.key: {"a": _spec(pair.a), "b": _spec(pair.b)} for pair in getattr(difference, name)}
    for name in ("ties_a", "ties_b"):
        data[name] = [list(group) for group in getattr(difference, name)]
    for name in ("entries", "metadata", "extras"):
        data[name] = {place: {"a": a, "b": b} for place, (a, b) in getattr(difference, name).items()}
    gaps = {pair.key: asdict(gap) for pair, gap in difference.values}
    data["values"] = plain({key: {n: v for n, v in gap.items() if n != "is_close"} for key, gap in gaps.items()})
    return data


def _spec(spec: TensorSpec) -> Any:
    return {"dtype": spec.dtype, "shape": list(spec.shape), "layout": spec.layout}


_SHOWN = 12
_NOTHING = "nothing"
_FAR = 1_000_000  # ULP; above this, the relative difference says more
_INDEX = re.compile(r"\[(\d+)\]")


def difference_lines(difference: Difference, verbose: bool = False) -> Iterator[Line]:
    """Yield the comparison as lines of text; lists are truncated unless ``verbose``."""
    limit = None if verbose else _SHOWN
    for name, side in (("A", difference.a), ("B", difference.b)):
        yield _side_line(name, side)
        yield from _damage(side, limit)
    for name, specs in (("A", difference.only_a), ("B", difference.only_b)):
        numel = elements(sum(spec.numel for spec in specs.values()))
        title = f"only in {name}: {counted(len(specs), 'tensor')}, {numel}"
        yield from _folded(title, {key: spec_text(spec) for key, spec in specs.items()}, limit)
    if difference.renamed:
        renames = [Rename(key, to) for key, to in difference.renamed.items()]
        yield (Span(f"renamed, with the same bytes: {counted(len(renames), 'tensor')}", "warning"),)
        yield from (f"  {line}" for line in edit_lines(renames, limit))
    for title, pairs in (("different shape", difference.shapes), ("different dtype or layout", difference.dtypes)):
        texts = {pair.key: f"{spec_text(pair.a)} → {spec_text(pair.b)}" for pair in pairs}
        yield from _folded(f"{title}: {counted(len(pairs), 'tensor')}", texts, limit)
    yield from _values([item for item in difference.values if not item[1].unread], limit)
    unread = {pair.key: gap.unread for pair, gap in difference.values if gap.unread}
    yield from _folded(f"values not compared: {counted(len(unread), 'tensor')}", unread, limit)
    for name, ties in (("A", difference.ties_a), ("B", difference.ties_b)):
        yield from _section(f"tied only in {name}", [" = ".join(group) for group in ties], limit)
    yield from _texts("entries that are not tensors", difference.entries, limit)
    yield from _texts("_metadata", difference.metadata, limit)
    yield from _texts("outside the state_dict", difference.extras, limit)
    yield from _closing(difference)


def _side_line(name: str, side: Side) -> Line:
    place = "" if side.container == "." else f", state_dict at {side.container}"
    return (
        Span(f"{name}  {side.source}", "strong"),
        f": {side.format}{place}, {counted(side.tensors, 'tensor')}, {elements(side.numel)}",
    )


def _damage(side: Side, limit: int | None) -> Iterator[Line]:
    if side.damaged:
        text = f"damaged: {counted(len(side.damaged), 'tensor')} with wrong bytes (checksum)"
        yield ("   ", Span(text, "error"))
        yield from (f"     {line}" for line in folded_lines(side.damaged, limit))
    if side.lost:
        yield ("   ", Span(f"damaged: the bytes of {counted(len(side.lost), 'tensor')} are gone", "error"))
        yield from (f"     {line}" for line in folded_lines(side.lost, limit))


def _closing(difference: Difference) -> Iterator[Line]:
    if not difference.values_compared:
        yield "values: not compared (--no-values); a renamed key shows as removed on one side and added on the other"
    else:
        close = f", {difference.close} more within the tolerance" if difference.close else ""
        renamed = f", {len(difference.renamed)} of them renamed" if difference.renamed else ""
        equal = counted(difference.equal + len(difference.renamed), "tensor")
        cast = f", {difference.cast} more of the same values in another dtype" if difference.cast else ""
        yield f"equal bit for bit: {equal}{renamed}{cast}{close}"
    if difference.is_empty:
        same = "no difference" if difference.values_compared else "no difference in names and specs"
        yield (Span(same, "good"),)


def _folded(title: str, texts: Mapping[str, str], limit: int | None) -> Iterator[Line]:
    """Yield a section of keys or places, each with its text; nothing if there are none."""
    if texts:
        yield (Span(title, "warning"),)
        yield from (f"  {line}" for line in folded_lines(texts, limit, texts.__getitem__))


def _values(gaps: Sequence[tuple[Pair, Gap]], limit: int | None) -> Iterator[Line]:
    """Yield a line per tensor, the largest differences first, and one line for the rest."""
    if not gaps:
        return
    yield (Span(f"different values: {counted(len(gaps), 'tensor')}", "warning"),)
    ordered = sorted(gaps, key=lambda item: (-item[1].nonfinite, -item[1].relative))
    shown = at_most(ordered, limit)
    width = max(len(pair.key) for pair, _ in shown)
    for pair, gap in shown:
        yield f"  {pair.key:{width}}  {_gap_text(gap)}"
    if len(shown) < len(ordered):
        rest = ordered[len(shown) :]
        farthest = max(gap.relative for _, gap in rest)
        yield f"  … and {len(rest)} more, at most {farthest:.3g} relative (-v)"


def _gap_text(gap: Gap) -> str:
    parts = [f"max abs {gap.absolute:.3g}, relative {gap.relative:.3g}"]
    if gap.nonfinite >= gap.differing:
        parts = []  # there are no two numbers to measure
    elif not (gap.absolute or gap.nonfinite):
        parts = ["other bits" if gap.ulp is None else "equal numbers with different bits: 0 and -0, or NaN and NaN"]
    elif gap.ulp is not None and gap.ulp < _FAR:
        parts.append(f"{gap.ulp} ULP")
    count = "all" if gap.differing == gap.numel else f"{gap.differing} of {gap.numel}"
    parts.append(f"{count} elements" if gap.numel > 1 else "its element")
    if gap.nonfinite:
        parts.append(f"{gap.nonfinite} NaN or infinite on one side")
    return ", ".join(parts)


def _texts(title: str, texts: Texts, limit: int | None) -> Iterator[Line]:
    """Yield a section of places, folding those with the same change into one line."""
    # Written as segments, indices are folded too: optimizer.state.{0…73}.exp_avg.
    lines = {
        _INDEX.sub(r".\1", place): b if b == f"{a}, different values" else f"{a or _NOTHING} → {b or _NOTHING}"
        for place, (a, b) in texts.items()
    }
    yield from _folded(f"{title}: {counted(len(texts), 'place')}", lines, limit)


def _section(title: str, lines: Sequence[str], limit: int | None) -> Iterator[Line]:
    if lines:
        yield (Span(f"{title}: {len(lines)}", "warning"),)
        shown = at_most(lines, limit)
        yield from (f"  {line}" for line in shown)
        if len(shown) < len(lines):
            yield f"  … and {len(lines) - len(shown)} more (-v)"
