"""Which known architecture a state_dict is, from names and shapes only.

The names are looked at as they are, without the segments of wrappers, and without what most of them begin with. Few
hashes of them find the structures that may be meant, and each of these is compared in full. A model is named only if
every tensor outside of its head is in the file in the right shape."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.likeness import Fit, Likeness
from ckptfix.known.table import (
    NAMES,
    WIDE,
    Model,
    Structure,
    hash_of,
    is_free,
    is_of_head,
    is_passing,
    solve,
    table,
)
from ckptfix.rules.wrapper_segment import WRAPPER_SEGMENTS, bare, colliding, strip_segments, without_segments

Shapes = Mapping[str, tuple[int, ...]]  # names and shapes of a state_dict
MOST = 20_000  # tensors of a state_dict that is looked at; no known structure has as many
_DEPTH = 6  # segments of a prefix that are tried

# Structures that are compared in full. As many may differ in their tables of positions and their patches alone.
_CANDIDATES = 96
_VOTES = 3  # hashes that a structure has in common with a state_dict at least, or it is not compared
_FEWEST = 8  # tensors that have to be as they are known before a model is named
_SMALL = 0.25  # the largest share of what is known that a new head may have, by the number of tensors
_NEAR = 0.6  # the share of the tensors of either side that a structure and a state_dict which is like it have in common

# Whose name a structure gets first that several libraries build.
_LIBRARIES = (
    "torchvision",
    "timm",
    "transformers",
    "diffusers",
    "open_clip",
    "smp",
    "torchaudio",
    "segment_anything",
    "dinov2",
)

_DENSE = re.compile(r"(?<=\.)(norm|relu|conv)\.([12])(?=\.)")


class _View(Struct, frozen=True):
    """Names and shapes as one way of reading the keys gives them, without what says nothing of the architecture."""

    shapes: Shapes
    texts: Mapping[str, str]
    tensors: int
    prefix: str = ""
    outside: int = 0


class _Match(Struct, frozen=True):
    """A structure that was compared with a view."""

    structure: Structure
    view: _View
    fit: Fit
    sizes: Mapping[str, int]
    matching: int
    missing: tuple[str, ...]
    added: tuple[str, ...]
    differing: tuple[str, ...]

    @property
    def rank(self) -> tuple[int, int, int]:
        """The smaller, the better: fit, keys that differ, sizes that are not the usual ones."""
        unusual = min(len(_unusual(model, self.sizes)) for model in self.structure.models)
        keys = len(self.missing) + len(self.added) + len(self.differing) + self.view.outside
        return (_ORDER[self.fit], keys, unusual)


_ORDER = {Fit.EXACT: 0, Fit.HEADLESS: 1, Fit.OTHER_HEAD: 2, Fit.PART: 2, Fit.NEAR: 3}


def recognise(shapes: Shapes, names: Iterable[str] = ()) -> Likeness | None:
    """Return the known architecture that a state_dict is or is like; None if there is none.

    ``names`` are those of the files: of models that are built alike, the one that they name comes first."""
    if not _FEWEST <= len(shapes) <= MOST:
        return None
    best: list[_Match] = []
    for view in _views(shapes):
        for match in _matches(view):
            if not best or match.rank < best[0].rank:
                best = [match]
            elif match.rank == best[0].rank and match.view is best[0].view:
                best.append(match)
        if best and best[0].fit is Fit.EXACT:
            break
    return _likeness(best, names) if best else None


def likeness_of(checkpoint: Checkpoint) -> Likeness | None:
    """Return the known architecture that a checkpoint, or the set of weights that was chosen in it, is or is like."""
    if "likeness" not in checkpoint.derived:
        names = checkpoint.picked or dict.fromkeys(checkpoint.specs, "")
        shapes = {name or key: checkpoint.specs[key].shape for key, name in names.items() if key in checkpoint.specs}
        checkpoint.derived["likeness"] = recognise(shapes, (checkpoint.path,))
    found: Likeness | None = checkpoint.derived["likeness"]
    return found


def modern_name(name: str) -> str:
    """Return the name that newer releases give a tensor: of DenseNet's layers, and of BERT's LayerNorm."""
    if "denselayer" in name:
        name = _DENSE.sub(r"\1\2", name)
    for old, new in (("gamma", "weight"), ("beta", "bias")):
        if name.endswith(f"LayerNorm.{old}"):
            name = name.removesuffix(old) + new
    return name


# ---- ways to read the keys


def _views(shapes: Shapes) -> Iterator[_View]:
    """Yield the names without the segments of wrappers, then without one first segment after the other that most of
    them share. After that the same with names as newer releases have them, and without ``module`` inside of them."""
    plain = {key: strip_segments(key) for key in shapes}
    if colliding(shapes, plain) is not None:
        plain = {key: key for key in shapes}
    segments = sorted({part for key in without_segments(shapes) for part in key.split(".")} & WRAPPER_SEGMENTS)
    yield from _shorter(shapes, plain, segments)
    modern = {key: modern_name(bare(key)) for key in shapes}
    if modern != plain and colliding(shapes, modern) is None:
        yield from _shorter(shapes, modern, segments)


def _shorter(shapes: Shapes, names: dict[str, str], segments: list[str]) -> Iterator[_View]:
    for _ in range(_DEPTH):
        yield _view(shapes, names, _prefix(names, segments), len(shapes) - len(names))
        firsts = Counter(name.partition(".")[0] for name in names.values() if "." in name)
        first, count = max(firsts.items(), key=lambda item: item[1], default=("", 0))
        if 2 * count <= len(names):
            return
        names = {key: name[len(first) + 1 :] for key, name in names.items() if name.startswith(f"{first}.")}


def _view(shapes: Shapes, names: Mapping[str, str], prefix: str, outside: int) -> _View:
    own = {name: shapes[key] for key, name in names.items() if not is_passing(name, shapes[key])}
    return _View(own, {key: ".".join(map(str, shape)) for key, shape in own.items()}, len(names), prefix, outside)


def _prefix(names: Mapping[str, str], segments: list[str]) -> str:
    """Return what keys have before the names; with a wrapper's segments in between, these and the rest."""
    key = next(iter(names))
    before = key.removesuffix(names[key])
    inner = [segment for segment in segments if f"{segment}." not in before]
    return ", ".join([*([before] if before != key and before else []), *(f"{segment}." for segment in inner)])


# ---- comparing


def _matches(view: _View) -> Iterator[_Match]:
    known = table()
    hashes = sorted([hash_of(key, text) for key, text in view.texts.items()])[:WIDE]
    votes = known.similar(hashes)
    top = max(votes.values(), default=0)
    found = False
    for number, count in votes.most_common(_CANDIDATES):
        # What fits in full has all of its hashes in the file, so that none with fewer fits better.
        if count < max(_VOTES, top - 2) or (found and count < top):
            return
        if _NEAR / 2 <= known.count(number) / view.tensors <= 1 / _NEAR:
            match = _compare(view, known.structure(number))
            if match is not None:
                found |= match.fit is not Fit.NEAR
                yield match


def _compare(view: _View, structure: Structure) -> _Match | None:
    """Compare all names and shapes. None if the structure is not even near."""
    missing, differing, solved = [], [], dict[str, dict[str, int]]()
    matching = 0
    for key, shape in structure.shapes.items():
        own = view.texts.get(key)
        if own == shape:
            matching += 1
        elif own is None:
            missing.append(key)
        elif is_free(shape) and (sizes := solve(shape, view.shapes[key], structure.models[0].sizes)) is not None:
            solved[key] = sizes
        else:
            differing.append(key)
    if matching + len(solved) < _NEAR * len(view.shapes):
        return None
    missing = [key for key in missing if not _is_excused(key, view, structure)]
    sizes = _agreed(solved.values())
    for key, own_sizes in solved.items():
        if own_sizes.items() <= sizes.items():
            matching += 1
        else:
            differing.append(key)
    added = [
        key for key in view.shapes if key not in structure.shapes and key not in structure.transient | structure.others
    ]
    tensors = sum(not is_passing(key, ()) for key in structure.shapes)
    fit = _fit(structure, matching, missing, added, differing)
    if fit is Fit.NEAR and not min(tensors, len(view.shapes)) >= matching >= _NEAR * max(tensors, len(view.shapes)):
        return None
    if fit is not Fit.NEAR and view.outside:
        fit = Fit.PART
    return _Match(structure, view, fit, sizes, matching, tuple(missing), tuple(added), tuple(differing))


def _is_excused(key: str, view: _View, structure: Structure) -> bool:
    """Return whether a tensor may be missing: it says nothing, or it is tied to one that is there."""
    if is_passing(key, ()):
        return True
    return any(key in group and any(other in view.shapes for other in group) for group in structure.ties)


def _agreed(solved: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """For each size the value that most tensors have."""
    values: dict[str, Counter[int]] = {}
    for sizes in solved:
        for letter, value in sizes.items():
            values.setdefault(letter, Counter())[value] += 1
    return {letter: counts.most_common(1)[0][0] for letter, counts in values.items()}


def _fit(structure: Structure, matching: int, missing: list[str], added: list[str], differing: list[str]) -> Fit:
    if matching < min(_FEWEST, len(structure.shapes)):
        return Fit.NEAR
    if not (missing or added or differing):
        return Fit.EXACT
    head = {key for key, shape in structure.shapes.items() if is_of_head(shape)}
    if not (added or differing) and set(missing) == head:
        return Fit.HEADLESS
    places = _head_places(structure, head)
    tops = {key.partition(".")[0] for key in structure.shapes}

    def is_elsewhere(key: str) -> bool:
        return "." in key and key.partition(".")[0] not in tops

    is_of_new_head = all(key.startswith(places) for key in (*missing, *differing)) and all(
        key.startswith(places) or is_elsewhere(key) for key in added
    )
    is_small = len(missing) + len(added) + len(differing) <= _SMALL * matching
    return Fit.OTHER_HEAD if head and is_of_new_head and is_small else Fit.NEAR


def _head_places(structure: Structure, head: Iterable[str]) -> tuple[str, ...]:
    """Return the modules that hold the head, each with its dot; the one around a layer if it holds little else."""
    places = set()
    for key in head:
        module = key.rpartition(".")[0]
        around = module.rpartition(".")[0]
        inner = sum(other.startswith(f"{around}.") for other in structure.shapes)
        places.add(f"{around if around and inner <= _SMALL * len(structure.shapes) else module}.")
    return tuple(places) or ("\0",)


# ---- naming


def _likeness(best: list[_Match], names: Iterable[str]) -> Likeness:
    stems = [re.sub(r"[^a-z0-9]+", "_", name.rpartition("/")[2].lower()).strip("_") for name in names]

    def rank(entry: tuple[Model, _Match]) -> tuple[int, bool, int, int, str]:
        model, match = entry
        own = model.name.partition("/")[2]
        is_said = any(re.sub(r"[^a-z0-9]+", "_", own.lower()) in stem for stem in stems)
        # Of names for one structure the shortest is the plainest: resnet18 and not resnetblur18.
        unusual = len(_unusual(model, match.sizes).keys() - {"c"})
        return (unusual, not is_said, _LIBRARIES.index(model.library), len(own), own)

    models = sorted(((model, match) for match in best for model in match.structure.models), key=rank)
    first, match = models[0]
    versions = table().versions
    libraries = dict.fromkeys(model.library for model, _ in models)
    return Likeness(
        names=tuple(dict.fromkeys(model.name for model, _ in models)),
        fit=match.fit,
        versions={library: versions[library] for library in libraries},
        prefix=match.view.prefix,
        outside=match.view.outside,
        sizes={NAMES[letter]: size for letter, size in _unusual(first, match.sizes).items()},
        matching=match.matching,
        tensors=sum(not is_passing(key, ()) for key in match.structure.shapes),
        missing=match.missing,
        added=match.added,
        differing=match.differing,
    )


def _unusual(model: Model, sizes: Mapping[str, int]) -> dict[str, int]:
    return {letter: size for letter, size in sizes.items() if model.sizes.get(letter) != size}
