"""Architectures that are told by their exact structure.

``known_structures.txt`` has a line for each: a digest of the names and shapes of all its tensors but those of the
head, the modules of the head, how wide these are, and the models of torchvision and timm that are built so.
`benchmarks/structures.py` writes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

Shapes = Mapping[str, tuple[int, ...]]
"""Names and shapes of a state_dict."""

PATH = Path(__file__).with_name("known_structures.txt")

COUNTERS = (
    "num_batches_tracked",
    "n_averaged",
    "position_ids",
    "total_ops",
    "total_params",
    "relative_position_index",
    "attn_mask",
)
"""Last parts of keys that come and go between releases, or that tools leave behind."""


@dataclass(frozen=True)
class Known:
    """A structure that is exactly that of these models, but for the number of classes.

    ``classes`` is that of the head, None where the file has no head."""

    names: tuple[str, ...]
    head: tuple[str, ...]
    classes: int | None


def find_known(shapes: Shapes) -> Known | None:
    """The models whose tensors have exactly these names and shapes; None where there is none among the known ones."""
    own = {key.rpartition(".")[0] for key in shapes}
    digests: dict[frozenset[str], str] = {}
    found: Known | None = None
    for modules, rows in _rows().items():
        present = frozenset(own.intersection(modules))
        if present not in digests:
            digests[present] = structure_digest(shapes, present)
        for widths, names in rows.get(digests[present], ()):
            if not present:
                found = Known((*found.names, *names) if found else names, modules, None)
            elif head_widths(shapes, modules) == widths:
                sizes = {shape[0] for key, shape in shapes.items() if key.rpartition(".")[0] in present and shape}
                if len(sizes) == 1:
                    return Known(names, modules, sizes.pop())
    return found


def head_widths(shapes: Shapes, modules: Iterable[str]) -> str:
    """What a head's weights are wide, each without its number of classes: ``2048``, ``1280x1x1``."""
    weights = (shapes.get(f"{module}.weight", ()) for module in modules)
    return ",".join("x".join(map(str, shape[1:])) or "-" for shape in weights)


def structure_digest(shapes: Shapes, head: Iterable[str]) -> str:
    """A digest of names and shapes in any order, without those of the head's modules and without counters."""
    left_out = set(head)
    lines = sorted(
        f"{key} {'x'.join(map(str, shape))}"
        for key, shape in shapes.items()
        if key.rpartition(".")[0] not in left_out and not is_counter(key)
    )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def is_counter(key: str) -> bool:
    """Whether a key says nothing of the architecture."""
    return key.rpartition(".")[2] in COUNTERS


@cache
def _rows() -> Mapping[tuple[str, ...], Mapping[str, list[tuple[str, tuple[str, ...]]]]]:
    """By the modules of the head and by digest: the widths of the head, and the models."""
    rows: dict[tuple[str, ...], dict[str, list[tuple[str, tuple[str, ...]]]]] = {}
    for line in PATH.read_text(encoding="utf-8").splitlines():
        digest, head, widths, *names = line.split()
        rows.setdefault(tuple(head.split(",")), {}).setdefault(digest, []).append((widths, tuple(names)))
    return rows


@cache
def named_models() -> Mapping[str, str]:
    """The names of the models that are known, and whose they are."""
    found: dict[str, str] = {}
    for rows in _rows().values():
        for entries in rows.values():
            for each in (name for _, names in entries for name in names):
                library, _, name = each.partition(":")
                if library == "torchvision" or name not in found:
                    found[name] = library
    return found
