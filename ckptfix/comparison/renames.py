"""The same bytes under another name: which keys of A are which keys of B.

Only tensors whose name the other side does not have, and for which the other side has one of the same dtype and shape
to spare, are read; a digest of 128 bits stands for their values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b

from ckptfix.comparison.elements import row_major_blocks
from ckptfix.core.spec import TensorSpec
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
