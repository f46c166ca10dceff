"""DeepSpeed's pipelines and GPT-NeoX: a file for each layer, ``layer_03-model_01-model_states.pt``.

The first number is the layer, the second the tensor-parallel rank, which is omitted without tensor parallelism. Keys in
a file are those of the layer; in the whole they get its number as prefix (``3.mlp.weight``), as in the state_dict of a
``PipelineModule``. A tied layer has a single file, and its parameters have the names in the model states
(``tied_modules.embed.weight``).

Trained weights are taken from ZeRO's fp32 masters if they exist: each stage of the pipeline has its own model states
and optimizer states, ``mp_rank_01``. Otherwise they are taken from the layers, in the dtype of the training.

Some tensors of GPT-NeoX's tensor-parallel ranks are computed (``neox.py``).

Sources: ``deepspeed/runtime/pipe/module.py``, ``runtime/pipe/topology.py`` (0.9 to 0.19), GPT-NeoX's ``megatron``."""

import math
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from itertools import islice, product
from pathlib import Path
from typing import Any

from ckptfix.bytes.listing import list_folder
from ckptfix.bytes.sources import is_torn
from ckptfix.core.facts import Fact, Kind
from ckptfix.core.finding import counted
from ckptfix.core.objects import tensors_in
from ckptfix.core.spec import TensorSpec, contiguous_strides
from ckptfix.core.wording import first_names
from ckptfix.errors import UnreadableError, damaged
from ckptfix.reading.folders.chunks import gone
from ckptfix.reading.folders.ranks import megatron_layers, zero, zero_splits
from ckptfix.reading.folders.ranks.files import LISTED, RankFiles, by_rank, note_copies, tagged
from ckptfix.reading.folders.ranks.names import LATEST, PIPELINE_LAYER, ZERO_MODEL, ZERO_OPTIM
from ckptfix.reading.folders.ranks.neox import Neox, splits_of
from ckptfix.reading.folders.ranks.partition import Joining, emptied
from ckptfix.reading.folders.ranks.zero_masters import joined_masters
from ckptfix.reading.pickles.claims import sizes
from ckptfix.reading.weights.document import Document

NAME = "pipeline"

_TIED = "tied_modules."


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
    models = {model: file for (data, model), file in by_rank(folder, ZERO_MODEL).items() if data == 0}
    roots = {model: root for model, file in models.items() if isinstance(root := files.root(file), dict)}
    stages = [root for model, root in roots.items() if model % tensor == 0]
    root = stages[0] if stages else {}
    count = _count_stages(files, models, stages, tensor)
    names = {name: shape for states in stages for name, shape in _shapes(states).items()}
    of_model = {name.partition(".")[0] for name in names}
    layers = sorted({layer for layer, _ in found} | {int(layer) for layer in of_model if layer.isdecimal()})
    parts = {place: files.root(file) for place, file in found.items()}
    if odd := [
        found[place].name for place, state in parts.items() if state is not None and not isinstance(state, dict)
    ]:
        raise damaged(path, f"{first_names(odd)}: no state_dict")
    weights: OrderedDict[str, Any] = OrderedDict()
    joining, neox, is_summed = Joining(path), Neox(folder), False
    lost: dict[str, int] = {}
    dtype = _dtype(parts)
    for layer in layers:
        states = _states(layer, [parts.get((layer, rank)) for rank in range(tensor)], roots, dtype, path)
        is_summed = is_summed or neox.is_summed(states)
        for key, entry in neox.join(joining, states, splits_of(states[0]), f"{layer}."):
            weights[name := _name(layer, key, entry, names)] = entry
            lost[name] = joining.lacking.pop(key, entry.nbytes if is_torn(entry) else 0)
    for name in _unplaced(weights, names):
        weights[name] = gone(name, _spec(dtype, names[name]), path)
        lost[name] = weights[name].nbytes * tensor
    read = {(layer, rank): parts.get((layer, rank)) for layer in layers for rank in range(tensor)}
    _note_missing_layers(files, found, read, [name for name, nbytes in lost.items() if nbytes])
    if not stages:
        _note_skipped(files, {layer: parts[layer, 0] for layer in layers if parts.get((layer, 0)) is not None}, found)
    producer = f"DeepSpeed pipeline, {counted(len(layers), 'layer')}"
    optimizer, halves = None, OrderedDict(weights)
    if by_rank(folder, ZERO_OPTIM) and not is_summed:
        optimizer, release = _take_masters(files, roots, count, tensor, joining, weights)
        producer = f"{release}, pipeline, {counted(len(layers), 'layer')}" if release else producer
    files.lacking.update({name: nbytes for name, nbytes in lost.items() if is_torn(weights[name])})
    producer += f", TP {tensor}" if tensor > 1 else ""
    note_copies(files.remarks, joining.differing, megatron_layers.may_drift(root))
    files.note_renamed()
    has_optimizer = bool(by_rank(folder, ZERO_OPTIM) or root.get("optimizer"))
    merged = zero.container(files, {**root, "module": None}, weights, optimizer, has_optimizer)
    copies = {name: half for name, half in halves.items() if weights[name] is not half and not is_torn(half)}
    if copies.keys() == weights.keys():  # no weight is from the layers
        for fact in [fact for fact in files.remarks if fact.kind is Kind.RANK_RENAMED]:
            if PIPELINE_LAYER.fullmatch(fact.place):
                del files.remarks[fact]
                files.remarks[Fact(Kind.COPY_RENAMED, fact.place, fact.data)] = None
    neox.note(files.remarks, tensor, copies)
    return files.document(NAME, merged, producer, copies)


def _states(
    layer: int, parts: Sequence[Any], roots: Mapping[int, Any], dtype: str, path: str
) -> list[Mapping[str, Any]]:
    """Return the state_dicts of a layer's ranks; those without a file have their bytes marked as lost.

    They have the keys and shapes of another rank, or else the trained parameters in the model states of their rank."""
    if (other := next((part for part in parts if part is not None), None)) is not None:
        return [emptied(other, path) if part is None else part for part in parts]
    states: list[Mapping[str, Any]] = []
    for rank in range(len(parts)):
        shapes = [_shapes(root) for model, root in roots.items() if model % len(parts) == rank]
        named = {name: shape for own in shapes for name, shape in own.items() if name.startswith(f"{layer}.")}
        specs = {name.partition(".")[2]: _spec(dtype, shape) for name, shape in named.items()}
        states.append(emptied(specs, path))
    return states


def _spec(dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(dtype, shape, contiguous_strides(shape))


def _dtype(parts: Mapping[tuple[int, ...], Any]) -> str:
    """Return the dtype of the weights in the layers' files."""
    dtypes = Counter(spec.dtype for spec in tensors_in(list(parts.values())))
    return dtypes.most_common(1)[0][0] if dtypes else "float32"


def _note_missing_layers(
    files: RankFiles, found: Mapping[tuple[int, ...], Path], read: Mapping[tuple[int, int], Any], lost: Sequence[str]
) -> None:
    """Record as damage the missing files of layers, and remark that the layers without any file that can be read may
    have had other weights than those ``lost``, which are known."""
    has_ranks = any((match := PIPELINE_LAYER.fullmatch(file.name)) and match[2] for file in found.values())
    form = "layer_{:02d}-model_{:02d}-model_states.pt" if has_ranks else "layer_{:02d}-model_states.pt"
    tied = dict.fromkeys(".".join(name.split(".")[:2]) for name in lost if name.startswith(_TIED))
    unknown = tuple(f"the layer of {module}" for module in tied)
    if names := (*(form.format(*place) for place in read if place not in found), *unknown):
        files.damage.insert(0, Fact.of(Kind.SHARDS_MISSING, names=names, keys=len(lost), nbytes=0, total=0))
    kept = {layer for (layer, _), state in read.items() if state is not None}
    if unread := (*(form.format(*place) for place in read if place[0] not in kept), *unknown):
        unnamed = f"{first_names(unread)} other than trained weights, if there were any"
        files.remarks[Fact.of(Kind.UNNAMED_LOSS, lost=unnamed)] = None


def _note_skipped(files: RankFiles, states: Mapping[int, Any], found: Mapping[tuple[int, ...], Path]) -> None:
    """Remark the numbers without a file between two layers with equal names and shapes, if no model states list the
    parameters. Layers without parameters have no file, so most neighbours of such layers have to be there."""
    forms = {
        layer: {key: getattr(spec, "shape", None) for key, spec in state.items()} for layer, state in states.items()
    }
    pairs = sum(bool(form) and forms.get(layer + 1) == form for layer, form in forms.items())
    gaps = [
        layer + 1 for layer, form in forms.items() if form and layer + 1 not in forms and forms.get(layer + 2) == form
    ]
    named = {layer: file.name for (layer, _), file in found.items()}
    if len(gaps) < pairs:
        for gap in gaps if not {*gaps} & named.keys() else ():
            name = named[gap - 1].replace(f"layer_{gap - 1:02d}", f"layer_{gap:02d}", 1)
            files.remarks[Fact(Kind.LAYER_SKIPPED, name)] = None


def _unplaced(weights: Mapping[str, Any], names: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the parameters of the model states that no layer has: those of tied layers, whose numbers are unknown."""
    unnamed = {(name.partition(".")[2], entry.shape) for name, entry in weights.items() if name not in names}
    return [name for name, shape in names.items() if name not in weights and (_key_of_tied(name), shape) not in unnamed]


def _key_of_tied(name: str) -> str:
    """Return the key in the layer of a tied module's parameter, such as ``tied_modules.embed.weight``."""
    return name.split(".", 2)[-1]


def _shapes(states: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {str(name): sizes(shape) for group in states.get("param_shapes") or () for name, shape in group.items()}


def _count_stages(
    files: RankFiles, models: Mapping[int, Path], stages: Sequence[Mapping[str, Any]], tensor: int
) -> int:
    """Return the number of stages of the pipeline, and record as damage those without model states."""
    degree = (stages[0].get("checkpoint_parallel_dimensions") or {}).get("pp_degree") if stages else None
    count = degree if type(degree) is int else -(-(max(models, default=-1) + 1) // tensor)
    if stages and (type(degree) is int or by_rank(files.folder, ZERO_OPTIM)):
        files.note_missing(count * tensor, models, "mp_rank_{:02d}_model_states.pt")
        if len(stages) < count:
            cause = "lacks the model states of a stage, which name tied layers"
            files.remarks[Fact.of(Kind.DOUBTFUL_NAMES, cause=cause)] = None
    return count


def _name(layer: int, key: str, entry: object, names: Mapping[str, tuple[int, ...]]) -> str:
    """Return the name of a layer's key in the whole model; a tied module has its name in the model states."""
    name = f"{layer}.{key}"
    if name in names or not isinstance(entry, TensorSpec):
        return name
    tied = [found for found in names if found.startswith(_TIED) and _key_of_tied(found) == key]
    if len(tied) > 1:
        tied = [found for found in tied if names[found] == entry.shape]
    return tied[0] if len(tied) == 1 else name


def _take_masters(
    files: RankFiles,
    roots: Mapping[int, Any],
    count: int,
    tensor: int,
    joining: Joining,
    weights: OrderedDict[str, Any],
) -> tuple[dict[str, Any] | None, str]:
    """Replace weights of the layers by the fp32 masters of all stages; return the optimizer's state by name, and the
    release that wrote it. A tied layer has a master in each of its stages, of which the first is taken.

    If masters are lost of weights that the layers have, only weights that these lack are replaced, so that the others
    are of one dtype."""
    optimizers: list[dict[str, Any] | None] = []
    taken: dict[str, TensorSpec] = {}
    release = ""
    complete, absent = _complete_stages(files, roots, count, tensor)
    for stage in complete:
        models = range(stage * tensor, (stage + 1) * tensor)
        own = [roots[model] for model in models]
        try:
            masters = joined_masters(files, models, own, joining, zero_splits.splits_of_ranks(own[0], weights))
        except UnreadableError:
            if not (unread := _unread(files, models)):
                raise
            absent += [_shapes(roots[model]) for model in unread]
            continue
        if masters.stage == 3:
            raise UnreadableError(f"{files.folder}: ZeRO stage 3 has no pipelines; its files are from different saves")
        if unknown := masters.tensors.keys() - weights.keys():
            raise UnreadableError(
                f"{files.folder}: no layer has the parameters {first_names(sorted(unknown))} of stage {stage}; put the"
                " files of one save together"
            )
        taken |= {name: spec for name, spec in masters.tensors.items() if name not in taken or is_torn(taken[name])}
        optimizers.append(masters.optimizer)
        release = masters.release
    whole = {name: spec for name, spec in weights.items() if not is_torn(spec)}
    if odd := [name for name, spec in taken.items() if name in whole and spec.shape != whole[name].shape]:
        raise UnreadableError(
            f"{files.folder}: {first_names(odd)} differ in shape between the layers and the optimizer states; put the"
            " files of one save together"
        )
    lost = [name for name, spec in taken.items() if is_torn(spec) and name in whole]
    for name in (name for name, spec in taken.items() if not is_torn(spec)):
        files.lacking.pop(name, None)  # another stage has it
    moments: Mapping[str, Any] = next((own for part in optimizers if part for own in part["state"].values()), {})
    fields = [field for field, moment in moments.items() if isinstance(moment, TensorSpec) and moment.shape]
    for name, shape in ((name, shape) for own in absent for name, shape in own.items() if name not in taken):
        for field in ("fp32", *fields):  # all of fp32
            files.lacking[f"{field} of {name}"] += 4 * math.prod(shape)
    if lost or len(optimizers) < count:
        for name in lost:
            files.lacking[f"fp32 of {name}"] = files.lacking.pop(name, 0)
        halves = {spec.dtype for spec in whole.values() if isinstance(spec, TensorSpec)}
        files.damage.append(Fact.of(Kind.COPIES_TAKEN, dtypes=tuple(sorted(halves))))
        weights.update({name: spec for name, spec in taken.items() if name not in whole})
        return None, release
    zero.note_masters(files, weights, taken)
    weights.update(taken)
    return _one_optimizer(optimizers), release


def _complete_stages(
    files: RankFiles, roots: Mapping[int, Any], count: int, tensor: int
) -> tuple[list[int], list[Mapping[str, tuple[int, ...]]]]:
    """Return the stages with model states and optimizer states of all tensor-parallel ranks, and the shapes of the
    parameters of ranks without optimizer states, which are recorded as damage."""
    found = by_rank(files.folder, ZERO_OPTIM)
    held = {model for _, model in found}
    absent = [model for model in range(count * tensor) if model not in held]
    files.check_absent(len(absent))
    if absent:
        before = next(iter(found.values())).name.partition("zero_pp_rank")[0]
        world = 1 + max(data for data, _ in found)
        places = islice(product(absent, range(world)), LISTED)
        names = tuple(f"{before}zero_pp_rank_{data}_mp_rank_{model:02d}_optim_states.pt" for model, data in places)
        lacking, ranks = world * len(absent), world * count * tensor
        files.damage.append(Fact.of(Kind.RANKS_LACKING, absent=lacking, ranks=ranks, names=names))
    stages = [range(stage * tensor, (stage + 1) * tensor) for stage in range(count)]
    complete = [at for at, models in enumerate(stages) if all(model in held and model in roots for model in models)]
    return complete, [_shapes(roots[model]) for model in absent if model in roots]


def _unread(files: RankFiles, models: Sequence[int]) -> list[int]:
    """Return the ranks of which no optimizer states could be read."""
    kinds = (Kind.RANK_UNREADABLE, Kind.RANK_MISPLACED)
    unread = {fact.place for fact in files.damage if fact.kind in kinds}
    read = {model for (_, model), file in by_rank(files.folder, ZERO_OPTIM).items() if files.name(file) not in unread}
    return [model for model in models if model not in read]


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
