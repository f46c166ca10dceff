"""What names and arguments of Megatron tell about the tensors of its layers: along which axis they are split over
ranks, which of them are several matrices or several experts, and the order of queries, keys and values.

Sources: Megatron-LM, ``megatron/training/checkpointing.py``, ``megatron/core/transformer`` (3.0, core 0.16 to 0.19)."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from ckptfix.core.objects import Opaque
from ckptfix.core.parts import full
from ckptfix.core.spec import TensorSpec, contiguous_strides
from ckptfix.errors import UnreadableError
from ckptfix.reading.boxes import boxed
from ckptfix.reading.folders.chunks import merge_parts
from ckptfix.reading.folders.ranks import mixers
from ckptfix.reading.folders.ranks.files import MOST_RANKS
from ckptfix.reading.folders.ranks.partition import Split, SplitOf, SplitRule, find_rule, rules

# All experts of a rank in one tensor.
_GROUPED = re.compile(r".*\.experts\.linear_fc[12]\.(weight|bias)")
# The arguments with which the gates of a module alternate with its other rows.
INTERLEAVED = {"experts": "moe_mlp_glu_interleave_size", "shared_experts": "moe_shared_expert_glu_interleave_size"}
# In multi-head latent attention. Transformer Engine has a copy on each rank, Megatron's own layers split it.
_DOWN = re.compile(r"((?:.*\.)?linear_\w+_)down_proj\.weight")
_QKV = re.compile(r".*\.(?:query_key_value|linear_qkv)\.(?:weight|bias)")

# The axis along which a tensor is split, by its name (in megatron.core and before); ``-`` is a copy.
RULES = rules(
    "0 word_embeddings.weight output_layer.weight output_layer.bias word_embeddings_for_head.weight",
    "0 lm_head.weight lm_head.bias",
    "0 linear_qkv.weight linear_qkv.bias linear_q.weight linear_q.bias linear_kv.weight linear_kv.bias",
    "0 query_key_value.weight query_key_value.bias query.weight query.bias key_value.weight key_value.bias",
    "0 linear_q_proj.weight linear_q_up_proj.weight linear_kv_up_proj.weight eh_proj.weight",
    "0 core_attention.softmax_offset",
    "0+ linear_fc1.weight\\d* linear_fc1.bias\\d* dense_h_to_4h.weight dense_h_to_4h.bias",
    "1 linear_proj.weight linear_fc2.weight\\d* dense_4h_to_h.weight \\w*attention.dense.weight",
    "- linear_proj.bias linear_fc2.bias\\d* dense_4h_to_h.bias \\w*attention.dense.bias",
    "- position_embeddings.weight tokentype_embeddings.weight pooler.dense.(?:weight|bias) router.\\w+ inv_freq",
    "- \\w*norm\\w*.(?:weight|bias) \\w+.layer_norm_(?:weight|bias) _extra_state",
)

# The two matrices of a layer, by their names: Megatron's, before megatron.core, GPT-NeoX's, and Transformer Engine's.
_LINEARS = (
    ("linear_fc1", "linear_fc2"),
    ("dense_h_to_4h", "dense_4h_to_h"),
    ("linear1.", "linear2."),
    ("fc1_weight", "fc2_weight"),
)


def arguments_of(root: Any) -> Mapping[str, Any]:
    args = root.get("args")
    return args.attributes if isinstance(args, Opaque) else args if isinstance(args, dict) else {}


def may_drift(root: Any) -> bool:
    """Return whether copies on tensor-parallel ranks may differ: under sequence parallelism, each rank sums gradients
    separately. Without arguments, it is assumed."""
    return bool(arguments_of(root).get("sequence_parallel", not arguments_of(root)))


def whole_arguments(args: Any) -> Any:
    """Return the arguments of the training with the sizes of parallelism set to 1."""
    known = {f"{kind}_model_parallel_size": 1 for kind in ("tensor", "pipeline", "expert")}
    known["expert_tensor_parallel_size"] = 1
    known["virtual_pipeline_model_parallel_size"] = None  # type: ignore[assignment]  # as Megatron has it
    if isinstance(args, Opaque) and isinstance(args.state, dict):
        changed = {key: known.get(key, value) for key, value in args.state.items()}
        return Opaque(args.cls, args.args, args.kwargs, changed)
    return {key: known.get(key, value) for key, value in args.items()} if isinstance(args, dict) else args


def splits_of(state: Mapping[str, Any], table: Sequence[SplitRule] = RULES, interleaved: Sequence[str] = ()) -> SplitOf:
    """Return the function that tells how each tensor is split, from the state_dict of the first rank.

    The gates in the modules with these names are not a half of the rows: they alternate with the others in blocks."""

    def split_of(name: str, parts: Sequence[TensorSpec]) -> Split | None:
        if match := _DOWN.fullmatch(name):
            up = state.get(f"{match[1]}up_proj.weight")
            is_divided = isinstance(up, TensorSpec) and len(up.shape) == 2 and parts[0].shape[0] < up.shape[1]
            return Split(0) if is_divided else None  # None: a copy on each rank
        if (mixed := mixers.split_of(name, parts, state)) is not None:
            return mixed
        rule = find_rule(table, name)
        is_gated = rule is not None and rule.is_gated and _is_gated(name, state)
        is_gated = is_gated and not any(f".{module}.linear_fc1." in name for module in interleaved)
        return None if rule is None else Split(rule.axis, 2 if is_gated else 1)

    return split_of


def _is_gated(name: str, state: Mapping[str, Any]) -> bool:
    """Return whether a layer is two stacked matrices, with twice as many rows as the next layer has columns."""
    name = re.sub(r"bias(\d*)$", r"weight\1", name)
    own = state.get(name)
    for first, second in _LINEARS:
        name = name.replace(first, second)
    other = state.get(name)
    if not (isinstance(own, TensorSpec) and isinstance(other, TensorSpec) and len(other.shape) == 2 == len(own.shape)):
        return False
    return own.shape[0] == 2 * other.shape[1]


def ungrouped(state: Mapping[tuple[str, ...], Any], args: Mapping[str, Any], folder: str) -> dict[tuple[str, ...], Any]:
    """Return the state of a rank with a tensor for each expert in place of one for all of them
    (``moe_single_grouped_weight``), under the names that Megatron also loads.

    Raises ``UnreadableError`` if the number of experts is unknown."""
    experts, ranks = args.get("num_experts"), args.get("expert_model_parallel_size")
    local = 0
    if isinstance(experts, int) and isinstance(ranks, int) and ranks > 0 and not experts % ranks:
        local = experts // ranks
    made: dict[tuple[str, ...], Any] = {}
    for path, spec in state.items():
        match = _GROUPED.fullmatch(name := ".".join(path)) if isinstance(spec, TensorSpec) else None
        if match is None:
            made[path] = spec
            continue
        is_apart = len(spec.shape) > (2 if match[1] == "weight" else 1)  # with a dimension for the experts
        count = spec.shape[0] if is_apart else local
        if not 0 < count <= MOST_RANKS or spec.shape[0] % count:
            raise UnreadableError(
                f"{folder}: {name} has all experts of a rank, and the arguments do not tell how many there are"
            )
        rows = spec.shape[0] // count
        shape, strides = (spec.shape[1:], spec.strides[1:]) if is_apart else ((rows, *spec.shape[1:]), spec.strides)
        for number in range(count):
            view = replace(spec, shape=shape, strides=strides, offset=spec.offset + number * rows * spec.strides[0])
            own = (*path[:-1], f"{path[-1]}{number}")
            made[own] = view
    return made


def ordered_qkv(
    state: Mapping[tuple[str, ...], Any], version: float, heads: Any, tensor: int, folder: str
) -> dict[tuple[str, ...], Any]:
    """Return the state of a rank with queries, keys and values in the order of version 2, by head.

    Version 0 has all queries before all keys before all values; version 1 interleaves the three by element
    (``checkpointing.py``, ``fix_query_key_value_ordering``)."""
    made = dict(state)
    for path, spec in state.items():
        if not (isinstance(spec, TensorSpec) and _QKV.fullmatch(".".join(path))):
            continue
        rows = 3 * heads // tensor if type(heads) is int and heads > 0 else 0
        if not rows or spec.shape[0] % rows or not spec.is_contiguous:
            raise UnreadableError(f"{folder}: {'.'.join(path)} has an order of heads that its arguments do not explain")
        count, width = rows // 3, spec.shape[0] // rows
        rest = spec.shape[1:]
        step = spec.strides[0]
        by_kind = (count * width, width, 1) if version < 1 else (1, 3 * width, 3)
        kind, head, element = (size * step for size in by_kind)
        view = replace(spec, shape=(count, 3, width, *rest), strides=(head, kind, element, *spec.strides[1:]))
        boxes = [((0, count), (number, number + 1), *full((width, *rest))) for number in range(3)]
        copies = {box: [boxed(view, box)] for box in boxes}
        whole = merge_parts(".".join(path), spec.dtype, view.shape, copies, folder)
        made[path] = replace(whole, shape=spec.shape, strides=contiguous_strides(spec.shape))
    return made
