"""Adapters: small files beside a model with changes of its weights, as peft, diffusers and kohya save them.

Only names, shapes and the configuration are read here; rules find the layers of the base that an adapter changes."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from operator import mul
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from ckptfix.bytes.sources import Content
from ckptfix.core.adapter_methods import METHODS, Method, Shape
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.facts import Kind
from ckptfix.core.spec import TensorSpec
from ckptfix.core.wrappers import strip_segments
from ckptfix.errors import AdapterError, Opt
from ckptfix.reading.configs import CONFIG

# The matrices of LoHa, of which a layer has all, and of LoKr: `w1` and `w2`, each whole or as a product of two.
HADAMARD = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
KRONECKER = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")
# The tensor between the two matrices of a convolution, for its kernel (Tucker decomposition).
CORES = ("hada_t1", "hada_t2", "lokr_t2", "lora_mid")

# The role of a tensor in a layer, by its name.
_ROLES = {
    **dict.fromkeys(("lora_A", "lora_down", "lora.down", "lora_linear_layer.down", "lora_a.weight"), "A"),
    **dict.fromkeys(("lora_B", "lora_up", "lora.up", "lora_linear_layer.up", "lora_b.weight"), "B"),
    **{"lora_a": "B", "lora_b": "A"},  # of mlx-lm, whose matrices have inputs first
    **{"lora_embedding_A": "A", "lora_embedding_B": "B", "lora_magnitude_vector": "magnitude"},
    **{"ia3_l": "scale", "trainable_tokens_delta": "tokens", "alpha": "alpha"},
    **{"ln_tuning_layers": "norm", "ln_tuning_layers.bias": "norm_bias"},
    **dict.fromkeys(("lora_B.bias", "lora_up.bias"), "bias"),
    "dora_scale": "magnitude",
    **{name: name for name in (*HADAMARD, *KRONECKER, *CORES)},
    **{"diff": "diff", "w_norm": "diff", "diff_b": "diff_b", "b_norm": "diff_b"},
}
# Roles that only files of one type have.
_OF_TYPES = {name: kind for kind, method in METHODS.items() for name in method.roles if name not in _ROLES}
_ROLES |= {name: role for method in METHODS.values() for name, role in method.roles.items()}
_OF_TYPES["ranknum"], _ROLES["ranknum"] = "ADALORA", "ranknum"  # in a whole model
# Roles of tensors that replace those of their module.
REPLACED = {"norm": "weight", "norm_bias": "bias"}
DIFFERENCES = frozenset(("diff", "diff_b"))

_NAME = "|".join(re.escape(role) for role in sorted(_ROLES, key=len, reverse=True))
_TENSOR = re.compile(
    rf"(?P<module>.+)\.(?P<role>{_NAME})(?:\.(?!weight$|bias$)(?P<name>[^.]+))?(?P<leaf>\.weight|\.bias)?"
)
# Names of the first matrix in diffusers, which end without an adapter's name, and of blocks of language models.
_DIFFUSERS = re.compile(
    r"(?:lora_A|lora_down|[._]lora[12]?\.down|lora_linear_layer\.down|lora_magnitude_vector|^)\.weight$"
)
_GPT = re.compile(r"h\.\d")
_UNSCALED = f"lora_alpha, which scales the change, is neither in the file nor in an {CONFIG}"
_SAVED = re.compile(r"\.(?:modules_to_save\.(?P<name>[^.]+)|modules_to_save|base_layer)(?=\.)")
_NESTED = ("base_layer", "token_adapter")
_MINLORA = re.compile(r"\.parametrizations\.weight\.\d+$")
_PROCESSOR = re.compile(r"\.processor\.(to_[qkv]|to_out)_lora\.(?=up|down)")
# The double blocks of Flux as XLabs names them, with attentions for images and texts.
_XLABS = re.compile(r"(?:diffusion_model\.)?(double_blocks\.\d+)\.processor\.(qkv|proj)_lora([12])(?=\.(?:up|down)\.)")
_XLABS_SIDES = {"1": "img", "2": "txt"}
_COMPONENT = re.compile(
    r"(?P<dotted>unet|text_encoder(?:_\d)?|text_encoders\.\w+\.transformer|transformer(?:_\d|_ref)?|prior|connectors"
    r"|text_conditioner|diffusion_model)\."
    r"|(?P<kohya>lora_(?:unet|te\d?|transformer|prior)|lycoris)[_.]"
)
_BASE = "base_model.model."

# Patterns of layers that match any text in at most some thousand steps.
_SIMPLE = re.compile(r"[\w.\-|()\\^$\[\]]*(?:(?<!\))[*+][\w.\-|()\\^$\[\]]*){0,2}")


class AdapterLayer(Struct, frozen=True):
    """The keys of an adapter's tensors for one module, by their roles (``A``, ``B``, ``magnitude``, ``bias``,
    ``scale``, ``tokens``, ``norm``, ``norm_bias``, ``alpha``, ``diff``, ``diff_b``, and the names of LoHa and LoKr)."""

    # The module's name in the model, without the prefixes of wrappers and of the component; files of kohya have
    # underscores for dots.
    module: str
    component: str
    keys: Mapping[str, str]

    @property
    def is_embedding(self) -> bool:
        """Whether it changes an embedding, by peft's names."""
        key = self.keys.get("A") or self.keys.get("rotation", "")
        return any(f".{kind}_embedding_" in key for kind in ("lora", "hira", "oft"))

    @property
    def is_mlx(self) -> bool:
        """Whether its matrices have inputs first, as in mlx-lm."""
        return self.keys.get("B", "").endswith(".lora_a")

    @property
    def is_kohya(self) -> bool:
        """Whether its name has underscores for dots."""
        return self.component.startswith(("lora_", "lycoris"))

    @property
    def is_of_comfy(self) -> bool:
        """Whether its name is of kohya's scripts or ComfyUI, which take alpha = rank if a file has no alpha."""
        return self.is_kohya or self.component == "diffusion_model"

    @property
    def is_of_diffusers(self) -> bool:
        """Whether its name is of diffusers, which takes alpha = rank too; ``transformer.h.0.mlp.lora_A`` is of loralib,
        LitGPT or mlx-lm."""
        is_named = bool(_DIFFUSERS.search(self.keys.get("A", ".weight")))
        return bool(self.component) and is_named and not _GPT.match(self.module)

    @property
    def is_kronecker(self) -> bool:
        return bool({"lokr_w1", "lokr_w1_a"} & self.keys.keys())

    @property
    def type(self) -> str:
        return next((name for role, name in _TYPES.items() if role in self.keys), "LoRA")


# The types of layers, each by a role that only it has.
_TYPES = {
    **{"scale": "IA3", "hada_w1_a": "LoHa", "magnitude": "DoRA", "A": "LoRA", "lokr_w1": "LoKr", "lokr_w1_a": "LoKr"},
    **{"tokens": "TRAINABLE_TOKENS", "norm": "LN_TUNING"},
}

# What to do about an adapter that is refused.
FETCH, OWN_CONFIG = "fetch the adapter again", f"use the {CONFIG} that was saved with it"
OTHER_BASE, OWN_LIBRARY = "give the base that it was trained on", "merge it with the library that trained it"

# The roles whose first axis is the rank.
WITH_RANK = ("A", "hada_w1_b", "lokr_w1_b", "lokr_w2_b")


class Adapter(Struct, frozen=True):
    """The layers of an adapter, and the modules that it saves whole. ``path`` is empty for an adapter in its base."""

    path: str
    checkpoint: Checkpoint
    config: Mapping[str, Any]  # empty if there is none
    layers: tuple[AdapterLayer, ...]
    saved: Mapping[str, str] = field(default_factory=dict)  # keys of the model to those of the adapter
    # Whether peft loads it directly, and not through diffusers, which computes in the dtype of the base.
    is_peft: bool = False
    weight: float = 1.0
    names: tuple[str, ...] = ()  # the names of adapters, if they were saved with the model

    @property
    def kind(self) -> str:
        """The type in the configuration, in capitals; LORA if it has none."""
        return str(self.config.get("peft_type") or self.config.get("swift_type") or "LORA").upper()

    @property
    def method(self) -> Method | None:
        """The type, if it changes a matrix by a formula of its own."""
        return METHODS.get(self.kind)

    def refused(self, words: str, remedy: str, *option: Opt) -> AdapterError:
        """Return the error for an adapter that cannot be merged."""
        return AdapterError(f"{self.path or self.checkpoint.path}: {words}; {remedy}", *option)

    @property
    def label(self) -> str:
        """The adapter as the user named it: ``style=0.7``."""
        return f"{self.path}={self.weight:g}" if self.weight != 1 else self.path

    @property
    def base(self) -> str:
        """The name of the base that it was trained on, from its configuration or a trainer's note in the header."""
        named = self.config.get("base_model_name_or_path") or self.config.get("model")
        named = named or _noted(self.checkpoint, "ss_sd_model_name")
        return named if isinstance(named, str) else ""

    def is_trained_on(self, path: str) -> bool | None:
        """Return whether the adapter was trained on a file, by the hash of 64 KiB after the first MiB that kohya's
        scripts note; None if there is no such note."""
        noted = _noted(self.checkpoint, "ss_sd_model_hash")
        if not re.fullmatch("[0-9a-f]{8}", noted) or not Path(path).is_file():
            return None
        import hashlib  # loads OpenSSL, which a first answer does not need

        some = Content.of_file(path)[1 << 20 : (1 << 20) + (1 << 16)]
        return hashlib.sha256(some).hexdigest().startswith(noted) if some else None

    @property
    def is_kohya(self) -> bool:
        """Whether the names have underscores for dots."""
        return any(layer.is_kohya for layer in self.layers)

    def spec(self, layer: AdapterLayer, role: str) -> TensorSpec | None:
        return self.checkpoint.specs.get(layer.keys.get(role, ""))

    def settings(self, layer: AdapterLayer) -> Mapping[str, Any]:
        start = f"{layer.component}."
        parts = {key.removeprefix(start): value for key, value in self.config.items() if key.startswith(start)}
        return parts or self.config

    def sizes(self, layer: AdapterLayer) -> frozenset[int]:
        """Return the numbers of inputs and outputs of a layer, as far as its tensors show them."""
        if self.method is not None:
            return frozenset()
        of_end = {role: spec.shape for role in layer.keys if (spec := self.spec(layer, role)) is not None}
        if layer.is_kronecker:
            one, two = (self.whole_shape(layer, name) for name in ("lokr_w1", "lokr_w2"))
            return frozenset(map(mul, one, two))
        if "hada_w1_a" in of_end:
            first = int(CORES[0] in of_end)
            return frozenset((*of_end["hada_w1_a"][first : first + 1], *of_end["hada_w1_b"][1:2]))
        if self.parts(layer):
            return frozenset(of_end["A"][1:2])
        if "A" in of_end:
            return frozenset((*of_end["A"][1:2], *of_end["B"][:1]))
        return frozenset(of_end.get("diff", ()))

    def whole_shape(self, layer: AdapterLayer, name: str) -> tuple[int, ...]:
        """Return the shape of a matrix of LoKr, stored whole or as a product of two; empty if these do not fit."""
        if (whole := self.spec(layer, name)) is not None:
            return whole.shape
        pair = [self.checkpoint.specs[layer.keys[f"{name}_{end}"]].shape for end in "ab"]
        core = self.spec(layer, CORES[2]) if name == "lokr_w2" else None
        if core is not None:
            return (pair[0][1], pair[1][1], *core.shape[2:]) if core.shape[:2] == (pair[0][0], pair[1][0]) else ()
        fits = len(pair[0]) == len(pair[1]) == 2 and pair[0][1] == pair[1][0]
        return (pair[0][0], pair[1][1]) if fits else ()

    def parts(self, layer: AdapterLayer) -> Sequence[tuple[int, int]]:
        """Return the first row and one past the last of each part that the matrices of a fused layer of LitGPT change;
        empty for any other layer."""
        return self.config.get("qkv") or () if layer.module.endswith("attn.qkv") and "A" in layer.keys else ()

    def with_rank(self, layer: AdapterLayer) -> TensorSpec | None:
        """Return the spec of the tensor of a layer whose first axis is the rank."""
        return next((spec for role in WITH_RANK if (spec := self.spec(layer, role)) is not None), None)

    def rank(self, layer: AdapterLayer) -> int:
        config, one = self.settings(layer), self.with_rank(layer)
        stored = 0 if one is None or not one.shape else one.shape[0]
        source, remedy = "", FETCH
        if "r" in config and not layer.is_kohya and self.method is None:
            stored = int(_by_pattern(config, "rank_pattern", layer.module, config["r"]))
            source, remedy = f" according to r or rank_pattern in {CONFIG}", OWN_CONFIG
        if stored < 1:
            raise self.refused(f"{layer.module} has the rank {stored}{source}", remedy)
        return stored

    def roles(self, layer: AdapterLayer) -> tuple[str, ...]:
        """Return the roles of the tensors that the formula of ``method`` takes, in order."""
        if (method := self.method) is None:
            return ()
        roles = dict.fromkeys(method.roles.values())
        return tuple(role for role in roles if role not in method.optional or role in layer.keys)

    def _shapes(self, layer: AdapterLayer) -> list[Shape]:
        """Return the shapes of these tensors, without those that are missing."""
        return [spec.shape for role in self.roles(layer) if (spec := self.spec(layer, role)) is not None]

    def fits(self, layer: AdapterLayer, *size: int) -> bool:
        """Return whether the tensors of a layer are for a matrix with these numbers of outputs and inputs, if the type
        is one with a formula of its own."""
        shapes = self._shapes(layer)
        is_whole = len(size) == 2 and len(shapes) == len(self.roles(layer)) and all(shapes)  # none is a single number
        return self.method is not None and is_whole and self.method.fits(*size, *shapes)

    def numbers(self, layer: AdapterLayer) -> tuple[int, float]:
        """Return the number that the formula of ``method`` needs, and the factor of the change. Raises ``AdapterError``
        if the configuration lacks them or has impossible ones."""
        config, method = self.config, self.method
        if method is None:
            return 0, self.weight
        is_on = bool(config.get(method.switch))
        number: float = int(is_on)
        if method.number and (is_on or not method.switch):
            number = _number(method.number, config.get(method.number))
        if int(number) != number or int(number) not in method.allowed:
            raise self.refused(f"its {method.number} in {CONFIG} is {number:g}", OWN_CONFIG)
        scale = _number(method.scale, config.get(method.scale)) if method.scale else 1
        ranks = 1 if method.ranks is None else method.ranks(*self._shapes(layer))
        return int(number), self.weight * scale / ranks

    @property
    def bound(self) -> float:
        """The bound of the change by ``method``, or 0 if the configuration names none. Raises ``AdapterError`` if it is
        not positive."""
        is_bounded, name = ("", "") if self.method is None else self.method.bounded
        if not self.config.get(is_bounded):
            return 0.0
        if (found := _number(name, self.config.get(name))) <= 0:
            raise self.refused(f"its {name} in {CONFIG} is {found:g}", OWN_CONFIG)
        return found

    def scaling(self, layer: AdapterLayer, key: str = "") -> float:
        """Return the factor of a layer's product, for the tensor ``key`` of the base. Raises ``AdapterError`` if it is
        unknown."""
        config = self.settings(layer)
        is_full = layer.is_kronecker and self.with_rank(layer) is None
        if is_full and "r" not in config and (layer.component or "alpha" in layer.keys):
            return self.weight  # as in LyCORIS; peft scales whole matrices too
        if self.kind == "LOKR" and "rank_dropout" in config and "rank_dropout_scale" not in config:
            return self.weight  # peft before 0.14 did not scale it
        if isinstance(given := config.get("lora_parameters"), Mapping):  # of mlx-lm; old releases have an alpha
            factor = _number("alpha", given["alpha"]) / self.rank(layer) if "alpha" in given else 1
            return self.weight * _number("scale", given.get("scale")) * factor
        own, own_name = "lora_alpha" if "lora_alpha" in config else "alpha", f"{layer.component}.{layer.module}"
        if "alpha" in layer.keys:
            spec = self.checkpoint.specs[layer.keys["alpha"]]
            raw = b"" if spec.storage is None or spec.numel != 1 else bytes(spec.storage.source.read(*spec.extent))
            if not (few := DTYPES[spec.dtype].few(raw)):
                raise self.refused(f"{layer.keys['alpha']} is not one number", FETCH)
            alpha = float(few[0])
            if not math.isfinite(alpha):
                raise self.refused(f"{layer.keys['alpha']} is {alpha}", FETCH)
        elif own in config:
            alpha = _by_pattern(config, "alpha_pattern", layer.module, config[own])
        elif layer.is_of_comfy or (layer.is_of_diffusers and not f".{key}".endswith(f".{own_name}.weight")):
            return self.weight  # as these programs do
        elif not self.path:
            raise self.refused(_UNSCALED, "name the adapter's configuration with ", Opt("adapter", CONFIG))
        else:
            example = f'{{"r": {self.rank(layer)}, "lora_alpha": ALPHA}}'
            hint = " (DiffSynth-Studio trains with lora_alpha = r)" * bool(self.names)
            words = f"put its {CONFIG} next to it, or write one with the values of the training: {example}{hint}"
            raise self.refused(_UNSCALED, words)
        alpha, rank = _number("lora_alpha", alpha), self.rank(layer)
        return self.weight * alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def adapter_in(checkpoint: Checkpoint, path: str = "", config: Mapping[str, Any] | None = None) -> Adapter:
    """Return the adapter in a checkpoint, recognised by the names of tensors; without layers if there is none."""
    is_peft = bool(config)  # names in files of peft do not begin with a component of a pipeline
    try:
        noted = json.loads(_noted(checkpoint, "lora_adapter_metadata") or "null")  # written by diffusers
    except (ValueError, RecursionError):
        noted = None
    config = config or (noted if isinstance(noted, dict) else {})
    kind = str(config.get("peft_type")).upper()
    found: dict[tuple[str, str], dict[str, str]] = {}
    shared: dict[str, str] = {}  # tensors that all layers use, and that each layer of a whole model has too
    names: set[str] = set()
    saved: dict[str, str] = {}
    for key in checkpoint.specs:
        # Old releases of diffusers kept a layer in the processor of an attention.
        own = _PROCESSOR.sub(lambda found: f".{found[1]}{'.0' if found[1] == 'to_out' else ''}.lora.", key)
        own = _XLABS.sub(lambda of: f"diffusion_model.{of[1]}.{_XLABS_SIDES[of[3]]}_attn.{of[2]}.lora", own)
        match = _TENSOR.fullmatch(own)
        if (
            match is None
            or (match["leaf"] == ".bias" and f"{match['role']}.bias" not in _ROLES)
            or _OF_TYPES.get(match["role"], kind) != kind
        ):
            # With bias="all", peft also saves the biases of modules that modules_to_save replaces.
            if (path and ".original_module." not in key) or ".modules_to_save." in key:
                saved[_wrapped(strip_segments(_SAVED.sub("", key)))] = key
            names.update(name for name in _SAVED.findall(key) if name)
            continue
        role = _ROLES.get(match["role"] + (match["leaf"] or "")) or _ROLES[match["role"]]
        if kind in METHODS and match["module"] == "base_model":
            shared |= {role: key, f"base_model.{role}": key}
            continue
        component = None if is_peft else _COMPONENT.match(match["module"])
        # Without the path of an adapter, the file may be a model with parameters of this name.
        is_named = component is not None and (path or component["dotted"] in (None, "diffusion_model"))
        if role in DIFFERENCES and not is_named:
            saved.update({key: key} if path else {})
            continue
        prefix = "" if component is None else component["dotted"] or component["kohya"]
        module = _MINLORA.sub("", match["module"])
        module = _wrapped(strip_segments(module)[len(prefix) + 1 if prefix else 0 :])
        module = module.replace(".", "_") if component is not None and component["kohya"] else module
        if found.setdefault((prefix, module), {}).setdefault(role, key) != key:
            saved[key] = key  # a second tensor with the same role
        if role in REPLACED:
            saved[f"{module}.{REPLACED[role]}"] = key
        if match["name"]:
            names.add(match["name"])
    layers = (
        AdapterLayer(".".join(part for part in module.split(".") if part not in _NESTED), prefix, {**shared, **keys})
        for (prefix, module), keys in found.items()
        if keys.keys() != {"alpha"}  # that is a parameter of the model
    )
    return Adapter(path, checkpoint, config, tuple(layers), saved, is_peft, names=tuple(sorted(names)))


def _wrapped(name: str) -> str:
    """Return a name in the model that peft wrapped, which may itself be inside another module."""
    return f".{name}".rpartition(f".{_BASE}")[2].removeprefix(".")


def _noted(checkpoint: Checkpoint, name: str) -> str:
    notes = (remark for remark in checkpoint.remarked(Kind.NOTE) if remark.place == name)
    return next((str(remark.data["text"]) for remark in notes), "")


def _by_pattern(config: Mapping[str, Any], name: str, module: str, default: float) -> float:
    """Return the number of the first pattern that matches the end of a module's name (as in peft), or the default."""
    patterns = config.get(name) or {}
    if not isinstance(patterns, dict):
        raise AdapterError(f"the {name} of {CONFIG} does not map layers to numbers; get the file from its source")
    for pattern, number in patterns.items():
        if not _SIMPLE.fullmatch(pattern):
            raise AdapterError(f"the {name} of {CONFIG} has the pattern {pattern!r:.80}; name its layers one by one")
        try:
            expression = re.compile(rf"(.*\.)?({pattern})$")
        except re.error as error:
            raise AdapterError(
                f"the {name} of {CONFIG} has the pattern {pattern!r:.80} ({error}); correct it"
            ) from error
        if expression.match(module):
            return _number(name, number)
    return _number({"rank_pattern": "r", "alpha_pattern": "lora_alpha"}.get(name, name), default)


_HUGE = 1e300  # JSON can have integers that are too large for a float


def _number(name: str, value: object) -> float:
    """Return a number of a configuration. Raises ``AdapterError`` for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _HUGE:  # also of NaN
        raise AdapterError(
            f"the {name} of {CONFIG} has {value!r:.40} instead of a number; get the file from its source"
        )
    return value
