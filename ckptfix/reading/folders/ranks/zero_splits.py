"""How tensor-parallel ranks of DeepSpeed split a model: by the ``universal_checkpoint_info`` of model states, which
maps patterns of names to kinds of splits, maps of pieces and lists of sub-parameters, or else by Megatron's names.

Source: ``deepspeed/checkpoint/ds_to_universal.py`` (0.9 to 0.19)."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ckptfix.bytes.limits import shown
from ckptfix.core.parts import Box, box_at
from ckptfix.core.spec import TensorSpec, contiguous_strides
from ckptfix.errors import UnreadableError
from ckptfix.reading.folders.ranks import neox
from ckptfix.reading.folders.ranks.partition import WHOLE, Split, SplitOf, stacked
from ckptfix.reading.pickles.claims import sizes

# Megatron before version 1 of its checkpoints, and SwissArmyTransformer (GLM-130B, CogVLM), have all queries of a rank
# before all keys before all values.
_IN_THIRDS = re.compile(r"((?:.*\.)?transformer\.layers\.\d+\.\w*attention\.)(query_)?key_value\.(?:weight|bias)")
_PATTERN = re.compile(r"(?:\w|-|\.[*+]?|\\d\+?|\\[^\w]|\^|\$){1,512}")
_MAP_VERSION = 1
_QUANTIFIERS = 3  # most quantifiers of a pattern, so that it matches any name in bounded time


def splits_of_ranks(root: Any, state: Mapping[str, Any]) -> SplitOf:
    """Return how tensor-parallel ranks split a model: by the rules for DeepSpeed's own converter, or by names.

    With the converter's rules, parameters without a rule are split by rows. ``state`` is the state_dict of one rank."""
    info = root.get("universal_checkpoint_info")
    if not isinstance(info, dict):
        version = root.get("checkpoint_version")
        by_name = neox.splits_of(state)
        in_thirds = not isinstance(version, (int, float)) or version < 1
        return _of_parameters(partial(_split_in_thirds, by_name, state) if in_thirds else by_name)
    literal: dict[str, _MakeSplit] = {}
    patterns: list[tuple[re.Pattern[str], _MakeSplit]] = []
    for text, rule in _rules(info):
        if not _PATTERN.fullmatch(text) or sum(map(text.count, "*+")) > _QUANTIFIERS:
            raise ValueError(f"{shown(text)} in the place of a pattern of names")
        if re.escape(name := re.sub(r"\\(.)", r"\1", text[1:-1])) == text[1:-1] and text[0] + text[-1] == "^$":
            literal.setdefault(name, rule)  # AutoTP writes one for every parameter
        else:
            patterns.append((re.compile(text), rule))
    if (groups := root.get("param_shapes")) is not None:
        trained = {str(name) for group in groups for name in group}
    else:  # without ZeRO
        trained = state.keys() - {*root.get("buffer_names", ())}

    def split_of(name: str, parts: Sequence[TensorSpec]) -> Split | None:
        found = (rule for pattern, rule in patterns if name in trained and pattern.match(name))
        rule = literal.get(name) or next(found, None)
        return rule(name, parts) if rule is not None else _BY_ROWS if name in trained else None

    return _of_parameters(split_of)


def kinds_of_splits(root: Any) -> tuple[object, ...]:
    """Return what model states say about splits that is equal on all tensor-parallel ranks: whether they name the
    trained parameters, and the patterns of each kind."""
    info = root.get("universal_checkpoint_info")
    info = info if isinstance(info, dict) else {}
    whole = [(entry["partition_dim"], *entry["patterns"]) for entry in info.get("parameter_with_sub_params") or ()]
    return "param_shapes" in root, [[*(info.get(key) or ())] for key in _DIVIDED], whole


_MakeSplit = Callable[[str, Sequence[TensorSpec]], Split]  # returns how a tensor is split into these parts


def _rules(info: Mapping[str, Any]) -> Iterator[tuple[str, _MakeSplit]]:
    """Yield the rules of DeepSpeed's converter by patterns of names, most specific first.

    Unsupported parameters come first, because without a rule they would be split by rows."""
    for text, reason in (info.get("autotp_unsupported_parameter_patterns") or {}).items():
        yield text, partial(_refused, reason)
    affine = info.get("affine_map") or {}
    if (version := affine.get("version", _MAP_VERSION)) > _MAP_VERSION:
        raise ValueError(f"version {version} of its maps of parts, which is newer than this release")
    for text, entry in (affine.get("params") or {}).items():
        yield text, partial(_by_map, entry)
    for key, split in _DIVIDED.items():
        for text in info.get(key) or ():
            yield text, partial(_by_category, split)
    widths = info.get("sub_param_shard_widths") or {}
    for entry in info.get("parameter_with_sub_params") or ():
        for text in entry["patterns"]:
            yield text, partial(_of_sub_parameters, entry, widths.get(text))


def _by_category(split: Split, name: str, parts: Sequence[TensorSpec]) -> Split:
    return split


def _refused(reason: object, name: str, parts: Sequence[TensorSpec]) -> Split:
    raise UnreadableError(f"DeepSpeed itself cannot merge the parts of {name}: {shown(reason)}")


def _by_map(entry: Mapping[str, Any], name: str, parts: Sequence[TensorSpec]) -> Split:
    """Return the split for a map of pieces, each of which is a view of the whole and a view of the part."""
    shape, places = sizes(entry["logical_shape"]), []
    for rank in range(len(parts)):
        held = entry["ranks"][rank]
        if any(piece.get("scale", 1.0) != 1.0 for piece in held["pieces"]):
            raise UnreadableError(f"the ranks hold {name} multiplied by a factor, and ckptfix only moves its bytes")
        own = sizes(held["shard_shape"])
        places.append(tuple((_box(shape, piece, "source"), _box(own, piece, "dest")) for piece in held["pieces"]))
    return Split(0, places=tuple(places), shape=shape)


def _box(shape: tuple[int, ...], piece: Mapping[str, Any], place: str) -> Box:
    """Return the box of a piece in a tensor. Raises ``ValueError`` if it is not a box."""
    (start, steps), extent, strides = piece[place], sizes(piece["shape"]), contiguous_strides(shape)
    usual = zip(extent, sizes(steps), strides, strict=True)
    if type(start) is not int or start < 0 or any(size > 1 and step != own for size, step, own in usual):
        raise ValueError(f"a piece of shape {list(extent)} with the strides {shown(steps)}")
    offsets = []
    for stride in strides:
        offsets.append(start // max(stride, 1))
        start -= offsets[-1] * stride
    return box_at(offsets, extent)


def _of_sub_parameters(entry: Mapping[str, Any], widths: Any, name: str, parts: Sequence[TensorSpec]) -> Split:
    """Return the split of concatenated parameters, each of which is split over all ranks."""
    axis, ranks, first = entry["partition_dim"], len(parts), parts[0]
    within = entry["shape"][axis]
    if widths is None and type(within) is int:  # the number of parameters, all of one size
        return Split(axis, within, is_uneven=True)
    if widths is None:
        if any(size % ranks for size in sizes(within)):
            raise ValueError(f"{name} consists of {list(within)}, which {ranks} ranks do not divide")
        widths = [[size // ranks] * ranks for size in sizes(within)]
    return stacked(axis, [sizes(own) for own in widths], first)


def _split_in_thirds(
    split_of: SplitOf, state: Mapping[str, Any], name: str, parts: Sequence[TensorSpec]
) -> Split | None:
    """Return the split of queries, keys and values that are concatenated on each rank; None if there are fewer keys
    than queries. Other tensors are split by ``split_of``."""
    if (match := _IN_THIRDS.fullmatch(name)) is None:
        return split_of(name, parts)
    count, dense = 3 if match[2] else 2, state.get(f"{match[1]}dense.weight")
    is_equal = isinstance(dense, TensorSpec) and parts[0].shape[0] == count * dense.shape[1]
    return Split(0, count) if is_equal else None


def check_degree(path: str, state: Mapping[str, Any], ranks: int) -> None:
    """Raise ``UnreadableError`` if attention layers are split over more than ``ranks`` ranks, by their shapes."""
    for name, spec in state.items():
        if name.endswith("attention.dense.weight") and isinstance(spec, TensorSpec) and len(spec.shape) == 2:
            rows, columns = spec.shape
            if columns and rows > columns * ranks and rows % columns == 0:
                raise UnreadableError(
                    f"{path}: has files of {ranks} of {rows // columns} tensor-parallel ranks; fetch the others"
                )


_BY_ROWS = Split(0, is_uneven=True)
_DIVIDED = {
    "tp_replicated_parameter_patterns": WHOLE,
    "parameter_to_average_patterns": WHOLE,
    "parameter_with_2_sub_params_cat_dim_0": Split(0, 2, is_uneven=True),
    "parameter_with_row_parallelism_patterns": Split(1, is_uneven=True),
}


def _of_parameters(split_of: SplitOf) -> SplitOf:
    """Return ``split_of``, except that scalars (an optimizer's step) and tensors emptied by stage 3 are copies."""
    return lambda name, parts: split_of(name, parts) if parts[0].shape and parts[0].numel else WHOLE
