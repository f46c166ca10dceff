"""What an adapter changes in a checkpoint: the delta of each tensor, checked against the shapes of both."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.core.adapter_methods import METHODS
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.edits import Delta, Drop, Edit, Fill, MergeAdapter, renames
from ckptfix.core.parts import full
from ckptfix.core.spec import TensorSpec
from ckptfix.core.target import Target
from ckptfix.errors import AdapterError, Opt
from ckptfix.maps.library import aliases
from ckptfix.maps.resolving import Move
from ckptfix.reading.adapters import (
    CORES,
    HADAMARD,
    KRONECKER,
    OTHER_BASE,
    OWN_CONFIG,
    OWN_LIBRARY,
    Adapter,
    AdapterLayer,
)
from ckptfix.reading.boxes import row_major_bytes
from ckptfix.reading.configs import CONFIG, model_config
from ckptfix.rules.adapter_names import EMBEDDINGS, HEADS, BaseNames, is_copied, is_of_words, quantised
from ckptfix.rules.quantised_layers import beside_codes

# Segments that peft adds to the names of a model whose layers it wraps.
_WRAPPERS = frozenset(("base_layer", "token_adapter", "original_module"))

_DENOISERS = ("lora_unet", "unet", "lora_transformer", "transformer", "diffusion_model")
_DENOISER = "model.diffusion_model."
_FLOATS = ("float64", "float32", "bfloat16", "float16")
_TAKEN_OFF = {"linear", "conv", "tucker", "experts", "hadamard", "kronecker", "bias", "scale"}
_TAKEN_OFF |= {kind.lower() for kind, method in METHODS.items() if method.adds}


class Merge(Struct):
    """The changes that adapters make to a checkpoint: the deltas of each key, in order, and the added tensors."""

    deltas: dict[str, list[Delta]] = field(default_factory=lambda: defaultdict(list))
    added: dict[str, Fill] = field(default_factory=dict)
    # Components of a pipeline that the checkpoint lacks, with their number of layers, and embeddings of prompts.
    left: dict[str, int] = field(default_factory=dict)
    # Embeddings and heads that an adapter holds in full for another vocabulary, with its size.
    resized: dict[str, int] = field(default_factory=dict)
    tied: set[str] = field(default_factory=set)  # embeddings and heads that change because their twin does


def merge_edits(checkpoint: Checkpoint, merge: Merge, undo: bool = False) -> Iterator[Edit]:
    """Yield the edits of a merge. Tied tensors stay tied, except if one of them is replaced."""
    specs = checkpoint.specs
    for key, deltas in merge.deltas.items():
        yield MergeAdapter(key, specs[key].dtype, specs[key].shape, tuple(deltas), undo)
    yield from merge.added.values()


def find_merge(
    checkpoint: Checkpoint, adapters: Sequence[Adapter], undo: bool = False, target: Target | None = None
) -> Merge:
    """Return what the adapters change. Raises ``AdapterError`` if one does not belong to the checkpoint."""
    merge = Merge()
    copies: dict[str, Adapter] = {}
    twins: dict[object, list[str]] = defaultdict(list)
    for key, spec in checkpoint.specs.items():
        twins[spec.view].append(key)
    for adapter in adapters:
        for key, delta in _deltas(checkpoint, adapter, merge, target):
            _refuse_codes(checkpoint, key)
            if undo and (delta.form not in _TAKEN_OFF or delta.has_magnitude):
                what = "the norms of DoRA" if delta.has_magnitude else "new values for it"
                words = f"{key} cannot be restored: the adapter has {what}, and the old ones are lost"
                if adapter.method is not None and delta.form != "whole":
                    words = f"{key} cannot be restored: {adapter.method.name} multiplied it"
                raise adapter.refused(words, "use the base itself")
            if undo and delta.form == "scale" and not adapter.checkpoint.read(delta.factors[0]).all():
                words = f"{key} cannot be restored: it was multiplied by a zero in {delta.factors[0]}"
                raise adapter.refused(words, "use the base itself")
            # A module saved in full is a separate copy; any other delta changes a tensor under all its names.
            is_copy = delta.form == "whole" and (adapter.kind == "LN_TUNING" or is_copied(adapter, key))
            if is_copy:
                copies[key] = adapter
            others = [] if is_copy else [one for one in twins[checkpoint.specs[key].view] if one != key]
            for name in (key, *(other for other in others if not is_copied(adapter, other))):
                if name != key and delta.form != "rows" and is_of_words(name):
                    merge.tied.add(name)
                _refuse_overlap(adapter, name, delta, merge)
                if delta not in merge.deltas[name]:
                    merge.deltas[name].append(replace(delta, weight=adapter.weight))
    for key, adapter in copies.items():
        _keep_tied(checkpoint, adapter, key, target, merge)
    _check_vocabulary(checkpoint, merge)
    return merge


def _refuse_overlap(adapter: Adapter, key: str, delta: Delta, merge: Merge) -> None:
    """Raise ``AdapterError`` if new values would take the place of what another adapter changed."""
    for other in merge.deltas[key]:
        common = {*other.rows} & {*delta.rows}
        if other.adapter != adapter.path and (common or delta.form == "whole"):
            what = f"a new row for token {min(common)} of {key}" if common else f"{key} whole"
            raise adapter.refused(f"has {what}, which {other.adapter} changes too", "merge one of the two")
        # These multiply the base's values, and not those after the other adapter.
        forms = {other.form, delta.form}
        if other.adapter != adapter.path and (forms == {"road"} or (len(forms) > 1 and forms & {"hira", "road"})):
            words = f"changes {key}, as {other.adapter} does, and one of them multiplies it (HiRA, RoAd)"
            raise adapter.refused(words, "merge them one after the other")


def _check_vocabulary(checkpoint: Checkpoint, merge: Merge) -> None:
    """Raise ``AdapterError`` unless all embeddings and heads of a resized vocabulary get the new size."""
    sizes = {checkpoint.specs[key].shape[0] for key in merge.resized}
    for key, spec in checkpoint.specs.items():
        is_whole = any(delta.form == "whole" for delta in merge.deltas.get(key, ()))
        if spec.shape[:1] and spec.shape[0] in sizes and is_of_words(key) and not is_whole:
            other, number = next(iter(merge.resized.items()))
            raise AdapterError(
                f"{merge.deltas[other][0].adapter}: has {other} for a vocabulary of {number}, and {key} of the base "
                f"has {spec.shape[0]}: give the base with that vocabulary, or save the adapter with both "
                "(save_embedding_layers=True in peft)"
            )


def _keep_tied(checkpoint: Checkpoint, adapter: Adapter, key: str, target: Target | None, merge: Merge) -> None:
    """Add a replaced tensor's old values under its other names in the model that the file lacks."""
    if not adapter.path:
        return
    spec, groups = checkpoint.specs[key], () if target is None else target.ties
    names = {name for group in groups if key in group for name in group} or _heads(checkpoint, adapter, key)
    for name in sorted(names - checkpoint.specs.keys() - merge.added.keys()):
        if key in merge.resized:
            words = f"has {key} for a vocabulary of {merge.resized[key]}, but not {name}, which the base ties to it"
            raise adapter.refused(words, "save the adapter with both (save_embedding_layers=True in peft)")
        if len(merge.deltas[key]) > 1:
            words = f"has {key} whole, and another adapter changes {name}, which is the same tensor in the base"
            raise adapter.refused(words, "merge them one after the other")
        merge.added[name] = Fill(name, spec.dtype, spec.shape, "tie", f":{key}")


def _heads(checkpoint: Checkpoint, adapter: Adapter, key: str) -> set[str]:
    """Return the key of the head that is tied to the embedding ``key`` according to the model's configuration."""
    config = model_config(checkpoint)
    module = key.removesuffix(".weight").rpartition(".")[2]
    if module not in EMBEDDINGS or any(name.rpartition(".")[0].endswith(HEADS) for name in checkpoint.specs):
        return set()
    classes = config.get("architectures")
    text = str(classes[0]) if isinstance(classes, list) and classes else ""
    if text.endswith(("ForCausalLM", "LMHeadModel")) and config.get("tie_word_embeddings", True):
        return {"lm_head.weight"}
    if config.get("tie_word_embeddings") and not text.endswith(("Model", "Classification", "Answering")):
        tied = f"a tensor of the model that is tied to it, but missing from {checkpoint.path}"
        words = f"replaces {key}; {tied}, would keep the old values"
        raise adapter.refused(words, "name the model with ", Opt("model"))
    return set()


def _deltas(
    checkpoint: Checkpoint, adapter: Adapter, merge: Merge, target: Target | None
) -> Iterator[tuple[str, Delta]]:
    groups: dict[str, list[AdapterLayer]] = defaultdict(list)
    for layer in _untied(checkpoint, adapter):
        groups[layer.component].append(layer)
    view, places = checkpoint, dict[str, _Holders]()
    names = {component: BaseNames(view, adapter, layers) for component, layers in groups.items()}
    if unfit := [component for component, each in names.items() if not each.fits]:
        other, known = _with_other_names(checkpoint)
        again = {component: BaseNames(other, adapter, groups[component]) for component in unfit if known}
        # The same names may be those of another text encoder, of other sizes.
        better = {one: each for one, each in again.items() if each.fits or len(each.found) > len(names[one].found)}
        if better:
            view, places, names = other, known, {**names, **better}
    if not any(each.found for each in names.values()):
        raise max(names.values(), key=lambda each: len(each.layers)).mismatch()
    # Text encoders have the same names: a component does not apply if another one fits the same tensors.
    fitting = [component for component, each in names.items() if each.fits]
    taken = Counter(name for component in fitting for name in names[component].found.values())
    if max(taken.values(), default=1) > 1:
        own = [component for component in fitting if component in Path(checkpoint.path).parts[-2:]]
        if not own:
            remedy = f"name the base by its folder in the diffusers pipeline, for example {fitting[-1]}"
            words = f"its layers for {' and '.join(fitting)} all fit {checkpoint.path}"
            raise adapter.refused(words, f"{remedy}, or save each adapter separately")
        fitting = own
    for component, each in names.items():
        is_other = component not in fitting and not taken.keys().isdisjoint(each.found.values())
        # The one file of a whole pipeline has a model for these layers, and it is not the one that was trained.
        is_of_another = component in _DENOISERS and any(key.startswith(_DENOISER) for key in checkpoint.specs)
        if len(names) > 1 and (is_other or not (each.found or is_of_another)):
            merge.left[component] = len(groups[component])
            del groups[component]
        elif not each.is_complete:
            raise each.mismatch()
    first = next(iter(names.values()))
    if adapter.is_peft and not adapter.is_kohya:
        first.check_complete()
    for key, stored in adapter.saved.items():
        if stored.startswith("bundle_emb."):  # of OneTrainer, for no tensor of the model
            merge.left["prompts (bundle_emb)"] = merge.left.get("prompts (bundle_emb)", 0) + 1
            continue
        yield from _whole(checkpoint, adapter, first.renamed(key), stored, merge)
    wider = {
        key: replace(view.specs[key], shape=(rows, *view.specs[key].shape[1:])) for key, rows in merge.resized.items()
    }
    view = replace(view, entries={**view.entries, **wider}, metadata=None)
    for component, layers in groups.items():
        keys = [names[component].key_of(layer) for layer in layers]
        turned = _Orientation(view, adapter, dict(zip(keys, layers, strict=True)), target)
        for layer, key in zip(layers, keys, strict=True):
            for name, delta in _of_layer(view, adapter, layer, key, turned):
                yield from _placed(adapter, layer, name, delta, places)


def _untied(checkpoint: Checkpoint, adapter: Adapter) -> list[AdapterLayer]:
    """Return an adapter's layers without the copies under names that a tied tensor has only in the model: peft saves
    the rows of tokens under each name."""
    names = {_leaf(key) for key in checkpoint.specs}
    kept = [layer for layer in adapter.layers if "tokens" not in layer.keys or layer.module.split(".")[-1] in names]
    if len(kept) == len(adapter.layers):
        return kept
    specs = {layer.module: adapter.spec(layer, "tokens") for layer in adapter.layers}
    rows = {name: row_major_bytes(spec, adapter.path) for name, spec in specs.items() if spec is not None}
    known = [rows.get(layer.module) for layer in kept]
    return kept + [one for one in adapter.layers if one not in kept and rows[one.module] not in known]


# The file's tensors that hold another release's tensor, each with `expert` and `within` of its `Delta`.
_Holders = list[tuple[str, tuple[int, ...], tuple[int, ...]]]

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w[123])\.weight")
# The matrices of an expert, in the order of `gate_up_proj` in transformers 5.
_PARTS = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1, "down_proj": 2, "w2": 2}


def _with_other_names(checkpoint: Checkpoint) -> tuple[Checkpoint, dict[str, _Holders]]:
    """Return the checkpoint with additional names that other releases and libraries use, and the places of those
    tensors.

    transformers 4 has each expert by itself; transformers 5 has all experts of a layer in ``gate_up_proj`` and
    ``down_proj``, recognised only as ``[experts, outputs, inputs]``. The names of libraries such as diffusers and of
    models' authors come from the shipped maps."""
    specs: dict[str, TensorSpec] = {}
    places: dict[str, _Holders] = {}

    def add(name: str, spec: TensorSpec, shape: tuple[int, ...], where: _Holders) -> None:
        if name not in checkpoint.entries and where and places.setdefault(name, where) == where:
            specs[name] = replace(spec, shape=shape)
        else:
            specs.pop(name, None)  # two maps contradict each other

    for name, move in aliases({key: spec.shape for key, spec in checkpoint.specs.items()}):
        add(name, checkpoint.specs[move.parts[0].source], move.shape, _rows_of(move, checkpoint.specs))
    experts: dict[str, dict[int, dict[int, str]]] = defaultdict(lambda: defaultdict(dict))
    for key, spec in checkpoint.specs.items():
        moe, _, leaf = key.rpartition(".")
        if match := _EXPERT.fullmatch(key):
            experts[match[1]][_PARTS[match[3]]][int(match[2])] = key
        elif len(spec.shape) == 3 and leaf in ("gate_up_proj", "down_proj") and len(set(spec.shape[1:])) == 2:
            number, height, width = spec.shape
            parts = [("gate_proj", "w1"), ("up_proj", "w3")] if leaf == "gate_up_proj" else [("down_proj", "w2")]
            rows = height // len(parts)
            for expert in range(number):
                for at, names in enumerate(parts):
                    first = expert * height + at * rows
                    for name, module in zip(names, (moe, moe.replace(".mlp.", ".block_sparse_moe.")), strict=True):
                        where: _Holders = [(key, (), (first, first + rows))]
                        add(f"{module}.{expert}.{name}.weight", spec, (rows, width), where)
        for one, other in (("mlp", "block_sparse_moe"), ("block_sparse_moe", "mlp")):
            if key.endswith(f".{one}.gate.weight"):
                add(key.replace(f".{one}.", f".{other}."), spec, spec.shape, [(key, (), ())])
    for moe, stacks in experts.items():
        module = moe.replace(".block_sparse_moe.", ".mlp.")
        for name, kinds in (("gate_up_proj", (0, 1)), ("down_proj", (2,))):
            columns = [dict(sorted(stacks[kind].items())) for kind in kinds]
            shapes = {checkpoint.specs[key].shape for keys in columns for key in keys.values()}
            number = len(columns[0])
            if len(shapes) == 1 and all([*keys] == [*range(number)] for keys in columns):
                rows, width = min(shapes)
                where = [
                    (key, (expert, number, at * rows, (at + 1) * rows), ())
                    for at, keys in enumerate(columns)
                    for expert, key in keys.items()
                ]
                spec = checkpoint.specs[columns[0][0]]
                add(f"{module}.{name}", spec, (number, rows * len(columns), width), where)
    return replace(checkpoint, entries={**checkpoint.entries, **specs}, metadata=None), places


def _rows_of(move: Move, specs: Mapping[str, TensorSpec]) -> _Holders:
    """Return where the rows of a renamed tensor are; nothing if the map splits or permutes rows of the file."""
    found: _Holders = []
    for part in move.parts:
        shape, (rows, *box), (place, *rest) = specs[part.source].shape, part.box or ((0, 0),), part.place or ((0, 0),)
        if part.axes or part.view or (*box,) != full(shape[1:]) or (*rest,) != full(move.shape[1:]):
            return []
        is_all = not shape or (rows, place) == ((0, shape[0]), (0, move.shape[0]))
        if not is_all and len(shape) > 2:
            return []
        found.append((part.source, () if is_all else (0, 1, *place), () if is_all else rows))
    return found


def _placed(
    adapter: Adapter, layer: AdapterLayer, key: str, delta: Delta, places: Mapping[str, _Holders]
) -> Iterator[tuple[str, Delta]]:
    """Yield the changes to the file's tensors for a delta whose tensor may be in another release's form."""
    # peft rounds the delta of a bare parameter before adding it; in transformers 5, experts and routers are parameters.
    is_stacked = any(
        within and "experts" in key.split(".") for where in places.values() for key, _, within in where[:1]
    )
    is_parameter = is_stacked and ("experts" in key.split(".") or key.endswith(".gate.weight"))
    for real, expert, within in places.get(key, [(key, (), ())]):
        is_matrices = delta.form in ("linear", "experts") and not (
            delta.transposed or delta.has_magnitude or delta.within
        )
        if (expert or within) and not is_matrices:
            words = f"changes {layer.module} as in another release or library, and not by two matrices"
            remedy = f"merge it into a base with its names: in this one, {key} is fused or split ({real})"
            raise adapter.refused(words, remedy)
        form = "linear" if expert else delta.form
        own = (expert or delta.expert, within or delta.within)
        yield real, replace(delta, form=form, expert=own[0], within=own[1], rounds=delta.rounds or is_parameter)


class _Orientation:
    """Which layers have their inputs first, like transformers' Conv1D: from the model, or from the shapes of layers of
    the same name. Layers of other names do not count for a square one, because an adapter may have both kinds."""

    def __init__(
        self, checkpoint: Checkpoint, adapter: Adapter, layers: Mapping[str, AdapterLayer], target: Target | None
    ) -> None:
        self.specs, self.adapter = checkpoint.specs, adapter
        self.classes = {} if target is None else target.modules or {}
        self.names = {_leaf(key) for key in layers}
        self.seen: dict[str, set[bool]] = defaultdict(set)
        for key, spec in self.specs.items():
            if len(spec.shape) != 2 or spec.shape[0] == spec.shape[1]:
                continue
            sizes = [bias.shape[0] for bias in self._biases(key) if len(bias.shape) == 1]
            if (layer := layers.get(key)) is not None and not layer.is_embedding:
                two, scale = adapter.spec(layer, "B"), adapter.spec(layer, "scale")
                sizes = [two.shape[0]] if two is not None and two.shape else sizes
                sizes = [scale.shape[0]] if scale is not None and scale.shape[1:] == (1,) else sizes
            self.seen[_leaf(key)] |= {outputs == spec.shape[1] for outputs in sizes if outputs in spec.shape}

    def _biases(self, key: str) -> list[TensorSpec]:
        module, _, leaf = key.rpartition(".")
        return [self.specs[name] for name in (f"{module}.bias",) if leaf == "weight" and name in self.specs]

    def is_conv1d(self, key: str) -> bool:
        """Return whether a layer is known to have its inputs first."""
        kind = self.classes.get(key.rpartition(".")[0])
        return "Conv1D" in kind if kind else True in self.seen.get(_leaf(key), ())

    def is_turned(self, layer: AdapterLayer, key: str) -> bool:
        """Return whether a square layer has its inputs first. Raises ``AdapterError`` if that is unknown."""
        leaf = _leaf(key)
        if layer.is_mlx:
            return True
        if kind := self.classes.get(key.rpartition(".")[0]):
            return "Conv1D" in kind
        if len(seen := self.seen.get(leaf, set())) == 1:
            return next(iter(seen))
        is_set = bool(self.adapter.settings(layer).get("fan_in_fan_out"))
        is_named, has_others = leaf in _INPUTS_FIRST, any(True in self.seen.get(name, ()) for name in self.names)
        if not (is_set or has_others or is_named) or not self._biases(key):
            return False  # a Conv1D always has a bias
        if self.names == {leaf} and self.adapter.is_peft:
            return is_set  # with layers of several names, peft sets it for the last one
        if is_named and not seen and (is_set or has_others):
            return True
        words = f"the square {layer.module} may be a Conv1D, with inputs first, or a Linear"
        raise self.adapter.refused(words, "name the model with ", Opt("model"))


# Names of layers that are a Conv1D in transformers.
_INPUTS_FIRST = frozenset(("c_attn", "c_proj", "c_fc", "q_attn"))


def _leaf(key: str) -> str:
    return key.rpartition(".")[0].rpartition(".")[2]


def _refuse_codes(checkpoint: Checkpoint, key: str) -> None:
    """Raise ``AdapterError`` if the tensors next to a key show that it is quantised."""
    if codes := beside_codes(key.rpartition(".")[0], checkpoint.entries):
        raise quantised(checkpoint, f"{key} is quantised, as {codes} shows")


def _of_layer(
    checkpoint: Checkpoint, adapter: Adapter, layer: AdapterLayer, key: str, turned: _Orientation
) -> Iterator[tuple[str, Delta]]:
    spec = checkpoint.specs[key]
    _refuse_codes(checkpoint, key)
    if spec.dtype not in _FLOATS or spec.storage is None or spec.quantizer is not None:
        raise quantised(checkpoint, f"{key} is stored as {spec.dtype}, so it is quantised")
    path = adapter.path
    if "scale" in layer.keys:
        yield from _scales(checkpoint, adapter, layer, key, turned)
        return
    if "tokens" in layer.keys:
        _refuse_weight(adapter, f"has rows of {key} whole, so no weight applies")
        yield key, Delta(path, "rows", (layer.keys["tokens"],), rows=_token_rows(adapter, layer, spec))
        return
    for role, name in (("diff", key), ("diff_b", f"{key.rpartition('.')[0]}.bias")):
        if role in layer.keys:
            yield name, _difference(checkpoint, adapter, layer.keys[role], name)
    if not layer.keys.keys() - {"diff", "diff_b", "norm", "norm_bias", "alpha"}:
        return
    if adapter.parts(layer):
        yield from ((key, delta) for delta in _fused(adapter, layer, key, spec))
        return
    make = _by_formula if adapter.method is not None else _product if "A" in layer.keys else _of_lycoris
    product = make(adapter, layer, key, spec, turned)
    yield key, product
    bias = f"{key.rpartition('.')[0]}.bias"
    if product.form == "road" and bias in checkpoint.specs:
        yield bias, product
    if "bias" in layer.keys:
        if bias not in checkpoint.specs:
            raise AdapterError(f"{path}: {layer.module} adds a bias, but the base has none there")
        narrow = not adapter.is_peft
        yield bias, Delta(path, "bias", (layer.keys["bias"],), product.scaling, is_narrow=narrow, rounds=narrow)


def _product(adapter: Adapter, layer: AdapterLayer, key: str, spec: TensorSpec, turned: _Orientation) -> Delta:
    """Return the delta of a layer's two matrices. Raises ``AdapterError`` if they do not fit the tensor."""
    leaf, narrow = key.rpartition(".")[2], not adapter.is_peft
    beside = adapter.settings(layer).get("target_parameters")  # parameters instead of modules
    is_named = isinstance(beside, list) and any(f".{layer.module}.{leaf}".endswith(f".{name}") for name in beside)
    is_parameter = leaf != "weight" or is_named
    # Rank patterns then match the parameter's name.
    named = replace(layer, module=f"{layer.module}.{leaf}") if is_parameter else layer
    rank, scaling = adapter.rank(named), adapter.scaling(named, key)
    factors = tuple(layer.keys[role] for role in ("A", "B", "magnitude") if role in layer.keys)
    one, two = adapter.checkpoint.specs[factors[0]].shape, adapter.checkpoint.specs[factors[1]].shape
    form, is_turned, rounds = "linear", False, narrow or adapter.config.get("init_lora_weights") == "mica"
    _check_norms(adapter, layer, two[0], spec)
    if len(one) != len(two) and not layer.is_embedding:
        words = f"{layer.module} has matrices {list(one)} and {list(two)}, as LyCORIS saves convolutions of DyLoRA"
        raise adapter.refused(words, OWN_LIBRARY)
    fits = len(one) == len(two) and one[:1] == two[1:2] == (rank,)
    if layer.is_embedding and len(one) == 2:
        fits, is_turned, rounds = fits and spec.shape == (one[1], two[0]), True, rounds or len(factors) < 3
    elif len(spec.shape) == 3 and len(one) == len(two) == 2 and leaf != "weight":
        fits = one[0] == two[1] == rank * spec.shape[0] and set(spec.shape[1:]) == {one[1], two[0]} != {one[1]}
        form, is_turned, rounds = "experts", spec.shape[1:] == (one[1], two[0]), True
    elif (core := adapter.spec(layer, "lora_mid")) is not None:
        fits = core.shape == (rank, rank, *spec.shape[2:])
        fits = fits and (prod(two), prod(one)) == (rank * spec.shape[0], rank * spec.shape[1])
        form, factors = "tucker", (*factors[:2], layer.keys["lora_mid"], *factors[2:])
    elif len(one) != len(spec.shape) and prod(spec.shape[2:]) == 1:
        # A 1x1 convolution and a linear layer, which libraries use interchangeably.
        fits = fits and (two[0], one[1], prod(one[2:])) == (*spec.shape[:2], 1)
    elif len(spec.shape) > 2:
        fits = fits and (two[0], *one[1:]) == spec.shape and set(two[2:]) == {1}
        form = "linear" if spec.shape[2:] == (1, 1) else "conv"
    elif fits := fits and len(one) == 2 and spec.shape in ((two[0], one[1]), (one[1], two[0])):
        is_turned = turned.is_turned(layer, key) if two[0] == one[1] else spec.shape != (two[0], one[1])
        rounds = rounds or is_parameter or layer.is_mlx
    if not fits:
        words = f"{layer.module} has matrices {list(one)} and {list(two)} of rank {rank}, which do not fit {key}"
        raise adapter.refused(f"{words} {list(spec.shape)} of the base", OTHER_BASE)
    return Delta(adapter.path, form, factors, scaling, is_turned, rounds, narrow)


def _fused(adapter: Adapter, layer: AdapterLayer, key: str, spec: TensorSpec) -> Iterator[Delta]:
    """Yield a delta for each part of a fused layer, which has its own rows of both matrices. Raises ``AdapterError`` if
    they do not fit the tensor."""
    parts, factors, rank = adapter.parts(layer), (layer.keys["A"], layer.keys["B"]), adapter.rank(layer)
    one, two = (adapter.checkpoint.specs[factor].shape for factor in factors)
    sizes = [last - first for first, last in parts]
    if (one, two) != ((rank * len(parts), *spec.shape[1:]), (sum(sizes), rank)) or parts[-1][1] > spec.shape[0]:
        words = f"{layer.module} has matrices {list(one)} and {list(two)} of rank {rank}, which do not fit {key}"
        raise adapter.refused(f"{words} {list(spec.shape)} of the base", OTHER_BASE)
    for at, part in enumerate(parts):
        rows = (at, len(parts), sum(sizes[:at]), sum(sizes[: at + 1]))
        yield Delta(adapter.path, "linear", factors, adapter.scaling(layer, key), expert=rows, within=part)


def _by_formula(adapter: Adapter, layer: AdapterLayer, key: str, spec: TensorSpec, turned: _Orientation) -> Delta:
    """Return the delta of a type of ``METHODS``. Raises ``AdapterError`` if its tensors do not fit."""
    method = adapter.method
    assert method is not None, "the caller looked"
    factors = tuple(layer.keys[role] for role in adapter.roles(layer))
    shapes = [adapter.checkpoint.specs[factor].shape for factor in factors]
    fits, is_turned, size = False, layer.is_embedding, (spec.shape[0], prod(spec.shape[1:]))
    turned_size = size[::-1]
    if len(spec.shape) == 2 or method.has_kernels:
        fits = adapter.fits(layer, *(turned_size if is_turned and method.turns else size))
        if len(spec.shape) == 2 and not layer.is_embedding:
            is_turned = (
                turned.is_turned(layer, key) if size[0] == size[1] and fits else not fits or turned.is_conv1d(key)
            )
            fits = adapter.fits(layer, *turned_size) if is_turned and method.turns else fits and not is_turned
    if not fits:
        words = f"{layer.module} has tensors {', '.join(map(str, map(list, shapes)))}, which do not fit {key}"
        raise adapter.refused(f"{words} {list(spec.shape)} of the base as {method.name}", f"{OTHER_BASE}, or use peft")
    if spec.dtype == "float64":
        raise adapter.refused(f"{key} is float64, in which peft does not compute {method.name}", "use peft")
    if not method.adds:
        _refuse_weight(adapter, f"{method.name} multiplies and takes no weight")
    number, scaling = adapter.numbers(layer)
    if scaling == 0 != adapter.weight:
        raise adapter.refused(f"the {method.scale} of {CONFIG} is 0", OWN_CONFIG)
    form = "bat" if "block" in layer.keys and len(shapes[0]) == 3 else adapter.kind.lower()
    # Layers of AdaLoRA with fewer ranks have the dtype of the base.
    is_cut = form == "adalora" and bool(adapter.config.get("rank_pattern"))
    bound = adapter.bound
    return Delta(adapter.path, form, factors, scaling, is_turned, method.rounds, is_cut, number=number, bound=bound)


def _check_norms(adapter: Adapter, layer: AdapterLayer, outputs: int, spec: TensorSpec) -> None:
    """Raise ``AdapterError`` if a layer has DoRA's norms and they do not fit the tensor."""
    if (norms := adapter.spec(layer, "magnitude")) is None:
        return
    # LyCORIS' norms may be [1, inputs, 1, 1] (wd_on_out); peft's are [1, outputs, 1, 1].
    is_lycoris = layer.keys["magnitude"].endswith("dora_scale")
    if is_lycoris:
        _refuse_weight(
            adapter, f"has {layer.keys['magnitude']}, and LyCORIS, ComfyUI and diffusers weigh that differently"
        )
    by_outputs = norms.numel == outputs and (norms.shape[0] == outputs or not is_lycoris)
    by_inputs = is_lycoris and norms.shape[:1] == (1,) and (norms.numel,) == spec.shape[1:2]
    if not by_outputs and not by_inputs:
        words = f"{layer.keys['magnitude']} {list(norms.shape)} has no norm for each of {outputs} outputs, unlike DoRA"
        raise adapter.refused(words, OWN_LIBRARY)


def _of_lycoris(adapter: Adapter, layer: AdapterLayer, key: str, spec: TensorSpec, turned: _Orientation) -> Delta:
    """Return the delta of a layer's LoHa or LoKr matrices. Raises ``AdapterError`` if they do not fit the tensor."""
    roles = (*(KRONECKER if layer.is_kronecker else HADAMARD), *CORES, "magnitude")
    factors = tuple(layer.keys[role] for role in roles if role in layer.keys)
    shapes = [adapter.checkpoint.specs[factor].shape for factor in factors]
    wanted = (spec.shape[0], prod(spec.shape[1:]))
    if layer.is_kronecker:
        one, two = (adapter.whole_shape(layer, name) for name in ("lokr_w1", "lokr_w2"))
        fits = len(one) == 2 and len(two) > 1 and (one[0] * two[0], one[1] * prod(two[1:])) == wanted
        # For the unfactored kernel of a Conv1d, peft's product differs from LyCORIS'.
        is_kernel = two[2:] == spec.shape[2:] and (len(two) == 4 or not adapter.is_peft)
        fits = fits and (len(two) == 2 or is_kernel)
    else:
        rank, cores = adapter.rank(layer), [core.shape for role in CORES if (core := adapter.spec(layer, role))]
        ends = [(rank, size) for size in spec.shape[:2]] if cores else [(wanted[0], rank), (rank, wanted[1])]
        # Those of OneTrainer have the axes of the kernel.
        flat = [(*shape[:1], prod(shape[1:])) for shape in shapes[: len(HADAMARD)]]
        fits = len(spec.shape) > 1 and flat == ends * 2
        fits = fits and all(core[:2] == (rank, rank) and prod(core[2:]) == prod(spec.shape[2:]) for core in cores)
    if not fits or turned.is_conv1d(key):
        matrices = " and ".join(map(str, map(list, shapes)))
        words = f"{layer.module} has matrices {matrices}, which do not fit {key} {list(spec.shape)} of the base"
        raise adapter.refused(words, f"{OTHER_BASE}, or {OWN_LIBRARY}")
    _check_norms(adapter, layer, spec.shape[0], spec)
    return Delta(adapter.path, "kronecker" if layer.is_kronecker else "hadamard", factors, adapter.scaling(layer, key))


def _difference(checkpoint: Checkpoint, adapter: Adapter, stored: str, key: str) -> Delta:
    """Return the delta that adds the adapter's full-size difference to a tensor."""
    spec, value = checkpoint.specs.get(key), adapter.checkpoint.specs[stored]
    if spec is None or spec.shape != value.shape:
        has = f"no {key}" if spec is None else f"{key} {list(spec.shape)}"
        raise adapter.refused(f"has {stored} {list(value.shape)}, but the base has {has}", OTHER_BASE)
    return Delta(adapter.path, "bias", (stored,), adapter.weight)


def _refuse_weight(adapter: Adapter, why: str) -> None:
    if adapter.weight != 1:
        raise adapter.refused(why, f"omit ={adapter.weight:g}")


def _scales(
    checkpoint: Checkpoint, adapter: Adapter, layer: AdapterLayer, key: str, turned: _Orientation
) -> Iterator[tuple[str, Delta]]:
    spec, scale = checkpoint.specs[key], adapter.checkpoint.specs[layer.keys["scale"]]
    _refuse_weight(adapter, "IA3 multiplies and takes no weight")
    if len(spec.shape) == 2:
        is_output = scale.shape[:1] == (scale.numel,)
        is_square = spec.shape[0] == spec.shape[1]
        is_turned = turned.is_turned(layer, key) if is_square else spec.shape[not is_output] != scale.numel
        axis = int(is_output == is_turned)
    else:  # a convolution: scales of inputs and of outputs have the same shape
        inputs = adapter.config.get("feedforward_modules") or []
        if isinstance(inputs, list):
            is_output = not any(layer.module.endswith(str(name)) for name in inputs)
        elif len(set(spec.shape[:2])) == 2:
            is_output = spec.shape[0] == scale.numel
        else:
            words = (
                f"{layer.module} has as many inputs as outputs, and feedforward_modules of {CONFIG} is an expression"
            )
            raise adapter.refused(words, "name its layers one by one")
        is_turned, axis = is_output, int(not is_output)
    wanted = [size if at == axis else 1 for at, size in enumerate(spec.shape)]
    wanted[:2] = wanted[1::-1] if is_turned else wanted[:2]
    if list(scale.shape) != wanted:
        words = f"{layer.module} has {list(scale.shape)} numbers, which do not fit {key} {list(spec.shape)}"
        raise adapter.refused(words, OTHER_BASE)
    yield key, Delta(adapter.path, "scale", (layer.keys["scale"],), transposed=is_turned)
    bias = f"{key.rpartition('.')[0]}.bias"
    if is_output and bias in checkpoint.specs:
        yield bias, Delta(adapter.path, "scale", (layer.keys["scale"],))


def _token_rows(adapter: Adapter, layer: AdapterLayer, spec: TensorSpec) -> tuple[int, ...]:
    given = adapter.config.get("trainable_token_indices") or adapter.config.get("token_indices")
    if isinstance(given, Mapping):
        ends = [name for name in given if f".{layer.module}".endswith(f".{name}")]
        given = given[ends[0]] if ends else None
    values = adapter.checkpoint.specs[layer.keys["tokens"]]
    rows = tuple(given) if isinstance(given, list) and all(type(row) is int for row in given) else ()
    if not rows or min(rows) < 0 or values.shape[:1] != (len(rows),):
        words = f"{layer.module} has {values.shape[0]} new rows, and {CONFIG} has no token indices for them"
        raise adapter.refused(words, OWN_CONFIG)
    if values.shape[1:] != spec.shape[1:]:
        words = f"{layer.module} has rows of {list(values.shape[1:])} numbers, and the base of {list(spec.shape[1:])}"
        raise adapter.refused(words, OTHER_BASE)
    if max(rows) >= spec.shape[0]:
        words = f"{layer.module} has a row for token {max(rows)}, and the base only {spec.shape[0]} tokens"
        remedy = "give the base with the vocabulary that it was trained on (resize_token_embeddings in transformers)"
        raise adapter.refused(words, remedy)
    return rows


def _whole(
    checkpoint: Checkpoint, adapter: Adapter, key: str, stored: str, merge: Merge
) -> Iterator[tuple[str, Delta]]:
    """Yield the replacement of a tensor that the adapter holds in full."""
    value, spec = adapter.checkpoint.specs[stored], checkpoint.specs.get(key)
    _refuse_weight(adapter, f"has {stored} whole, so no weight applies")
    if spec is None:
        if "peft_type" not in adapter.config:
            raise adapter.refused(f"has {stored}, which ckptfix does not know", OWN_LIBRARY)
        if other := _same_by_another_name(checkpoint, key, value.shape):
            words = f"has {stored} whole, but {checkpoint.path} has {other} instead"
            raise adapter.refused(words, "rename its layers first with ", Opt("model"))
        if not is_copied(adapter, key) and not (is_of_words(key) and value.shape[1:]):
            raise adapter.refused(f"has {stored}, which {checkpoint.path} lacks", OTHER_BASE)
        merge.added[key] = Fill(key, value.dtype, value.shape, "adapter", f"{adapter.path}:{stored}")
    elif "float" in value.dtype and "float" not in spec.dtype:
        raise quantised(checkpoint, f"{key} is stored as {spec.dtype}, so it is quantised")
    elif ("float" in spec.dtype) != ("float" in value.dtype):
        raise adapter.refused(f"has {key} as {value.dtype} and the base as {spec.dtype}", OTHER_BASE)
    elif spec.shape != value.shape and not (is_of_words(key) and spec.shape[1:] == value.shape[1:]):
        shapes = f"{list(value.shape)} and the base as {list(spec.shape)}, which was resized for it or is another model"
        raise adapter.refused(f"has {key} as {shapes}", OTHER_BASE)
    else:
        if spec.shape != value.shape:
            merge.resized[key] = value.shape[0]
        yield key, Delta(adapter.path, "whole", (stored,))


def _same_by_another_name(checkpoint: Checkpoint, key: str, shape: tuple[int, ...]) -> str:
    """Return what the base has instead of a tensor that an adapter holds in full; empty if the tensor is new."""
    parts = key.split(".")
    last = max((at for at, part in enumerate(parts) if part.isdecimal()), default=-1)
    block = ".".join((*parts[: last + 1], ""))
    heads = (name for name, spec in checkpoint.specs.items() if _leaf(name) in HEADS and spec.shape == shape)
    layers = (block.rstrip(".") for name in checkpoint.specs if last >= 0 and name.startswith(block))
    return next(heads if _leaf(key) in HEADS else layers, "")


def edits_within(checkpoint: Checkpoint, adapter: Adapter, target: Target | None) -> Iterator[Edit]:
    """Yield the edits that merge an adapter inside its base, and rename the base's tensors to their original names."""
    own = {key for layer in adapter.layers for key in layer.keys.values()} | set(adapter.saved.values())
    names = {key: plain_name(key) for key in checkpoint.entries if key not in own}
    base = replace(checkpoint, entries={name: checkpoint.entries[key] for key, name in names.items()}, metadata=None)
    stored = {name: key for key, name in names.items()}
    for edit in merge_edits(base, find_merge(base, [adapter], target=target)):
        yield replace(edit, key=stored[edit.key]) if isinstance(edit, MergeAdapter) else edit
    yield from renames(names)
    yield from map(Drop, sorted(own))


def plain_name(key: str) -> str:
    """Return the name of a tensor before peft wrapped the model, which may itself be a submodule."""
    before, _, after = f".{key}".rpartition(".base_model.model.")
    return ".".join(part for part in f"{before}.{after}".split(".") if part and part not in _WRAPPERS)
