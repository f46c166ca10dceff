"""Evidence against inferred matches: layers that do not move together, siblings that could be swapped. It lowers the
label of a match and does not change its parts.

Each kind of doubt is a function that names the implementations in which it occurs."""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import sub

from msgspec.structs import replace

from ckptfix.core.parts import Shape, Shapes, full
from ckptfix.maps.leaves import Segments
from ckptfix.maps.matches import Inference
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
)
from ckptfix.maps.trees import Label

FEW = 2  # up to this number, the common changes of layers of one kind are no evidence


def doubt_what_may_differ(inference: Inference, sorted_sides: Sequence[int]) -> None:
    """Lower the labels of all doubtful matches. ``sorted_sides`` (0 the source, 1 the target) have keys sorted by name,
    so that these are no evidence for the order of layers."""
    _doubt_orientation(inference)
    _doubt_rotary(inference)
    _doubt_merged_patches(inference)
    _doubt_torn_layers(inference)
    _doubt_norms(inference, sorted_sides)
    _doubt_torn_norms(inference, sorted_sides)
    _doubt_beside_gaps(inference)
    _doubt_uneven_lists(inference)
    _doubt_exchanges(inference)
    _doubt_broken_lists(inference, sorted_sides)
    _doubt_other_places(inference)
    inference.doubt_torn_tensors()


def _doubt_orientation(inference: Inference) -> None:
    """Lower square matrices to likely if no other matrix shows whether one side stores them transposed."""
    matrices = {key: shape for key, shape in inference.target.items() if len(shape) == 2 and key in inference.matches}
    if any(rows != columns and 1 not in (rows, columns) for rows, columns in matrices.values()):
        return
    square = (key for key, (rows, columns) in matrices.items() if rows == columns)
    renamed = (key for key in square if any(part.source != key for part in inference.matches[key].parts))
    inference.doubt(renamed, Label.LIKELY)


def _doubt_rotary(inference: Inference) -> None:
    """Mark queries and keys as ambiguous if only one side has the names of Meta's Llama, as torchtune and gpt-fast do:
    its rotary embeddings need the rows of a head in another order than those of transformers. The token embedding,
    whose name shows this, is ambiguous too, so that it keeps its name until the others are resolved."""
    if is_metas(inference.source) is is_metas(inference.target):
        return
    turned, signs = [], []
    for key, match in inference.matches.items():
        names = segments(key), *(segments(part.source) for part in match.parts)
        if any({"query", "key"} & {*roles(names[0])} & {*roles(name)} for name in names[1:]):
            turned.append(key)
        elif any("tok_embeddings" in name for name in names):
            signs.append(key)
    if any(inference.matches[key].label > Label.AMBIGUOUS for key in turned):
        inference.doubt([*turned, *signs])


def is_metas(keys: Iterable[str]) -> bool:
    """Return whether keys are those of Meta's Llama, or of an implementation with its names and rotary embeddings."""
    return any("tok_embeddings" in path or module(path) in ("wq", "wk") for path in map(segments, keys))


def _doubt_merged_patches(inference: Inference) -> None:
    """Mark the layers that merge four patches as ambiguous if only one side has them in ``stages``, as in mmpretrain:
    there the four patches of a channel are adjacent, elsewhere the channels of a patch."""
    for key, match in inference.matches.items():
        ours, theirs = segments(match.parts[0].source), segments(key)
        is_merging = "downsample" in theirs and f"{'.'.join(parent(theirs))}.reduction.weight" in inference.target
        if is_merging and ("stages" in ours) is not ("stages" in theirs):
            inference.doubt([key])


def _doubt_torn_layers(inference: Inference) -> None:
    """Mark the tensors of a layer as ambiguous if they do not move together: a matrix that is stored transposed may be
    matched with a layer of swapped sizes, and a leftover tensor with any layer that lacks one."""
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
    """Return whether layers are several, and not a layer and its child."""
    shortest = min(layers, key=len, default="")
    return any(layer not in (shortest, f"{shortest}.{layer.rpartition('.')[2]}") for layer in layers)


def _is_of_layer(key: str) -> bool:
    return key.rpartition(".")[2] in ("weight", "bias", *STATISTICS)


def _layer(key: str) -> str:
    return key.rpartition(".")[0]


def _doubt_norms(inference: Inference, sorted_sides: Sequence[int]) -> None:
    """Mark the first two norms of a sorted side as ambiguous if their names change and cross attention may come first:
    ``norm1`` belongs to self-attention in DETR, but to cross attention in Deformable DETR."""
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
    """Mark a batch norm as ambiguous if it does not move with the convolution that it follows on both sides: in the
    downsampling of ShuffleNet, torchvision has the branches in another order than other libraries."""
    if sorted_sides:
        return
    after = dict(_followers(inference.source))
    before = {two: one for one, two in _followers(inference.target)}
    sources = inference.single_sources
    for key, source in sources.items():
        matrix = f"{before[_layer(key)]}.weight" if _layer(key) in before else ""
        follower = after.get(_layer(sources[matrix]), "") if matrix in sources else ""
        if follower and follower != _layer(source):
            own = f"{follower}.{key.rpartition('.')[2]}"
            if inference.source.get(own) == inference.target[key]:
                inference.doubt([key])


def _followers(specs: Shapes) -> Iterator[tuple[str, str]]:
    """Yield the layers with a matrix, each with the batch norm that follows in the same module."""
    sizes: dict[str, int] = {}
    for key, shape in specs.items():
        sizes[_layer(key)] = max(sizes.get(_layer(key), 0), len(shape))
    for one, two in pairwise(sizes):
        if sizes[one] > 1 and f"{two}.running_mean" in specs and _layer(one) == _layer(two):
            yield one, two


def _doubt_beside_gaps(inference: Inference) -> None:
    """Mark a key as ambiguous if a leftover tensor of its shape could take its place: one of the same block, or one
    whose name fits equally well. If the file lacks an embedding, its head may be matched with it; if the target lacks
    ``bn1``, its ``bn2`` may get it. For layers that move like those of other blocks, only their own block counts."""
    left: tuple[dict[object, list[str]], ...] = defaultdict(list), defaultdict(list)
    for rivals, specs, keys in zip(
        left, (inference.source, inference.target), (inference.unused, inference.missing), strict=True
    ):
        for key in keys:
            rivals[_squeezed(specs[key])].append(key)
    single = inference.single_sources
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
    """Mark the equal members of a numbered list as ambiguous if one of them has no counterpart, because the other side
    may lack any of them, or if their layers do not move in step: to the same layers of equally spaced members."""
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
        equal: dict[object, list[Segments]] = defaultdict(list)
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


def _members(keys: Iterable[str]) -> dict[Segments, dict[Segments, str]]:
    """Return the keys in each numbered module, by their path inside it."""
    members: dict[Segments, dict[Segments, str]] = defaultdict(dict)
    for key in keys:
        path = segments(key)
        for depth, segment in enumerate(path[:-1], 1):
            if segment[-1:].isdigit():
                members[path[:depth]][path[depth:]] = key
    return members


def _ranks(paths: Iterable[Segments]) -> dict[Segments, tuple[int, int]]:
    """Return the index of each numbered module in its list, and the length of the list."""
    lists: dict[tuple[Segments, str], list[Segments]] = defaultdict(list)
    for path in paths:
        lists[path[:-1], template(path[-1])].append(path)
    return {
        path: (at, len(each))
        for each in lists.values()
        for at, path in enumerate(sorted(each, key=lambda path: numbers(path[-1:])))
    }


def _in_step(
    members: Sequence[Mapping[Segments, Sequence[str]]],
    places: Sequence[tuple[int, int]],
    others: Mapping[Segments, tuple[int, int]],
) -> bool:
    """Return whether equal modules, given as what each of their tensors becomes, have equal counterparts, and at the
    same indices if the lists have the same length, forwards or backwards.

    The counterparts of ``attn1`` and ``attn2`` may have different names."""
    if any(2 * sum(not keys for keys in each.values()) > len(each) for each in members):
        return False
    owners: dict[Segments, int] = {}
    within: list[tuple[Segments, int]] = []
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
            # Chunks of DINOv2 go on counting, `blocks.0.1` and `blocks.1.2`: only the second number tells blocks apart.
            kinds = [len(set(each)) for each in zip(*paths, strict=True)]
            depth = next((at for most in (len(paths), 2) for at, many in enumerate(kinds, 1) if many >= most), 0)
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
    """Mark two keys as ambiguous if they would be swapped although both sides have both names with fitting shapes."""
    sources = inference.single_sources
    exchanged = (key for key, source in sources.items() if source != key and sources.get(source) == key)
    inference.doubt(key for key in exchanged if _squeezed(inference.source[key]) == _squeezed(inference.target[key]))


def _doubt_broken_lists(inference: Inference, sorted_sides: Sequence[int]) -> None:
    """Mark a layer as ambiguous if it moves from a list to a name without a number on a sorted side, and so the layers
    of its shape that keep their names. SAM has ``layers.{0,1,2}``, and transformers has ``proj_in``, ``layers.0`` and
    ``proj_out``: its ``layers.0`` is another layer."""
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
    """Lower the layers of a numbered list to likely if they are not in its order on the other side, forwards or
    backwards: each side may lack different layers."""
    lists: dict[tuple[str, ...], list[tuple[int, ...]]] = defaultdict(list)
    sources = inference.single_sources
    for key, source in sources.items():
        path = re.split(r"(\d+)", source)
        for at in range(1, len(path), 2):
            place = (int(path[at]), *numbers((key,)))
            lists["".join(path[:at]), "".join(path[at + 1 :]), template(key)].append(place)
    places = {each: [place[1:] for place in sorted(members)] for each, members in lists.items()}
    doubtful = {each[0] for each, ends in places.items() if ends not in (sorted(ends), sorted(ends, reverse=True))}
    inference.doubt((key for key, source in sources.items() if source.startswith(tuple(doubtful))), Label.LIKELY)


def _list_of(key: str) -> str:
    """Return the key with ``#`` for the number of its layer, if the layer is directly in a list; else empty."""
    *front, number, end = ("", *key.split("."))
    return ".".join((*front, "#", end)) if number.isdigit() else ""


def _squeezed(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)


def _block(key: str) -> tuple[str, ...]:
    """Return the path of the module that contains the tensor's layer."""
    path = segments(key)
    return path[:-2] if path[-1] in STATISTICS else parent(path)


def _common(keys: Collection[str]) -> set[str]:
    """Return the concepts that most keys have, such as ``model``, which do not distinguish keys."""
    counts = Counter(concept for key in keys for concept in bag(segments(key)))
    return {concept for concept, number in counts.items() if 2 * number > len(keys)}


def _alike(source: str, key: str, common: Collection[str]) -> float:
    """Return the similarity of two names by concepts, ignoring ``common`` ones."""
    one, other = (bag(segments(name)) for name in (source, key))
    return similarity(one, other, {concept: float(concept not in common) for concept in one | other})
