"""Configurations beside a file of weights: ``config.json`` of its model, ``adapter_config.json`` of an adapter."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptfix.bytes.sources import Content
from ckptfix.core.checkpoint import IN_MEMORY, Checkpoint
from ckptfix.errors import AdapterError, HostileError, UnreadableError

CONFIG = "adapter_config.json"
# The same of verl, next to its ranks. It says lora_alpha 0 if the training did not set one.
_OF_VERL = "lora_train_meta.json"


def config_file(path: str, *names: str) -> Path | None:
    """Return the file of an adapter's configuration, or one with another name, in a folder or beside a file; None if
    there is none."""
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    return next((folder / name for name in names or (CONFIG, _OF_VERL) if (folder / name).is_file()), None)


def config_beside(path: str, *names: str) -> Mapping[str, Any] | None:
    """Return what ``config_file`` finds, parsed; None if there is none."""
    file = config_file(path, *names)
    return read_config(file) if file is not None else None


def model_config(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the ``config.json`` beside a file; empty if it is missing or unreadable."""
    if checkpoint.format == IN_MEMORY:
        return {}
    try:
        return config_beside(checkpoint.path, "config.json") or {}
    except (AdapterError, UnreadableError, HostileError):
        return {}


def read_config(file: Path) -> Mapping[str, Any]:
    """Return a configuration, parsed. Raises ``AdapterError`` for a file that is not one."""
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
