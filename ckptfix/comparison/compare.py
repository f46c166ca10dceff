"""The comparison from top to bottom: open both, pair the tensors, compare what is paired.

pair       by name; then, among the rest, by bytes (renames)
specs      shapes and dtypes of the pairs
values     in blocks, so that no tensor is held as a whole; then the checksums of both files, where they have them
the rest   ties, entries that are no tensors, _metadata, what lies beside the state_dict
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b

from ckptfix.bytes.checksums import is_sound
from ckptfix.comparison.contents import compare_entries, compare_extras, compare_metadata
from ckptfix.comparison.difference import Difference, Gap, Pair, Side, Ties
from ckptfix.comparison.gap import Tolerance, measure_gap, row_major_blocks
from ckptfix.core.checkpoint import Checkpoint, path_name
from ckptfix.core.spec import TensorSpec
from ckptfix.errors import UsageError
from ckptfix.reading.opening import open_file
from ckptfix.report.figures import size
from ckptfix.report.inspection import ties
from ckptfix.values.walk import OVERLAP

Kind = tuple[str, tuple[int, ...]]


def find_renames(only_a: Mapping[str, TensorSpec], only_b: Mapping[str, TensorSpec]) -> Iterator[tuple[str, str]]:
    """Pairs of keys that hold the same bytes, in the order of A. Raises ``UnreadableError`` for bytes that are gone."""
    kinds = {_kind(spec) for spec in only_a.values()} & {_kind(spec) for spec in only_b.values()}
    b_keys: dict[tuple[Kind, bytes], list[str]] = {}
    for key, digest in _digests(only_b, kinds):
        b_keys.setdefault(digest, []).append(key)
    a_keys: dict[tuple[Kind, bytes], list[str]] = {}
    for key, digest in _digests(only_a, kinds):
        if digest in b_keys:
            a_keys.setdefault(digest, []).append(key)
    found = dict(pair for digest, keys in a_keys.items() for pair in _match(keys, b_keys[digest]))
    yield from ((key, found[key]) for key in only_a if key in found)


def rename_modules(renamed: Mapping[str, str]) -> dict[str, str]:
    """The modules of A by their names in B, as the renamed keys tell: ``module.bn1`` is ``bn1``."""
    modules: dict[str, str] = {}
    for key, other in renamed.items():
        old, new = key.split("."), other.split(".")
        while old and new and old[-1] == new[-1]:
            old, new = old[:-1], new[:-1]
            if ".".join(old) in modules:
                break
            modules[".".join(old)] = ".".join(new)
    return modules


def _kind(spec: TensorSpec) -> Kind:
    return spec.dtype, spec.shape


def _digests(specs: Mapping[str, TensorSpec], kinds: set[Kind]) -> Iterator[tuple[str, tuple[Kind, bytes]]]:
    for key, spec in specs.items():
        start, stop = spec.extent if spec.storage is not None else (0, 0)
        plain = spec.storage is not None and spec.quantizer is None and not any(spec.math_bits.values())
        if plain and _kind(spec) in kinds and spec.nbytes <= OVERLAP * max(stop - start, 1):
            digest = blake2b(digest_size=16)
            for block in row_major_blocks(spec) if spec.numel else ():
                digest.update(block.data.cast("B") if block.flags.c_contiguous else block.tobytes())
            yield key, (_kind(spec), digest.digest())


def _match(a_keys: Sequence[str], b_keys: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Pair keys of the same bytes (many biases are nothing but zeros): by the longest common end, then in order."""
    left, right = dict.fromkeys(a_keys), dict.fromkeys(b_keys)
    longest = max(key.count(".") + 1 for key in a_keys)
    for length in range(min(longest, _MAX_TAIL), -1, -1):
        by_tail: dict[tuple[str, ...], list[str]] = {}
        for key in reversed(right):
            by_tail.setdefault(_tail(key, length), []).append(key)
        for key in list(left):
            if candidates := by_tail.get(_tail(key, length)):
                other = candidates.pop()
                del left[key], right[other]
                yield key, other


_MAX_TAIL = 16


def _tail(key: str, length: int) -> tuple[str, ...]:
    return tuple(key.split(".")[-length:]) if length else ()


Progress = Callable[[str], None]
"""Is told from time to time how far the comparison is, in words."""

_EXACT = Tolerance()


def _silent(text: str) -> None:
    pass


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    weights: str | None = None,
    other_weights: str | None = None,
    salvage: bool = False,
    values: bool = True,
    atol: float = 0.0,
    rtol: float = 0.0,
    progress: Progress = _silent,
) -> Difference:
    """Compare two checkpoint files; neither is loaded whole, and none of their code runs.

    ``weights`` picks the state_dict of A by its name in the container, ``other_weights`` that of B (the same as A's
    unless given). ``atol`` and ``rtol`` are tolerances as ``torch.allclose`` takes them: a tensor within them counts
    as equal. ``values=False`` reads no tensor, so that only names and specs are compared. Raises ``UnreadableError``
    for a file that cannot be read, and ``UsageError`` for a tolerance without meaning."""
    if not (atol >= 0 and rtol >= 0 and atol < float("inf") and rtol < float("inf")):
        raise UsageError(f"the tolerances are {atol:g} and {rtol:g}; give finite numbers of 0 or more")
    first = open_file(os.fspath(a), weights, salvage=salvage)
    second = open_file(os.fspath(b), other_weights or weights, salvage=salvage)
    return compare(first, second, values=values, tolerance=Tolerance(atol, rtol), progress=progress)


def compare(
    a: Checkpoint, b: Checkpoint, *, values: bool = True, tolerance: Tolerance = _EXACT, progress: Progress = _silent
) -> Difference:
    """Compare two open checkpoints; the settings are those of ``diff``."""
    pairs = [Pair(key, spec, b.specs[key]) for key, spec in a.specs.items() if key in b.specs]
    only_a = {key: spec for key, spec in a.specs.items() if key not in b.specs}
    only_b = {key: spec for key, spec in b.specs.items() if key not in a.specs}
    renamed = dict(find_renames(only_a, only_b)) if values else {}
    gaps = _gaps([pair for pair in pairs if pair.a.shape == pair.b.shape], tolerance, progress) if values else []
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
        metadata=compare_metadata(a, b, rename_modules(renamed)),
        extras=compare_extras(a, b, values, tolerance),
        equal=sum(gap.is_equal and pair.a.dtype == pair.b.dtype for pair, gap in gaps),
        cast=sum(gap.is_equal and pair.a.dtype != pair.b.dtype for pair, gap in gaps),
        close=sum(gap.is_close for _, gap in gaps),
        values_compared=values,
    )


def _gaps(pairs: Sequence[Pair], tolerance: Tolerance, progress: Progress) -> list[tuple[Pair, Gap]]:
    total, done, gaps = sum(pair.a.nbytes for pair in pairs), 0, []
    for pair in pairs:
        progress(f"compared {size(done)} of {size(total)}")
        gaps.append((pair, measure_gap(pair.a, pair.b, tolerance)))
        done += pair.a.nbytes
    return gaps


def _ties(a: Checkpoint, b: Checkpoint, renamed: Mapping[str, str]) -> tuple[Ties, Ties]:
    """The ties that only one side has, under the names of B, among the tensors that both have."""
    left = [tuple(renamed.get(key, key) for key in group) for group in ties(a.specs)]
    right = ties(b.specs)
    both = {renamed.get(key, key) for key in a.specs} & b.specs.keys()
    groups = [
        dict.fromkeys(tuple(sorted(both.intersection(group))) for group in side if len(both.intersection(group)) > 1)
        for side in (left, right)
    ]
    return tuple(group for group in groups[0] if group not in groups[1]), tuple(
        group for group in groups[1] if group not in groups[0]
    )


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
