"""Adapters saved and merged by peft, for the tests of merging."""

import json
from pathlib import Path

import peft
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ckptfix.core.adapter_methods import METHODS

LORA = peft.LoraConfig
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LINEAR = ["q", "block.0.fc"]


# Parts of the names of what peft trains.
TRAINED = (
    *("lora_", "modules_to_save", "trainable_tokens", "ia3_", "hada_", "lokr_", "ln_tuning"),
    *(name for method in METHODS.values() for name in method.roles),
)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = Conv1D(96, 32), Conv1D(32, 32)


class Net(nn.Module):
    """One layer of each kind that peft adapts; ``q`` has more rows than a block of the merge."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.q = nn.Linear(32, 33)
        self.block = nn.ModuleList([nn.ModuleDict({"fc": nn.Linear(32, 32), "attn": Attention()})])
        self.conv, self.pixel = nn.Conv2d(3, 40, 3), nn.Conv2d(8, 12, 1)
        self.line = nn.Conv1d(4, 20, 5)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 5)


def cached(name: str, folder: Path) -> Path:
    """Create the folder of a repository in the cache of a hub, and return it."""
    place = folder / f"models--{name.replace('/', '--')}" / "snapshots" / "0123"
    place.mkdir(parents=True)
    return place


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return Net().to(dtype)


def trained(config, folder: Path, dtype=torch.float32, make=net) -> Path:
    """Save an adapter of ``make()`` with random instead of initial values, and return its folder."""
    model = peft.get_peft_model(make(dtype), config)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if any(part in name for part in TRAINED):
            parameter.data.normal_(1.0 if "ia3" in name or "magnitude" in name else 0.0, 0.2)
        elif name.endswith(".bias") and getattr(config, "bias", "none") != "none":
            parameter.data.normal_()
    model.save_pretrained(folder)
    return folder


def merged_by_peft(adapters, dtype=torch.float32, make=net):
    first, *others = adapters
    model = peft.PeftModel.from_pretrained(make(dtype), first)
    for number, other in enumerate(others):
        model.load_adapter(other, str(number))
    return model.merge_and_unload(adapter_names=["default", *map(str, range(len(others)))]).state_dict()


def changed_config(folder: Path, **values) -> Path:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    return folder


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        embedding, head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        head.weight = embedding.weight
        layers = [nn.ModuleDict({"q_proj": nn.Linear(8, 8), "v_proj": nn.Linear(8, 4)}) for _ in range(2)]
        self.model = nn.ModuleDict({"embed_tokens": embedding, "layers": nn.ModuleList(layers)})
        self.lm_head = head


def language(dtype=torch.float32):
    torch.manual_seed(0)
    return Language().to(dtype)
