"""Which tensors of the base an adapter's layers change, matched by name, and the errors if the base lacks them."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.finding import counted
from ckptfix.errors import AdapterError, Opt
from ckptfix.reading.adapters import FETCH, OTHER_BASE, OWN_LIBRARY, Adapter, AdapterLayer, adapter_in
from ckptfix.reading.configs import CONFIG, model_config
from ckptfix.rules.quantised_layers import MULTIPLIED, beside_codes, wanted_layers

EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "shared", "tok_embeddings", "embed_in")
HEADS = ("lm_head", "embed_out")
# Layers of diffusion models as their authors name them, and not diffusers.
_ORIGINAL = re.compile(r"(?:^|\.)(?:(?:in|out)put_blocks|middle_block|(?:double|single|joint)_blocks)[._]")
_DROPPED = 3  # leading segments of a layer's name that the base may lack

# Segments that may replace each other: releases of a library nest the same layers in different modules.
_OUTER = frozenset("model base_model module language_model text_model transformer".split())


class BaseNames:
    """The tensors of the base, by the names that an adapter's layers have.

    These names are the base's own, or differ from them by one prefix that all layers share."""

    def __init__(self, checkpoint: Checkpoint, adapter: Adapter, layers: list[AdapterLayer]) -> None:
        self.checkpoint, self.adapter, self.layers = checkpoint, adapter, layers
        self.dot = "_" if adapter.is_kohya else "."
        self.known: dict[str, list[str]] = defaultdict(list)
        for key, spec in checkpoint.specs.items():
            module, _, leaf = key.rpartition(".")
            # A layer for a bare parameter, such as the weights of all experts, is named after the module too.
            if leaf == "weight" or len(spec.shape) == 3:
                self.known[self.dot.join(module.split("."))].append(key)
        self.dropped, self.prefix, self.found = self._find()

    @property
    def is_complete(self) -> bool:
        """Whether every layer has its tensor."""
        return len(self.found) == len({layer.module for layer in self.layers})

    def renamed(self, name: str) -> str:
        """Return the base's key for a key of the adapter's model."""
        return self.prefix + ".".join(name.split(".")[self.dropped :])

    def _find(self) -> tuple[int, str, dict[str, str]]:
        modules = list(dict.fromkeys(layer.module for layer in self.layers))
        best: tuple[int, str, dict[str, str]] = (0, "", {})
        for dropped in range(_DROPPED + 1):
            if dropped and self.dot == "_" and modules[0].split("_")[:dropped] != ["text", "model"]:
                continue  # without dots, only text_model is recognised, which transformers 5 omits
            tails = {module: self.dot.join(module.split(self.dot)[dropped:]) for module in modules}
            ends = [*tails.values()]
            if not all(ends) or len(set(ends)) < len(ends):
                break
            complete = []
            for prefix in dict.fromkeys((*self._prefixes(ends[0]), *self._prefixes(ends[-1]))):
                swapped = {*modules[0].split(".")[:dropped], *prefix.split(".")[:-1]}
                if dropped and prefix and not swapped <= _OUTER:
                    continue  # encoder.layers are not decoder.layers
                found = {module: prefix + tail for module, tail in tails.items() if prefix + tail in self.known}
                if len(found) == len(modules):
                    complete.append((dropped, prefix, found))
                if len(found) > len(best[2]):
                    best = dropped, prefix, found
            complete = [each for each in complete if self._has_shapes(each[2])] or complete
            exact = [each for each in complete if not each[1]]
            if len(exact or complete) > 1:
                prefixes = _either(each[1] for each in complete)
                words = f"its layers may belong under {prefixes} of {self.checkpoint.path}"
                raise self.adapter.refused(words, "choose one by naming its file")
            if complete:
                best = (exact or complete)[0]
                break
        return best

    @property
    def fits(self) -> bool:
        """Whether every layer has its tensor, with the inputs and outputs of the adapter's."""
        return self.is_complete and self._has_shapes(self.found)

    def _has_shapes(self, found: Mapping[str, str]) -> bool:
        for layer in self.layers:
            keys, sizes = self.known[found[layer.module]] if layer.module in found else (), self.adapter.sizes(layer)
            shapes = [self.checkpoint.specs[key].shape for key in keys]
            if shapes and not any(sizes <= {*shape, prod(shape[1:])} for shape in shapes):
                return False
        return True

    def _prefixes(self, tail: str) -> list[str]:
        """Return the prefixes under which the base has a layer whose name ends with ``tail``."""
        return [name.removesuffix(tail) for name in self.known if name == tail or name.endswith(self.dot + tail)]

    def key_of(self, layer: AdapterLayer) -> str:
        """Return the key of the tensor that a layer changes. Raises ``AdapterError`` if it is ambiguous."""
        keys, sizes = self.known[self.found[layer.module]], self.adapter.sizes(layer)
        if len(keys) > 1:
            keys = [key for key in keys if {*self.checkpoint.specs[key].shape[-2:]} == sizes] or keys
        if len(keys) > 1:
            words = f"the layer {layer.module} may be {_either(keys)} of {self.checkpoint.path}"
            raise self.adapter.refused(words, OWN_LIBRARY)
        return keys[0]

    def check_complete(self) -> None:
        """Raise ``AdapterError`` if the configuration names more layers of a kind than the adapter has."""
        config, own = self.adapter.config, {layer.module for layer in self.layers}
        head = next(iter(self.layers)).module.split(".")[: self.dropped]
        extra = [name.removesuffix("eh_proj") for name in self.known if name.endswith(".eh_proj")]
        kinds: dict[str, set[str]] = defaultdict(set)
        for name, keys in self.known.items():
            if not name.startswith(self.prefix) or any(f"{name}.".startswith(block) for block in extra):
                continue  # layers for multi-token prediction are in the file, but not in the model of transformers
            module = ".".join((*head, name.removeprefix(self.prefix)))
            if len(self.checkpoint.specs[keys[0]].shape) > 1 and _is_target(config, module):
                kinds[re.sub(r"\d+", "", module)].add(module)
        leaves = {module.rpartition(".")[2] for module in own}
        for modules in kinds.values():
            leaf = next(iter(modules)).rpartition(".")[2]
            # Experts are modules in transformers 4 and not in 5, with which the adapter may have been trained.
            if leaf not in leaves and not any(".experts." in module for module in modules):
                places = counted(len(modules), "layer")
                words = f"its configuration names {leaf}, which the base has in {places} but the adapter lacks"
                raise self.adapter.refused(words, f"{FETCH}, or remove the name from target_modules in {CONFIG}")
            if lacking := sorted(modules - own) if modules & own else []:
                has = f"and the adapter has {len(modules & own)} of them, not {lacking[0]}"
                remedy = f"{OTHER_BASE}, {FETCH}, or list its layers one by one in target_modules in {CONFIG}"
                raise self.adapter.refused(f"its configuration names {leaf} in {len(modules)} layers {has}", remedy)
        saved = {self.renamed(key) for key in self.adapter.saved}
        for key in self.checkpoint.specs:
            if key not in saved and is_copied(self.adapter, key):
                module = key.rpartition(".")[0]
                words = f"its configuration names {module} in modules_to_save, but the adapter has no {key}"
                raise self.adapter.refused(words, f"{FETCH}, or remove the name from {CONFIG}")

    def mismatch(self) -> AdapterError:
        """Return the error for layers that the base lacks."""
        path, base = self.adapter.path or self.checkpoint.path, self.checkpoint.path
        lacking = [layer.module for layer in self.layers if layer.module not in self.found]
        number = len(self.layers)
        named = self.adapter.base
        own = f"; it was trained on {named}" if named else ""
        if self.adapter.path and any("base_layer" in key.split(".") for key in self.checkpoint.entries):
            config = Path(path) / CONFIG if Path(path).is_dir() else CONFIG
            return AdapterError(
                f"{base}: contains an unmerged adapter and its base; if it is this one, give its configuration: ",
                Opt("adapter", str(config)),
            )
        for module in lacking:
            if f"{module}.in_proj_weight" in self.checkpoint.entries:
                words = (
                    f"changes {module}, an nn.MultiheadAttention, and some releases of peft change its out_proj twice"
                )
                return self.adapter.refused(words, "merge it with the release that trained it")
            if packed := beside_codes(module, self.checkpoint.entries):
                has = packed.removeprefix(f"{module}.")
                return quantised(self.checkpoint, f"{module} is quantised (it has {has} and no weight)")
        if self.adapter.path and not self.found and adapter_in(self.checkpoint).layers:
            return AdapterError(f"{base}: is an adapter and not a model; give the base that {path} was trained on{own}")
        is_tied = all(map(self._may_be_tied, lacking)) and any(map(is_of_words, self.checkpoint.specs))
        if "model_type" in model_config(self.checkpoint) and not is_tied:
            folder = Path(base) if Path(base).is_dir() else Path(base).parent
            return self.adapter.refused(
                f"changes layers that {base} lacks, {len(lacking)} of {number}, such as {lacking[0]}{own}",
                f"{OTHER_BASE}, or if this is it, have its layers renamed for your transformers by adding ",
                Opt("model", f"transformers:{folder}"),
            )
        if is_tied:
            tied = f"{lacking[0]}, which {base} has only as the embedding that it is tied to"
            remedy = "save the base with separate tensors (tie_word_embeddings=False)"
            return self.adapter.refused(f"changes {tied}, so a merge would change both", remedy)
        if named and Path(named).absolute() in (Path(base).absolute(), Path(base).absolute().parent):
            lacks = f"lacks {len(lacking)} of the adapter's {number} layers, such as {lacking[0]}"
            return self.adapter.refused(f"was trained on {named}, whose file {lacks}", "fetch both again")
        is_original = bool(_ORIGINAL.match(lacking[0]))
        if is_original is not any(map(_ORIGINAL.search, self.checkpoint.entries)) and self.adapter.is_kohya:
            own += "; its layers are named as in " + ("the one file of the authors" if is_original else "diffusers")
        lacks = f"lacks {len(lacking)} of the adapter's {number} layers, such as {lacking[0]}{own}"
        return self.adapter.refused(f"does not belong to {base}, which {lacks}", OTHER_BASE)

    def _may_be_tied(self, module: str) -> bool:
        """Return whether a layer may be a tied head: it is named like one, or has the embedding's shape."""
        layer = next(layer for layer in self.layers if layer.module == module)
        words = [spec.shape for key, spec in self.checkpoint.specs.items() if is_of_words(key)]
        if self.adapter.method is not None:
            return is_of_words(f"{module}.weight") or any(self.adapter.fits(layer, *shape) for shape in words)
        return is_of_words(f"{module}.weight") or self.adapter.sizes(layer) in map(frozenset, words)


def quantised(checkpoint: Checkpoint, words: str) -> AdapterError:
    """Return the error for a base whose weights are quantised."""
    words = f"{checkpoint.path}: {words}; merge into the original weights and quantise the result"
    if not any(layer.scheme in MULTIPLIED for layer in wanted_layers(checkpoint.specs, None).values()):
        return AdapterError(words)
    options = Opt("dtype", "bfloat16"), " ", Opt("unsafe_fixes", True)
    return AdapterError(f"{words}, or first dequantise the base by a repair with ", *options)


def _is_target(config: Mapping[str, Any], module: str) -> bool:
    """Return whether a configuration targets a module, by peft's rules; False if a regular expression decides it."""
    targets, excluded = config.get("target_modules"), config.get("exclude_modules") or []
    if not isinstance(excluded, list) or config.get("layers_pattern"):
        return False
    if any(_is_named(names, module) for names in (excluded, config.get("modules_to_save"))):
        return False
    if not isinstance(targets, list) or not _is_named(targets, module):
        return False
    only = config.get("layers_to_transform")
    if only is None or only == [] or module in targets:
        return True
    layers = only if isinstance(only, list) else [only]
    # peft takes the index in the outermost list of modules, older releases that in the innermost.
    numbers = [int(part) for part in module.split(".")[2:-1] if part.isdecimal()]
    return bool(numbers) and numbers[0] in layers and numbers[-1] in layers


def _is_named(names: object, module: str) -> bool:
    return isinstance(names, list) and any(f".{module}".endswith(f".{name}") for name in names)


def _either(names: Iterable[str]) -> str:
    return " or ".join(name or "the top" for name in names)


def is_of_words(key: str) -> bool:
    """Return whether a key is named like a word embedding or a language model's head."""
    return key.rpartition(".")[0].rpartition(".")[2] in (*EMBEDDINGS, *HEADS)


def is_copied(adapter: Adapter, key: str) -> bool:
    """Return whether an adapter replaces a key's module by its own full copy (``modules_to_save``)."""
    return _is_named(adapter.config.get("modules_to_save"), key.rpartition(".")[0])
