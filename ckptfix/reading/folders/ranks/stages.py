"""The stages of Megatron's pipelines: which modules they have, and their layers, which each of them numbers from 0.

Sources: Megatron-LM, ``megatron/core/transformer/transformer_layer.py`` (``get_transformer_layer_offset``)."""

from collections.abc import Mapping, Set
from typing import Any

StagePlace = tuple[str, int]  # a chunk of the model (`model1` with virtual stages), and a stage of the pipeline

# Arguments with which stages have different numbers of layers.
_UNEVEN = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)

_LAST = frozenset(("final_layernorm", "final_norm"))  # modules of the last stage


def is_of_another(modules: Set[str], stage: int, stages: int) -> bool:
    """Return whether the modules in a file of one of two stages show that it is that of the other: the embedding is in
    the first stage, and the last norm in the last one."""
    return stage != stages - 1 if modules & _LAST else "embedding" in modules and stage > 0


def stage_offsets(
    counts: Mapping[StagePlace, Mapping[str, int]], present: set[StagePlace], args: Mapping[str, Any]
) -> dict[StagePlace, dict[str, int] | None]:
    """Return the number of the first layer in each stage, by the prefix of the layers' names; None if it is unknown,
    because an earlier stage is missing and the arguments do not tell how many layers it had.

    ``counts`` has the numbers of layers of the stages that are ``present``, in the order of the model."""
    prefixes = {prefix for found in counts.values() for prefix in found}
    gap = _layers_of_missing(counts, present, prefixes, args)
    offsets: dict[StagePlace, dict[str, int] | None] = {}
    begin: dict[str, int] | None = {}
    for place, found in counts.items():
        offsets[place] = begin
        if begin is not None:
            own = found if place in present else None if gap is None else dict.fromkeys(prefixes, gap)
            begin = None if own is None else {p: begin.get(p, 0) + own.get(p, 0) for p in prefixes}
    return offsets


def _layers_of_missing(
    counts: Mapping[StagePlace, Mapping[str, int]],
    present: set[StagePlace],
    prefixes: set[str],
    args: Mapping[str, Any],
) -> int | None:
    """Return how many layers each missing stage had; None if that is not certain."""
    whole, missing = args.get("num_layers"), len(counts) - len(present)
    if type(whole) is not int or len(prefixes) != 1:
        return None  # the arguments count the layers of one stack
    (prefix,) = prefixes
    held = [counts[place].get(prefix, 0) for place in present]
    left = whole - sum(held)
    if missing == 1:
        return left if left >= 0 else None
    is_even = len(set(held)) == 1 and held[0] * len(counts) == whole and not any(args.get(name) for name in _UNEVEN)
    return held[0] if is_even else None
