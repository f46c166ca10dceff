"""The files that are measured, made on the spot: what matters is their size, their layout and their names."""

from __future__ import annotations

import json
import shutil
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

BLOCK_TENSORS = (("attn.qkv.weight", 3), ("attn.proj.weight", 1), ("mlp.fc1.weight", 4), ("mlp.fc2.weight", 4))
"""The matrices of a block of a transformer, in units of width by width."""

SMALL_TENSORS = ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias", "attn.proj.bias", "mlp.fc2.bias")
FREE_AT_LEAST = 2 << 30
"""Bytes of the disk that stay free whatever is asked for."""


def shapes(nbytes: int, itemsize: int = 4, blocks: int = 40) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of about ``nbytes`` bytes: 40 blocks are 400 tensors."""
    numel = nbytes // itemsize // blocks // sum(units for _, units in BLOCK_TENSORS)
    width = max(8, int(numel**0.5) // 8 * 8)
    for block in range(blocks):
        for name, units in BLOCK_TENSORS:
            yield f"blocks.{block}.{name}", (units * width, width)
        for name in SMALL_TENSORS:
            yield f"blocks.{block}.{name}", (width,)


def many_keys(count: int, nbytes: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of ``count`` tensors that take ``nbytes`` bytes together."""
    size = max(1, nbytes // 4 // count)
    for index in range(count):
        yield f"blocks.{index // 8}.layer{index % 8}.weight", (size,)


def make_state_dict(
    names: Iterator[tuple[str, tuple[int, ...]]], dtype: str = "float32", prefix: str = "module."
) -> OrderedDict[str, object]:
    """Normal random numbers, no two tensors alike, each in a storage of its own."""
    import torch

    generator = torch.Generator().manual_seed(0)
    pool = torch.randn(1 << 22, generator=generator) * 0.02
    made: OrderedDict[str, object] = OrderedDict()
    for index, (name, shape) in enumerate(names):
        numel = torch.Size(shape).numel()
        whole = torch.empty(numel, dtype=getattr(torch, dtype))
        piece = (pool.roll(index * 4099) + 0.001).to(whole.dtype)
        for start in range(0, numel, len(piece)):
            stop = min(start + len(piece), numel)
            whole[start:stop] = piece[: stop - start]
        made[prefix + name] = whole.reshape(shape)
    return made


def make_file(
    path: Path, names: Iterator[tuple[str, tuple[int, ...]]], dtype: str = "float32", prefix: str = "module."
) -> Path:
    """A checkpoint in the form that its name tells: ``.legacy.pth``, ``.pth`` or ``.safetensors``."""
    import torch
    from safetensors.torch import save_file

    state_dict = make_state_dict(names, dtype, prefix)
    if path.suffix == ".safetensors":
        save_file(dict(state_dict), path, metadata={"format": "pt"})
    else:
        torch.save(state_dict, path, _use_new_zipfile_serialization=not path.name.endswith(".legacy.pth"))
    return path


def make_shards(folder: Path, nbytes: int, count: int) -> Path:
    """The index of a checkpoint in ``count`` safetensors files."""
    from safetensors.torch import save_file

    state_dict = make_state_dict(shapes(nbytes))
    keys = list(state_dict)
    homes: dict[str, str] = {}
    folder.mkdir()
    for number in range(count):
        name = f"model-{number + 1:05}-of-{count:05}.safetensors"
        part = keys[number * len(keys) // count : (number + 1) * len(keys) // count]
        save_file({key: state_dict[key] for key in part}, folder / name, metadata={"format": "pt"})
        homes.update(dict.fromkeys(part, name))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": nbytes}, "weight_map": homes}))
    return index


def warm(path: Path) -> None:
    """Read a file or the files of a folder once, so that all ways find it in the page cache."""
    for file in path.parent.iterdir() if path.name.endswith(".index.json") else [path]:
        with file.open("rb", buffering=0) as opened:
            buffer = bytearray(1 << 20)
            while opened.readinto(buffer):
                pass


def check_room(folder: Path, nbytes: int) -> None:
    """Raises ``SystemExit`` where the disk has no room for so many bytes."""
    free = shutil.disk_usage(folder).free
    if free < nbytes + FREE_AT_LEAST:
        raise SystemExit(f"{folder}: {nbytes / 1e9:.0f} GB are needed and {free / 1e9:.0f} GB are free; see --folder")
