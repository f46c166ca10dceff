"""Writes checkpoints with torch or with the package's own writers, and reads them back."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.reading.opening import open_file
from ckptfix.writing import safetensors as safetensors_write
from ckptfix.writing import torch_files as torch_write

WRITERS = {
    "zip": (torch_write.write_zip, ".pth"),
    "legacy": (torch_write.write_legacy, ".pth"),
    "safetensors": (safetensors_write.write, ".safetensors"),
}


def write(checkpoint: Checkpoint, form: str, folder: Path, name: str = "written") -> Path:
    """Write a checkpoint with one of the writers, and return the path."""
    writer, suffix = WRITERS[form]
    path = folder / f"{name}{suffix}"
    with path.open("wb") as file:
        writer(checkpoint, file)
    return path


def saved(value: Any, folder: Path, name: str = "saved.pth", **options: Any) -> Path:
    """Write a file with torch.save, and return the path."""
    path = folder / name
    torch.save(value, path, **options)
    return path


def opened(path: Path, weights: str | None = None) -> Checkpoint:
    """Return the checkpoint in a file."""
    return open_file(str(path), weights)


def read_all(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint, read one by one."""
    return {key: checkpoint.read(key) for key in checkpoint.specs}


def in_memory(value: Any, **options: Any) -> bytes:
    """Return the bytes that torch.save writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def tensors(state_dict: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the entries of a state_dict that are tensors."""
    return {key: value for key, value in state_dict.items() if isinstance(value, torch.Tensor)}
