"""Folders written by the frameworks themselves, with the results of their own consolidation (``samples``)."""

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

SAMPLES = Path(__file__).parent / "samples"


def unpacked(name: str, folder: Path) -> tuple[Path, Any]:
    """Unpack a sample; return the saved folder, and the result of the framework's own merge."""
    with tarfile.open(SAMPLES / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "saved", torch.load(folder / "truth.pt", weights_only=True)


def swap(one: Path, other: Path) -> None:
    """Swap the names of two files or folders."""
    one.rename(kept := one.with_name("kept"))
    other.rename(one)
    kept.rename(other)


def tensors_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """Yield the tensors in a container, each with its path."""
    if isinstance(value, torch.Tensor):
        yield path, value
    for key, child in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    ):
        yield from tensors_of(child, (*path, key))


def flip(file: Path, word: bytes, at: int = 1) -> None:
    """Flip a bit of the first occurrence of ``word`` in a file, at one of its bytes."""
    data = bytearray(file.read_bytes())
    data[data.index(word) + at] ^= 1
    file.write_bytes(data)
