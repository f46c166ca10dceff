"""What other tools do with a checkpoint, step by step: ``python -m benchmarks.peers WAY SOURCE OUT``.

Each runs in a process of its own, so that memory and imports are counted for it.
"""

from __future__ import annotations

import hashlib
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path


def timm_clean(source: str, out: Path) -> None:
    """Do what timm's ``clean_checkpoint.py`` does: load, remove the prefix, save, hash, rename."""
    import torch

    if not torch.cuda.is_available():
        # PyPI's torchvision is built for CUDA. On the CPU, its operators are missing, and registering them makes the
        # import of timm fail. No operator is called here.
        sys.modules["torchvision._meta_registrations"] = types.ModuleType("_meta_registrations")
    from timm.models import clean_state_dict

    cleaned = clean_state_dict(torch.load(source, map_location="cpu", weights_only=True))
    temporary = out / "temporary.pth"
    torch.save(cleaned, temporary)
    digest = hashlib.sha256()
    with temporary.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    _flush(temporary)
    temporary.rename(out / f"model-{digest.hexdigest()[:8]}.pth")


def hf_convert(source: str, out: Path) -> None:
    """Do what safetensors' ``convert.py`` does: load, save, load the result and compare every tensor."""
    import torch
    from safetensors.torch import load_file, save_file

    loaded = torch.load(source, map_location="cpu", weights_only=True)
    converted = {key.removeprefix("module."): tensor.contiguous() for key, tensor in loaded.items()}
    save_file(converted, out / "model.safetensors", metadata={"format": "pt"})
    again = load_file(out / "model.safetensors")
    for key, tensor in converted.items():
        if not torch.equal(tensor, again[key]):
            raise SystemExit(f"{key} differs")
    _flush(out / "model.safetensors")


def torch_save(source: str, out: Path) -> None:
    """Load, rename keys, and save with torch, as most scripts do."""
    import torch

    loaded = torch.load(source, map_location="cpu", weights_only=True)
    torch.save({key.removeprefix("module."): tensor for key, tensor in loaded.items()}, out / "model.pth")
    _flush(out / "model.pth")


def mmap_save_file(source: str, out: Path) -> None:
    """Map the file and save it with safetensors, which takes the least memory with these two libraries."""
    import torch
    from safetensors.torch import save_file

    loaded = torch.load(source, map_location="cpu", weights_only=True, mmap=True)
    named = {key.removeprefix("module."): tensor for key, tensor in loaded.items()}
    save_file(named, out / "model.safetensors", metadata={"format": "pt"})
    _flush(out / "model.safetensors")


def peft_merge(source: str, out: Path) -> None:
    """Load model and adapter, merge, and save. The adapter is in ``adapter`` next to the folder of the model."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = Path(source).parent
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    PeftModel.from_pretrained(model, str(folder.parent / "adapter")).merge_and_unload().save_pretrained(out)
    for file in out.glob("*.safetensors"):
        _flush(file)


def torch_loop(source: str, out: Path) -> None:
    """Convert the files of a folder in a loop, as most scripts do."""
    import torch

    for path in sorted(Path(source).rglob("*.pth")):
        loaded = torch.load(path, map_location="cpu", weights_only=True)
        goal = out / path.relative_to(source)
        goal.parent.mkdir(parents=True, exist_ok=True)
        torch.save({key.removeprefix("module."): tensor for key, tensor in loaded.items()}, goal)
    os.sync()


def timm_loop(source: str, out: Path) -> None:
    """Do what timm's script does for each file of a folder, in one process."""
    for path in sorted(Path(source).rglob("*.pth")):
        goal = out / path.relative_to(source).parent / path.stem
        goal.mkdir(parents=True)
        timm_clean(str(path), goal)


def zero_to_fp32(source: str, out: Path) -> None:
    """Merge ranks into a torch file with DeepSpeed itself, as ``zero_to_fp32.py`` does."""
    os.environ.update(DS_ACCELERATOR="cpu")
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

    folder = Path(source).parent
    convert_zero_checkpoint_to_fp32_state_dict(str(folder.parent), str(out), max_shard_size=None, tag=folder.name)
    for file in out.iterdir():
        _flush(file)


def all_ranks(source: str, out: Path) -> None:
    """Load all ranks into memory, concatenate, and save, as verl's merger and most scripts do."""
    import torch
    from safetensors.torch import save_file

    folder = Path(source).parent
    files = sorted(folder.glob("*optim_states.pt"), key=lambda file: int(file.name.split("_")[3]))
    held = [torch.load(file, weights_only=False)["optimizer_state_dict"] for file in files]
    names = torch.load(next(folder.glob("*model_states.pt")), weights_only=False)["param_shapes"][0]
    made, start = {}, 0
    stage = held[0]["zero_stage"]
    runs = [rank["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"][0] for rank in held]
    flat = torch.cat(runs) if stage == 2 else None
    for name, shape in names.items():
        share = shape.numel() if flat is not None else -(-shape.numel() // len(runs))
        pieces = [flat] if flat is not None else runs
        whole = torch.cat([piece[start : start + share] for piece in pieces])
        made[name], start = whole[: shape.numel()].view(shape), start + share
    save_file(made, out / "model.safetensors")
    _flush(out / "model.safetensors")


def all_mesh_ranks(source: str, out: Path) -> None:
    """Load all ranks into memory, concatenate the local tensors, and save, as verl's merger does."""
    import torch
    from safetensors.torch import save_file

    files = sorted(Path(source).parent.glob("*.pt"), key=lambda file: int(file.stem.rpartition("_")[2]))
    held = [torch.load(file, weights_only=False) for file in files]
    made = {}
    for name, first in held[0].items():
        made[name] = torch.cat([rank[name]._local_tensor for rank in held], first.placements[0].dim)
    save_file(made, out / "model.safetensors")
    _flush(out / "model.safetensors")


def _flush(path: Path) -> None:
    """Flush a file to disk, as ``ckptfix`` and the ``cp`` of the tables do."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


PEERS: dict[str, tuple[str, Callable[[str, Path], None]]] = {
    "timm": ("timm's clean_checkpoint", timm_clean),
    "hf": ("HF convert with comparison", hf_convert),
    "torch": ("torch.load + torch.save", torch_save),
    "peft": ("peft's merge_and_unload", peft_merge),
    "zero": ("DeepSpeed's zero_to_fp32", zero_to_fp32),
    "ranks": ("all ranks into memory, torch.cat, save_file", all_ranks),
    "mesh": ("all ranks into memory, torch.cat, save_file", all_mesh_ranks),
    "mmap": ("torch.load(mmap) + safetensors save_file", mmap_save_file),
}

LOOPS: dict[str, tuple[str, Callable[[str, Path], None]]] = {
    "torch-loop": ("torch.load + torch.save in a loop, sync", torch_loop),
    "timm-loop": ("timm's clean_checkpoint in a loop", timm_loop),
}
"""Ways to process a whole folder."""

if __name__ == "__main__":
    (PEERS | LOOPS)[sys.argv[1]][1](sys.argv[2], Path(sys.argv[3]))
