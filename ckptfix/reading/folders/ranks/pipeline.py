"""DeepSpeed's pipelines and GPT-NeoX: a file for each layer, ``layer_03-model_01-model_states.pt``.

The first number is the layer, the second the tensor-parallel rank, which is omitted without tensor parallelism. Keys in
a file are those of the layer; in the whole they get its number as prefix (``3.mlp.weight``), as in the state_dict of a
``PipelineModule``. A tied layer has a single file, and its parameters have the names in the model states
(``tied_modules.embed.weight``).

Trained weights are taken from ZeRO's fp32 masters if they exist: each stage of the pipeline has its own model states
and optimizer states, ``mp_rank_01``. Otherwise they are taken from the layers, in the dtype of the training.

Some tensors of GPT-NeoX's tensor-parallel ranks are computed (``neox.py``).

Sources: ``deepspeed/runtime/pipe/module.py``, ``runtime/pipe/topology.py`` (0.9 to 0.19), GPT-NeoX's ``megatron``."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptfix.bytes.listing import list_folder
from ckptfix.core.facts import clauses
from ckptfix.core.finding import counted
from ckptfix.core.spec import TensorSpec
from ckptfix.core.wording import first_names
from ckptfix.errors import UnreadableError, damaged
from ckptfix.reading.folders.ranks import megatron, zero, zero_splits
from ckptfix.reading.folders.ranks.files import RankFiles, by_rank, note_copies, tagged
from ckptfix.reading.folders.ranks.names import LATEST, PIPELINE_LAYER, ZERO_MODEL, ZERO_OPTIM
from ckptfix.reading.folders.ranks.neox import Neox
from ckptfix.reading.folders.ranks.partition import Joining, rules
from ckptfix.reading.folders.ranks.zero_masters import joined_masters
from ckptfix.reading.pickles.claims import sizes
from ckptfix.reading.weights.document import Document

NAME = "pipeline"

_TIED = "tied_modules."

# The axis along which a tensor is split, by its name.
RULES = (
    *rules("0 final_linear.weight word_embeddings.weight", "- attention.rotary_emb.inv_freq attention.masked_bias"),
    *megatron.RULES,
)


def find(folder: Path) -> Path | None:
    """Return the folder of a tag with a file for each layer; None if there is none."""
    return tagged(folder, LATEST, _has_layers)


def folder_of(file: Path) -> Path | None:
    """Return the folder of a layer's file, or of the states of a stage beside such files; None for other files."""
    is_one = PIPELINE_LAYER.fullmatch(file.name) or ZERO_MODEL.fullmatch(file.name) or ZERO_OPTIM.fullmatch(file.name)
    return file.parent if is_one and _has_layers(file.parent) else None


def _has_layers(folder: Path) -> bool:
    return any(map(PIPELINE_LAYER.fullmatch, list_folder(folder).names))


def document(files: RankFiles) -> Document:
    """Return the merged document: the container of the first stage's model states with whole weights."""
    folder, path = files.folder, str(files.folder)
    found = by_rank(folder, PIPELINE_LAYER)
    tensor = max(model for _, model in found) + 1
    layers = list(dict.fromkeys(layer for layer, _ in found))
    if absent := [(layer, rank) for layer in layers for rank in range(tensor) if (layer, rank) not in found]:
        raise UnreadableError(
            f"{path}: has {len(found)} of {len(layers) * tensor} files of its layers (missing:"
            f" {first_names([f'layer_{layer:02d}-model_{rank:02d}-model_states.pt' for layer, rank in absent])}); fetch"
            " them"
        )
    models = {model: files.root(file) for (data, model), file in by_rank(folder, ZERO_MODEL).items() if data == 0}
    roots = {model: root for model, root in models.items() if isinstance(root, dict)}
    stages = [root for model, root in roots.items() if model % tensor == 0]
    root = stages[0] if stages else {}
    _check_layers(path, layers, stages)
    names = {name: shape for states in stages for name, shape in _shapes(states).items()}
    weights: OrderedDict[str, Any] = OrderedDict()
    joining, neox, is_summed = Joining(path), Neox(folder), False
    for layer in layers:
        states = [files.root(found[layer, rank]) for rank in range(tensor)]
        if files.damage or not all(isinstance(state, dict) for state in states):
            raise damaged(path, f"layer {layer}: {clauses(files.damage) or 'no state_dict'}")
        is_summed = is_summed or neox.is_summed(states)
        for key, entry in neox.join(joining, states, megatron.splits_of(states[0], RULES), f"{layer}."):
            weights[_name(layer, key, entry, names)] = entry
    producer = f"DeepSpeed pipeline, {counted(len(layers), 'layer')}"
    optimizer, halves = None, OrderedDict(weights)
    if by_rank(folder, ZERO_OPTIM) and len(roots) == len(stages) * tensor and not is_summed:
        optimizer, release = _take_masters(files, list(roots.values()), tensor, joining, weights)
        producer = f"{release}, pipeline, {counted(len(layers), 'layer')}"
    producer += f", TP {tensor}" if tensor > 1 else ""
    note_copies(files.remarks, joining.differing, megatron.may_drift(root))
    files.note_renamed()
    has_optimizer = bool(by_rank(folder, ZERO_OPTIM) or root.get("optimizer"))
    merged = zero.container(files, {**root, "module": None}, weights, optimizer, has_optimizer)
    copies = {name: half for name, half in halves.items() if weights[name] is not half}
    neox.note(files.remarks, tensor, copies)
    return files.document(NAME, merged, producer, copies)


def _shapes(states: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {str(name): sizes(shape) for group in states.get("param_shapes") or () for name, shape in group.items()}


def _check_layers(path: str, layers: Sequence[int], stages: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``UnreadableError`` if a layer in the model states has no file, or a stage has no model states."""
    named = {name.partition(".")[0] for states in stages for name in _shapes(states)}
    absent = sorted(int(layer) for layer in named if layer.isdecimal() and int(layer) not in layers)
    if absent:
        names = first_names([f"layer_{layer:02d}" for layer in absent])
        raise UnreadableError(f"{path}: lacks the file of {names}, which its model states name; fetch it")
    degree = (stages[0].get("checkpoint_parallel_dimensions") or {}).get("pp_degree") if stages else None
    if type(degree) is int and degree != len(stages):
        raise UnreadableError(
            f"{path}: has model states of {len(stages)} of {degree} stages of its pipeline; fetch them"
        )


def _name(layer: int, key: str, entry: object, names: Mapping[str, tuple[int, ...]]) -> str:
    """Return the name of a layer's key in the whole model; a tied module has its name in the model states."""
    name = f"{layer}.{key}"
    if name in names or not isinstance(entry, TensorSpec):
        return name
    tied = [found for found in names if found.startswith(_TIED) and found.split(".", 2)[2] == key]
    if len(tied) > 1:
        tied = [found for found in tied if names[found] == entry.shape]
    return tied[0] if len(tied) == 1 else name


def _take_masters(
    files: RankFiles, roots: Sequence[Any], tensor: int, joining: Joining, weights: OrderedDict[str, Any]
) -> tuple[dict[str, Any] | None, str]:
    """Replace weights of the layers by the fp32 masters of all stages; return the optimizer's state by name, and the
    release that wrote it. A tied layer has a master in each of its stages, of which the first is taken."""
    optimizers: list[dict[str, Any] | None] = []
    taken: dict[str, TensorSpec] = {}
    release = ""
    for stage in range(len(roots) // tensor):
        models = range(stage * tensor, (stage + 1) * tensor)
        own = roots[models.start : models.stop]
        masters = joined_masters(files, models, own, joining, zero_splits.splits_of_ranks(own[0], RULES, weights))
        if masters.stage == 3:
            raise UnreadableError(f"{files.folder}: ZeRO stage 3 has no pipelines; its files are from different saves")
        if unknown := masters.tensors.keys() - weights.keys():
            raise UnreadableError(
                f"{files.folder}: no layer has the parameters {first_names(sorted(unknown))} of stage {stage}; put the"
                " files of one save together"
            )
        taken = {**masters.tensors, **taken}
        optimizers.append(masters.optimizer)
        release = masters.release
    if odd := [name for name, spec in taken.items() if spec.shape != weights[name].shape]:
        raise UnreadableError(
            f"{files.folder}: {first_names(odd)} differ in shape between the layers and the optimizer states; put the"
            " files of one save together"
        )
    zero.note_masters(files, weights, taken)
    weights.update(taken)
    return _one_optimizer(optimizers), release


def _one_optimizer(parts: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Merge the optimizers of all stages; None if their groups differ."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or len({len(part["param_groups"]) for part in known}) != 1:
        return None
    state: dict[str, Any] = {}
    for part in known:
        state.update({name: value for name, value in part["state"].items() if name not in state})
    groups = []
    for same in zip(*(part["param_groups"] for part in known), strict=True):
        if any({**group, "params": []} != {**same[0], "params": []} for group in same):
            return None
        groups.append({**same[0], "params": list(dict.fromkeys(name for group in same for name in group["params"]))})
    return {"state": state, "param_groups": groups}
