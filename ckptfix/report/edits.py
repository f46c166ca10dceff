"""The edits of a plan in few lines: ``rename 122 keys: module.{…} → {…}``."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, takewhile
from typing import Any, TypeVar

from ckptfix.core.edits import (
    Adapt,
    Assemble,
    Cast,
    Dequantise,
    Disarm,
    Drop,
    Edit,
    Fill,
    Fold,
    MergeAdapter,
    Moments,
    Omit,
    Plain,
    Regroup,
    Rename,
    RenameModule,
    Replace,
    Retag,
    Rewrite,
    Tie,
    Zero,
)
from ckptfix.core.finding import counted
from ckptfix.core.parts import extent
from ckptfix.core.rename_map import CERTAIN, RenameMap
from ckptfix.core.wording import folded_places
from ckptfix.report.key_lists import folded_lines
from ckptfix.report.style import at_most, elements, tensor_text

_ANY = "{…}"
_INDENT = "  "

E = TypeVar("E", bound=Edit)
K = TypeVar("K")


def edit_lines(edits: Sequence[Edit], limit: int | None = 12) -> list[str]:
    """Return lines that say what the edits do, grouped by kind in the order of ``LINES``.

    A key list is folded, indented below its line, and cut to ``limit`` lines."""
    lines: list[str] = []
    for kind, lines_of in LINES.items():
        if found := _of(edits, kind):
            lines += lines_of(found, limit)
    for place, edit in enumerate(edits):
        if isinstance(edit, Regroup):
            its_own = takewhile(lambda each: not isinstance(each, Regroup), edits[place + 1 :])
            lines += _optimizer_lines(edit, _of(its_own, Moments), limit)
    return lines + [f"leave out {edit.where}" for edit in _of(edits, Omit)]


def _optimizer_lines(regroup: Regroup, moments: Sequence[Moments], limit: int | None) -> Iterator[str]:
    groups = counted(len(regroup.like), "group")
    where = "" if regroup.where == "optimizer" else f" in {regroup.where}"
    yield f"match the optimizer{where} to the weights: {counted(len(moments), 'parameter')} in {groups}"
    if regroup.order:
        yield f"{_INDENT}put {len(regroup.order)} keys of the state_dict into model order"
    parted = [edit.key for edit in moments if edit.parts]
    yield from _key_lines(f"{_INDENT}assemble the state of {{}} as the weights", parted, limit)
    shaped = [edit.key for edit in moments if edit.shape and edit.source is not None]
    yield from _key_lines(f"{_INDENT}reshape the state of {{}}", shaped, limit)
    anew = [edit.key for edit in moments if edit.source is None and not edit.parts]
    yield from _key_lines(f"{_INDENT}start the state of {{}} anew", anew, limit)


def _change(edit: MergeAdapter) -> str:
    """Return the heading of keys that adapters change in the same way, with ``{}`` for their number."""
    names = dict.fromkeys(
        delta.source.replace("{", "{{").replace("}", "}}") or "its own adapter" for delta in edit.deltas
    )
    if edit.undo:
        return f"remove {', '.join(names)} from {{}}"
    if {delta.form for delta in edit.deltas} <= {"whole", "rows"}:
        return f"replace {{}}{' in part' * (edit.deltas[-1].form == 'rows')} by those of {', '.join(names)}"
    return f"merge {', '.join(names)} into {{}}"


def map_lines(rename_map: RenameMap) -> Iterator[str]:
    """Yield the rules of a map, labelled if they are not certain, the keys that no rule names, and the proof."""
    for rule in rename_map.rules:
        others = f"; or from {', '.join(rule.alternatives)}" if rule.alternatives else ""
        yield f"{rule}{f'  ({rule.label}{others})' if rule.label not in ('', CERTAIN) else ''}"
    yield from _key_lines("no source for {} of the target", rename_map.missing, 12)
    yield from _key_lines("nothing in the target takes {} of the source", rename_map.unused, 12)
    if rename_map.proof is not None:
        yield str(rename_map.proof)


def _alike(edits: Iterable[E], pattern: Callable[[E], tuple[str, str]]) -> Iterator[list[E]]:
    """Yield groups of edits whose patterns differ only in the numbers of layers."""
    yield from (group for _, group in _grouped(edits, lambda edit: _numbered([pattern(edit), ("", "")])))


def _numbered(patterns: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Return the first of several patterns; if they differ, with ``{n}`` for each number that both its sides have."""
    old, new = patterns[0]
    numbers = [[segment for segment in side.split(".") if segment.isdigit()] for side in (old, new)]
    if numbers[0] != numbers[1] or len(set(patterns)) == 1:
        return old, new
    names = iter("nmklij")
    for _ in numbers[0]:
        name = f"{{{next(names, 'n')}}}"
        old, new = (re.sub(r"(?<![^.])\d+(?![^.])", name, side, count=1) for side in (old, new))
    return old, new


def _how(edit: Assemble, users: Mapping[str, int]) -> str:
    """Return in parentheses how a tensor is made of its parts; an empty text if it is only renamed."""
    words = []
    sources = dict.fromkeys(part.source for part in edit.parts)
    if len(sources) > 1:
        words.append(f"of {len(sources)} tensors")
    if any(extent(part.box) != extent(part.place) and not part.axes for part in edit.parts):
        words.append("reshaped")
    if any(users[source] > 1 for source in sources):
        words.append("split")
    if any(part.axes for part in edit.parts):
        words.append("transposed")
    return f" ({', '.join(words)})" if words else ""


def rename_pattern(key: str, to: str) -> tuple[str, str]:
    """Return both sides of a rename, with each run of unchanged segments as ``{…}``.

    ``module.a.b`` to ``a.b`` is ``module.{…}`` to ``{…}``, ``a._orig_mod.b`` to ``a.b`` is ``{…}._orig_mod.{…}`` to
    ``{…}.{…}``, and ``a_b_c`` to ``a.b_c`` is ``{…}_{…}`` to ``{…}.{…}``."""
    old, new = key.split("."), to.split(".")
    spelling = re.sub(r"[./]", "_", to)
    if len(old) == 1 < len(new) and key.replace("/", "_").endswith(spelling):
        between = "/" if "/" in key else "_"
        return f"{key[: -len(to)]}{_ANY}{between}{_ANY}", f"{_ANY}.{_ANY}"
    if (kept := _subsequence(new, old)) is not None:
        return _pattern(old, kept), _pattern(new, [True] * len(new), breaks=_breaks(kept))
    if (kept := _subsequence(old, new)) is not None:
        return _pattern(old, [True] * len(old), breaks=_breaks(kept)), _pattern(new, kept)
    first = _same(old, new)
    last = _same(old[first:][::-1], new[first:][::-1])
    ends = (_pattern(side, [n < first or n >= len(side) - last for n in range(len(side))]) for side in (old, new))
    return next(ends), next(ends)


def _same(old: list[str], new: list[str]) -> int:
    """Return the length of the common prefix of two keys, in segments."""
    unlike = (n for n, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1])
    return next(unlike, min(len(old), len(new)))


def _subsequence(short: list[str], long: list[str]) -> list[bool] | None:
    """Return which segments of ``long`` form ``short``, matched from the end; None if it is not a subsequence."""
    kept = [False] * len(long)
    position = len(short) - 1
    for n in reversed(range(len(long))):
        if position >= 0 and long[n] == short[position]:
            kept[n] = True
            position -= 1
    return kept if position < 0 else None


def _breaks(kept: list[bool]) -> set[int]:
    """Return the positions in the list of kept segments before which something was left out."""
    places = [n for n, is_kept in enumerate(kept) if is_kept]
    return {number for number, (last, place) in enumerate(pairwise(places), 1) if place > last + 1}


def _pattern(segments: list[str], kept: Sequence[bool], breaks: Iterable[int] = ()) -> str:
    breaks = set(breaks)
    parts: list[str] = []
    for n, (segment, is_kept) in enumerate(zip(segments, kept, strict=True)):
        if not is_kept:
            parts.append(segment)
        elif n == 0 or not kept[n - 1] or n in breaks:
            parts.append(_ANY)
    return ".".join(parts)


def _supplied_lines(verb: str, origin: str, fills: Sequence[Fill | Replace], limit: int | None) -> list[str]:
    numel = sum(math.prod(edit.shape) for edit in fills)
    source = {
        "zeros": "with zeros",
        "target": "from the initial values of the target (not trained)",
        "formula": "by the formula of the target",
        "donor": "from the donor file",
        "adapter": "from the adapter",
        "tie": "from the old values of the tensor it was tied to",
        "part": "from another set of weights in the file",
    }.get(origin, f"from {origin}")
    specs = {edit.key: tensor_text(edit.dtype, edit.shape) for edit in fills}
    return _key_lines(f"{verb} {{}} ({elements(numel)}) {source}", specs, limit, specs.__getitem__)


def _key_lines(
    head: str, keys: Iterable[str], limit: int | None, spec: Callable[[str], str] | None = None
) -> list[str]:
    """Return ``head`` with the number of keys for ``{}``, and the folded keys after it, or indented below."""
    keys = list(keys)
    if not keys:
        return []
    text = head.format(counted(len(keys), "key"))
    folded = folded_lines(keys, limit, spec)
    if len(folded) == 1:
        return [f"{text}: {folded[0].removesuffix(f'  ({len(keys)})')}"]
    return [f"{text}:", *(_INDENT + line for line in folded)]


def _of(edits: Iterable[Edit], kind: type[E]) -> list[E]:
    return [edit for edit in edits if isinstance(edit, kind)]


def _grouped(edits: Iterable[E], key: Callable[[E], K]) -> Iterator[tuple[K, list[E]]]:
    """Yield the edits grouped by ``key``, in the order of first occurrence."""
    groups: dict[K, list[E]] = {}
    for edit in edits:
        groups.setdefault(key(edit), []).append(edit)
    yield from groups.items()


def _headed(head: Callable[[Any], str]) -> Callable[[Sequence[Any], int | None], Iterator[str]]:
    """Return a function that lists the keys of edits with the same ``head`` under it, with their number for ``{}``."""

    def lines(edits: Sequence[Any], limit: int | None) -> Iterator[str]:
        for text, alike in _grouped(edits, head):
            yield from _key_lines(text, (edit.key for edit in alike), limit)

    return lines


def _rename_lines(edits: Sequence[Rename], limit: int | None) -> Iterator[str]:
    for renames in _alike(edits, lambda edit: rename_pattern(edit.key, edit.to)):
        change = _numbered([rename_pattern(edit.key, edit.to) for edit in renames])
        yield f"rename {counted(len(renames), 'key')}: {change[0]} → {change[1]}"
        if limit is None:
            yield from (f"{_INDENT}{edit.key} → {edit.to}" for edit in renames)


def _module_lines(edits: Sequence[RenameModule], limit: int | None) -> Iterator[str]:
    for change, modules in _grouped(edits, lambda edit: rename_pattern(edit.module, edit.to)):
        yield f"rename {counted(len(modules), 'row')} of _metadata: {change[0]} → {change[1]}"


def _tie_lines(edits: Sequence[Tie], limit: int | None) -> Iterator[str]:
    for ties in _alike(edits, lambda edit: rename_pattern(edit.key, edit.to)):
        if len(ties) == 1 or limit is None:
            yield from (f"tie {edit.key} to {edit.to}" for edit in ties)
        else:
            name, to = _numbered([rename_pattern(edit.key, edit.to) for edit in ties])
            yield f"tie {counted(len(ties), 'key')}: {name} to {to}"


def _plain_lines(edits: Sequence[Plain], limit: int | None) -> Iterator[str]:
    lines = []
    for (before, after), alike in _grouped(edits, lambda edit: (edit.before, edit.after)):
        places = [edit.where for edit in alike]
        lines += [
            f"turn {before} into {after}{'' if place == '.' else f' at {place}'}"
            for place in (folded_places(places) if limit else places)
        ]
    shown = at_most(lines, limit)
    yield from shown
    if rest := len(lines) - len(shown):
        yield f"… and {counted(rest, 'more place')}"


def _assemble_lines(edits: Sequence[Assemble], limit: int | None) -> Iterator[str]:
    reshapes = _headed(lambda edit: f"reshape {{}} from {list(extent(edit.parts[0].box))} to {list(edit.shape)}")
    yield from reshapes([edit for edit in edits if edit.is_reshape], limit)
    edits = [edit for edit in edits if not edit.is_reshape]
    users = Counter(part.source for edit in edits for part in edit.parts)
    own = [edit for edit in edits if edit.parts[0].source == edit.key]
    yield from _headed(lambda edit: f"assemble {{}}{_how(edit, users)}")(own, limit)
    renamed = [edit for edit in edits if edit.parts[0].source != edit.key]
    for made in _alike(renamed, lambda edit: rename_pattern(edit.parts[0].source, edit.key)):
        change = _numbered([rename_pattern(edit.parts[0].source, edit.key) for edit in made])
        yield f"assemble {counted(len(made), 'key')}: {change[0]} → {change[1]}{_how(made[0], users)}"


def _replace_lines(edits: Sequence[Replace], limit: int | None) -> Iterator[str]:
    measures = _headed(lambda edit: f"measure {{}} of running statistics on {edit.source}")
    yield from measures([edit for edit in edits if edit.origin == "data"], limit)
    resets = [edit for edit in edits if edit.origin in ("zeros", "ones")]
    yield from _key_lines("reset {} of running statistics", (edit.key for edit in resets), limit)
    replaced = [edit for edit in edits if edit.origin not in ("zeros", "ones", "data")]
    for (origin, place), replaces in _grouped(replaced, lambda edit: (edit.origin, edit.place)):
        source = place or "its twin in the same state_dict" if origin == "twin" else origin
        yield from _supplied_lines("replace", source, replaces, limit)


def _adapt_lines(edits: Sequence[Adapt], limit: int | None) -> Iterator[str]:
    for (recipe, grids), adapts in _grouped(edits, lambda edit: (edit.recipe, tuple(edit.grids))):
        old, new = ("x".join(map(str, side)) for side in (grids[: len(grids) // 2], grids[len(grids) // 2 :]))
        how = f"{recipe}, {old} → {new}" if grids else recipe
        numel = sum(math.prod(edit.shape) for edit in adapts)
        specs = {edit.key: f"{list(edit.before)} → {list(edit.shape)}" for edit in adapts}
        yield from _key_lines(f"adapt {{}} ({elements(numel)}) by {how}", specs, limit, specs.__getitem__)


# How the edits of each kind are listed, in the order of the report; those of optimizers come last.
LINES: Mapping[type[Edit], Callable[[Sequence[Any], int | None], Iterable[str]]] = {
    Rename: _rename_lines,
    RenameModule: _module_lines,
    Assemble: _assemble_lines,
    Drop: _headed(lambda edit: "drop {}"),
    Fill: lambda edits, limit: [
        line
        for origin, fills in _grouped(edits, lambda edit: edit.origin)
        for line in _supplied_lines("fill", origin, fills, limit)
    ],
    Replace: _replace_lines,
    MergeAdapter: _headed(_change),
    Zero: _headed(lambda edit: f"set the {edit.which} values of {{}} to zero"),
    Adapt: _adapt_lines,
    Tie: _tie_lines,
    Cast: _headed(lambda edit: f"cast {{}} from {edit.before} to {edit.dtype}"),
    Fold: _headed(lambda edit: f"compute {{}} from their parts ({edit.form})"),
    Dequantise: _headed(lambda edit: f"multiply the codes of {{}} by their scales ({edit.scheme})"),
    Plain: _plain_lines,
    Retag: lambda edits, limit: [f"retag tensors from {edit.device} to {edit.to}" for edit in edits],
    Disarm: lambda edits, limit: ["drop everything except the tensors of the state_dict"],
    Rewrite: lambda edits, limit: [f"rewrite the file: it {edit.cause}" for edit in edits],
}
