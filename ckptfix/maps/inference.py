"""Infers the map between the layers of two implementations from names, shapes, order and structure."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import count, pairwise, takewhile
from math import prod
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ckptfix.core.parts import Part, Shape, Shapes, full, inverse, merged, shape_of, used_in_full
from ckptfix.maps.doubts import doubt_what_may_differ
from ckptfix.maps.leaves import Leaf, Leaves, common, expanded, flipped, whole
from ckptfix.maps.matches import Inference, Match
from ckptfix.maps.names import (
    STATISTICS,
    bag,
    by_number,
    disambiguated,
    module,
    numbers,
    parent,
    roles,
    segments,
    similarity,
    weights,
)
from ckptfix.maps.trees import NARROW, Choice, Label, Matcher, assign

if TYPE_CHECKING:
    from ckptfix.core.target import Converter

ORDER_WEIGHT = 0.6
SORTED_WEIGHT = 0.12  # keys sorted by name say little about the order of the layers

SORTED_UP_TO = 10
"""Keys count as sorted if at most one in this many is out of order; in a model's own order, half are."""

Converters = tuple["Converter | None", "Converter | None"]
"""The converter of the model that the file is from, and that of the target."""

CONVERTED = 0.75  # minimum share of the target that a library's own loader has to fill for files that it supports

SAME_NUMBERS = 0.2  # added to the similarity of two names for equal numbers

COUNTER = "num_batches_tracked"

ROTATED = ({"wq", "q_proj"}, {"wk", "k_proj"})
"""Layers of Meta's Llama and of transformers, whose rows have different orders that depend on the size of the heads."""

BY_HEAD = frozenset({"query_key_value", "linear_qkv", "wqkv", "attn"})
"""Names of Megatron, GPT-NeoX, BLOOM, Falcon, InternLM2 and litgpt before it said ``qkv``."""

CHATGLM = ("transformer", "encoder")  # path of ChatGLM's layers, which use such a name with all queries first

OTHER_ORDER = ("qkv_proj", ("self_attn_layer_norm", "mlp.fc_in"))
"""A module of vLLM with the queries first, and its siblings if it has another order: metaseq's OPT has the keys first,
and CodeGen has queries, values and keys for each of four devices."""


def infer(source: Shapes, target: Shapes, without: frozenset[Choice] = frozenset()) -> Inference:
    """Infer the map from the keys of ``source`` to those of ``target``, both in the order of their file or model.

    ``without`` are choices that the map must not make."""
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
    doubt_what_may_differ(inference, sides)
    _match_counters(inference)
    return inference


@lru_cache(maxsize=4)
def cached(source: tuple[tuple[str, Shape], ...], target: tuple[tuple[str, Shape], ...]) -> Inference:
    """Return the inferred map, cached for files of a zoo with the same structure."""
    return infer(dict(source), dict(target))


def infer_tied(source: Shapes, target: Shapes, tied: Mapping[str, tuple[str, ...]]) -> Inference:
    """Return the inferred map; ``tied`` has all names of each tied tensor, by each of its names.

    A tensor that could be either of two tied names is matched with the tied tensor. Nothing is certain if a layer is
    left over on either side, because shapes do not tell whether it is one that the other side lacks."""
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
    """Return the map by the loader of the target's own library, or the inverse of the map by the loader of the file's;
    None without such a loader, or if it fills no more of the target than equal names do. A renamed table of positions
    is matched even if it has another length."""
    given, wanted = converters
    kept = [key for key, shape in target.items() if source.get(key) == shape]
    if len(kept) == len(target):
        return None
    for parts in (wanted and wanted(source), given and inverse(given(target))):
        if parts:
            parts = {
                key: own
                for key, own in parts.items()
                if key in target and all(part.source in source for part in own)
                if shape_of(own) == target[key] or (own[0].source != key and _is_longer(own, source, target[key]))
            }
            whole = used_in_full(parts, source)
            fitting = [key for key, own in whole.items() if shape_of(own) == target[key]]
            least = min(len(target), len(source))  # the whole file is enough for a model with more layers
            if len(fitting) > len(kept) and len(fitting) >= CONVERTED * least:
                matches = {key: Match(whole[key], Label.CERTAIN) for key in target if key in whole}
                return Inference(matches, source, target, origin="loader")
    return None


def _is_longer(parts: tuple[Part, ...], shapes: Shapes, wanted: Shape) -> bool:
    """Return whether the parts are one whole matrix of these shapes with the columns of ``wanted``, and other rows."""
    (part, *others) = parts
    old = shapes[part.source]
    return (
        not others and part == Part.whole(part.source, old) and len(old) == len(wanted) == 2 and old[1:] == wanted[1:]
    )


def spelled(source: Shapes, target: Shapes) -> Inference | None:
    """Return the map of a file whose names are the target's with underscores or slashes instead of dots, perhaps with a
    common prefix (``ema_layer1_0_conv1_weight``); None if too few are, or if two names could be the same. Tensors are
    matched by name even if their shapes differ."""
    ours, theirs = ({re.sub(r"[./]", "_", key): key for key in side} for side in (source, target))
    if not theirs or (len(ours), len(theirs)) != (len(source), len(target)):
        return None
    longest = max(theirs, key=len)
    maps = [
        {key: ours[front + name] for name, key in theirs.items() if front + name in ours}
        for front in {name.removesuffix(longest) for name in ours if name.endswith(longest)}
        if not front or front.endswith("_")  # a whole word
    ]
    fitting = [
        found
        for found in maps
        if sum(source[name] == target[key] for key, name in found.items()) >= CONVERTED * len(target)
    ]
    if len(fitting) != 1 or all(key == name for key, name in fitting[0].items()):
        return None
    matches = {key: Match((Part.whole(name, source[name]),), Label.CERTAIN) for key, name in fitting[0].items()}
    return Inference(matches, source, target, origin="spelling")


def others(first: Inference, until: float) -> Iterator[Inference]:
    """Yield alternative maps between the two sides, the likeliest first, by excluding choices of the earlier maps.

    ``until`` is the time limit by ``time.monotonic``."""
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
        keys = by_number(keys)
        weight = SORTED_WEIGHT
    paths = disambiguated([segments(key) for key in keys], weight == ORDER_WEIGHT)
    return [whole(key, specs[key], path, at) for at, (key, path) in enumerate(zip(keys, paths, strict=True))], weight


def is_in_order(source: Iterable[str], target: Iterable[str]) -> bool:
    """Return whether the common keys of both sides are in almost the same order.

    The tolerance is for sorted files of which some keys were renamed, and for safetensors, which sorts by dtype
    first."""
    places = {key: at for at, key in enumerate(target)}
    common = [places[key] for key in source if key in places]
    return SORTED_UP_TO * sum(one > other for one, other in pairwise(common)) <= len(common)


def _oriented(source: Leaves, target: Leaves) -> tuple[Leaves, Leaves]:
    """Split both sides into leaves, with the source's matrices transposed if more of them then have a partner, or if
    only one side calls them ``kernel``, as JAX and TensorFlow do."""
    ours, theirs = map(_has_kernels, (source, target))
    if ours != theirs:
        return expanded(flipped(source, ours), target)
    straight, turned = expanded(source, target), expanded(flipped(source), target)
    return turned if common(*turned) > common(*straight) else straight


def _has_kernels(leaves: Leaves) -> bool:
    """Return whether the matrices are called ``kernel``, and not only the filters of some layers."""
    ends = {leaf.key.rpartition(".")[2] for leaf in leaves if len(leaf.shape) > 1}
    return "kernel" in ends and "weight" not in ends


def _part(source: Leaf, target: Leaf) -> Part:
    """Return the part for a pair of leaves; only leaves of the source are ever transposed."""
    turned = len(source.shape) > 1 and source.axes != tuple(range(len(source.axes)))
    return Part(source.key, source.box, target.box, axes=source.axes if turned else ())


def _match(key: str, found: list[tuple[Part, Label, tuple[str, ...]]], source: Shapes, target: Shapes) -> Match | None:
    """Return the match of a key from its parts; None if some of its elements have no source."""
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
    """Return whether gate and up projection are fused under a name that does not say which comes first."""
    named = roles(segments(source)), roles(segments(key))
    return {*named[0], *named[1]} <= {"gate", "up"} and max(map(len, named)) == 1


def _is_unordered(names: Mapping[str, Shapes]) -> bool:
    """Return whether query, key and value are fused under a name that libraries use for different orders: one after the
    other, or interleaved by head or group. Shapes do not tell these apart."""
    fused, signs = OTHER_ORDER
    paths = {name: segments(name) for name in names}
    if fused in map(module, paths.values()):
        return any(
            ".".join((*parent(paths[name])[:-1], sign, "weight")) in specs
            for name, specs in names.items()
            for sign in signs
        )
    return any(module(path) in BY_HEAD and path[:2] != CHATGLM for path in paths.values())


def _may_be_permuted(source: str, key: str) -> bool:
    """Return whether two layers may have their rows in different orders: if fused, or permuted for RoPE."""
    ours, theirs = segments(source), segments(key)
    named = {*roles(ours), *roles(theirs)}
    fused = len(roles(ours)) > 1 or len(roles(theirs)) > 1
    return module(ours) != module(theirs) and (fused or bool(named & {"query", "key"}))


def _hidden_transpose(part: Part, key: str, source: Shapes, target: Shapes) -> bool:
    """Return whether a square matrix may move between a bare parameter (``x @ p``) and a linear layer (``x @ w.T``): if
    only one side calls it a weight, or if it moves into a child of its module without the bias."""
    shape = target[key]
    square = len(shape) == 2 and shape[0] == shape[1] and not part.axes
    ours, theirs = segments(part.source), segments(key)
    outer, inner = sorted((part.source.rpartition(".")[0], key.rpartition(".")[0]), key=len)
    moves_alone = inner.startswith(f"{outer}.") and source.get(f"{outer}.bias") == target.get(f"{outer}.bias", ())
    if not square or ((ours[-1] == "weight") == (theirs[-1] == "weight") and not moves_alone):
        return False
    return not {"embed", "position", "token", "table", "scale"} & (bag(ours) | bag(theirs)).keys()


def _turn_like_siblings(inference: Inference) -> None:
    """Transpose square matrices whose names change like those of other matrices that only fit transposed.

    Graph convolutions of PyG had ``conv2.weight`` in the order of ``x @ w`` before 2.0, and have a linear layer
    ``conv2.lin.weight`` since."""
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
    """Return the rest of two names from the first segment that differs, without numbers."""
    ours, theirs = source.split("."), key.split(".")
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))
    one, other = (re.sub(r"\d+", "", ".".join(path[same:])) for path in (ours, theirs))
    return one, other


def _of_halves(part: Part, key: str, source: Shapes) -> Label:
    """Return the confidence that the two halves of a layer are in the same order: diffusers swaps shift and scale in
    the layers of norms. Names without a common concept do not identify the halves."""
    ours, theirs = bag(segments(part.source)), bag(segments(key))
    rows, *columns = source.get(f"{part.source.rpartition('.')[0]}.weight") or (0,)  # a weight may be a scalar
    if [rows] != [2 * size for size in columns]:
        return Label.CERTAIN
    if ("modulation" in ours) != ("modulation" in theirs):
        return Label.AMBIGUOUS
    return Label.CERTAIN if (ours & theirs).keys() - {"weight", "bias"} else Label.LIKELY


def _is_torn(key: str, inference: Inference) -> bool:
    """Return whether a vector comes from a layer whose matrix goes elsewhere, while its target layer has a matrix
    too."""
    parts = inference.matches[key].parts
    if len(parts) > 1 or len(inference.target[key]) != 1:
        return False
    front, end = (name.rpartition(".")[0] for name in (parts[0].source, key))
    ours, theirs = f"{front}.weight", f"{end}.weight"
    is_own = theirs == key or (ours == parts[0].source and segments(key)[-1] != "bias")
    if is_own or ours not in inference.source or theirs not in inference.target:
        return False
    return theirs not in inference.matches or all(part.source != ours for part in inference.matches[theirs].parts)


def _match_leftovers(inference: Inference, kernels: int) -> None:
    """Match single tensors that differ by a transposition or by flattened axes if their names agree.

    ``kernels`` is 1 if only the file has the kernels of JAX, -1 if only the target has, else 0."""
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
                inference.matches[own] = Match((Part.whole(bias, *shapes),), label)


def _reshaped(key: str, shape: Shape, wanted: Shape, kernels: int) -> Part | None:
    """Return the part that reshapes or transposes a tensor to a shape, None if there is none. A matrix of JAX has its
    inputs first, and one of its axes may be two: ``(inputs, heads, size)`` and ``(heads, size, outputs)`` in
    attention."""
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
    """Match each ``num_batches_tracked`` like the running mean of its module."""
    for key in inference.target:
        front, _, last = key.rpartition(".")
        match = inference.matches.get(f"{front}.running_mean") if last == COUNTER else None
        if match:
            counter = match.parts[0].source.rpartition(".")[0] + "." + COUNTER
            if counter in inference.source and inference.source[counter] == inference.target[key]:
                inference.matches[key] = Match((Part.whole(counter, inference.target[key]),), match.label)
