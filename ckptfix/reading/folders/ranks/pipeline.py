"""DeepSpeed's pipelines and GPT-NeoX: a file for each layer, ``layer_03-model_01-model_states.pt``.

The first number is the layer, the second the tensor-parallel rank, which is not there without tensor parallelism. The
keys in a file are those of the layer; in the whole they follow its number (``3.mlp.weight``), as in the state_dict of a
``PipelineModule``. A layer that is tied has a file once, and the name that the model states give its parameters
(``tied_modules.embed.weight``).

Without tensor parallelism, what is trained comes from ZeRO's fp32 masters, if they are there: each stage of the
pipeline has model states and optimizer states of its own, ``mp_rank_01``. With it, from the layers, in the dtype of the
training.

GPT-NeoX adds up the outputs of attention and MLP over all ranks, and so their biases, if ``gpt_j_residual`` is set; if
not, each rank has a copy of them. Only the configuration tells, which it saves in ``configs``. Its own converter adds
them up in either case, and averages norms (``convert_neox_to_hf.py``, ``megatron/model/transformer.py``).

Sources: ``deepspeed/runtime/pipe/module.py``, ``runtime/pipe/topology.py`` (0.9 to 0.19), GPT-NeoX's ``megatron``."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ckptfix.core.facts import Fact, Kind
from ckptfix.core.finding import counted
from ckptfix.core.lazy import torch
from ckptfix.core.spec import Storage, TensorSpec, contiguous_strides
from ckptfix.core.wording import clauses, first_names
from ckptfix.errors import UnreadableError
from ckptfix.reading.folders.ranks import megatron, zero
from ckptfix.reading.folders.ranks.files import RankFiles, ReadContent, Reader, by_rank, note_copies, tagged
from ckptfix.reading.folders.ranks.names import PIPELINE_LAYER, ZERO_MODEL, ZERO_OPTIM
from ckptfix.reading.folders.ranks.partition import Joining, rules
from ckptfix.reading.pickles.claims import sizes
from ckptfix.reading.tensors import bytes_of, torch_dtype
from ckptfix.reading.weights.document import Document

NAME = "pipeline"

_TIED = "tied_modules."

# Along which dimension a tensor is divided, by its name.
RULES = (
    *rules("0 final_linear.weight word_embeddings.weight", "- attention.rotary_emb.inv_freq attention.masked_bias"),
    *megatron.RULES,
)

_RESIDUAL = re.compile(r"""(?im)^[^#\n]*?["']?gpt[-_]j[-_]residual["']?\s*:\s*["']?(true|false)""")
_CONFIGS, _CONFIG_LIMIT = "configs", 1 << 20
_NEOX = re.compile(r"(?:^|\.)attention\.query_key_value\.")
# What a layer of GPT-NeoX has, and its biases of which every rank has a part of the sum.
_SUMMED = re.compile(r"(?:^|\.)(?:attention\.dense|mlp\.dense_4h_to_h)\.bias$")


def find(folder: Path) -> Path | None:
    """Return the folder of a tag with a file for each layer."""
    return tagged(folder, zero.LATEST, _has_layers)


def read_folder(folder: Path, salvage: bool, read: ReadContent) -> Document:
    """Return the document of a folder with a file for each layer."""
    files = RankFiles(folder, salvage, read)
    with files.merging():
        return _document(files)


def of_file(file: Path) -> tuple[Path, Reader] | None:
    """Return the folder of a file of one layer, or of the states of one stage beside such files."""
    is_one = PIPELINE_LAYER.fullmatch(file.name) or ZERO_MODEL.fullmatch(file.name) or ZERO_OPTIM.fullmatch(file.name)
    return (file.parent, read_folder) if is_one and _has_layers(file.parent) else None


def _has_layers(folder: Path) -> bool:
    return any(PIPELINE_LAYER.fullmatch(path.name) for path in folder.iterdir())


def _document(files: RankFiles) -> Document:
    """Return the merged document: the container of the first stage's model states, with whole weights in it."""
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
    joining, neox = Joining(path), _Neox(folder)
    for layer in layers:
        states = [files.root(found[layer, rank]) for rank in range(tensor)]
        if files.damage or not all(isinstance(state, dict) for state in states):
            raise UnreadableError(f"{path}: layer {layer}: {clauses(files.damage) or 'no state_dict'}; fetch it again")
        for key, entry in _joined(joining, neox, layer, states):
            weights[_name(layer, key, entry, names)] = entry
    merged = {key: value for key, value in root.items() if key not in zero.PARTITION}
    producer = f"DeepSpeed pipeline, {counted(len(layers), 'layer')}"
    optimizer, halves = None, OrderedDict(weights)
    if by_rank(folder, ZERO_OPTIM) and len(roots) == len(stages) * tensor and not neox.summed:
        optimizer, release = _take_masters(files, list(roots.values()), tensor, joining, weights)
        producer = f"{release}, pipeline, {counted(len(layers), 'layer')}"
    elif by_rank(folder, ZERO_OPTIM) or root.get("optimizer"):
        files.remarks[Fact(Kind.RANK_LEFT_OUT, "optimizer")] = None
    producer += f", TP {tensor}" if tensor > 1 else ""
    note_copies(files.remarks, joining.differing, megatron.may_drift(root))
    for key, rule in {**dict.fromkeys(neox.summed, "sum"), **dict.fromkeys(neox.averaged, "mean")}.items():
        files.remarks[Fact.of(Kind.RANKS_COMPUTED, key, rule=rule, ranks=tensor)] = None
    files.note_renamed()
    merged["module"] = weights
    if optimizer is not None:
        merged["optimizer"] = optimizer
    copies = {name: half for name, half in halves.items() if weights[name] is not half}
    return files.document(NAME, merged, producer, copies)


def _shapes(states: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {str(name): sizes(shape) for group in states.get("param_shapes") or () for name, shape in group.items()}


def _check_layers(path: str, layers: Sequence[int], stages: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``UnreadableError`` if the model states name a layer that has no file, or a stage has none."""
    named = {name.partition(".")[0] for states in stages for name in _shapes(states)}
    absent = sorted(int(layer) for layer in named if layer.isdecimal() and int(layer) not in layers)
    if absent:
        raise UnreadableError(f"{path}: has no file of the layers {first_names(absent)}, which its model states name")
    degree = (stages[0].get("checkpoint_parallel_dimensions") or {}).get("pp_degree") if stages else None
    if type(degree) is int and degree != len(stages):
        raise UnreadableError(
            f"{path}: has model states of {len(stages)} of {degree} stages of its pipeline; fetch them"
        )


class _Neox:
    """What is known of a folder of GPT-NeoX: whether its biases are summed, and what was computed of several ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_one = False
        self.summed: list[str] = []
        self.averaged: list[str] = []

    @cached_property
    def is_residual(self) -> bool | None:
        """Whether ``gpt_j_residual`` is set, which it is not by default; None if no configuration is there."""
        for place in (self.folder / _CONFIGS, self.folder.parent / _CONFIGS):
            files = [file for file in sorted(place.glob("*.yml")) if file.stat().st_size < _CONFIG_LIMIT]
            texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
            found = {match[1].lower() == "true" for text in texts for match in _RESIDUAL.finditer(text)}
            if len(found) > 1:
                raise UnreadableError(f"{place}: its files differ in gpt_j_residual; leave those of this run there")
            if texts:
                return bool(found) and found.pop()
        return None


def _joined(
    joining: Joining, neox: _Neox, layer: int, states: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a layer, whole."""
    neox.is_one = neox.is_one or any(_NEOX.search(key) for key in states[0])
    is_summed = False
    if len(states) > 1 and neox.is_one and (biases := [key for key in states[0] if _SUMMED.search(key)]):
        if (residual := neox.is_residual) is None:
            raise UnreadableError(
                f"{joining.path}: GPT-NeoX adds up {first_names(biases)} of its {len(states)} ranks if gpt_j_residual"
                f" is set, which nothing here says; put the .yml files of the run into {joining.path}/{_CONFIGS}"
            )
        is_summed = residual
    for key, entry in joining.join(states, megatron.splits_of(states[0], RULES)):
        parts = [state.get(key) for state in states]
        is_sum = is_summed and _SUMMED.search(key) is not None
        if is_sum or (neox.is_one and "norm" in key and key in joining.differing):
            joining.differing.pop(key, None)
            (neox.summed if is_sum else neox.averaged).append(f"{layer}.{key}")
            entry = _computed(key, parts, is_sum, joining.path)
        yield key, entry


def _computed(name: str, parts: Sequence[Any], is_sum: bool, path: str) -> TensorSpec:
    """Return the sum of the tensors of ranks, or their mean."""
    first: TensorSpec = parts[0]
    if any((part.dtype, part.shape) != (first.dtype, first.shape) or not part.is_contiguous for part in parts):
        raise UnreadableError(f"{path}: its ranks have {name} in different shapes; put the files of one save together")
    storages = tuple(storage for part in parts for storage in part.storages)
    storage = Storage(name, _ComputedBytes(parts, is_sum), parts=storages)
    return TensorSpec(first.dtype, first.shape, contiguous_strides(first.shape), storage)


class _ComputedBytes:
    """The bytes of the sum of tensors, or of their mean, in their dtype and as GPT-NeoX computes them."""

    def __init__(self, parts: Sequence[TensorSpec], is_sum: bool) -> None:
        self.parts, self.is_sum, self.nbytes = parts, is_sum, parts[0].nbytes

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes ``start`` to ``stop``."""
        size = self.parts[0].itemsize
        first, last = start // size * size, -(-stop // size) * size
        if first >= last:
            return memoryview(b"")
        total: Any = 0
        for part in self.parts:
            assert part.storage is not None
            begin = part.extent[0]
            raw = bytearray(part.storage.source.read(begin + first, begin + last))
            total = total + torch.frombuffer(raw, dtype=torch_dtype(part.dtype))
        whole = total if self.is_sum else total / len(self.parts)
        return bytes_of(whole.view(torch.uint8))[start - first : stop - first]


def _name(layer: int, key: str, entry: object, names: Mapping[str, tuple[int, ...]]) -> str:
    """Return the name in the whole model of a layer's key: that of a tied module, where the model states say so."""
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
    """Put the fp32 masters of all stages in the place of the layers' halves; return the optimizer's state by name and
    what wrote it. A tied layer has a master in each of its stages; the first is taken."""
    optimizers: list[dict[str, Any] | None] = []
    taken: dict[str, TensorSpec] = {}
    release = ""
    for stage in range(len(roots) // tensor):
        models = range(stage * tensor, (stage + 1) * tensor)
        own = roots[models.start : models.stop]
        masters = zero.joined_masters(files, models, own, joining, zero.splits_of(own[0], RULES, weights))
        if masters.stage == 3:
            raise UnreadableError(f"{files.folder}: ZeRO stage 3 has no pipelines; its files are of different saves")
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
    """Return the optimizers of all stages as one; None if they have other groups."""
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
