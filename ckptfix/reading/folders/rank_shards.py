"""Recognises files of one rank of a distributed training, and names what merges the ranks.

DeepSpeed's ZeRO leaves ``(0,)`` tensors in the model states (stage 3) and flat unnamed slices in the optimizer states
(``deepspeed/runtime/zero/``, ``deepspeed/utils/zero_to_fp32.py``). FSDP writes flat parameters (``LOCAL_STATE_DICT``)
or sharded tensors (``SHARDED_STATE_DICT``, DTensor). None of these loads into a single process, and renaming keys does
not help."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.bytes.files import small_text
from ckptfix.core.finding import counted
from ckptfix.core.objects import Global, Opaque, mappings_in
from ckptfix.core.spec import TensorSpec, contiguous_strides
from ckptfix.reading.pickles.claims import sizes

# Keys under which a ZeRO optimizer stores its slices of parameters: stages 1 and 2, stage 3.
SLICES = ("single_partition_of_fp32_groups", "fp32_flat_groups")

FSDP = "fsdp"  # the format of merged ranks of FSDP
NANOTRON = "nanotron"

# Names of rank files with plain tensors, the programs that write them, and text in the config.json beside them.
_PLAIN_PARTS = (
    (r"model-rank-(\d{1,5})-part-\d{1,5}\.safetensors", "vLLM", ""),
    (r"rank(\d{1,5})\.safetensors", "TensorRT-LLM", '"tp_size"'),
    (r"model_\w+_pp-rank-\d{1,5}-of-\d{1,5}_tp-rank-(\d{1,5})-of-(?!1\D)\d{1,5}\S*\.safetensors", NANOTRON, ""),
    (r"(?:.+-)?model_part-(\d{1,5})(?:-shard\d{1,5})?\.pt", "metaseq", ""),
    (r"model_[tw]p(\d{1,5}(?:_wp\d{1,5})?_pp\d{1,5}(?:_dp\d{1,5})?)\.pt", "InternEvo", ""),
)
_PART = "holds one rank's part of weights that {} split, under the names of the full weights"
FLAT = ("_flat_param", "flat_param")
_OLMO = "flat_param.data"
_OF_XLA = "_fsdp_shard"
_OF_FAIRSCALE = re.compile(r"flat_param_\d{1,5}")
_DEEPSPEED = ("ds_version", "ds_config", "param_shapes")
_SHARDED = ("ShardedTensor", "DTensor")
_MOST_RANKS = 1 << 20
_OF_VOCABULARY = ("word_embeddings.weight", "output_layer.weight")  # what Megatron splits by the rows of the vocabulary
_LEAST_SHARE = 0.2
_PARTS = 100  # objects in the description of a tensor's layout, which has a dozen

# The files of Megatron (`torch_dist`) and Lightning with the rest of a checkpoint, beside the chunks.
TORCH_DIST = "common.pt"
LIGHTNING = "meta.pt"
COMMON = (LIGHTNING, TORCH_DIST)
# What says that Megatron saved the chunks, and all files beside them.
MEGATRON_METADATA = "metadata.json"
BESIDE_CHUNKS = (*COMMON, MEGATRON_METADATA)

# The key by which Lightning knows its checkpoints.
LIGHTNING_RELEASE = "pytorch-lightning_version"

# How the names of folders begin in which an optimizer is saved, next to the model's: ``optimizer_0`` of accelerate,
# ``optimizer`` of NeMo RL and XTuner, ``optim`` of NeMo AutoModel.
OPTIMIZERS = "optim"

# The parts of a save of verl, of which the first has the weights (verl/utils/megatron_utils.py, 0.9).
OF_VERL = ("model/dist_ckpt", "optimizer/dist_ckpt", "extra/dist_ckpt")

_GATHER = "put the files of all ranks into one folder, as training saved them: ckptfix repair FOLDER {}-o model.pth"
RANKS_REMEDY = _GATHER.format("")
FLAT_REMEDY = (
    f"{_GATHER.format('--model PKG.MOD:FACTORY ')}; or save the full state_dict from the training run:"
    " get_model_state_dict with StateDictOptions(full_state_dict=True), or torch.distributed.checkpoint"
)


class RankShard(Struct, frozen=True):
    """What a file has instead of weights (as a clause), how to merge it with the others, and the keys concerned.

    ``is_proven`` is whether the file says that its weights, which have the names of whole ones, are parts."""

    what: str
    remedy: str
    keys: tuple[str, ...] = ()
    is_proven: bool = False


def rank_shard(root: Any, entries: Mapping[str, Any]) -> RankShard | None:
    """Return which part of a distributed checkpoint a file is; None for a complete checkpoint.

    ``root`` is the parsed object, and ``entries`` is the state_dict in it, empty if none was found."""
    if isinstance(root, Opaque) and str(root.cls) == "torch.distributed.checkpoint.metadata.Metadata":
        what = "is the .metadata of torch.distributed.checkpoint, which describes the .distcp files next to it"
        return RankShard(what, "name its folder instead")
    ranks = _sharing_ranks(root, entries)
    if ranks > 1:
        what = f"holds the weights of one of {ranks} ranks that share the model (Megatron)"
        return RankShard(what, RANKS_REMEDY, is_proven=True)
    if _OLMO in entries:
        what = "holds flattened parameters of FSDP of one rank, as OLMo saves them (`sharded_checkpointer: local`)"
        return RankShard(what, "merge the folder with scripts/unshard.py of OLMo", (_OLMO,))
    if of_xla := tuple(key for key in entries if _OF_XLA in key):
        what = f"holds one rank's part of {counted(len(of_xla), 'parameter')} of torch_xla's FSDP"
        merge = "python -m torch_xla.distributed.fsdp.consolidate_sharded_ckpts --ckpt_prefix PREFIX"
        return RankShard(what, f"merge the files of all ranks where torch_xla is installed: {merge}", of_xla)
    flat = tuple(key for key in entries if key.endswith(FLAT) and key.rpartition(".")[2] in FLAT)
    if flat:
        what = f"holds flattened parameters of FSDP, {counted(len(flat), 'tensor')} of one rank"
        return RankShard(what, FLAT_REMEDY, flat)
    of_fairscale = tuple(key for key in entries if _OF_FAIRSCALE.fullmatch(key.rpartition(".")[2]))
    if of_fairscale and isinstance(root, dict) and "shard_metadata" in root:
        what = f"holds flattened parameters of fairscale's FSDP, {counted(len(of_fairscale), 'tensor')} of one rank"
        return RankShard(what, RANKS_REMEDY, of_fairscale)
    members = entries or next((found for found in mappings_in(root) if any(map(is_sharded, found.values()))), {})
    parts = tuple(str(key) for key, value in members.items() if isinstance(value, Opaque) and is_sharded(value))
    if parts:
        return RankShard(f"holds one rank's part of {counted(len(parts), 'sharded tensor')}", RANKS_REMEDY, parts)
    empty = _emptied(root, entries)
    if empty:
        what = f"holds {counted(len(empty), 'weight')} of shape (0,): the model states of ZeRO stage 3, without values"
        return RankShard(what, RANKS_REMEDY, empty)
    if not entries and any(map(is_zero_state, mappings_in(root))):
        return RankShard("holds the optimizer states of one ZeRO rank: unnamed slices of weights", RANKS_REMEDY)
    return None


def may_be_rank(path: str) -> bool:
    """Return whether a file is named like that of a rank, or like one that names the latest save."""
    if re.search(
        r"rank|shard|consolidated\.|(?:^|/)(?:layer_|zero/|hf_model_|sdp_|latest[a-z_]*(?:\.txt)?$|params\.json$)", path
    ):
        return True
    return re.search(r"_\d{1,7}\.pt$", path) is not None and Path(path).with_name("metadata.pkl").is_file()


def named_part(path: Path) -> RankShard | None:
    """Return which part of a model a file of plain tensors is, by the names that vLLM (``sharded_state``),
    TensorRT-LLM, NeMo and others give to ranks; None if it is none, or if neither its name nor those beside it show
    other ranks."""
    if may_be_rank(str(path)):
        from ckptfix.reading.folders.ranks.names import MEGATRON_RANK, NEMO  # few files need its patterns

        if path.name == NEMO and MEGATRON_RANK.fullmatch(path.parent.name):
            return RankShard(_PART.format("NeMo"), f"unpack all of it; {RANKS_REMEDY}")
    for pattern, maker, says in _PLAIN_PARTS:
        if re.fullmatch(pattern, path.name) and path.is_file():
            numbers = {found[1] for other in path.parent.iterdir() if (found := re.fullmatch(pattern, other.name))}
            are_several = maker == NANOTRON or any(number.strip("0_wpd") for number in numbers)
            if says in small_text(path.with_name("config.json")) and are_several:
                remedy = f"load it with {maker} on as many GPUs, or name the weights that it was made from"
                if maker == NANOTRON:
                    remedy = "name the folder of the save that it was copied from"
                return RankShard(_PART.format(maker), remedy)
    return None


def _sharing_ranks(root: Any, entries: Mapping[str, Any]) -> int:
    """Return the number of ranks over which Megatron or DeepSpeed split tensors or layers; 1 for other files."""
    if not isinstance(root, dict):
        return 1
    args = root.get("args")
    named = args.attributes if isinstance(args, Opaque) else args if isinstance(args, dict) else {}
    sizes = [root.get("mp_world_size") if "ds_version" in root else None]
    if "iteration" in root:
        # Weights that a script merged keep the arguments of the training.
        rows = {
            spec.shape[:1] for key, spec in entries.items() if key.endswith(_OF_VOCABULARY) and hasattr(spec, "shape")
        }
        layers = {found[1] for key in entries if (found := re.search(r"\blayers\.(\d+)\.", key))}
        is_merged = {
            "tensor": (named.get("padded_vocab_size"),) in rows,
            "pipeline": len(layers) == named.get("num_layers"),
            "expert": False,
        }
        sizes += [named.get(f"{kind}_model_parallel_size") for kind, is_whole in is_merged.items() if not is_whole]
    return math.prod(size for size in sizes if type(size) is int and 1 < size <= _MOST_RANKS)


def is_zero_state(mapping: Mapping[Any, Any]) -> bool:
    return any(name in mapping for name in SLICES) or ("zero_stage" in mapping and "partition_count" in mapping)


def local_part(cls: Any, size: Any, state: Any, specs: dict[Any, Opaque]) -> Any:
    """Return the inert value of a pickled tensor subclass without a storage of its own: its local tensor if that is the
    whole (one process, or replicated), else an ``Opaque`` object; ``NotImplemented`` if it has no local tensor.

    The weights of all experts that Transformer Engine keeps in one flat tensor are the whole too, unless quantised.

    ``specs`` has the descriptions of the layouts of earlier tensors, and equal ones become one object: each takes
    1.5 kB, and a rank may have ten thousand."""
    if not isinstance(cls, Global):
        return NotImplemented
    made = Opaque(cls, state=state)
    if is_sharded(made) and isinstance(state, tuple) and state and isinstance(state[0], list):
        # The state of a ShardedTensor begins with the shards of this rank, each with its tensor.
        shards = [shard.attributes.get("tensor") for shard in state[0] if isinstance(shard, Opaque)]
        return shards[0] if len(shards) == 1 and getattr(shards[0], "shape", None) == size else made
    if cls.name == "GroupedTensor" and cls.module.startswith("transformer_engine."):
        flat = made.attributes.get("rowwise_data") if made.attributes.get("quantizer") is None else None
        if not isinstance(flat, TensorSpec) or not flat.is_contiguous or math.prod(sizes(size)) != flat.numel:
            return NotImplemented
        return replace(flat, shape=sizes(size), strides=contiguous_strides(sizes(size)))
    local, spec = made.attributes.get("_local_tensor"), made.attributes.get("_spec")
    if not isinstance(local, TensorSpec):
        return NotImplemented
    placements = spec.attributes.get("placements") if isinstance(spec, Opaque) else None
    # A tensor with a Partial placement is a term of a sum, whatever its shape.
    whole = isinstance(placements, (tuple, list)) and all(
        isinstance(placement, Opaque) and "Partial" not in placement.cls.name for placement in placements
    )
    if whole and local.shape == size:
        return local
    if isinstance(spec, Opaque) and (form := _form(spec)) is not None:
        made.state = {**made.attributes, "_spec": specs.setdefault(form, spec)}
    return made


def _form(spec: Opaque) -> tuple[object, ...] | None:
    """Return a key that is equal for equal specs of DTensors on the same mesh object; None for one of too many parts.

    It identifies objects by their ids, so they have to live as long as the key."""
    form: list[object] = []
    pending: list[Any] = [spec]
    while pending:
        part = pending.pop()
        kind = type(part)
        if kind is Opaque and part.cls.name != "DeviceMesh" and not part.items and not part.pairs:
            form += (part.cls, len(part.kwargs))
            pending += (part.args, part.kwargs or None, part.state)
        elif kind is int or kind is str or kind is bool or part is None:
            form += (kind, part)
        elif kind is not tuple and kind is not dict and kind is not list:
            form += (object, id(part))
        elif len(part) > _PARTS or len(form) > _PARTS:
            return None
        else:
            form += (kind, len(part), *(part if kind is dict else ()))
            pending += part.values() if kind is dict else part
    return tuple(form)


def is_sharded(value: Any) -> bool:
    return isinstance(value, Opaque) and value.cls.name in _SHARDED and value.cls.module.startswith("torch.distributed")


def _emptied(root: Any, entries: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the parameters of shape (0,) if their number, or keys of DeepSpeed, show that values are missing.

    Some models have a single empty tensor, observers of quantised models have empty ranges, and layers of e3nn without
    parameters have empty weights beside the mask of their outputs."""
    shapes = {key: value.shape for key, value in entries.items() if isinstance(value, TensorSpec)}
    empty = tuple(key for key, shape in shapes.items() if shape == (0,) and _is_weight(key))
    if not empty or (isinstance(root, dict) and any(note in root for note in _DEEPSPEED)):
        return empty
    empty = tuple(key for key in empty if f"{key.rpartition('.')[0]}.output_mask" not in shapes)
    return empty if len(empty) > 1 and len(empty) >= _LEAST_SHARE * sum(map(_is_weight, shapes)) else ()


def _is_weight(key: str) -> bool:
    leaf = key.rpartition(".")[2]
    return "weight" in leaf or "bias" in leaf
