"""Write folders of FSDP ranks on a CPU: ``python fsdp.py FOLDER WORLD PORT``, each next to the expected result.

Kinds: ``sharded``, ``local`` and ``names`` (FSDP 1: SHARDED_STATE_DICT, LOCAL_STATE_DICT without and with
``use_orig_params``), ``fsdp2`` (``fully_shard``), ``tensor_parallel`` and ``hybrid``."""

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.multiprocessing.spawn import start_processes

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # before torch 2.6
    fully_shard = import_module("torch.distributed._composable.fsdp").fully_shard


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a = nn.Linear(width, width + 4)
        self.ln = nn.LayerNorm(width + 4)
        self.b = nn.Linear(width + 4, width, bias=False)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = x + self.b(torch.relu(self.ln(self.a(x))))
        return made


class Net(nn.Module):
    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.emb = nn.Embedding(13, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 13, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.emb(x)
        for block in self.blocks:
            hidden = block(hidden)
        made: torch.Tensor = self.head(self.norm(hidden)).sum()
        return made


def save(value: Any, folder: Path, rank: int, world: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(value, folder / f"model_world_size_{world}_rank_{rank}.pt")


def train(net: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    for _ in range(2):
        net(torch.arange(4) + rank).backward()
        optimizer.step()
        optimizer.zero_grad()


def first_fsdp(folder: Path, rank: int, world: int) -> None:
    for names in (False, True):
        torch.manual_seed(0)
        policy = ModuleWrapPolicy({Block})
        net = FSDP(Net(), auto_wrap_policy=policy, use_orig_params=names, device_id=torch.device("cpu"))
        train(net, torch.optim.AdamW(net.parameters(), lr=1e-2), rank)
        with FSDP.state_dict_type(net, StateDictType.FULL_STATE_DICT):
            whole = net.state_dict()
        kinds = {"local": StateDictType.LOCAL_STATE_DICT, "sharded": StateDictType.SHARDED_STATE_DICT}
        for kind, form in kinds.items():
            name = "names" if names and kind == "local" else kind
            with FSDP.state_dict_type(net, form):
                save(net.state_dict(), folder / name, rank, world)
            if rank == 0:
                torch.save(whole, folder / f"{name}.pt")
        dist.barrier()


def second_fsdp(folder: Path, rank: int, world: int) -> None:
    shapes: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
        "fsdp2": ((world,), ("dp",)),
        "tensor_parallel": ((2, world // 2), ("dp", "tp")),
        "hybrid": ((2, world // 2), ("replicate", "shard")),
    }
    for kind, (shape, names) in shapes.items():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        torch.manual_seed(0)
        net = Net(7 if kind == "fsdp2" else 8)  # rows that four ranks cannot divide evenly, and that they can
        if kind == "tensor_parallel":
            parallelize_module(net, mesh["tp"], {"head": ColwiseParallel()})
            mesh = mesh["dp"]
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
        save(net.state_dict(), folder / kind, rank, world)
        whole = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(whole, folder / f"{kind}.pt")
        dist.barrier()


def run(rank: int, folder: str, world: int, port: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first_fsdp(Path(folder), rank, world)
    second_fsdp(Path(folder), rank, world)
    dist.destroy_process_group()


if __name__ == "__main__":
    # Forked, since importing torch in each rank would take longer than everything else.
    start_processes(run, (sys.argv[1], int(sys.argv[2]), int(sys.argv[3])), int(sys.argv[2]), start_method="fork")
