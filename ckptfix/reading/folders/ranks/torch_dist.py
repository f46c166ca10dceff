"""Megatron-LM's ``torch_dist``: a folder of torch.distributed.checkpoint with stacked layers, and ``common.pt``.

The container becomes that of the format ``torch``, with one tensor per layer under the names on disk. If masters and
moments have names, masters become the weights, and moments the optimizer's state.

Sources: Megatron-LM (core 0.16 to 0.19), ``megatron/core/dist_checkpointing/``, ``megatron/core/optimizer/``."""

import math
import re
from collections import OrderedDict
from collections.abc import Mapping
from itertools import product
from operator import mul
from typing import Any

from msgspec.structs import replace

from ckptfix.core.parts import box_at, full
from ckptfix.core.spec import TensorSpec, contiguous_strides, with_own_storage
from ckptfix.errors import UnreadableError
from ckptfix.reading.boxes import boxed
from ckptfix.reading.folders.chunks import merge_parts
from ckptfix.reading.folders.ranks import mixers
from ckptfix.reading.folders.ranks.files import MOST_RANKS
from ckptfix.reading.folders.ranks.megatron_layers import INTERLEAVED, arguments_of, whole_arguments

_STACKED = re.compile(r"((?:.*\.)?layers\.)(?!\d+\.)(.+)")
# Moments and masters by name, and the empty extra states of layers in a folder of torch_dist.
_MOMENT = re.compile(r"(?:chained_(\d+)\.)?optimizer\.state\.([^.]+)\.(.+)")
_NOTHING = re.compile(r"_extra_state/shard_[\d.]+_[\d.]+$")  # with a second number if layers have experts
# Masters and moments in unnamed buckets (`dp_reshardable`), with uninitialised memory between them.
_BUCKETS = re.compile(r"((?:chained_\d+\.)?optimizer\.distributed)\..+")
_BESIDE = ("optimizer.", "chained_", "rng_state", "rerun_state_machine")
_GATED = re.compile(r".*\.(experts|shared_experts)(?:\.\d+)?\.linear_fc1\.(weight|bias)")
# The arguments with the number of ranks that split these experts.
_RANKS = {"experts": "expert_tensor_parallel_size", "shared_experts": "tensor_model_parallel_size"}
_MOST_PARTS = 1 << 12  # parts into which ranks may split a weight


def converted(
    saved: Mapping[Any, Any], common: Mapping[Any, Any]
) -> tuple[dict[Any, Any], dict[str, TensorSpec], list[str]]:
    """Convert a container of ``torch_dist`` to the form of ``torch``. Return it, copies of the masters in the dtype of
    the training, and the buckets of the distributed optimizer that are left out.

    The weights are under ``model``, with one tensor per layer, before the rest of the chunks and of ``common.pt``. If
    masters and moments have names, masters become the weights, and moments become ``optimizer``."""
    buckets = {key: match[1] for key in saved if (match := _BUCKETS.fullmatch(str(key)))}
    root, left_out = {key: value for key, value in saved.items() if key not in buckets}, sorted({*buckets.values()})
    held = {key: value for key, value in root.items() if key not in common and isinstance(value, TensorSpec)}
    weights = {key: value for key, value in held.items() if not str(key).startswith(_BESIDE)}
    if "model" in root or not weights:
        return root, {}, left_out
    rest = {
        key: whole_arguments(value) if key == "args" else value
        for key, value in root.items()
        if key not in weights and not (_NOTHING.search(str(key)) and value in ([], [None]))
    }
    layers = arguments_of(common).get("num_layers")
    # Experts that ranks share have an optimizer of their own in a chain.
    model, fields = unstacked(weights, layers), dict[tuple[int, str], dict[str, TensorSpec]]()
    for key in held:
        if match := _MOMENT.fullmatch(str(key)):
            fields.setdefault((int(match[1] or 0), match[2]), {})[match[3]] = rest.pop(key)
    fields = {
        field: {name: _unflattened(name, spec, model.get(name)) for name, spec in unstacked(found, layers).items()}
        for field, found in fields.items()
    }
    args = arguments_of(common)
    model = OrderedDict(_with_blocks(mixers.rejoined(model), args))
    fields = {field: _with_blocks(mixers.rejoined(found), args) for field, found in fields.items()}
    named = [(field, name, spec) for field, found in fields.items() for name, spec in found.items()]
    if not named or any(name not in model or spec.shape != model[name].shape for _, name, spec in named):
        moments = {key: value for key, value in root.items() if key in held and key not in weights}
        return {"model": model, **moments, **rest}, {}, left_out
    kind = next((field for _, field in fields if field == "fp32_param"), "param")
    masters = {name: spec for (_, field), found in fields.items() if field == kind for name, spec in found.items()}
    copies = {name: model[name] for name in masters}
    states: dict[int, dict[str, dict[str, Any]]] = {}
    for (chain, field), found in fields.items():
        for name, spec in found.items() if field != kind else ():
            states.setdefault(chain, {}).setdefault(name, {})[field] = spec
    model.update(masters)
    return {"model": model, **rest, "optimizer": _chained(states, rest.get("optimizer"))}, copies, left_out


def _chained(states: Mapping[int, dict[str, dict[str, Any]]], saved: Any) -> dict[str, Any]:
    """Return the state of all optimizers of a chain as that of one, with all of their groups if they are known."""
    entries = dict(enumerate(saved)) if isinstance(saved, list) else saved if isinstance(saved, dict) else {}
    is_chain = bool(entries) and all(type(number) is int for number in entries)
    made = [_by_name(state, entries.get(chain) if is_chain else saved) for chain, state in sorted(states.items())]
    whole: dict[str, Any] = {"state": {name: row for each in made for name, row in each["state"].items()}}
    if all("param_groups" in each for each in made):
        whole["param_groups"] = [group for each in made for group in each["param_groups"]]
    return whole


def _with_blocks(entries: Mapping[Any, Any], args: Mapping[str, Any]) -> dict[Any, Any]:
    """Return tensors by name, with the rows of experts in the order of the ranks if gates are in blocks of them.

    Megatron saves the first half of each rank's rows before the second halves, as it does with gates that are a half.
    It loads blocks in the right order only on as many ranks as saved them."""
    made = dict(entries)
    for name, spec in entries.items():
        match = _GATED.fullmatch(name) if isinstance(name, str) and isinstance(spec, TensorSpec) else None
        ranks = args.get(_RANKS[match[1]]) if match and args.get(INTERLEAVED[match[1]]) else 1
        axis = len(spec.shape) - (2 if match[2] == "weight" else 1) if match else 0
        if (
            type(ranks) is not int
            or not 1 < ranks <= MOST_RANKS
            or axis < 0
            or spec.shape[axis] % (2 * ranks)
            or not spec.numel
        ):
            continue
        rows = spec.shape[axis] // (2 * ranks)
        front, back = full(spec.shape[:axis]), full(spec.shape[axis + 1 :])
        boxes = [(*front, (start, start + rows), *back) for start in range(0, spec.shape[axis], rows)]
        copies = {
            boxes[2 * rank + half]: [boxed(spec, boxes[half * ranks + rank])]
            for rank, half in product(range(ranks), range(2))
        }
        made[name] = merge_parts(name, spec.dtype, spec.shape, copies, name)
    return made


def _unflattened(name: str, spec: TensorSpec, weight: TensorSpec | None) -> TensorSpec:
    """Return a moment in the shape of its weight.

    In the form ``fully_sharded_model_space``, the distributed optimizer stores it as the parts into which ranks split
    each dimension, each of them flat: [4, 2, 6] for a weight of [8, 6]."""
    counts = spec.shape[:-1]
    if weight is None or len(spec.shape) != len(weight.shape) + 1:
        return spec
    if 0 in spec.shape or math.prod(counts) > _MOST_PARTS or not spec.is_contiguous:
        return spec
    part = tuple(size // count for size, count in zip(weight.shape, counts, strict=True))
    if tuple(map(mul, part, counts)) != weight.shape or math.prod(part) != spec.shape[-1]:
        return spec
    copies = {
        box_at([*map(mul, place, part)], part): [
            replace(spec, shape=part, strides=contiguous_strides(part), offset=spec.offset + number * spec.shape[-1])
        ]
        for number, place in enumerate(product(*map(range, counts)))
    }
    return merge_parts(name, spec.dtype, weight.shape, copies, name)


def _by_name(state: Mapping[str, dict[str, Any]], saved: Any) -> dict[str, Any]:
    """Return the optimizer's state, with its groups if Megatron's weight decay tells their parameters."""
    while isinstance(saved, dict) and "param_groups" not in saved and isinstance(saved.get("optimizer"), dict):
        saved = saved["optimizer"]
    saved = saved if isinstance(saved, dict) else {}
    groups, held = saved.get("param_groups"), saved.get("state")
    groups = groups if isinstance(groups, list) and all(isinstance(group, dict) for group in groups) else []
    step = held.get("common_step") if isinstance(held, dict) else None
    plain = [
        name
        for name, moments in state.items()
        if name.endswith(".bias") or all(len(m.shape) == 1 for m in moments.values() if isinstance(m, TensorSpec))
    ]
    steps = [group.get("step") for group in groups]  # the distributed optimizer stores it there
    if step is None and type(steps[0] if steps else None) in (int, float) and steps.count(steps[0]) == len(steps):
        step = steps[0]
    for moments in state.values() if isinstance(step, (TensorSpec, int, float)) else ():
        moments["step"] = with_own_storage(step)
    decays = [bool(group.get("wd_mult", group.get("weight_decay"))) for group in groups]
    if len(groups) == 1:
        names = [list(state)]
    elif sorted(decays) == [False, True]:
        names = [[name for name in state if (name in plain) is not decay] for decay in decays]
    else:
        return {"state": state}
    return {
        "state": state,
        "param_groups": [{**group, "params": part} for group, part in zip(groups, names, strict=True)],
    }


def unstacked(root: Mapping[Any, Any], layers: object) -> dict[Any, Any]:
    """Return weights with one tensor per layer in place of stacks.

    Stacks are tensors whose names have no number after ``layers``, if all of them have the same number of layers, which
    is ``layers`` unless that is None. Otherwise nothing is changed."""
    found = {key: match for key in root if isinstance(key, str) and (match := _STACKED.fullmatch(key))}
    stacks = {key: spec for key in found if isinstance(spec := root[key], TensorSpec) and spec.shape}
    if len(counts := {spec.shape[0] for spec in stacks.values()}) != 1 or layers not in (None, *counts):
        return dict(root)
    made: dict[Any, Any] = {}
    for key, value in root.items():
        if key not in stacks:
            made[key] = value
            continue
        for number in range(value.shape[0]):
            name = f"{found[key][1]}{number}.{found[key][2]}"
            if name in root:
                raise UnreadableError(
                    f"{name} exists along with {key}, which contains it; the folder is from two saves"
                )
            offset = value.offset + number * value.strides[0]
            made[name] = replace(value, shape=value.shape[1:], strides=value.strides[1:], offset=offset)
    return made
