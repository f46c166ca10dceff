"""Infer which layers of one implementation are which of another one, from names, shapes, order and structure."""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import count, pairwise, takewhile
from math import prod
from operator import sub
from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.core.parts import Part, Shape, full, inverse, merged, shape_of, used_in_full
from ckptfix.core.rename_map import RenameMap
from ckptfix.maps.leaves import Leaf, Leaves, Path, common, expanded, flipped, whole
from ckptfix.maps.names import (
    STATISTICS,
    bag,
    concepts,
    crosses_first,
    module,
    numbers,
    parent,
    roles,
    segments,
    similarity,
    template,
    told_apart,
    weights,
)
from ckptfix.maps.trees import NARROW, Choice, Label, Matcher, assign

if TYPE_CHECKING:
    from ckptfix.core.target import Converter

Shapes = Mapping[str, Shape]

ORDER_WEIGHT = 0.6
SORTED_WEIGHT = 0.12  # keys sorted by name say less about the order of the layers

SORTED_UP_TO = 10
"""Keys are sorted if one of so many comes before its predecessor by name; as a model defines them, about half do."""

Converters = tuple["Converter | None", "Converter | None"]
"""Those of the model that the file is from, and of the target."""

CONVERTED = 0.75  # the share of the target that a library's own loader has to fill: else the file is not one of its own

SAME_NUMBERS = 0.2  # what equal numbers add to the likeness of two names

FEW = 2  # up to this number, layers of one kind do not show by what they have in common which layers they are

COUNTER = "num_batches_tracked"

ROTATED = ({"wq", "q_proj"}, {"wk", "k_proj"})
"""Layers of Meta's Llama and of transformers: their rows have another order, which depends on the size of the heads."""


BY_HEAD = frozenset({"query_key_value", "linear_qkv", "wqkv"})
"""Names of Megatron, GPT-NeoX, BLOOM, Falcon and InternLM2."""

CHATGLM = ("transformer", "encoder")  # where ChatGLM has its layers; it uses such a name with all queries first

KEY_FIRST = ("qkv_proj", "self_attn_layer_norm")
"""Modules that metaseq's OPT has beside each other: keys, values, queries. Those of vLLM have the queries first."""


class Match(Struct, frozen=True):
    """Where a key of the target comes from; ``alternatives`` are the other source keys that fit."""

    parts: tuple[Part, ...]
    label: Label
    alternatives: tuple[str, ...] = ()


class Inference(Struct, frozen=True):
    """The map: a match for each key of the target that has one, and the shapes of both sides.

    ``maps`` are the shipped maps that it comes from. ``origin`` is ``loader`` if the library's own loader says so,
    ``values`` if those of both sides do, ``spelling`` if the names are the same without their dots. ``choices`` are the
    pairs of subtrees that it rests on, with how much better they are than others."""

    matches: dict[str, Match]
    source: Shapes
    target: Shapes
    maps: tuple[RenameMap, ...] = ()
    origin: str = ""
    choices: Mapping[Choice, float] = field(default_factory=dict)

    def doubt(self, keys: Iterable[str], label: Label = Label.AMBIGUOUS) -> None:
        """Call the matches of keys no better than this."""
        for key in keys:
            self.matches[key] = replace(self.matches[key], label=min(label, self.matches[key].label))

    @property
    def missing(self) -> list[str]:
        return [key for key in self.target if key not in self.matches]

    def lacking(self, tied: Mapping[str, tuple[str, ...]]) -> list[str]:
        """Return the keys of the target without a source, those left out that are tied to one with a source."""
        return [key for key in self.missing if self.matches.keys().isdisjoint(tied.get(key, ()))]

    @property
    def unused(self) -> list[str]:
        used = {part.source for match in self.matches.values() for part in match.parts}
        return [key for key in self.source if key not in used]


def infer(source: Shapes, target: Shapes, without: frozenset[Choice] = frozenset()) -> Inference:
    """Return the map from the keys of ``source`` to those of ``target``, both in the order of their file or model.

    ``without`` are choices of another map between them that were wrong."""
    used = ([key for key in side if key.rpartition(".")[2] not in STATISTICS] for side in (source, target))
    ours, weight = _leaves(source, is_in_order(*used))  # statistics come first in the order of execution
    theirs, other = _leaves(target)
    pairs = _oriented(ours, theirs)
    sides = tuple(side for side, each in enumerate((weight, other)) if each == SORTED_WEIGHT)
    matcher = Matcher(NARROW / 3 if len(sides) == 2 else min(weight, other), sides, without)
    matcher.match(*pairs)
    found: dict[str, list[tuple[Part, Label, tuple[str, ...]]]] = defaultdict(list)
    for decision in matcher.decisions:
        for at, (one, into, label) in enumerate(zip(decision.source, decision.target, decision.labels, strict=True)):
            alternatives = tuple(dict.fromkeys(each[at].key for each in decision.alternatives))
            found[into.key].append((_part(one, into), label, alternatives))
    matches = {key: match for key in target if (match := _match(key, found.get(key, []), source, target))}
    whole = used_in_full({key: match.parts for key, match in matches.items()}, source)
    kept = {key: match for key, match in matches.items() if key in whole}
    inference = Inference(kept, source, target, choices=matcher.choices)
    _match_leftovers(inference, kernels=_has_kernels(ours) - _has_kernels(theirs))
    for key in [key for key in kept if _is_torn(key, inference)]:
        del kept[key]
    _turn_like_siblings(inference)
    _doubt_orientation(inference)
    _doubt_torn_layers(inference)
    _doubt_norms(inference, sides)
    _doubt_torn_norms(inference, sides)
    _doubt_beside_gaps(inference)
    _doubt_uneven_lists(inference)
    _doubt_exchanges(inference)
    _doubt_broken_lists(inference, sides)
    _doubt_other_places(inference)
    _match_counters(inference)
    return inference


@lru_cache(maxsize=4)
def cached(source: tuple[tuple[str, Shape], ...], target: tuple[tuple[str, Shape], ...]) -> Inference:
    """Return the inferred map; that of the files of a zoo which have the same structure is inferred once."""
    return infer(dict(source), dict(target))


def infer_tied(source: Shapes, target: Shapes, tied: Mapping[str, tuple[str, ...]]) -> Inference:
    """Return the map; ``tied`` has for each name of a tied tensor all of its names. A tensor that could be either of
    two names is the one that both are names of. Nothing is certain if a layer is left over on either side: shapes do
    not say whether it is that one which the other side lacks."""
    inference = cached(tuple(source.items()), tuple(target.items()))
    found = inference.matches
    doubtful = {key for key in target if key not in found or found[key].label is Label.AMBIGUOUS}
    groups = [tied[key] for key in inference.missing if key in tied and doubtful.issuperset(tied[key])]
    if others := {name for names in groups for name in names[1:]}:
        once = tuple((key, shape) for key, shape in target.items() if key not in others)
        inference = replace(cached(tuple(source.items()), once), target=target)
    if not inference.unused and not inference.lacking(tied):
        return inference
    likely = {key: replace(each, label=min(each.label, Label.LIKELY)) for key, each in inference.matches.items()}
    return replace(inference, matches=likely)


def converted(source: Shapes, target: Shapes, converters: Converters) -> Inference | None:
    """Return what the loader of the target's own library makes of the file, or undo what that of the file's model makes
    of the target; None without such a loader, or if it fills no more of the target than the names do."""
    given, wanted = converters
    kept = [key for key, shape in target.items() if source.get(key) == shape]
    if len(kept) == len(target):
        return None
    for parts in (wanted and wanted(source), given and inverse(given(target))):
        if parts:
            parts = {
                key: own
                for key, own in parts.items()
                if key in target and shape_of(own) == target[key] and all(part.source in source for part in own)
            }
            whole = used_in_full(parts, source)
            least = min(len(target), len(source))  # a model of more layers is explained by all of the file
            if len(whole) > len(kept) and len(whole) >= CONVERTED * least:
                matches = {key: Match(whole[key], Label.CERTAIN) for key in target if key in whole}
                return Inference(matches, source, target, origin="loader")
    return None


def spelled(source: Shapes, target: Shapes) -> Inference | None:
    """Return the map of a file whose names are the target's with underscores or slashes for its dots, perhaps with a
    word before all of them (``ema_layer1_0_conv1_weight``); None if too few are, or if two names could be the same. A
    tensor that has such a name keeps it in another shape, too."""
    ours, theirs = ({_without_dots(key): key for key in side} for side in (source, target))
    if not theirs or (len(ours), len(theirs)) != (len(source), len(target)):
        return None
    longest = max(theirs, key=len)
    maps = [
        {key: ours[front + name] for name, key in theirs.items() if front + name in ours}
        for front in {name.removesuffix(longest) for name in ours if name.endswith(longest)}
        if not front or front.endswith("_")  # a word, and no part of one
    ]
    fitting = [
        found
        for found in maps
        if sum(source[name] == target[key] for key, name in found.items()) >= CONVERTED * len(target)
    ]
    if len(fitting) != 1 or all(key == name for key, name in fitting[0].items()):
        return None
    shapes = {key: full(source[name]) for key, name in fitting[0].items()}
    matches = {key: Match((Part(name, shapes[key], shapes[key]),), Label.CERTAIN) for key, name in fitting[0].items()}
    return Inference(matches, source, target, origin="spelling")


def _without_dots(key: str) -> str:
    return re.sub(r"[./]", "_", key)


def others(first: Inference, until: float) -> Iterator[Inference]:
    """Yield the other maps between the two sides, the likeliest first: without one choice of the first, and so on.

    ``until`` is when to stop, by ``time.monotonic``."""
    seen = [_parts(first)]
    numbers = count()
    heap = [(margin, next(numbers), frozenset([choice])) for choice, margin in first.choices.items()]
    heapify(heap)
    while heap and time.monotonic() < until:
        worse, _, without = heappop(heap)
        found = infer(first.source, first.target, without)
        if _parts(found) not in seen:
            seen.append(_parts(found))
            yield found
        for choice, margin in found.choices.items():
            if choice not in without:
                heappush(heap, (worse + max(margin, 0.0), next(numbers), without | {choice}))


def _parts(inference: Inference) -> dict[str, tuple[Part, ...]]:
    return {key: match.parts for key, match in inference.matches.items()}


def _leaves(specs: Shapes, is_shown: bool = True) -> tuple[Leaves, float]:
    keys = [key for key in specs if key.rpartition(".")[2] != COUNTER]
    weight = ORDER_WEIGHT
    if not is_shown or is_in_order(keys, sorted(keys)):
        keys.sort(key=_natural)
        weight = SORTED_WEIGHT
    paths = told_apart([segments(key) for key in keys], weight == ORDER_WEIGHT)
    return [whole(key, specs[key], path, at) for at, (key, path) in enumerate(zip(keys, paths, strict=True))], weight


def is_in_order(source: Iterable[str], target: Iterable[str]) -> bool:
    """Tell whether the keys that both sides have come in much the same order.

    A file that was sorted keeps its order if some of its keys are renamed; safetensors sorts each dtype by itself."""
    places = {key: at for at, key in enumerate(target)}
    common = [places[key] for key in source if key in places]
    return SORTED_UP_TO * sum(one > other for one, other in pairwise(common)) <= len(common)


def _natural(key: str) -> list[tuple[int, int, str]]:
    return [(0, int(text), "") if text.isdigit() else (1, 0, text) for text in re.split(r"(\d+)", key) if text]


def _oriented(source: Leaves, target: Leaves) -> tuple[Leaves, Leaves]:
    """Take both sides apart, with the source's matrices transposed if more of them then find a partner, or if only one
    side calls them ``kernel``, as JAX and TensorFlow do."""
    ours, theirs = map(_has_kernels, (source, target))
    if ours != theirs:
        return expanded(flipped(source, ours), target)
    straight, turned = expanded(source, target), expanded(flipped(source), target)
    return turned if common(*turned) > common(*straight) else straight


def _has_kernels(leaves: Leaves) -> bool:
    """Tell whether the matrices are called ``kernel``, and not only the filters of some layers."""
    ends = {leaf.key.rpartition(".")[2] for leaf in leaves if len(leaf.shape) > 1}
    return "kernel" in ends and "weight" not in ends


def _part(source: Leaf, target: Leaf) -> Part:
    """Return the part; only leaves of the source are ever seen transposed."""
    turned = len(source.shape) > 1 and source.axes != tuple(range(len(source.axes)))
    return Part(source.key, source.box, target.box, axes=source.axes if turned else ())


def _match(key: str, found: list[tuple[Part, Label, tuple[str, ...]]], source: Shapes, target: Shapes) -> Match | None:
    """Put the parts of a key together; None if some of it has no source."""
    if not found or sum(part.numel for part, _, _ in found) != prod(target[key]):
        return None
    parts = merged(part for part, _, _ in found)
    label = min(label for _, label, _ in found)
    if len(parts) > 1 or parts[0].box != full(source[parts[0].source]) or _may_be_permuted(parts[0].source, key):
        label = min(label, Label.LIKELY)
    if any(part.axes and part.source != key for part in parts):
        label = min(label, Label.LIKELY)
    if len(parts) == 1:
        label = min(label, _of_halves(parts[0], key, source))
    if len(parts) == 1 and (
        _hidden_transpose(parts[0], key, source, target)
        or {module(segments(parts[0].source)), module(segments(key))} in ROTATED
    ):
        label = Label.AMBIGUOUS
    is_fused = len(parts) > 1 or parts[0].numel != prod(source[parts[0].source])
    if is_fused and any(
        _is_unnamed_gate(part.source, key) or _is_unordered({part.source: source, key: target}) for part in parts
    ):
        label = Label.AMBIGUOUS
    return Match(parts, label, tuple(dict.fromkeys(other for _, _, others in found for other in others)))


def _is_unnamed_gate(source: str, key: str) -> bool:
    """Tell whether a gate and what it gates are fused under a name that does not say which of them comes first."""
    named = roles(segments(source)), roles(segments(key))
    return {*named[0], *named[1]} <= {"gate", "up"} and max(map(len, named)) == 1


def _is_unordered(names: Mapping[str, Shapes]) -> bool:
    """Tell whether query, key and value are fused under a name that some libraries use for one after the other, and
    others for a row of the three of each head or group, or for another order: no shape says which."""
    fused, beside = KEY_FIRST
    paths = {name: segments(name) for name in names}
    if fused in map(module, paths.values()):
        return any(".".join((*parent(paths[name])[:-1], beside, "weight")) in specs for name, specs in names.items())
    return any(module(path) in BY_HEAD and path[:2] != CHATGLM for path in paths.values())


def _may_be_permuted(source: str, key: str) -> bool:
    """Tell whether two layers may hold their rows in another order: if fused, or permuted for RoPE."""
    ours, theirs = segments(source), segments(key)
    named = {*roles(ours), *roles(theirs)}
    fused = len(roles(ours)) > 1 or len(roles(theirs)) > 1
    return module(ours) != module(theirs) and (fused or bool(named & {"query", "key"}))


def _hidden_transpose(part: Part, key: str, source: Shapes, target: Shapes) -> bool:
    """Tell whether a square matrix may move between a bare parameter (``x @ p``) and a linear layer (``x @ w.T``): if
    only one side calls it a weight, or if it moves into a child of its module and leaves the bias behind."""
    shape = target[key]
    square = len(shape) == 2 and shape[0] == shape[1] and not part.axes
    ours, theirs = segments(part.source), segments(key)
    outer, inner = sorted((part.source.rpartition(".")[0], key.rpartition(".")[0]), key=len)
    moves_alone = inner.startswith(f"{outer}.") and source.get(f"{outer}.bias") == target.get(f"{outer}.bias", ())
    if not square or ((ours[-1] == "weight") == (theirs[-1] == "weight") and not moves_alone):
        return False
    return not {"embed", "position", "token", "table", "scale"} & (bag(ours) | bag(theirs)).keys()


def _turn_like_siblings(inference: Inference) -> None:
    """Transpose square matrices whose names change as those of matrices do that only fit transposed.

    The graph convolutions of PyG before 2.0 have ``conv2.weight`` in the order of ``x @ w``, and a linear layer since:
    ``conv2.lin.weight``."""
    changes: dict[tuple[str, str], list[str]] = defaultdict(list)
    for key, match in inference.matches.items():
        part = match.parts[0]
        if len(match.parts) == 1 and len(inference.target[key]) == 2 and part.source != key:
            changes[_change(part.source, key)].append(key)
    for keys in changes.values():
        square = [key for key in keys if len(set(inference.target[key])) == 1]
        turned = {bool(inference.matches[key].parts[0].axes) for key in keys if key not in square}
        for key in square if True in turned else ():
            match = inference.matches[key]
            part = replace(match.parts[0], axes=(1, 0))
            label = Label.LIKELY if len(turned) == 1 else Label.AMBIGUOUS
            inference.matches[key] = replace(match, parts=(part,), label=label)


def _change(source: str, key: str) -> tuple[str, str]:
    """Return what is different of two names from the first segment on that is, without numbers."""
    ours, theirs = source.split("."), key.split(".")
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))
    one, other = (re.sub(r"\d+", "", ".".join(path[same:])) for path in (ours, theirs))
    return one, other


def _of_halves(part: Part, key: str, source: Shapes) -> Label:
    """Return how far the two halves of a layer can be trusted to be in the same order: diffusers exchanges shift and
    scale where it has the layer in a norm. Names that have nothing in common do not say what the halves are."""
    ours, theirs = bag(segments(part.source)), bag(segments(key))
    rows, *columns = source.get(f"{part.source.rpartition('.')[0]}.weight") or (0,)  # a weight may be a scalar
    if [rows] != [2 * size for size in columns]:
        return Label.CERTAIN
    if ("modulation" in ours) != ("modulation" in theirs):
        return Label.AMBIGUOUS
    return Label.CERTAIN if (ours & theirs).keys() - {"weight", "bias"} else Label.LIKELY


def _doubt_orientation(inference: Inference) -> None:
    """Call square matrices likely if no other matrix shows whether one side stores them transposed."""
    matrices = {key: shape for key, shape in inference.target.items() if len(shape) == 2 and key in inference.matches}
    if any(rows != columns and 1 not in (rows, columns) for rows, columns in matrices.values()):
        return
    square = (key for key, (rows, columns) in matrices.items() if rows == columns)
    renamed = (key for key in square if any(part.source != key for part in inference.matches[key].parts))
    inference.doubt(renamed, Label.LIKELY)


def _is_torn(key: str, inference: Inference) -> bool:
    """Tell whether a vector comes from a layer whose matrix goes elsewhere, while its own layer has a matrix too."""
    parts = inference.matches[key].parts
    if len(parts) > 1 or len(inference.target[key]) != 1:
        return False
    front, end = (name.rpartition(".")[0] for name in (parts[0].source, key))
    ours, theirs = f"{front}.weight", f"{end}.weight"
    is_own = theirs == key or (ours == parts[0].source and segments(key)[-1] != "bias")
    if is_own or ours not in inference.source or theirs not in inference.target:
        return False
    return theirs not in inference.matches or all(part.source != ours for part in inference.matches[theirs].parts)


def _doubt_torn_layers(inference: Inference) -> None:
    """Call the tensors of a layer ambiguous that do not move together: that of a layer which is stored transposed goes
    where it would fit the other way round, and one that is alone goes to whatever lacks it."""
    moves = {
        key: part.source
        for key, (part, *others) in ((key, match.parts) for key, match in inference.matches.items())
        if not others and part.box == full(inference.source[part.source]) and _is_of_layer(key)
    }
    ends: tuple[dict[str, set[str]], ...] = defaultdict(set), defaultdict(set)
    for key, source in moves.items():
        ends[0][_layer(source)].update([_layer(key)] if _is_of_layer(source) else ())
        ends[1][_layer(key)].add(_layer(source))
    torn = [
        {_layer(key) for key in left if key.endswith(".weight")}  # a layer may have no bias on the other side
        for left in (inference.unused, inference.missing)
    ]
    pairs = {key: (_layer(source), _layer(key)) for key, source in moves.items() if source != key}
    inference.doubt(
        key
        for key, layers in pairs.items()
        if any(_are_apart(ends[at][layer]) or layer in torn[at] for at, layer in enumerate(layers))
    )


def _are_apart(layers: set[str]) -> bool:
    """Tell whether layers are several, and not one of which the other is a part."""
    shortest = min(layers, key=len, default="")
    return any(layer not in (shortest, f"{shortest}.{layer.rpartition('.')[2]}") for layer in layers)


def _is_of_layer(key: str) -> bool:
    return key.rpartition(".")[2] in ("weight", "bias", *STATISTICS)


def _layer(key: str) -> str:
    return key.rpartition(".")[0]


def _doubt_norms(inference: Inference, sorted_sides: Sequence[int]) -> None:
    """Call the first two norms of a sorted side ambiguous if they go by other names and cross attention may come first:
    in DETR ``norm1`` is that of the self attention, in Deformable DETR that of the cross attention."""
    fronts = [
        crosses_first(map(segments, side)) if at in sorted_sides else {}
        for at, side in enumerate((inference.source, inference.target))
    ]
    for key, match in inference.matches.items() if any(fronts) else ():
        names = segments(match.parts[0].source), segments(key)
        if min(map(len, names)) > 1 and names[0][-2:] != names[1][-2:]:
            sides = zip(names, fronts, strict=True)
            if any(path[:-2] in side and path[-2][-1] in "12" and "norm" in concepts(path[-2]) for path, side in sides):
                inference.doubt([key])


def _doubt_torn_norms(inference: Inference, sorted_sides: Sequence[int]) -> None:
    """Call a batch norm ambiguous that goes elsewhere than the convolution which it comes next to on both sides: in the
    downsampling of ShuffleNet, torchvision has the branches in another order than others."""
    if sorted_sides:
        return
    after = dict(_followers(inference.source))
    before = {two: one for one, two in _followers(inference.target)}
    sources = {key: match.parts[0].source for key, match in inference.matches.items() if len(match.parts) == 1}
    for key, source in sources.items():
        matrix = f"{before[_layer(key)]}.weight" if _layer(key) in before else ""
        follower = after.get(_layer(sources[matrix]), "") if matrix in sources else ""
        if follower and follower != _layer(source):
            own = f"{follower}.{key.rpartition('.')[2]}"
            if inference.source.get(own) == inference.target[key]:
                inference.doubt([key])


def _followers(specs: Shapes) -> Iterator[tuple[str, str]]:
    """Yield the layers of a matrix with the batch norms that come next in the same module."""
    sizes: dict[str, int] = {}
    for key, shape in specs.items():
        sizes[_layer(key)] = max(sizes.get(_layer(key), 0), len(shape))
    for one, two in pairwise(sizes):
        if sizes[one] > 1 and f"{two}.running_mean" in specs and _layer(one) == _layer(two):
            yield one, two


def _doubt_beside_gaps(inference: Inference) -> None:
    """Call a key ambiguous if a tensor of its shape is left over on one side that it could be: of the same block, or
    one whose name fits as well. If the file lacks an embedding, its head has the shape of it; if the target lacks
    ``bn1``, its ``bn2`` may get it. Layers that move together with those of other blocks only fear their own block."""
    left: tuple[dict[object, list[str]], ...] = defaultdict(list), defaultdict(list)
    for rivals, specs, keys in zip(
        left, (inference.source, inference.target), (inference.unused, inference.missing), strict=True
    ):
        for key in keys:
            rivals[_squeezed(specs[key])].append(key)
    single = {key: match.parts[0].source for key, match in inference.matches.items() if len(match.parts) == 1}
    doubtful: set[str] = set()
    common = _common(inference.source) | _common(inference.target) if any(left) else set()
    together = Counter((template(source), template(key)) for key, source in single.items())
    for key, source in single.items():
        match = inference.matches[key]
        if match.label is Label.AMBIGUOUS or source == key:
            continue
        shape = _squeezed(inference.target[key])
        is_one_of_many = together[template(source), template(key)] > FEW
        pairs = [(other, key, source) for other in left[0].get(shape, ())]
        pairs += [(source, other, key) for other in left[1].get(shape, ())]
        for one, other, own in pairs:
            lost = one if own == source else other
            is_like = segments(lost)[-1] == segments(own)[-1]
            if is_like and _block(lost) == _block(own):
                name = module(segments(source))
                is_doubtful = name != module(segments(key)) or name.isdigit()
            elif is_one_of_many:
                is_doubtful = False
            else:
                better = _alike(one, other, common) - _alike(source, key, common)
                has_siblings_there = together[template(one), template(other)] > 0
                is_doubtful = has_siblings_there or (better >= 0 if is_like else better > 0)
            if is_doubtful:
                doubtful.add(_layer(key) if _is_of_layer(key) else key)
                break
    inference.doubt(
        key for key in inference.matches if key in doubtful or (_is_of_layer(key) and _layer(key) in doubtful)
    )


def _doubt_uneven_lists(inference: Inference) -> None:
    """Call the equal members of a numbered list ambiguous if one of them has no counterpart, as the other side may lack
    any of them, or if their layers do not move in step: to the same layers of members that are as far apart."""
    images: tuple[dict[str, list[str]], ...] = defaultdict(list), defaultdict(list)
    for key, match in inference.matches.items():
        for part in match.parts:
            images[0][part.source].append(key)
            images[1][key].append(part.source)
    doubtful: set[str] = set()
    sides = [_members(specs) for specs in (inference.source, inference.target)]
    ranks = [_ranks(members) for members in sides]
    for side, (specs, members, image) in enumerate(
        zip((inference.source, inference.target), sides, images, strict=True)
    ):
        equal: dict[object, list[Path]] = defaultdict(list)
        for path, keys in members.items():
            inside = frozenset((rest, specs[key]) for rest, key in keys.items())
            equal[path[:-1], template(path[-1]), inside].append(path)
        for paths in equal.values():
            is_layer = len({rest[:-1] for rest in members[paths[0]]}) < FEW
            alike = [{rest: image[key] for rest, key in members[path].items()} for path in paths]
            places = [ranks[side][path] for path in paths]
            if not is_layer and len(alike) > 1 and not _in_step(alike, places, ranks[1 - side]):
                doubtful.update(key for path in paths for key in members[path].values())
    inference.doubt(key for key in inference.matches if not doubtful.isdisjoint((key, *images[1][key])))


def _members(keys: Iterable[str]) -> dict[Path, dict[Path, str]]:
    """Return the keys in each numbered module, by their path inside of it."""
    members: dict[Path, dict[Path, str]] = defaultdict(dict)
    for key in keys:
        path = segments(key)
        for depth, segment in enumerate(path[:-1], 1):
            if segment[-1:].isdigit():
                members[path[:depth]][path[depth:]] = key
    return members


def _ranks(paths: Iterable[Path]) -> dict[Path, tuple[int, int]]:
    """Return the place of each numbered module in its list, and the length of the list."""
    lists: dict[tuple[Path, str], list[Path]] = defaultdict(list)
    for path in paths:
        lists[path[:-1], template(path[-1])].append(path)
    return {
        path: (at, len(each))
        for each in lists.values()
        for at, path in enumerate(sorted(each, key=lambda path: numbers(path[-1:])))
    }


def _in_step(
    members: Sequence[Mapping[Path, Sequence[str]]],
    places: Sequence[tuple[int, int]],
    others: Mapping[Path, tuple[int, int]],
) -> bool:
    """Tell whether equal modules, given as what each of their tensors becomes, have counterparts that are equal, too,
    and at the same places if the lists are of one length, forwards or backwards.

    Those of ``attn1`` and ``attn2`` may have names of their own."""
    if any(2 * sum(not keys for keys in each.values()) > len(each) for each in members):
        return False
    owners: dict[Path, int] = {}
    within: list[tuple[Path, int]] = []
    steps: list[set[tuple[int, ...]]] = [set() for _ in members]
    for rest in members[0]:
        found = [(at, each[rest]) for at, each in enumerate(members) if each[rest]]
        names = [tuple(map(template, keys)) for _, keys in found]
        if 1 < len(set(names)) < len(names) or 0 < 2 * len(found) < len(members):
            return False
        if len(found) < 2 or len(set(names)) > 1:
            continue
        for column in zip(*(keys for _, keys in found), strict=True):
            paths = list(map(segments, column))
            varies = [len(set(each)) > 1 for each in zip(*paths, strict=True)]
            depth = varies.index(True) + 1 if True in varies else 0
            for (at, _), path in zip(found, paths, strict=True):
                if depth and owners.setdefault(path[:depth], at) != at:
                    return False  # two modules share one
                within += [(path[:outer], at) for outer in range(depth)]
                steps[at].add(tuple(step for step in map(sub, numbers(path), numbers(paths[0])) if step))
    if any(owners.get(path, at) != at for path, at in within):
        return False  # a layer moves to the counterpart of another module
    pairs = [(places[at], others[owner]) for owner, at in owners.items() if owner in others]
    of_one_length = [(one, other, length) for (one, length), (other, size) in pairs if length == size]
    is_same = all(one == other for one, other, _ in of_one_length)
    is_mirrored = all(one + other == length - 1 for one, other, length in of_one_length)
    return (is_same or is_mirrored) and all(len(each) < 2 for each in steps)


def _doubt_exchanges(inference: Inference) -> None:
    """Call two keys ambiguous that would be exchanged though both sides have both names, and they fit as they are."""
    sources = {key: match.parts[0].source for key, match in inference.matches.items() if len(match.parts) == 1}
    exchanged = (key for key, source in sources.items() if source != key and sources.get(source) == key)
    inference.doubt(key for key in exchanged if _squeezed(inference.source[key]) == _squeezed(inference.target[key]))


def _doubt_broken_lists(inference: Inference, sorted_sides: Sequence[int]) -> None:
    """Call a layer that leaves its list for a name without a number ambiguous, and those of its shape that keep their
    names, if the side where it has left is sorted. SAM has ``layers.{0,1,2}``, and transformers ``proj_in``,
    ``layers.0`` and ``proj_out``: its ``layers.0`` is another one."""
    kept: dict[tuple[str, Shape], list[str]] = defaultdict(list)
    for key, match in inference.matches.items():
        if len(match.parts) == 1 and match.parts[0].source == key and (own := _list_of(key)):
            kept[own, inference.target[key]].append(key)
    for key, match in list(inference.matches.items()) if kept else ():
        source = match.parts[0].source
        left, own = (source, _list_of(key)) if _list_of(key) else (key, _list_of(source))
        is_hidden = (0 if left == source else 1) in sorted_sides and not _list_of(left) and len(match.parts) == 1
        rivals = kept.get((own, inference.target[key]), ()) if is_hidden else ()
        for each, others in [(key, rivals), *((rival, (source,)) for rival in rivals)] if rivals else ():
            one = inference.matches[each]
            alternatives = tuple(dict.fromkeys((*one.alternatives, *others)))
            inference.matches[each] = replace(one, label=Label.AMBIGUOUS, alternatives=alternatives)


def _doubt_other_places(inference: Inference) -> None:
    """Call the layers of a numbered list likely, and not certain, if they do not come in its order on the other side,
    forwards or backwards: each side may lack another one of them."""
    lists: dict[tuple[str, ...], list[tuple[int, ...]]] = defaultdict(list)
    sources = {key: match.parts[0].source for key, match in inference.matches.items() if len(match.parts) == 1}
    for key, source in sources.items():
        path = re.split(r"(\d+)", source)
        for at in range(1, len(path), 2):
            place = (int(path[at]), *numbers((key,)))
            lists["".join(path[:at]), "".join(path[at + 1 :]), template(key)].append(place)
    places = {each: [place[1:] for place in sorted(members)] for each, members in lists.items()}
    doubtful = {each[0] for each, ends in places.items() if ends not in (sorted(ends), sorted(ends, reverse=True))}
    inference.doubt((key for key, source in sources.items() if source.startswith(tuple(doubtful))), Label.LIKELY)


def _list_of(key: str) -> str:
    """Return the key of a layer that only has a number in its list, without this number; that of another is empty."""
    *front, number, end = ("", *key.split("."))
    return ".".join((*front, "#", end)) if number.isdigit() else ""


def _squeezed(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)


def _block(key: str) -> tuple[str, ...]:
    """Return the module that has the layer of a tensor."""
    path = segments(key)
    return path[:-2] if path[-1] in STATISTICS else parent(path)


def _common(keys: Collection[str]) -> set[str]:
    """Return the concepts that most keys have: ``model`` says nothing."""
    counts = Counter(concept for key in keys for concept in bag(segments(key)))
    return {concept for concept, number in counts.items() if 2 * number > len(keys)}


def _alike(source: str, key: str, common: Collection[str]) -> float:
    """Return the share of concepts that two names have in common, without those that most names have."""
    one, other = (bag(segments(name)) for name in (source, key))
    return similarity(one, other, {concept: float(concept not in common) for concept in one | other})


def _match_leftovers(inference: Inference, kernels: int) -> None:
    """Match single tensors that differ by a transposition or by flattened axes, where the names agree.

    ``kernels`` is 1 if only the file has the kernels of JAX, -1 if only the target has."""
    ours = [key for key in inference.unused if len(inference.source[key]) > 1]
    theirs = [key for key in inference.missing if len(inference.target[key]) > 1]
    one, other = [bag(segments(key)) for key in ours], [bag(segments(key)) for key in theirs]
    weigh = weights(one, other)
    fitting = {
        (key, into): part
        for key in ours
        for into in theirs
        if (part := _reshaped(key, inference.source[key], inference.target[into], kernels))
    }
    scores = [
        [
            similarity(a, b, weigh) + SAME_NUMBERS * (numbers((key,)) == numbers((into,)))
            if (key, into) in fitting
            else -9.0
            for b, into in zip(other, theirs, strict=True)
        ]
        for a, key in zip(one, ours, strict=True)
    ]
    for row, column in assign(scores):
        key, into = ours[row], theirs[column]
        if (key, into) in fitting and similarity(one[row], other[column], weigh) > 0.25:
            rivals = [*scores[row][:column], *scores[row][column + 1 :]]
            rivals += [each[column] for at, each in enumerate(scores) if at != row]
            is_clear = scores[row][column] - max(rivals, default=0.0) > NARROW
            label = Label.LIKELY if is_clear else Label.AMBIGUOUS
            inference.matches[into] = Match((fitting[key, into],), label)
            bias, own = (name.rpartition(".")[0] + ".bias" for name in (key, into))
            shapes = inference.source.get(bias, ()), inference.target.get(own, ())
            if kernels and own not in inference.matches and prod(shapes[0]) == prod(shapes[1]) > 1:
                inference.matches[own] = Match((Part(bias, full(shapes[0]), full(shapes[1])),), label)


def _reshaped(key: str, shape: Shape, wanted: Shape, kernels: int) -> Part | None:
    """Return a tensor as one of another shape, None if it is none. A matrix of JAX has its inputs first, and either
    of its axes may be two: ``(inputs, heads, size)`` and ``(heads, size, outputs)`` in attention."""
    whole = full(shape), full(wanted)
    if len(shape) == len(wanted) == 2:
        return Part(key, *whole, axes=(1, 0)) if shape == wanted[::-1] else None
    if kernels and {len(shape), len(wanted)} == {2, 3}:
        long, short = sorted((shape, wanted), key=len, reverse=True)
        views = [(prod(long[:at]), prod(long[at:])) for at in (1, 2)]
        view = next((view for view in views if view == short[::-1]), None)
        return view and Part(key, *whole, view if long == shape else (), (1, 0))
    fits = prod(shape) == prod(wanted) and shape[0] == wanted[0] and 2 in (len(shape), len(wanted))
    return Part(key, *whole) if fits else None


def _match_counters(inference: Inference) -> None:
    """Let the counters of batches follow the running means of their modules."""
    for key in inference.target:
        front, _, last = key.rpartition(".")
        match = inference.matches.get(f"{front}.running_mean") if last == COUNTER else None
        if match:
            counter = match.parts[0].source.rpartition(".")[0] + "." + COUNTER
            if counter in inference.source and inference.source[counter] == inference.target[key]:
                shape = full(inference.target[key])
                inference.matches[key] = Match((Part(counter, shape, shape),), match.label)
