"""The comparison for people: what is different, folded, and how much is the same."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ckptfix.comparison.difference import Difference, Gap, Pair, Side, Texts, Ties
from ckptfix.core.edits import Rename
from ckptfix.core.finding import counted
from ckptfix.core.spec import TensorSpec
from ckptfix.report.edits import edit_lines
from ckptfix.report.figures import elements, tensor_text
from ckptfix.report.folding import folded_lines
from ckptfix.report.style import Line, Span

_SHOWN = 12
_NOTHING = "nothing"
_FAR = 1_000_000  # ULP: beyond it their number says less than the relative difference
_INDEX = re.compile(r"\[(\d+)\]")


def difference_lines(difference: Difference, verbose: bool = False) -> Iterator[Line]:
    """The whole comparison; ``verbose`` cuts no list."""
    limit = None if verbose else _SHOWN
    for name, side in (("A", difference.a), ("B", difference.b)):
        yield _side_line(name, side)
        yield from _damage(side, limit)
    yield from _keys("only in A", difference.only_a, limit)
    yield from _keys("only in B", difference.only_b, limit)
    if difference.renamed:
        renames = [Rename(key, to) for key, to in difference.renamed.items()]
        yield (Span(f"renamed, with the same bytes: {counted(len(renames), 'tensor')}", "warning"),)
        yield from (f"  {line}" for line in edit_lines(renames, limit))
    yield from _pairs("another shape", difference.shapes, limit)
    yield from _pairs("another dtype or layout", difference.dtypes, limit)
    yield from _values([item for item in difference.values if not item[1].unread], limit)
    yield from _unread([item for item in difference.values if item[1].unread], limit)
    yield from _ties("tied only in A", difference.ties_a, limit)
    yield from _ties("tied only in B", difference.ties_b, limit)
    yield from _texts("entries that are no tensors", difference.entries, limit)
    yield from _texts("_metadata", difference.metadata, limit)
    yield from _texts("beside the state_dict", difference.extras, limit)
    yield from _closing(difference)


def _side_line(name: str, side: Side) -> Line:
    place = "" if side.container == "." else f", state_dict at {side.container}"
    return (
        Span(f"{name}  {side.source}", "strong"),
        f": {side.format}{place}, {counted(side.tensors, 'tensor')}, {elements(side.numel)}",
    )


def _damage(side: Side, limit: int | None) -> Iterator[Line]:
    if side.damaged:
        text = f"damaged: {counted(len(side.damaged), 'tensor')} with other bytes than were saved (checksum)"
        yield ("   ", Span(text, "error"))
        yield from (f"     {line}" for line in folded_lines(side.damaged, limit))
    if side.lost:
        yield ("   ", Span(f"damaged: the bytes of {counted(len(side.lost), 'tensor')} are gone", "error"))
        yield from (f"     {line}" for line in folded_lines(side.lost, limit))


def _closing(difference: Difference) -> Iterator[Line]:
    if not difference.values_compared:
        yield "values: not compared (--no-values); a renamed key shows as gone on one side and new on the other"
    else:
        close = f", {difference.close} more within the tolerance" if difference.close else ""
        renamed = f", {len(difference.renamed)} of them renamed" if difference.renamed else ""
        equal = counted(difference.equal + len(difference.renamed), "tensor")
        cast = f", {difference.cast} more of the same values in another dtype" if difference.cast else ""
        yield f"equal bit for bit: {equal}{renamed}{cast}{close}"
    if difference.is_empty:
        same = "no difference" if difference.values_compared else "no difference in names and specs"
        yield (Span(same, "good"),)


def _keys(title: str, specs: Mapping[str, TensorSpec], limit: int | None) -> Iterator[Line]:
    if specs:
        numel = sum(spec.numel for spec in specs.values())
        yield (Span(f"{title}: {counted(len(specs), 'tensor')}, {elements(numel)}", "warning"),)
        yield from (f"  {line}" for line in folded_lines(specs, limit, lambda key: _spec_text(specs[key])))


def _pairs(title: str, pairs: Sequence[Pair], limit: int | None) -> Iterator[Line]:
    if pairs:
        texts = {pair.key: f"{_spec_text(pair.a)} → {_spec_text(pair.b)}" for pair in pairs}
        yield (Span(f"{title}: {counted(len(pairs), 'tensor')}", "warning"),)
        yield from (f"  {line}" for line in folded_lines(texts, limit, texts.__getitem__))


def _values(gaps: Sequence[tuple[Pair, Gap]], limit: int | None) -> Iterator[Line]:
    """The farthest apart first: one line for each tensor, then the rest in one."""
    if not gaps:
        return
    yield (Span(f"other values: {counted(len(gaps), 'tensor')}", "warning"),)
    ordered = sorted(gaps, key=lambda item: (-item[1].nonfinite, -item[1].relative))
    shown = ordered if limit is None or len(ordered) <= limit else ordered[: limit - 1]
    width = max(len(pair.key) for pair, _ in shown)
    for pair, gap in shown:
        yield f"  {pair.key:{width}}  {_gap_text(gap)}"
    if len(shown) < len(ordered):
        rest = ordered[len(shown) :]
        farthest = max(gap.relative for _, gap in rest)
        yield f"  … and {len(rest)} more, at most {farthest:.3g} relative (-v)"


def _unread(gaps: Sequence[tuple[Pair, Gap]], limit: int | None) -> Iterator[Line]:
    if gaps:
        texts = {pair.key: gap.unread for pair, gap in gaps}
        yield (Span(f"values not compared: {counted(len(gaps), 'tensor')}", "warning"),)
        yield from (f"  {line}" for line in folded_lines(texts, limit, texts.__getitem__))


def _gap_text(gap: Gap) -> str:
    parts = [f"max abs {gap.absolute:.3g}, relative {gap.relative:.3g}"]
    if gap.nonfinite >= gap.differing:
        parts = []  # there are no two numbers to measure
    elif not (gap.absolute or gap.nonfinite) and gap.ulp is not None:
        parts = ["the same numbers in other bits: 0 and -0, or NaN and NaN"]
    elif gap.ulp is not None and gap.ulp < _FAR:
        parts.append(f"{gap.ulp} ULP")
    count = "all" if gap.differing == gap.numel else f"{gap.differing} of {gap.numel}"
    parts.append(f"{count} elements" if gap.numel > 1 else "its element")
    if gap.nonfinite:
        parts.append(f"{gap.nonfinite} NaN or infinite on one side")
    return ", ".join(parts)


def _ties(title: str, groups: Ties, limit: int | None) -> Iterator[Line]:
    yield from _section(title, [" = ".join(group) for group in groups], limit)


def _texts(title: str, texts: Texts, limit: int | None) -> Iterator[Line]:
    """Places that went from the same text to the same text come together in one folded line."""
    if not texts:
        return
    # Indices fold as segments do: optimizer.state.{0…73}.exp_avg.
    lines = {_INDEX.sub(r".\1", place): _change(a or _NOTHING, b or _NOTHING) for place, (a, b) in texts.items()}
    yield (Span(f"{title}: {counted(len(texts), 'place')}", "warning"),)
    yield from (f"  {line}" for line in folded_lines(lines, limit, lambda place: lines[place]))


def _change(a: str, b: str) -> str:
    return b if b == f"{a}, other values" else f"{a} → {b}"


def _section(title: str, lines: Iterable[str], limit: int | None) -> Iterator[Line]:
    lines = list(lines)
    if lines:
        yield (Span(f"{title}: {len(lines)}", "warning"),)
        shown = lines if limit is None or len(lines) <= limit else lines[: limit - 1]
        yield from (f"  {line}" for line in shown)
        if len(shown) < len(lines):
            yield f"  … and {len(lines) - len(shown)} more (-v)"


def _spec_text(spec: TensorSpec) -> str:
    text = tensor_text(spec.dtype, spec.shape)
    return text if spec.layout == "strided" else f"{text} {spec.layout}"
