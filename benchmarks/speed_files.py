"""Generates the files to measure; what matters is their size, layout and names."""

from __future__ import annotations

import json
import shutil
from collections import OrderedDict
from collections.abc import Iterator
from functools import cache
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BLOCK_TENSORS = (("attn.qkv.weight", 3), ("attn.proj.weight", 1), ("mlp.fc1.weight", 4), ("mlp.fc2.weight", 4))
"""The matrices of a transformer block, with their sizes in units of width by width."""

SMALL_TENSORS = ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias", "attn.proj.bias", "mlp.fc2.bias")
FREE_AT_LEAST = 2 << 30
"""Bytes of the disk that always stay free."""


def shapes(nbytes: int, itemsize: int = 4, blocks: int = 40) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of about ``nbytes`` bytes; 40 blocks are 400 tensors."""
    numel = nbytes // itemsize // blocks // sum(units for _, units in BLOCK_TENSORS)
    width = max(4, int(numel**0.5) // 4 * 4)
    for block in range(blocks):
        for name, units in BLOCK_TENSORS:
            yield f"blocks.{block}.{name}", (units * width, width)
        for name in SMALL_TENSORS:
            yield f"blocks.{block}.{name}", (width,)


def many_keys(count: int, nbytes: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of ``count`` tensors that take ``nbytes`` bytes together."""
    size = max(1, nbytes // 4 // count)
    for index in range(count):
        yield f"blocks.{index // 8}.layer{index % 8}.weight", (size,)


@cache
def _numbers() -> torch.Tensor:
    """Return normal random numbers, of which each tensor takes a range."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randn(1 << 22, generator=generator) * 0.02 + 0.001


def make_state_dict(
    names: Iterator[tuple[str, tuple[int, ...]]], dtype: str = "float32", prefix: str = "module.", first: int = 0
) -> OrderedDict[str, object]:
    """Return tensors of normal random numbers, all different, with own storages. ``first`` distinguishes files."""
    import torch

    numbers, pieces = _numbers(), count(first)
    made: OrderedDict[str, object] = OrderedDict()
    for index, (name, shape) in enumerate(names, first):
        whole = torch.empty(shape, dtype=getattr(torch, dtype))
        flat, done, begin = whole.view(-1), 0, index * 4099 % len(numbers)
        while done < len(flat):
            piece = numbers[begin : begin + len(flat) - done]
            # Scaled differently each time: trained weights do not repeat, and FIL204 compares blocks that do.
            flat[done : done + len(piece)] = piece * (1 + next(pieces) * 0.618 % 1)
            done, begin = done + len(piece), 0
        made[prefix + name] = whole
    return made


def make_file(
    path: Path,
    names: Iterator[tuple[str, tuple[int, ...]]],
    dtype: str = "float32",
    prefix: str = "module.",
    first: int = 0,
) -> Path:
    """Write a checkpoint in the format of its suffix (``.legacy.pth``, ``.pth``, ``.safetensors``); return its path."""
    import torch
    from safetensors.torch import save_file

    state_dict = make_state_dict(names, dtype, prefix, first)
    if path.suffix == ".safetensors":
        save_file(dict(state_dict), path, metadata={"format": "pt"})
    else:
        torch.save(state_dict, path, _use_new_zipfile_serialization=not path.name.endswith(".legacy.pth"))
    return path


def make_shards(folder: Path, nbytes: int, count: int) -> Path:
    """Write a checkpoint in ``count`` safetensors files; return the path of its index."""
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


def make_zoo(folder: Path, count: int, nbytes: int) -> Path:
    """Write ``count`` files of ``nbytes`` bytes each, ten per subfolder, without equal tensors; return the folder."""
    blocks = 16 if nbytes > 4_000_000 else 2
    for number in range(count):
        family = folder / f"family{number // 10:04}"
        family.mkdir(parents=True, exist_ok=True)
        make_file(family / f"model{number:05}.pth", shapes(nbytes, blocks=blocks), first=number * 163)
    return folder


def make_ranks(folder: Path, names: Iterator[tuple[str, tuple[int, ...]]], stage: int, world: int) -> Path:
    """Write what ZeRO 2 or 3 saves of a training in bfloat16, without moments: the fp32 weights, split over ``world``
    ranks. Return the file of the first rank."""
    import torch

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    made = make_state_dict(names, prefix="").items()
    masters = OrderedDict((name, tensor) for name, tensor in made if isinstance(tensor, torch.Tensor))
    sizes = OrderedDict((name, tensor.shape) for name, tensor in masters.items())
    pieces: list[list[torch.Tensor]] = [[] for _ in range(world)]
    flats = [tensor.view(-1) for tensor in masters.values()]
    for flat in flats if stage == 3 else [torch.cat(flats)]:
        share = -(-len(flat) // world)
        padded = torch.nn.functional.pad(flat, (0, share * world - len(flat)))
        for rank, piece in enumerate(padded.split(share)):
            pieces[rank].append(piece)
    module = OrderedDict(
        (name, tensor.bfloat16() if stage == 2 else torch.empty(0)) for name, tensor in masters.items()
    )
    states = {
        "module": module,
        "buffer_names": [],
        "param_shapes": [sizes],
        "shared_params": {},
        "ds_version": "0.19.8",
    }
    states |= {"frozen_param_shapes": None, "frozen_param_fragments": None}
    for rank in range(world):
        slices = [torch.cat(pieces[rank])]
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        held = {key: slices, "partition_count": world if stage == 3 else [world], "zero_stage": stage}
        root = {"optimizer_state_dict": held, "ds_config": {}, "ds_version": "0.19.8"}
        torch.save(root, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        if stage == 3 or not rank:
            start = f"zero_pp_rank_{rank}_" if stage == 3 else ""
            torch.save(states, folder / f"{start}mp_rank_00_model_states.pt")
    (folder / "latest").write_text(".")
    return folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt"


def make_mesh_ranks(folder: Path, names: Iterator[tuple[str, tuple[int, ...]]], dim: int, world: int) -> Path:
    """Write what ``world`` ranks save of tensors on a mesh that splits each along ``dim``: 0 as FSDP 2 does, -1 as
    tensor parallelism does with some matrices. Return the file of the first rank."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())  # no rank waits for another
    mesh = init_device_mesh("cpu", (world,))
    parts, made = {}, OrderedDict()
    for name, whole in make_state_dict(names, prefix="").items():
        assert isinstance(whole, torch.Tensor)
        axis = dim % whole.ndim
        parts[name] = whole.chunk(world, axis)
        made[name] = DTensor.from_local(
            parts[name][0], mesh, [Shard(axis)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
    for rank in range(world):
        mesh._coordinate_on_dim = [rank]  # all tensors share the mesh
        for name, tensor in made.items():
            tensor._local_tensor = parts[name][rank].clone()
        torch.save(made, folder / f"model_world_size_{world}_rank_{rank}.pt")
    dist.destroy_process_group()
    return folder / f"model_world_size_{world}_rank_0.pt"


def warm(path: Path) -> None:
    """Read a file or all files of a folder, so that they are in the page cache for all ways."""
    files = path.parent.iterdir() if path.name.endswith(".index.json") else path.rglob("*") if path.is_dir() else [path]
    for file in files:
        if file.is_dir():
            continue
        with file.open("rb", buffering=0) as opened:
            buffer = bytearray(1 << 20)
            while opened.readinto(buffer):
                pass


def make_model_and_adapter(folder: Path, nbytes: int, rank: int = 16) -> Path:
    """Write a Llama in bfloat16 and a LoRA adapter, as transformers and peft do; return the path of the model."""
    from transformers import LlamaConfig

    hidden, inner, words, layers = 4096, 11008, 4096, max(nbytes // 405_000_000, 1)
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": 32, "vocab_size": words}
    config = LlamaConfig(**sizes, num_hidden_layers=layers, architectures=["LlamaForCausalLM"], dtype="bfloat16")
    config.save_pretrained(folder / "base")
    linear = {f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
    linear |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    stack = {f"model.layers.{layer}.{name}": shape for layer in range(layers) for name, shape in linear.items()}
    norms = [
        f"model.layers.{layer}.{name}_layernorm" for layer in range(layers) for name in ("input", "post_attention")
    ]
    weights = {"model.embed_tokens": (words, hidden), "lm_head": (words, hidden), **stack}
    weights |= dict.fromkeys([*norms, "model.norm"], (hidden,))
    named = ((f"{name}.weight", shape) for name, shape in weights.items())
    source = make_file(folder / "base" / "model.safetensors", named, "bfloat16", prefix="")
    (folder / "adapter").mkdir()
    sides = (
        ((f"{name}.lora_A.weight", (rank, of[1])), (f"{name}.lora_B.weight", (of[0], rank)))
        for name, of in stack.items()
    )
    make_file(folder / "adapter" / "adapter_model.safetensors", chain.from_iterable(sides), prefix="base_model.model.")
    names = sorted({name.rpartition(".")[2] for name in linear})
    lora = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 8, "target_modules": names}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(lora))
    return source


def check_room(folder: Path, nbytes: int) -> None:
    """Raise ``SystemExit`` if the disk has not enough room for so many bytes."""
    free = shutil.disk_usage(folder).free
    if free < nbytes + FREE_AT_LEAST:
        raise SystemExit(f"{folder}: {nbytes / 1e9:.0f} GB are needed and {free / 1e9:.0f} GB are free; see --folder")
