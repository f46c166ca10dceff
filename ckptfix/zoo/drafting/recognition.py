"""Which architecture a layout is, how sure that is, and why.

``ckptfix.known`` knows the structures that the libraries build; ``families.toml`` has telling names of other models."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from pathlib import Path

from ckptfix.core.config import parse_toml
from ckptfix.core.finding import counted
from ckptfix.core.likeness import Fit, Likeness
from ckptfix.known.recognition import Shapes, recognise
from ckptfix.known.table import table
from ckptfix.modules.named import SCHEMES
from ckptfix.report.likeness import likeness_text

_FAMILIES = Path(__file__).with_name("families.toml")

_BUILDERS = ("timm", "torchvision")
"""Libraries whose models are known by what people call their files."""

_SHOWN = 4


class Confidence(Enum):
    """How sure an architecture is."""

    EXACT = "exact"
    """Every name and shape is that of the model."""
    GUESS = "guess"
    """Only a class, a telling key or the names of the files say so."""
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Architecture:
    """An architecture. ``model`` or ``like`` is the line of the table; ``needs`` is what builds the model, as pip calls
    it."""

    title: str
    confidence: Confidence
    evidence: tuple[str, ...] = ()
    model: str | None = None
    needs: str | None = None
    like: str | None = None


def find_architecture(shapes: Shapes, classes: Iterable[str], names: Iterable[str]) -> Architecture:
    """Return the architecture of a layout. ``classes`` are those of models that were saved whole, ``names`` the names
    of the files: they choose among equal structures, and are evidence for or against."""
    names = tuple(names)
    stems = [re.sub(r"[^a-z0-9]+", "_", name.rpartition("/")[2].lower()).strip("_") for name in names]
    known = recognise(shapes, names)
    if known is not None and known.fit in (Fit.EXACT, Fit.HEADLESS):
        found = _exact(known)
    else:
        found = _by_class(classes) or _by_family(shapes) or _by_name(stems)
        if known is not None:
            found = replace(found, evidence=(*found.evidence, f"names and shapes: {likeness_text(known)}"))
    return replace(found, evidence=(*found.evidence, *_named(found, stems)))


@cache
def named_models() -> Mapping[str, str]:
    """Return the names of the models that a draft can build, with the library of each."""
    pairs = [(library, name) for library, _, name in (each.partition("/") for each in table().names())]
    return {name: library for library, name in sorted(pairs) if library in _BUILDERS}  # of two the last, torchvision's


def name_in(stem: str) -> str | None:
    """Return the longest name of a model that a file's name holds, as words of its own."""
    text = f"_{stem}_"
    return max((name for name in named_models() if f"_{name}_" in text), key=len, default=None)


def _exact(known: Likeness) -> Architecture:
    """The first of the models that are built exactly so."""
    title = known.names[0].partition("/")[2]
    evidence = (f"every name and shape is that of {likeness_text(known)}",)
    if known.model is None:
        return Architecture(title, Confidence.EXACT, evidence, like=known.target)
    return Architecture(title, Confidence.EXACT, evidence, known.model, SCHEMES[known.model.partition(":")[0]][1])


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
    return Architecture(name, Confidence.GUESS, (line,), f"{library}:{name}", SCHEMES[library][1])


def _named(found: Architecture, stems: Sequence[str]) -> list[str]:
    """What the names of the files say of an architecture that is sure, for and against."""
    if found.confidence is not Confidence.EXACT:
        return []
    named = Counter(name for stem in stems if (name := name_in(stem)) is not None)
    return [
        f"{'' if name in found.title or found.title in name else 'BUT '}the name says {name} ({counted(count, 'file')})"
        for name, count in named.most_common(_SHOWN)
    ]
