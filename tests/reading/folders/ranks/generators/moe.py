"""Write DeepSpeed's mixtures of experts on a CPU: ``python moe.py FOLDER WORLD PORT CASE …``, where ``zero.py`` runs.

A case is ``STAGE-DTYPE-EP-GROUPS``: stage 0, 1 or 2; fp32, bf16 or fp16; over how many ranks experts are divided; one
or two optimizer groups. Its truth, ``CASE.pt``, is gathered from the live optimizers: masters and moments, by fragment
and name; of stage 0, the weights of the training, their masters if it has them, and the names of each optimizer group
of a process with all experts."""

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

EXPERT = re.compile(r"(.*\.deepspeed_experts\.)(\d+)(\..*)")
FIELDS = ("exp_avg", "exp_avg_sq")


class Net(nn.Module):
    """Two layers of experts with several tensors each, one next to a dense layer, and an integer buffer."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        layer: Any = import_module("deepspeed.moe.layer").MoE
        expert = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6))
        settings = {"ep_size": ep_size, "capacity_factor": 4.0}
        self.emb = nn.Embedding(13, 6)
        self.one = layer(6, expert, num_experts=4, k=1, use_residual=True, **settings)
        self.mid = nn.Linear(6, 6)
        self.two = layer(6, nn.Linear(6, 6), num_experts=8, k=2, **settings)
        self.ln = nn.LayerNorm(6)
        self.register_buffer("cnt", torch.tensor(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.emb(x)[None]
        hidden = self.mid(hidden + self.one(hidden)[0])
        made: torch.Tensor = self.ln(hidden + self.two(hidden)[0]).pow(2).sum() + hidden.sum()
        return made


def train(folder: Path, case: str, rank: int, world: int) -> None:
    deepspeed: Any = import_module("deepspeed")
    stage, dtype, ep_size, groups = case.split("-")
    settings = import_module("zero").configuration(stage, dtype)
    torch.manual_seed(0)
    net = Net(int(ep_size))
    every = list(net.named_parameters())
    optimizer = torch.optim.AdamW(divided(net, groups), lr=1e-2)
    torch.manual_seed(1 + rank % int(ep_size))
    with torch.no_grad():
        for name, parameter in every:
            if EXPERT.fullmatch(name):
                parameter.add_(torch.randn_like(parameter))
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=settings)
    for step in range(2):
        engine.backward(engine((torch.arange(4) * (rank + 2) + step) % 13).float())
        engine.step()
    engine.save_checkpoint(str(folder / case), tag="global_step2")
    held: list[Any] = [None] * world
    dist.all_gather_object(held, dict(fragments(engine, int(stage))))
    if rank == 0:
        truth: dict[str, Any] = dict(joined(held, int(ep_size)))
        if stage == "0":
            whole = Net(1)
            names = {parameter: name for name, parameter in whole.named_parameters()}
            truth["/groups"] = [[names[each] for each in group["params"]] for group in divided(whole, groups)]
        torch.save(truth, folder / f"{case}.pt")
    dist.barrier()


def divided(net: nn.Module, groups: str) -> list[dict[str, Any]]:
    """Return the optimizer groups of a model, with experts in groups of their own."""
    decayed = (True, False) if groups == "two" else (None,)
    parts = [[each for each in net.parameters() if kept in (None, each.ndim > 1)] for kept in decayed]
    split: Any = import_module("deepspeed.moe.utils").split_params_into_different_moe_groups_for_optimizer
    made: list[dict[str, Any]] = split([{"params": part, "name": str(at)} for at, part in enumerate(parts)])
    return made


def fragments(engine: Any, stage: int) -> Iterator[tuple[str, Any]]:
    """Yield this rank's part of every parameter: its shape, and where each range of its values begins."""
    halves, wide = (getattr(engine.optimizer, name, []) for name in ("fp16_groups", "fp32_groups"))
    masters = dict(zip(chain(*halves), chain(*wide), strict=True)) if not stage else {}
    for name, parameter in engine.module.named_parameters():
        held = parameter._hp_mapping if stage else None
        if not stage:
            yield name, (parameter.shape, 0, parameter.detach().flatten().clone())
            master = masters.get(parameter, parameter)
            state = getattr(engine.optimizer, "optimizer", engine.optimizer).state[master]
            kept = {field: state[field] for field in FIELDS} | ({} if master is parameter else {"master": master})
            for field, value in kept.items():
                yield f"{name}/{field}", (parameter.shape, 0, value.detach().flatten().clone())
        if held is None:
            continue
        start, master = held.lp_fragment_address.start, held.hp_fragment
        yield name, (parameter.shape, start, master.clone())
        for flat, state in engine.optimizer.optimizer.state.items():
            if flat.untyped_storage().data_ptr() == master.untyped_storage().data_ptr():
                for field in FIELDS:
                    part = state[field].narrow(0, master.storage_offset() - flat.storage_offset(), len(master))
                    yield f"{name}/{field}", (parameter.shape, start, part.clone())


def joined(held: list[Any], ep_size: int) -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = {}
    for rank, parts in enumerate(held):
        for name, (shape, start, part) in parts.items():
            if match := EXPERT.fullmatch(name):
                local = (4 if name.startswith("one.") else 8) // ep_size
                name = f"{match[1]}{rank % ep_size * local + int(match[2])}{match[3]}"
            whole = made.setdefault(name, torch.full((shape.numel(),), torch.nan, dtype=part.dtype).view(shape))
            whole.view(-1)[start : start + len(part)] = part
    assert all(not whole.isnan().any() for whole in made.values())
    return made


if __name__ == "__main__":
    from torch.multiprocessing.spawn import spawn

    ranks = int(sys.argv[2])
    spawn(import_module("zero").run, (sys.argv[1], ranks, int(sys.argv[3]), sys.argv[4:], train), nprocs=ranks)
