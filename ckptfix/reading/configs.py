"""Configurations beside a file of weights: ``config.json`` of its model, ``adapter_config.json`` of an adapter."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptfix.bytes.files import small_text
from ckptfix.bytes.sources import Content
from ckptfix.core.buffers import is_rope, is_transient
from ckptfix.core.checkpoint import IN_MEMORY, Checkpoint
from ckptfix.errors import AdapterError, HostileError, UnreadableError

CONFIG = "adapter_config.json"
# The same of verl, next to its ranks. It says lora_alpha 0 if the training did not set one.
_OF_VERL = "lora_train_meta.json"
# The same of LitGPT, next to `lit_model.pth.lora`, and the sizes of its model.
_OF_LITGPT, _SIZES_OF_LITGPT = "hyperparameters.yaml", "model_config.yaml"
_SCALAR = re.compile(r"^(\w+): (true|false|0|[1-9]\d{0,8})$", re.MULTILINE)


def config_file(path: str, *names: str) -> Path | None:
    """Return the file of an adapter's configuration, or one with another name, in a folder or beside a file; None if
    there is none."""
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    return next((folder / name for name in names or (CONFIG, _OF_VERL, _OF_LITGPT) if (folder / name).is_file()), None)


def config_beside(path: str, *names: str) -> Mapping[str, Any] | None:
    """Return what ``config_file`` finds, parsed; None if there is none."""
    file = config_file(path, *names)
    return read_config(file) if file is not None else None


def model_config(checkpoint: Checkpoint, name: str = "config.json") -> Mapping[str, Any]:
    """Return the configuration of the model beside a file; empty if it is missing or unreadable."""
    if checkpoint.format == IN_MEMORY:
        return {}
    try:
        return config_beside(checkpoint.path, name) or {}
    except (AdapterError, UnreadableError, HostileError):
        return {}


# The size of the whole, and the number of attention heads, in configurations of transformers and of Meta's Llama.
_HEADS = {"config.json": ("hidden_size", "num_attention_heads"), "params.json": ("dim", "n_heads")}


def head_sizes(checkpoint: Checkpoint) -> frozenset[int]:
    """Return the sizes of attention heads that a file or a configuration beside it gives, more than one if they
    contradict each other: Meta's ``rope.freqs`` has an element for each two of a head."""
    found = {
        2 * spec.shape[0] for key, spec in checkpoint.specs.items() if is_rope(key) and is_transient(key, spec.shape)
    }
    for file, names in _HEADS.items():
        config = model_config(checkpoint, file)
        size, whole, number = (config.get(name) for name in ("head_dim", *names))
        if size is None and type(whole) is int and type(number) is int and number > 0:
            size = whole // number
        found |= {size} if type(size) is int else set()
    return frozenset(size for size in found if 0 < size < 1 << 16 and size % 2 == 0)


def read_config(file: Path) -> Mapping[str, Any]:
    """Return a configuration, parsed. Raises ``AdapterError`` for a file that is not one."""
    if file.name == _OF_LITGPT:
        return _of_litgpt(file)
    content = Content.of_file(str(file))
    try:
        parsed = content.bounds.parse_json(content[:])
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{file}: invalid JSON ({error}); get it from the adapter's source") from error
    if not isinstance(parsed, dict):
        raise AdapterError(f"{file}: not the configuration of an adapter; get it from the adapter's source")
    if file.name == _OF_VERL and not parsed.get("lora_alpha"):
        parsed.pop("lora_alpha", None)
    return parsed


def _of_litgpt(file: Path) -> Mapping[str, Any]:
    """Return LitGPT's settings under the names of peft, with the first row and one past the last of each trained part
    of its fused layer under ``qkv``; empty for another tool's file."""
    own, model = _scalars(file), _scalars(file.with_name(_SIZES_OF_LITGPT))
    if "lora_r" not in own:
        return {}
    heads = [model.get(name) for name in ("n_head", "n_query_groups", "n_query_groups")]
    sizes = [head * model["head_size"] for head in heads if type(head) is type(model.get("head_size")) is int]
    ends = [sum(sizes[:at]) for at in range(len(sizes) + 1)]
    trained = [own.get(f"lora_{name}") is True for name in ("query", "key", "value")]
    parts = [(first, last) for first, last, is_on in zip(ends, ends[1:], trained, strict=False) if is_on]
    return {"r": own["lora_r"], "lora_alpha": own.get("lora_alpha"), "qkv": parts}


def _scalars(file: Path) -> dict[str, Any]:
    """Return the integers and booleans on the top level of a YAML file; none if there is no such file."""
    return {name: json.loads(value) for name, value in _SCALAR.findall(small_text(file))}
