"""Which known architecture a state_dict is, from names and shapes only.

The names are looked at as they are, without the segments of wrappers, and without what most of them begin with. Few
hashes of them find the structures that may be meant, and each of these is compared in full. A model is named only if
every tensor outside of its head is in the file in the right shape."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from os.path import commonprefix
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.likeness import Fit, Likeness
from ckptfix.core.wrappers import bare, colliding, segments_in, strip_segments
from ckptfix.known.table import (
    NAMES,
    OF_CLIP,
    WIDE,
    Model,
    Structure,
    hashes_of,
    is_free,
    is_of_head,
    is_passing,
    solve,
    starred,
    table,
)

T = TypeVar("T")
Shapes = Mapping[str, tuple[int, ...]]  # names and shapes of a state_dict
MOST = 20_000  # tensors of a state_dict that is looked at; no known structure has as many
_DEPTH = 6  # segments of a prefix that are tried

# Tensors of structures that are compared in full: some libraries have a dozen models around the same encoder.
_KEYS = 4_000
_VOTES = 3  # hashes that a structure has in common with a state_dict at least, or it is not compared
_FEWEST = 8  # tensors that have to be as they are known before a model is named
_SMALL = 0.25  # the largest share of what is known that a new head may have, by the number of tensors
_PART = 0.1  # the share of the keys of a file that a model beside others in it has at least
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
    """Names and shapes (with dots) as one way of reading the keys gives them, without what says nothing of the
    architecture."""

    shapes: Mapping[str, str]
    prefix: str = ""
    outside: int = 0
    renamed: Mapping[str, str] = {}


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
    def rank(self) -> tuple[int, int, int, int]:
        """The smaller, the better: fit, keys that differ, those that stand in the place of no other, sizes that are not
        the usual ones."""
        unusual = min(len(_unusual(model, self.sizes)) for model in self.structure.models)
        keys = len(self.missing) + len(self.added) + len(self.differing) + self.view.outside
        strange = len(self.added)
        if self.fit is Fit.OTHER_HEAD:  # of a layer that another one has the place of, nothing else is missing
            places = Counter(f"{key.rpartition('.')[0]}." for key in self.missing)
            keys -= sum(n for place, n in places.items() if any(key.startswith(place) for key in self.added))
            strange -= sum(key.startswith(tuple(places)) for key in self.added)
        return (_ORDER[self.fit], keys, strange, unusual)


_Candidates = Iterable[tuple[int, bool]]  # numbers of structures, and whether none is more similar
_ORDER = {Fit.EXACT: 0, Fit.HEADLESS: 1, Fit.OTHER_HEAD: 2, Fit.PART: 2, Fit.PIECE: 3, Fit.NEAR: 4}


def recognise(shapes: Shapes, names: Iterable[str] = ()) -> Likeness | None:
    """Return the known architecture that a state_dict is or is like; None if there is none.

    ``names`` are those of the files: of models that are built alike, the one that they name comes first."""
    if not _FEWEST <= len(shapes) <= MOST:
        return None
    names = tuple(names)
    best = _best(_views(shapes))
    found = _likeness(best, names) if best else None
    if found is not None and found.is_named and found.outside < _FEWEST:
        return found
    parts = sorted(_parts(shapes, names), key=lambda part: -part.matching)
    if len(parts) > 1 or (parts and found is None):
        covered = sum(len(shapes) - part.outside for part in parts)
        if found is None or found.is_named or 2 * covered > len(shapes):
            first, *others = (replace(part, fit=Fit.PART, outside=len(shapes) - covered) for part in parts)
            return replace(first, others=tuple(others))
    if found is None and (best := _best(_renamed(shapes))):
        return _likeness(best, names)
    return found


def _best(views: Iterable[tuple[_View, _Candidates]]) -> list[_Match]:
    """Return the structures that fit best; several if they fit one view equally well."""
    best: list[_Match] = []
    for view, candidates in views:
        left = _KEYS
        for number, is_first in candidates:
            is_named = bool(best) and best[0].fit is not Fit.NEAR
            # What fits in full has all of its hashes in the file, so that none with fewer fits better.
            if left <= 0 or (is_named and not is_first):
                break
            count = table().count(number)
            if best and best[0].fit is Fit.EXACT and best[0].structure.count != count:
                continue
            left -= count
            match = _compare(view, table().structure(number), near=not (is_named or view.renamed))
            if match is None:
                continue
            if not best or match.rank < best[0].rank:
                best = [match]
            elif match.rank == best[0].rank and match.view is best[0].view:
                best.append(match)
        if best and best[0].fit is Fit.EXACT:
            break
    return best


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


def _views(shapes: Shapes) -> Iterator[tuple[_View, _Candidates]]:
    """Yield the names without the segments of wrappers, then without one first segment after the other that most of
    them share. After that the same with names as newer releases have them, and without ``module`` inside of them.

    Each comes with the structures that have much in common with it."""
    plain = {key: strip_segments(key) for key in shapes}
    if colliding(shapes, plain) is not None:
        plain = {key: key for key in shapes}
    segments = segments_in(shapes)
    solid = _solid(shapes)
    yield from _shorter(solid, plain, segments)
    modern = {key: modern_name(bare(key)) for key in shapes}
    if modern != plain and colliding(shapes, modern) is None:
        yield from _shorter(solid, modern, segments)


def _solid(shapes: Shapes) -> dict[str, str]:
    """Return the shapes, with dots, of the tensors that say something of the architecture."""
    return {key: ".".join(map(str, shape)) for key, shape in shapes.items() if not is_passing(key, shape)}


def _shorter(
    solid: Mapping[str, str], names: dict[str, str], segments: list[str]
) -> Iterator[tuple[_View, _Candidates]]:
    for _ in range(_DEPTH):
        own = {name: solid[key] for key, name in names.items() if key in solid and name not in OF_CLIP}
        view = _View(own, _prefix(names, segments), len(solid) - sum(key in solid for key in names))
        yield view, _similar(own.items(), len(own))
        firsts = Counter(name.partition(".")[0] for name in names.values() if "." in name)
        first, count = max(firsts.items(), key=lambda item: item[1], default=("", 0))
        if 2 * count <= len(names):
            return
        names = {key: name[len(first) + 1 :] for key, name in names.items() if name.startswith(f"{first}.")}


def _similar(tensors: Iterable[tuple[str, str]], count: int) -> _Candidates:
    """Yield the structures that have many of the smallest hashes of these names and shapes, the most first
    and of those the nearest in size; and whether none has more. ``count`` is the number of all tensors."""
    known = table()
    votes = known.similar(hashes_of(tensors)[:WIDE])
    top = max(votes.values(), default=0)
    least = max(_VOTES, top - 2)
    found = sorted((top - hits, abs(known.count(each) - count), each) for each, hits in votes.items() if hits >= least)
    for behind, difference, number in found:
        if difference <= count * (1 - _NEAR / 2):
            yield number, not behind


def _grouped(shapes: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """Return what has a name by the first segment of the name, and then by the rest."""
    groups: dict[str, dict[str, T]] = {}
    for name, shape in shapes.items():
        first, _, rest = name.partition(".")
        groups.setdefault(first, {})[rest] = shape
    return groups


def _without_common(shapes: Mapping[str, T]) -> tuple[str, dict[str, T]]:
    """Return the segments that all names begin with, and the names without them."""
    common = commonprefix(list(shapes))  # noqa: RUF071 - texts, not paths; it is cut at the last dot
    before = common[: common.rfind(".") + 1]
    return before, {name[len(before) :]: shape for name, shape in shapes.items()}


def _parts(shapes: Shapes, names: tuple[str, ...]) -> Iterator[Likeness]:
    """Yield the known models that are beside each other, each under a first segment of its own."""
    before, own = _without_common(shapes)
    for first, part in _grouped(own).items():
        if len(part) >= max(_FEWEST, _PART * len(shapes)):
            best = _best(_views(part))
            if best and best[0].fit is not Fit.NEAR:
                found = _likeness(best, names)
                outside = len(shapes) - len(part) + found.outside
                yield replace(found, prefix=f"{before}{first}.{found.prefix}", outside=outside)


def _renamed(shapes: Shapes) -> Iterator[tuple[_View, _Candidates]]:
    """Yield names with the first segments of a known model in the place of their own, which are numbers in a Sequential
    of its layers; and with one before them, if the file is no more than that layer of the model."""
    before, own = _without_common(_solid(shapes))
    groups = _grouped(own)
    for number, _ in _similar(((starred(name), shape) for name, shape in own.items() if "." in name), len(own)):
        if firsts := _paired(groups, _layers(table().structure(number))):
            new = {
                f"{firsts[first]}.{rest}".rstrip("."): shape
                for first, group in groups.items()
                for rest, shape in group.items()
            }
            changed = {old: first for old, first in firsts.items() if old != first}
            yield _View(new, before, renamed=changed), [(number, True)]
    for number, _ in _similar(((f"*.{name}", shape) for name, shape in own.items()), len(own)):
        for first, layer in _layers(table().structure(number)).items():
            if own.keys() == layer.keys():
                new = {f"{first}.{name}": shape for name, shape in own.items()}
                yield _View(new, before, renamed={"": first}), [(number, True)]


def _layers(structure: Structure) -> dict[str, dict[str, str]]:
    return _grouped({name: shape for name, shape in structure.shapes.items() if not is_passing(name, ())})


def _paired(groups: Mapping[str, Mapping[str, str]], layers: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return for each first segment that of the known model which has the same names below it, in the same order;
    nothing if no segment is another one."""
    own = sorted(groups, key=int) if all(map(str.isdecimal, groups)) else list(groups)
    pairs: dict[str, str] = {}
    for first, layer in layers.items():
        if len(pairs) < len(own) and groups[own[len(pairs)]].keys() == layer.keys():
            pairs[own[len(pairs)]] = first
    pairs = {first: pairs.get(first, first) for first in own}
    return pairs if len(set(pairs.values())) == len(pairs) and any(old != new for old, new in pairs.items()) else {}


def _prefix(names: Mapping[str, str], segments: list[str]) -> str:
    """Return what keys have before the names; with a wrapper's segments in between, these and the rest."""
    key = next(iter(names))
    before = key.removesuffix(names[key])
    inner = [segment for segment in segments if f"{segment}." not in before]
    return ", ".join([*([before] if before != key and before else []), *(f"{segment}." for segment in inner)])


# ---- comparing


def _compare(view: _View, structure: Structure, near: bool) -> _Match | None:
    """Compare all names and shapes. None if the structure is not even near, or if ``near`` is not asked for."""
    missing, differing, solved = [], [], dict[str, dict[str, int]]()
    matching = 0
    for key, shape in structure.shapes.items():
        own = view.shapes.get(key)
        if own == shape:
            matching += 1
        elif own is None:
            missing.append(key)
        elif is_free(shape) and (sizes := solve(shape, own, structure.models[0].sizes)) is not None:
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
    known = structure.shapes.keys() | structure.transient | structure.others
    added = [key for key in view.shapes if key not in known]
    fit = _fit(structure, matching, missing, added, differing)
    if "" in view.renamed:
        fit = Fit.NEAR if added or differing or 2 * matching < structure.count else Fit.PIECE
    if fit is Fit.NEAR:
        smaller, larger = sorted((structure.count, len(view.shapes)))
        if not near or not smaller >= matching >= _NEAR * larger:
            return None
    elif view.outside:
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
    changed = len(missing) + len(added) + len(differing)
    head = {key for key, shape in structure.shapes.items() if is_of_head(shape)}
    if not (added or differing) and set(missing) == head:
        return Fit.HEADLESS
    if changed > _SMALL * matching:
        return Fit.NEAR
    places = _head_places(structure, head)
    tops = {key.partition(".")[0] for key in structure.shapes}

    def is_elsewhere(key: str) -> bool:
        return "." in key and key.partition(".")[0] not in tops

    is_of_new_head = all(key.startswith(places) for key in (*missing, *differing)) and all(
        key.startswith(places) or is_elsewhere(key) for key in added
    )
    return Fit.OTHER_HEAD if is_of_new_head else Fit.NEAR


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
        renamed=match.view.renamed,
        tensors=match.structure.count,
        missing=match.missing,
        added=match.added,
        differing=match.differing,
    )


def _unusual(model: Model, sizes: Mapping[str, int]) -> dict[str, int]:
    return {letter: size for letter, size in sizes.items() if model.sizes.get(letter) != size}
