"""The comparison from top to bottom: open both files, pair the tensors, compare the pairs.

pair       by name, and the rest by bytes (renames)
specs      shapes and dtypes of the pairs
values     in blocks, so that no tensor is in memory as a whole; then the checksums of both files, if they have any
the rest   ties, entries that are not tensors, _metadata, everything outside the state_dict"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import islice, product

from ckptfix.bytes.checksums import is_sound
from ckptfix.comparison.difference import Difference, Pair, Side, Texts, Ties
from ckptfix.comparison.gap import EXACT, Tolerance, measure_gap, row_major_elements
from ckptfix.core.checkpoint import IN_MEMORY, Checkpoint, ContainerPath, path_name
from ckptfix.core.facts import Kind
from ckptfix.core.finding import counted
from ckptfix.core.metadata import rename_metadata
from ckptfix.core.objects import Global, Opaque
from ckptfix.core.progress import Task
from ckptfix.core.settings import Settings
from ckptfix.core.spec import TensorSpec, TypedShape, ties
from ckptfix.errors import UsageError
from ckptfix.reading.opening import Source, open_file, open_source
from ckptfix.reading.pickles.arrays import NumpyArray
from ckptfix.reading.weights.prefixed_sets import narrowed
from ckptfix.report.inspection import children, describe
from ckptfix.values.walk import OVERLAP


def find_renames(
    only_a: Mapping[str, TensorSpec], only_b: Mapping[str, TensorSpec], shared: Iterable[str] = ()
) -> Iterator[tuple[str, str]]:
    """Yield pairs of keys with the same bytes, in the order of A; ``shared`` are the keys of both sides, whose layers
    are the same. Raises ``UnreadableError`` for missing bytes."""
    kinds = {_kind(spec) for spec in only_a.values()} & {_kind(spec) for spec in only_b.values()}
    b_keys: dict[tuple[TypedShape, bytes], list[str]] = {}
    for key, digest in _digests(only_b, kinds):
        b_keys.setdefault(digest, []).append(key)
    a_keys: dict[tuple[TypedShape, bytes], list[str]] = {}
    for key, digest in _digests(only_a, kinds):
        if digest in b_keys:
            a_keys.setdefault(digest, []).append(key)
    sides = [(keys, b_keys[digest]) for digest, keys in a_keys.items()]
    certain = [(ours[0], theirs[0]) for ours, theirs in sides if len(ours) == len(theirs) == 1]
    votes: dict[Numbers, Counter[Numbers]] = {}
    for key, other in (*((key, key) for key in shared), *certain):
        votes.setdefault(_numbers(key), Counter())[_numbers(other)] += 1
    layers = {numbers: others.most_common(1)[0][0] for numbers, others in votes.items()}
    found = dict(pair for ours, theirs in sides for pair in _match(ours, theirs, layers))
    yield from ((key, found[key]) for key in only_a if key in found)


Numbers = tuple[str, ...]  # those in a key: which layer, which expert


def _numbers(key: str) -> Numbers:
    return tuple(segment for segment in key.split(".") if segment.isdecimal())


def _kind(spec: TensorSpec) -> TypedShape:
    return spec.dtype, spec.shape


def _digests(specs: Mapping[str, TensorSpec], kinds: set[TypedShape]) -> Iterator[tuple[str, tuple[TypedShape, bytes]]]:
    for key, spec in specs.items():
        start, stop = spec.extent if spec.storage is not None else (0, 0)
        plain = spec.storage is not None and spec.quantizer is None and not any(spec.math_bits.values())
        if plain and _kind(spec) in kinds and spec.nbytes <= OVERLAP * max(stop - start, 1):
            digest = blake2b(digest_size=16)
            for block in row_major_elements(spec) if spec.numel else ():
                digest.update(block.data.cast("B") if block.flags.c_contiguous else block.tobytes())
            yield key, (_kind(spec), digest.digest())


def _match(
    a_keys: Sequence[str], b_keys: Sequence[str], layers: Mapping[Numbers, Numbers]
) -> Iterator[tuple[str, str]]:
    """Pair keys with the same bytes (all norms may be ones): within a layer, whose numbers ``layers`` maps from A to B,
    before others; each time by the longest common suffix, then in order."""
    left, right = dict.fromkeys(a_keys), dict.fromkeys(b_keys)
    longest = min(max(key.count(".") + 1 for key in a_keys), _MAX_TAIL)
    for is_of_layer, length in product((True, False), range(longest, -1, -1)):
        by_tail: dict[tuple[Numbers | None, tuple[str, ...]], list[str]] = {}
        for key in reversed(right):
            by_tail.setdefault((_numbers(key) if is_of_layer else None, _tail(key, length)), []).append(key)
        for key in list(left):
            layer = layers.get(_numbers(key)) if is_of_layer else None
            if candidates := by_tail.get((layer, _tail(key, length))):
                other = candidates.pop()
                del left[key], right[other]
                yield key, other


_MAX_TAIL = 16


def _tail(key: str, length: int) -> tuple[str, ...]:
    return tuple(key.split(".")[-length:]) if length else ()


def diff(
    a: Source,
    b: Source,
    *,
    weights: str | None = None,
    other_weights: str | None = None,
    salvage: bool = False,
    values: bool = True,
    atol: float = 0.0,
    rtol: float = 0.0,
) -> Difference:
    """Compare two checkpoints, each a file or a state_dict, without loading a file as a whole or running its code.

    ``weights`` selects the state_dict of A by its name in the container, ``other_weights`` that of B (default: the same
    as A's). ``atol`` and ``rtol`` are tolerances as in ``torch.allclose``: a tensor within them counts as equal.
    ``values=False`` compares only names and specs, without reading a tensor. Raises ``UnreadableError`` for a file that
    cannot be read, and ``UsageError`` for an invalid tolerance."""
    if not (atol >= 0 and rtol >= 0 and atol < float("inf") and rtol < float("inf")):
        raise UsageError(f"the tolerances are {atol:g} and {rtol:g}; give finite numbers of at least 0")
    first, second = _opened(a, weights, salvage), _opened(b, other_weights or weights, salvage)
    is_one_source = a is b or (first.path == second.path and first.format != IN_MEMORY)
    return compare(first, second, values, Tolerance(atol, rtol), is_one_source)


def _opened(source: Source, weights: str | None, salvage: bool) -> Checkpoint:
    if isinstance(source, (str, os.PathLike)):
        return open_file(os.fspath(source), weights, salvage=salvage)
    return narrowed(open_source(source, Settings(weights=weights)))


def compare(a: Checkpoint, b: Checkpoint, values: bool, tolerance: Tolerance, is_one_source: bool) -> Difference:
    """Compare two open checkpoints. ``is_one_source``: they are two sets of weights of one file, each outside the
    other, so that only the sets are compared. Other arguments are those of ``diff``."""
    pairs = [Pair(key, spec, b.specs[key]) for key, spec in a.specs.items() if key in b.specs]
    only_a = {key: spec for key, spec in a.specs.items() if key not in b.specs}
    only_b = {key: spec for key, spec in b.specs.items() if key not in a.specs}
    renamed = dict(find_renames(only_a, only_b, [pair.key for pair in pairs])) if values else {}
    comparable = [pair for pair in pairs if pair.a.shape == pair.b.shape] if values else []
    task, gaps = Task(f"comparing {a.path}", sum(pair.a.nbytes for pair in comparable)), []
    for pair in comparable:
        gaps.append((pair, measure_gap(pair.a, pair.b, tolerance)))
        task.advance(pair.a.nbytes)
    ties_a, ties_b = _ties(a, b, renamed)
    return Difference(
        a=_side(a, values),
        b=_side(b, values),
        only_a={key: spec for key, spec in only_a.items() if key not in renamed},
        only_b={key: spec for key, spec in only_b.items() if key not in renamed.values()},
        renamed=renamed,
        shapes=tuple(pair for pair in pairs if pair.a.shape != pair.b.shape),
        dtypes=tuple(pair for pair in pairs if (pair.a.dtype, pair.a.layout) != (pair.b.dtype, pair.b.layout)),
        values=tuple((pair, gap) for pair, gap in gaps if not gap.is_equal and not gap.is_close),
        ties_a=ties_a,
        ties_b=ties_b,
        entries=compare_entries(a, b, values),
        metadata=compare_metadata(a, b, renamed),
        extras={} if is_one_source else compare_extras(a, b, values, tolerance),
        equal=sum(gap.is_equal and pair.a.dtype == pair.b.dtype for pair, gap in gaps),
        cast=sum(gap.is_equal and pair.a.dtype != pair.b.dtype for pair, gap in gaps),
        close=sum(gap.is_close for _, gap in gaps),
        values_compared=values,
    )


def _ties(a: Checkpoint, b: Checkpoint, renamed: Mapping[str, str]) -> tuple[Ties, Ties]:
    """Return the ties that only one side has, under the names of B, among tensors on both sides."""
    left = [tuple(renamed.get(key, key) for key in group) for group in ties(a.specs)]
    right = ties(b.specs)
    both = {renamed.get(key, key) for key in a.specs} & b.specs.keys()
    ours, theirs = (
        dict.fromkeys(tuple(sorted(both.intersection(group))) for group in side if len(both.intersection(group)) > 1)
        for side in (left, right)
    )
    return tuple(group for group in ours if group not in theirs), tuple(group for group in theirs if group not in ours)


def _side(checkpoint: Checkpoint, read_values: bool) -> Side:
    specs = checkpoint.specs.values()
    damaged = [key for key, spec in checkpoint.specs.items() if read_values and not all(map(is_sound, spec.storages))]
    return Side(
        checkpoint.path,
        checkpoint.format,
        path_name(checkpoint.container),
        len(checkpoint.specs),
        sum(spec.numel for spec in specs),
        tuple(damaged),
        tuple(checkpoint.lost),
    )


LIMIT = 100_000  # differing places to list; nobody reads more
_DEPTH = 200
_TOO_DEEP = "nested too deep to compare"

Text = tuple[str | None, str | None]


def compare_extras(a: Checkpoint, b: Checkpoint, read_values: bool, tolerance: Tolerance) -> Texts:
    """Return what differs outside the two state_dicts, by place, including the texts in a safetensors header."""
    beside = [_without(side.root, side.container) for side in (a, b)]
    notes = [{mark.place: mark.data["text"] for mark in side.remarked(Kind.NOTE)} for side in (a, b)]
    for texts in notes:
        texts.pop("format", None)  # "pt", required by the file format
    return {
        **_texts(_differences(beside[0], beside[1], (), read_values, tolerance)),
        **_texts(_differences(notes[0], notes[1], ("__metadata__",), read_values)),
    }


def compare_entries(a: Checkpoint, b: Checkpoint, read_values: bool) -> Texts:
    """Return the differences of the entries of the state_dicts that are not tensors, by key."""
    left, right = ({key: side.entries[key] for key in side.entries if key not in side.specs} for side in (a, b))
    return _texts(_differences(left, right, (), read_values))


def compare_metadata(a: Checkpoint, b: Checkpoint, renamed: Mapping[str, str]) -> Texts:
    """Return the rows of ``_metadata`` that differ, under the names of B; ``renamed`` maps keys of A to those of B."""
    if a.metadata is None or b.metadata is None:
        whole = (_count(a), _count(b))
        return {} if whole[0] == whole[1] else {"_metadata": whole}
    left = rename_metadata(a.metadata, {key: renamed.get(key, key) for key in a.entries}) or {}
    right = b.metadata
    return {
        module: (_row(left.get(module)), _row(right.get(module)))
        for module in {**left, **right}
        if left.get(module) != right.get(module)
    }


def _count(checkpoint: Checkpoint) -> str | None:
    return None if checkpoint.metadata is None else counted(len(checkpoint.metadata), "row")


def _row(row: Mapping[str, object] | None) -> str | None:
    return None if row is None else ", ".join(f"{name} {value!r:.40}" for name, value in row.items()) or "no version"


def _texts(differences: Iterator[tuple[ContainerPath, Text]]) -> Texts:
    return {path_name(place): text for place, text in islice(differences, LIMIT)}


_ABSENT = object()  # stands for a missing value


def _differences(
    a: object, b: object, place: ContainerPath, read_values: bool, tolerance: Tolerance = EXACT
) -> Iterator[tuple[ContainerPath, Text]]:
    """Yield what differs, by place. Each pair of objects is compared once, so that cycles end."""
    pending = [(a, b, place)]
    met: dict[tuple[int, int], object] = {}
    while pending:
        a, b, place = pending.pop()
        left, right = children(a), children(b)
        if left is None or right is None:
            if not _same(a, b, read_values, tolerance):
                texts = (_text(a), _text(b))
                yield place, texts if texts[0] != texts[1] else (texts[0], f"{texts[1]}, different values")
            continue
        if (id(a), id(b)) in met:
            continue
        met[id(a), id(b)] = a, b
        if _kind_name(a) != _kind_name(b):
            yield place, (_kind_name(a), _kind_name(b))
        if len(place) >= _DEPTH:
            yield place, (_TOO_DEEP, _TOO_DEEP)
            continue
        names = reversed({**left, **right})
        pending += [(left.get(name, _ABSENT), right.get(name, _ABSENT), (*place, name)) for name in names]


def _same(a: object, b: object, read_values: bool, tolerance: Tolerance) -> bool:
    if isinstance(a, TensorSpec) and isinstance(b, TensorSpec):
        if (a.dtype, a.shape, a.layout) != (b.dtype, b.shape, b.layout):
            return False
        if not read_values:
            return True
        gap = measure_gap(a, b, tolerance)
        return gap.is_equal or gap.is_close
    if isinstance(a, Global) and isinstance(b, Global):
        return str(a) == str(b)
    if isinstance(a, float) and isinstance(b, float) and a != a and b != b:
        return True
    return type(a) is type(b) and a == b


def _text(value: object) -> str | None:
    return None if value is _ABSENT else describe(value)


def _kind_name(value: object) -> str:
    """Return the kind of a container. An OrderedDict is a dict."""
    if isinstance(value, Opaque):
        return f"object of {value.cls}"
    return "list" if isinstance(value, list | tuple) else "array" if isinstance(value, NumpyArray) else "dict"


def _without(root: object, container: ContainerPath) -> object:
    """Return a container as dicts without the state_dict in it."""
    if not container:
        return {}
    beside = children(root) or {}
    inside = _without(beside.pop(container[0], None), container[1:])
    return {**beside, container[0]: inside} if inside else beside
