"""Which architecture a layout is, how sure that is, and why.

``known_structures.txt`` has a line for each structure that torchvision and timm build: a digest of the names and shapes
of all its tensors but those of the head, the modules of the head, how wide these are, and the models.
``benchmarks/structures.py`` writes it. ``families.toml`` has telling names of other models."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from ckptfix.core.config import parse_toml
from ckptfix.core.finding import counted
from ckptfix.zoo.drafting.survey import Shapes, is_counter

PATH = Path(__file__).with_name("known_structures.txt")
_FAMILIES = Path(__file__).with_name("families.toml")

_SHOWN = 4


class Confidence(Enum):
    """How sure an architecture is."""

    EXACT = "exact"
    """Every name and shape is that of the model."""
    LIKELY = "likely"
    """The same, except for a head that only the model has."""
    GUESS = "guess"
    """Only a class, a telling key or the names of the files say so."""
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Architecture:
    """An architecture. ``model`` and ``arguments`` are the lines of the table; ``needs`` is the package of the
    factory."""

    title: str
    confidence: Confidence
    evidence: tuple[str, ...] = ()
    model: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    needs: str | None = None


@dataclass(frozen=True)
class Known:
    """A structure that is exactly that of these models, apart from the number of classes.

    ``classes`` is that of the head, None if the file has no head."""

    names: tuple[str, ...]
    head: tuple[str, ...]
    classes: int | None


def recognise(shapes: Shapes, classes: Iterable[str], names: Iterable[str]) -> Architecture:
    """Return the architecture of a layout. ``classes`` are those of models that were saved whole, ``names`` the names
    of the files: they choose among equal structures, and are evidence for or against."""
    stems = [re.sub(r"[^a-z0-9]+", "_", name.rpartition("/")[2].lower()).strip("_") for name in names]
    known = find_known(shapes)
    found = _exact(known, stems) if known is not None else _by_class(classes) or _by_family(shapes) or _by_name(stems)
    return replace(found, evidence=(*found.evidence, *_named(found, stems)))


def find_known(shapes: Shapes) -> Known | None:
    """Return the models whose tensors have exactly these names and shapes; None if no known one has."""
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
    """Return how wide a head's weights are, each without its number of classes: ``2048``, ``1280x1x1``."""
    weights = (shapes.get(f"{module}.weight", ()) for module in modules)
    return ",".join("x".join(map(str, shape[1:])) or "-" for shape in weights)


def structure_digest(shapes: Shapes, head: Iterable[str]) -> str:
    """Return a digest of names and shapes in any order, without those of the head's modules and without counters."""
    left_out = set(head)
    lines = sorted(
        f"{key} {'x'.join(map(str, shape))}"
        for key, shape in shapes.items()
        if key.rpartition(".")[0] not in left_out and not is_counter(key)
    )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


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
    """Return the names of the known models, with the library of each."""
    known = (name for rows in _rows().values() for entries in rows.values() for _, names in entries for name in names)
    pairs = sorted(each.partition(":")[::2] for each in known)  # torchvision comes last, and wins
    return {name: library for library, name in pairs}


def name_in(stem: str) -> str | None:
    """Return the longest name of a model that a file's name holds, as words of its own."""
    text = f"_{stem}_"
    return max((name for name in named_models() if f"_{name}_" in text), key=len, default=None)


def _exact(known: Known, stems: Sequence[str]) -> Architecture:
    """One of the models that are built exactly so: the one whose name the files say, or torchvision's."""

    def rank(model: tuple[str, str]) -> tuple[bool, bool, bool, int]:
        library, name = model
        is_said = any(name in stem for stem in stems)
        # Of names for one structure the shortest is the plainest: resnet18 and not resnetblur18.
        return (known.classes is None and library != "timm", not is_said, library != "torchvision", len(name))

    (library, name), *others = sorted((each.partition(":")[::2] for each in known.names), key=rank)
    head = "without a head" if known.classes is None else f"with {known.classes} classes"
    evidence = [f"every name and shape is that of {library}'s {name} {head}"]
    if also := [f"{each}'s {other}" if each != library else other for each, other in others]:
        more = f" and {len(also) - _SHOWN} more" if len(also) > _SHOWN else ""
        evidence.append(f"so are those of {', '.join(also[:_SHOWN])}{more}")
    confidence = Confidence.EXACT
    if library == "torchvision" and known.classes is None:
        confidence = Confidence.LIKELY
        evidence.append(f"torchvision builds it with its head ({', '.join(known.head)}), which these files do not have")
    arguments: dict[str, Any] = {} if known.classes in (None, 1000) else {"num_classes": known.classes}
    if library == "timm":
        arguments = {"num_classes": known.classes or 0}
    return _of_library(Architecture(name, confidence, tuple(evidence)), library, arguments)


def _of_library(found: Architecture, library: str, arguments: Mapping[str, Any]) -> Architecture:
    if library == "timm":
        named = {"model_name": found.title, **arguments}
        return replace(found, model="timm:create_model", arguments=named, needs=library)
    return replace(found, model=f"torchvision.models:{found.title}", arguments=arguments, needs=library)


def _by_class(classes: Iterable[str]) -> Architecture | None:
    """The class of a whole model."""
    word, _ = next(iter(Counter(each for each in classes if "." in each).most_common(1)), ("", 0))
    module, _, own = word.rpartition(".")
    model = f"{'your_script' if module == '__main__' else module}:{own}"
    return Architecture(own, Confidence.GUESS, (f"saved whole, as a {word}",), model) if word else None


def _by_family(shapes: Shapes) -> Architecture | None:
    """The family that one telling name gives away."""
    for family in parse_toml(_FAMILIES)["family"]:
        expression = re.compile(family["pattern"])
        if (key := next(filter(expression.fullmatch, shapes), None)) is not None:
            remark = f"; {family['remark']}" if "remark" in family else ""
            return Architecture(family["title"], Confidence.GUESS, (f"by the name {key}{remark}",))
    return None


def _by_name(stems: Sequence[str]) -> Architecture:
    """What only the names of the files say."""
    name = next((name for stem in stems if (name := name_in(stem)) is not None), None)
    if name is None:
        return Architecture("unknown", Confidence.UNKNOWN, ("names and shapes match no known architecture",))
    library = named_models()[name]
    line = f"the names of the files say {name}, but names and shapes are not those of {library}'s {name}"
    return _of_library(Architecture(name, Confidence.GUESS, (line,)), library, {})


def _named(found: Architecture, stems: Sequence[str]) -> list[str]:
    """What the names of the files say of an architecture that is sure, for and against."""
    if found.confidence not in (Confidence.EXACT, Confidence.LIKELY):
        return []
    named = Counter(name for stem in stems if (name := name_in(stem)) is not None)
    return [
        f"{'' if name in found.title or found.title in name else 'BUT '}the name says {name} ({counted(count, 'file')})"
        for name, count in named.most_common(_SHOWN)
    ]
