"""Opens adapters, and refuses by name those that cannot be merged into a base. No values are read."""

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from msgspec.structs import replace

from ckptfix.core.adapter_methods import METHODS
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.errors import AdapterError, Opt
from ckptfix.reading.adapters import (
    CORES,
    DIFFERENCES,
    FETCH,
    HADAMARD,
    KRONECKER,
    OWN_CONFIG,
    OWN_LIBRARY,
    REPLACED,
    WITH_RANK,
    Adapter,
    AdapterLayer,
    adapter_in,
)
from ckptfix.reading.configs import CONFIG, config_beside, read_config
from ckptfix.reading.opening import open_file

_FOREIGN = re.compile(
    r"(?:^|[._])(?:(?P<old_oft>oft_[rs])|(?P<lycoris>oft_(?:blocks|diag))|(?P<scalar>scalar)"
    r"|(?P<kind>oft|boft|vera|randlora|c3a|vblora|fourierft|shira|waveft|gralora|delora)_\w+"
    r"|(?P<nemo>adapter)\.linear_(?:in|out)|(?P<adalora>lora_E))(?:\.|$)"
    r"|^(?:lora|lycoris)_\w+\.(?:(?P<glora>[ab][12]\.weight)|(?P<ia3>on_input)|(?P<tlora>lambda_layer|[pq]_layer\..+))$"
    # Short names, which layers of a model may have too, only in files of peft.
    r"|^base_model\.(?:.+\.)?(?P<peft>adamss|adaption|beft|bone|deft|frod|glora|hira|hra|lily"
    r"|miss|osf|peanut|poly|psoft|pvera|road|shadow|supertuning|tinylora|unilora)_\w+(?:\.|$)"
    r"|^(?P<prompt>prompt_embeddings|prefix_task_\w+)$|(?:^|\.)internal_(?P<xlora>xlora)_classifier\."
)
_FOREIGN_TYPES = {
    "old_oft": "OFT of peft before 0.16",
    "lycoris": "OFT or BOFT of LyCORIS",
    "scalar": "LyCORIS with use_scalar",
    "nemo": "LoRA of NeMo",
    "adalora": "ADALORA",
    "glora": "GLoRA",
    "ia3": "IA3 of LyCORIS",
    "tlora": "T-LoRA",
    "adaption": "ADAPTION_PROMPT",
    "prompt": "prompt or prefix tuning",
}

# Settings of peft under which an adapter changes more than the product of two matrices.
_VARIANTS = {
    "use_qalora": "QA-LoRA",
    "use_bdlora": "BD-LoRA",
    "alora_invocation_tokens": "aLoRA, which applies only after certain tokens,",
    "arrow_config": "Arrow",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
    "kasa_config": "KaSA",
    "layer_replication": "layer_replication, which gives the model more layers than its file,",
}

# Settings of peft under which each layer has a further tensor, and its role.
_LAYERS_HAVE = {"use_dora": "magnitude", "lora_bias": "bias"}

_OF_LITGPT = "lit_model.pth.lora"

_MERGED = ("LORA", "LOHA", "LOKR", "IA3", "TRAINABLE_TOKENS", "LN_TUNING", *METHODS)

# Types that cannot be merged into weights, each with the reason.
UNMERGED = {
    **dict.fromkeys(
        (
            _FOREIGN_TYPES["prompt"],
            *"ADAPTION_PROMPT PROMPT_TUNING MULTITASK_PROMPT_TUNING P_TUNING PREFIX_TUNING CPT CARTRIDGE".split(),
        ),
        "adds to the model's input and changes no weights",
    ),
    **dict.fromkeys(("LILY", "POLY", "SHADOW", "XLORA"), "changes with the input"),
}

# What is loaded along with a model and is not merged: its name, what it does, and the function that loads it; the names
# of all of its tensors, or of one.
_COMPANIONS = (
    (
        ("a textual inversion embedding", "adds tokens to the text encoder", "load_textual_inversion() of diffusers"),
        re.compile(r"emb_params|clip_[lg]|t5xxl|<[^<>]{1,99}>|\*|string_to_param\..*"),
    ),
    (
        ("a hypernetwork", "changes the inputs of attentions while the model runs", "the web UI that trained it"),
        re.compile(r"\d+\.\d\.linear\.\d+\.(?:weight|bias)"),
    ),
    (
        ("an adapter of AdapterHub", "adds layers to the model", "load_adapter() of the library adapters"),
        re.compile(r".*\.(?:adapters\.[^.]+\.adapter_(?:down|up)|loras\.[^.]+\.lora_[AB]|invertible_adapters)\b.*"),
    ),
    (
        ("an IP-Adapter", "adds attentions to an image", "load_ip_adapter() of diffusers"),
        re.compile(r"(?:image_proj|ip_adapter)\..*"),
    ),
)
_CONTROL_LORA = ("a Control-LoRA", "takes its other weights from the model while it runs", "ComfyUI")

# Values of `init_lora_weights` with which the base is changed before training.
_REBUILT = ("pissa", "olora", "corda", "loftq", "lora_ga")


def open_adapter(text: str, base: Checkpoint) -> Adapter:
    """Open the adapter that ``--adapter`` names: a folder, a file of weights, or the configuration of an adapter inside
    its base; ``=0.5`` at the end of the text is its weight. Raises ``AdapterError`` if it cannot be merged."""
    path, weight = _weighted(text)
    if Path(path).suffix == ".json":
        adapter = adapter_in(base, "", read_config(Path(path)))
    else:
        from ckptfix.reading.folders.folders import ADAPTERS, weights_file  # only a merge needs it

        # Beside the adapter, torchtune saves the merged model, and trl a value head.
        own = [str(file) for name in (*ADAPTERS, _OF_LITGPT) if (file := Path(path) / name).is_file()]
        path = own[0] if len(own) == 1 and weights_file(path) is None else path
        adapter = adapter_in(open_file(path), path, config_beside(path))
    _refuse(adapter)
    if not adapter.layers:
        raise adapter.refused("holds no layers of an adapter", "give the folder or file that peft or a trainer saved")
    check_alone(adapter)
    return replace(adapter, weight=weight)


def adapter_paths(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the folders and files that ``--adapter`` names, without their weights."""
    return tuple(_weighted(text)[0] for text in texts)


def _weighted(text: str) -> tuple[str, float]:
    path, equals, number = text.rpartition("=")
    if not equals or Path(text).exists():
        return text, 1.0
    try:
        weight = float(number)
    except ValueError:
        if not Path(path).exists():
            return text, 1.0  # opening it then reports the missing file
        weight = math.nan
    if not math.isfinite(weight):
        raise AdapterError(
            Opt("adapter", text), ": the weight of an adapter has to be a finite number, for example 0.5"
        )
    return path, weight


def companion(checkpoint: Checkpoint) -> tuple[str, str, str] | None:
    """Return what a file is that is loaded along with a model (``_COMPANIONS``); None for any other file."""
    if "lora_controlnet" in checkpoint.specs:
        return _CONTROL_LORA
    keys = [".".join(map(str, (*checkpoint.container, key))) for key in checkpoint.specs]
    found = (facts for facts, named in _COMPANIONS if keys and all(map(named.fullmatch, keys)))
    return next(found, None)


def foreign_type(adapter: Adapter) -> str:
    """Return the type of an adapter that cannot be merged, from its configuration or the names of its tensors; empty
    for any other adapter."""
    if adapter.kind not in _MERGED:
        return adapter.kind
    if adapter.method is not None and adapter.layers:
        return ""
    found = next(filter(None, map(_FOREIGN.search, adapter.checkpoint.specs)), None)
    if found is None:
        return ""
    name = str(found["kind"] or found["peft"] or found.lastgroup)
    return _FOREIGN_TYPES.get(name, name.upper())


def is_foreign(adapter: Adapter, key: str) -> bool:
    """Return whether a tensor belongs to an adapter that cannot be merged, and not to a model."""
    found = _FOREIGN.search(key)
    is_of_peft = key.startswith("base_model.") and (bool(adapter.config) or ".lora_" in key)
    is_of_adapter = key.endswith(".alpha") or is_of_peft
    return found["scalar"] is None if found else is_of_adapter


def _refuse(adapter: Adapter) -> None:
    """Raise ``AdapterError`` for an adapter that cannot be merged from its tensors."""
    config, kind = adapter.config, adapter.kind
    if adapter.path and (one := companion(adapter.checkpoint)):
        name, does, loader = one
        raise adapter.refused(f"{name}, which {does} and is not merged", f"load it along with the model, with {loader}")
    if (other := foreign_type(adapter)) and (adapter.path or kind not in _MERGED):
        if other in UNMERGED:
            remedy = "load it along with the model, in peft with PeftModel.from_pretrained()"
            raise adapter.refused(f"an adapter of the type {other}, which {UNMERGED[other]}", remedy)
        if other in METHODS:
            raise adapter.refused(f"an adapter of the type {other}, without its {CONFIG}", "put that next to it")
        remedy = OWN_LIBRARY + " (in peft: merge_and_unload())" * ("peft_type" in config)
        raise adapter.refused(f"an adapter of the type {other}, which ckptfix does not merge", remedy)
    types = {layer.type.upper() for layer in adapter.layers}
    if types and "peft_type" in config and types & {"LOHA", "LOKR"} != {kind} & {"LOHA", "LOKR"}:
        words = f"{CONFIG} says the type {kind}, and it has matrices of {' and '.join(sorted(types))}"
        raise adapter.refused(words, OWN_CONFIG)
    for name, words in _VARIANTS.items():
        if config.get(name):
            raise adapter.refused(f"trained with {words} and cannot be merged from its matrices only", "use peft")
    # Before 0.18, which began to note the release, OFT had another series.
    if config.get("use_cayley_neumann") and "peft_version" not in config:
        raise adapter.refused("trained with the series of peft before 0.18", "merge it with that release")


def _matrices(adapter: Adapter, layer: AdapterLayer) -> Sequence[str]:
    """Return the roles of the matrices that a layer requires."""
    if adapter.method is not None:
        return adapter.roles(layer)
    if not layer.keys.keys() - {*DIFFERENCES, "alpha"}:
        return ()
    if layer.keys.keys() & {*KRONECKER}:
        one, two = ((name,) if name in layer.keys else (f"{name}_a", f"{name}_b") for name in ("lokr_w1", "lokr_w2"))
        return (*one, *two, *CORES[2:3] * (CORES[2] in layer.keys and len(two) > 1))
    if layer.keys.keys() & {*HADAMARD}:
        return (*HADAMARD, *CORES[:2] * any(core in layer.keys for core in CORES[:2]))
    return ("A", "B", *CORES[3:] * (CORES[3] in layer.keys))


_MATRICES = ("A", "B", *HADAMARD, *KRONECKER, *CORES)


def check_alone(adapter: Adapter) -> None:
    """Raise ``AdapterError`` for defects of an adapter that do not depend on its base."""
    if len(adapter.names) > 1:
        words = f"holds {len(adapter.names)} adapters ({', '.join(adapter.names)})"
        raise adapter.refused(words, "save each separately and merge them one after the other")
    how = adapter.config.get("init_lora_weights")
    if isinstance(how, str) and how.lower().startswith(_REBUILT):
        raise adapter.refused(
            f"trained with init_lora_weights={how}, which changes the base too",
            "merge it in peft, which repeats that, or convert it there with "
            "save_pretrained(…, path_initial_model_for_weight_conversion=…)",
        )
    # The components of a pipeline are trained separately: each may have been saved with or without alphas.
    scaled = {layer.component for layer in adapter.layers if "alpha" in layer.keys}
    lacking = [
        layer
        for layer in adapter.layers
        if layer.component in scaled and {*WITH_RANK} & layer.keys.keys() and "alpha" not in layer.keys
    ]
    if lacking:
        words = f"{len(lacking)} of {len(adapter.layers)} layers have lost their alpha, such as {lacking[0].module}"
        raise adapter.refused(words, FETCH)
    for layer in adapter.layers:
        for role, key in layer.keys.items():
            if role not in ("alpha", "shira_indices") and "float" not in (dtype := adapter.checkpoint.specs[key].dtype):
                words = f"{key} is stored as {dtype}, but changes of weights are floats"
                raise adapter.refused(words, "use the adapter from before the conversion")
        if {"scale", "tokens", *REPLACED} & layer.keys.keys():
            continue
        matrices = _matrices(adapter, layer)
        if other := next((role for role in _MATRICES if role in layer.keys and role not in matrices), ""):
            words = f"{layer.module} has matrices of two types ({matrices[0]} and {other})"
            raise adapter.refused(words, OWN_LIBRARY)
        specs = [spec for role in matrices if (spec := adapter.spec(layer, role)) is not None]
        if len(specs) < len(matrices) and adapter.config.get("save_projection") is False:
            words = "saved without its random matrices (save_projection=False)"
            raise adapter.refused(words, "merge it in peft, which makes them again")
        if len(specs) < len(matrices):
            raise adapter.refused(f"{layer.module} has only {len(specs)} of its {len(matrices)} matrices", FETCH)
        if any(spec.numel == 0 for spec in specs):
            words = f"{layer.module} has an empty matrix, as ZeRO-3 and FSDP save parameters that were not gathered"
            raise adapter.refused(words, "gather them and save the adapter again")
        if not adapter.config or not specs or adapter.method is not None or adapter.parts(layer):
            continue
        adapter.scaling(layer)
        rank, one, settings = adapter.rank(layer), adapter.with_rank(layer), adapter.settings(layer)
        two = adapter.spec(layer, "B")
        if one is not None and two is not None and two.shape[1:] == (rank,) and one.shape[0] in (2 * rank, 3 * rank):
            words = f"{layer.module} has a matrix for each part of a fused layer, as in loralib and LitGPT"
            raise adapter.refused(words, OWN_LIBRARY)
        if one is not None and one.shape[:1] != (rank,) and not settings.get("target_parameters"):
            words = (
                f"{layer.module} has matrices of rank {one.shape[0]}, and the r or rank_pattern of {CONFIG} says {rank}"
            )
            raise adapter.refused(words, OWN_CONFIG)
        for option, role in _LAYERS_HAVE.items():
            if settings.get(option) and role not in layer.keys:
                raise adapter.refused(f"trained with {option}, and {layer.module} has no {role} vector", FETCH)
            if settings.get(option) is False and role in layer.keys:
                words = f"{layer.module} has a {role} vector, and {CONFIG} says that {option} is off"
                raise adapter.refused(words, OWN_CONFIG)
    has_tokens = any("tokens" in layer.keys for layer in adapter.layers)
    if adapter.config.get("trainable_token_indices") and not has_tokens:
        raise adapter.refused("trained with trainable_token_indices, and has no rows of tokens", FETCH)
