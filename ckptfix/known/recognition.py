"""Recognises the architecture of a state_dict from names and shapes only.

The names are tried as they are, without the segments of wrappers, and without common prefixes. A few hashes of them
find candidate structures, each of which is compared in full. A model is identified only if every tensor outside its
head is in the file with the right shape."""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from os.path import commonprefix

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.likeness import Fit, Likeness
from ckptfix.core.parts import Shapes
from ckptfix.core.wrappers import MODULE, bare, colliding, segments_in, strip_segments
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
    text_of,
)

_Candidates = Iterator[tuple["_View", int, bool]]  # the number of a structure, and whether none is more similar
MOST = 7_500  # maximum tensors of a state_dict; with more, no known structure can have the share `_NEAR` in common
_DEPTH = 6  # maximum segments of a prefix

# Tensors to compare in full per search; some libraries have a dozen models around the same encoder.
_KEYS = 4_000
_VOTES = 3  # minimum hashes that a candidate structure has in common with a state_dict
_FEWEST = 8  # minimum matching tensors for identifying a model
_SMALL = 0.25  # maximum tensors of a new head, as a share of the matching ones
_PART = 0.1  # minimum share of a file's keys for one of several models in it
_NEAR = 0.6  # minimum share of tensors, on both sides, that a near structure has in common with a state_dict

# Libraries in order of precedence, for a structure that several of them build.
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

_LEADING = f"{MODULE}."
_OLD = (f".{_LEADING}", "denselayer", "LayerNorm.gamma", "LayerNorm.beta")  # parts of old names
_DENSE = r"(?<=\.)(norm|relu|conv)\.([12])(?=\.)"


class _View(Struct, frozen=True):
    """Names and shapes (with dots) in one reading of the keys, without tensors that are not specific to an
    architecture."""

    shapes: Mapping[str, str]
    prefix: str = ""
    outside: int = 0
    renamed: Mapping[str, str] = {}


class _Search(Struct):
    """The views compared so far, by hashes, and the remaining budget of tensors, so that a state_dict that is similar
    to many structures does not slow down a check."""

    seen: set[tuple[int, ...]] = field(default_factory=set)
    left: int = 3 * _KEYS


class _ModelMatch(Struct, frozen=True, dict=True):
    """The result of comparing a structure with a view."""

    structure: Structure
    view: _View
    fit: Fit
    sizes: Mapping[str, int]
    matching: int
    missing: tuple[str, ...]
    added: tuple[str, ...]
    differing: tuple[str, ...]

    @cached_property
    def rank(self) -> tuple[int, int, int, int]:
        """The sort key, smallest first: fit, number of differing keys, added keys that replace none, unusual sizes."""
        unusual = min(len(_unusual(model, self.sizes)) for model in self.structure.models)
        keys = len(self.missing) + len(self.added) + len(self.differing) + self.view.outside
        strange = len(self.added)
        if self.fit is Fit.OTHER_HEAD:  # the tensors of a replaced layer count once
            places = Counter(f"{key.rpartition('.')[0]}." for key in self.missing)
            keys -= sum(n for place, n in places.items() if any(key.startswith(place) for key in self.added))
            strange -= sum(key.startswith(tuple(places)) for key in self.added)
        return (_ORDER[self.fit], keys, strange, unusual)


_ORDER = {Fit.EXACT: 0, Fit.HEADLESS: 1, Fit.OTHER_HEAD: 2, Fit.PART: 2, Fit.PIECE: 3, Fit.NEAR: 4}


def recognise(shapes: Shapes, names: Iterable[str] = ()) -> Likeness | None:
    """Return the known architecture that matches a state_dict or is nearest to it; None if there is none.

    ``names`` are file names: of models with the same structure, one that they mention comes first."""
    if not _FEWEST <= len(shapes) <= MOST:
        return None
    names, search = tuple(names), _Search()
    solid = {key: ".".join(map(str, shape)) for key, shape in shapes.items() if not is_passing(key, shape)}
    best = _best(_views(solid, search))
    found = _likeness(best, names) if best else None
    if found is not None and found.is_named and found.outside < _FEWEST:
        return found
    if found is not None and found.is_named:
        search.seen.clear()  # it has to be found again as one of the parts
    parts = sorted(_parts(solid, names, search), key=lambda part: -part.matching)
    if len(parts) > 1 or (parts and found is None):
        covered = sum(len(solid) - part.outside for part in parts)
        if found is None or found.is_named or 2 * covered > len(solid):
            first, *others = (replace(part, fit=Fit.PART, outside=len(solid) - covered) for part in parts)
            return replace(first, others=tuple(others))
    if found is None and (best := _best(_renamed(solid))):
        return _likeness(best, names)
    return found


def _best(views: Iterable[tuple[int, _Candidates]]) -> list[_ModelMatch]:
    """Return the structures that fit best, several if they fit a view equally well."""
    best: list[_ModelMatch] = []
    for outside, candidates in views:
        # Nothing under a prefix can rank better than this.
        if best and best[0].rank[:2] < (_ORDER[Fit.PART] if outside else 0, outside):
            continue
        for view, number, is_first in candidates:
            is_named = bool(best) and best[0].fit is not Fit.NEAR
            # A full match has all of its hashes in the file, so none with fewer can be better.
            if is_named and not is_first:
                break
            if best and best[0].fit is Fit.EXACT and best[0].structure.count != table().count(number):
                continue
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
    """Return the known architecture that matches a checkpoint, or the chosen set of weights in it, or is nearest."""
    if "likeness" not in checkpoint.derived:
        names = checkpoint.picked or dict.fromkeys(checkpoint.specs, "")
        shapes = {name or key: checkpoint.specs[key].shape for key, name in names.items() if key in checkpoint.specs}
        checkpoint.derived["likeness"] = recognise(shapes, (checkpoint.path,))
    found: Likeness | None = checkpoint.derived["likeness"]
    return found


def modern_name(name: str) -> str:
    """Return the name of a tensor in newer releases, for DenseNet's layers and BERT's LayerNorm."""
    if "denselayer" in name:
        name = re.sub(_DENSE, r"\1\2", name)
    for old, new in (("gamma", "weight"), ("beta", "bias")):
        if name.endswith(f"LayerNorm.{old}"):
            name = name.removesuffix(old) + new
    return name


# ---- ways to read the keys


def _views(solid: Mapping[str, str], search: _Search) -> Iterator[tuple[int, _Candidates]]:
    """Yield readings of the keys: without the segments of wrappers, then without one shared leading segment after
    another; then the same with the names of newer releases and without ``module`` inside them.

    Each reading is the number of tensors left out, and the candidate structures for the others."""
    segments = segments_in(solid)
    for rename in (strip_segments, lambda key: modern_name(bare(key)))[: 1 + _has_old_names(solid)]:
        names = {key: rename(key) for key in solid}
        if colliding(solid, names) is not None:
            names = {key: key for key in solid}
        texts = sorted(text_of(name, solid[key]) for key, name in names.items())
        prefix = b""
        for _ in range(_DEPTH if texts else 0):
            yield len(solid) - len(texts), _candidates(solid, names, texts, prefix, segments, search)
            # A prefix that more than half of the sorted texts share is a prefix of the middle one.
            name = texts[len(texts) // 2].rpartition(b" ")[0]
            first, dot, _ = name[len(prefix) :].partition(b".")
            prefix += first + dot
            below = texts[bisect_left(texts, prefix) : bisect_left(texts, prefix[:-1] + b"/")]  # a slash follows a dot
            if not dot or 2 * len(below) <= len(texts):
                break
            texts = below


def _has_old_names(names: Collection[str]) -> bool:
    """Return whether some names may have newer forms, or a ``module`` that is not a prefix of all."""
    text = "\n".join(names)
    return text.count(_LEADING) not in (0, len(names)) or any(each in text for each in _OLD)


def _candidates(
    solid: Mapping[str, str],
    names: Mapping[str, str],
    texts: list[bytes],
    prefix: bytes,
    segments: list[str],
    search: _Search,
) -> _Candidates:
    """Yield the structures that are similar to the tensors under a prefix, unless these were looked up before."""
    hashes = tuple(hashes_of(texts, len(prefix)))
    if hashes in search.seen:
        return
    search.seen.add(hashes)
    view = None
    for number, is_first in _similar(hashes, len(texts)):
        search.left -= table().count(number)
        if search.left < 0:
            return
        if view is None:
            before = prefix.decode(errors="surrogatepass")
            below = {key: name.removeprefix(before) for key, name in names.items() if name.startswith(before)}
            own = {name: solid[key] for key, name in below.items() if name not in OF_CLIP}
            view = _View(own, _prefix(below, segments), len(solid) - len(texts))
        yield view, number, is_first


def _similar(hashes: Sequence[int], count: int) -> Iterator[tuple[int, bool]]:
    """Yield the structures that have many of the smallest of these hashes, with whether none has more; the most first,
    and among equals the nearest in size. ``count`` is the number of all tensors."""
    known = table()
    votes = known.similar(hashes[:WIDE])
    top = max(votes.values(), default=0)
    least = max(_VOTES, top - 2)
    found = sorted((top - hits, abs(known.count(each) - count), each) for each, hits in votes.items() if hits >= least)
    left = _KEYS
    for behind, _, number in found:
        if left > 0 and _NEAR * count <= known.count(number) <= (2 - _NEAR / 2) * count:
            left -= known.count(number)
            yield number, not behind


def _grouped(shapes: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Group shapes by the first segment of their names, with the rest of the name as key."""
    groups: dict[str, dict[str, str]] = {}
    for name, shape in shapes.items():
        first, _, rest = name.partition(".")
        groups.setdefault(first, {})[rest] = shape
    return groups


def _without_common(shapes: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Return the common leading segments of all names, and the names without them."""
    common = commonprefix(list(shapes))  # noqa: RUF071 - texts, not paths; it is cut at the last dot
    before = common[: common.rfind(".") + 1]
    return before, {name[len(before) :]: shape for name, shape in shapes.items()}


def _parts(solid: Mapping[str, str], names: tuple[str, ...], search: _Search) -> Iterator[Likeness]:
    """Yield the known models in a state_dict, each under its own first segment."""
    before, own = _without_common(solid)
    for first, part in _grouped(own).items():
        if len(part) >= max(_FEWEST, _PART * len(solid)):
            best = _best(_views(part, search))
            if best and best[0].fit is not Fit.NEAR:
                found = _likeness(best, names)
                outside = len(solid) - len(part) + found.outside
                yield replace(found, prefix=f"{before}{first}.{found.prefix}", outside=outside)


def _renamed(solid: Mapping[str, str]) -> Iterator[tuple[int, _Candidates]]:
    """Yield readings whose first segments are replaced by those of a known model, as for a Sequential of its layers, or
    with one of its segments added in front, if the file is only that layer."""
    before, own = _without_common(solid)
    groups = _grouped(own)
    stars = hashes_of(text_of(starred(name), shape) for name, shape in own.items() if "." in name)
    for number, _ in _similar(stars, len(own)):
        if firsts := _paired(groups, _layers(table().structure(number))):
            new = {
                f"{firsts[first]}.{rest}".rstrip("."): shape
                for first, group in groups.items()
                for rest, shape in group.items()
            }
            changed = {old: first for old, first in firsts.items() if old != first}
            yield 0, iter([(_View(new, before, renamed=changed), number, True)])
    for number, _ in _similar(hashes_of(text_of(f"*.{name}", shape) for name, shape in own.items()), len(own)):
        for first, layer in _layers(table().structure(number)).items():
            if own.keys() == layer.keys():
                new = {f"{first}.{name}": shape for name, shape in own.items()}
                yield 0, iter([(_View(new, before, renamed={"": first}), number, True)])


def _layers(structure: Structure) -> dict[str, dict[str, str]]:
    return _grouped({name: shape for name, shape in structure.shapes.items() if not is_passing(name, ())})


def _paired(groups: Mapping[str, Mapping[str, str]], layers: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Map each first segment to that of the known model with the same names below it, in the same order; return nothing
    if all segments are equal or two map to the same one."""
    own = sorted(groups, key=int) if all(map(str.isdecimal, groups)) else list(groups)
    pairs: dict[str, str] = {}
    for first, layer in layers.items():
        if len(pairs) < len(own) and groups[own[len(pairs)]].keys() == layer.keys():
            pairs[own[len(pairs)]] = first
    pairs = {first: pairs.get(first, first) for first in own}
    return pairs if len(set(pairs.values())) == len(pairs) and any(old != new for old, new in pairs.items()) else {}


def _prefix(names: Mapping[str, str], segments: list[str]) -> str:
    """Return what precedes the names in the keys, and the segments of wrappers inside them."""
    key = next(iter(names))
    before = key.removesuffix(names[key])
    inner = [segment for segment in segments if f"{segment}." not in before]
    return ", ".join([*([before] if before != key and before else []), *(f"{segment}." for segment in inner)])


# ---- comparing


def _compare(view: _View, structure: Structure, near: bool) -> _ModelMatch | None:
    """Compare all names and shapes; return None if the structure is not near, or is only near and ``near`` is False."""
    missing, differing, solved = [], [], dict[str, dict[str, int]]()
    others = [(key, shape) for key, shape in structure.shapes.items() if view.shapes.get(key) != shape]
    matching = len(structure.shapes) - len(others)
    for key, shape in others:
        own = view.shapes.get(key)
        if own is None:
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
    return _ModelMatch(structure, view, fit, sizes, matching, tuple(missing), tuple(added), tuple(differing))


def _is_excused(key: str, view: _View, structure: Structure) -> bool:
    """Return whether a tensor may be missing: it is not specific to an architecture, or is tied to an existing one."""
    if is_passing(key, ()):
        return True
    return any(key in group and any(other in view.shapes for other in group) for group in structure.ties)


def _agreed(solved: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the most common value of each size."""
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
    """Return the modules of the head, each with a trailing dot; the parent of a layer if it contains little else."""
    places = set()
    for module in {key.rpartition(".")[0] for key in head}:
        around = module.rpartition(".")[0]
        inner = sum(other.startswith(f"{around}.") for other in structure.shapes) if around else 0
        places.add(f"{around if around and inner <= _SMALL * len(structure.shapes) else module}.")
    return tuple(places) or ("\0",)


# ---- naming


def _likeness(best: list[_ModelMatch], names: Iterable[str]) -> Likeness:
    stems = [re.sub(r"[^a-z0-9]+", "_", name.rpartition("/")[2].lower()).strip("_") for name in names]

    def rank(entry: tuple[Model, _ModelMatch]) -> tuple[int, bool, int, int, str]:
        model, match = entry
        own = model.name.partition("/")[2]
        is_said = any(re.sub(r"[^a-z0-9]+", "_", own.lower()) in stem for stem in stems)
        # The shortest name is the plainest: resnet18, not resnetblur18.
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
