"""Write folders of DeepSpeed's ZeRO on a CPU: ``python zero.py FOLDER WORLD PORT [CASE …]``, in an environment that has
DeepSpeed (``DS_ACCELERATOR=cpu DS_BUILD_OPS=0``).

A case is ``STAGE-DTYPE-GROUPS``: stage 1 to 3; fp32, bf16 or fp16; one, two or many optimizer groups. Without any, all
27 are made. Each has its truth beside it, ``CASE.pt``: what ``zero_to_fp32`` makes of it, and the moments of
``ds_to_universal``, where the release has that. Sub-groups are small."""

import os
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

GROUPS = ("one", "two", "many")
CASES = tuple("-".join(map(str, case)) for case in product((1, 2, 3), ("fp32", "bf16", "fp16"), GROUPS))


class Net(nn.Module):
    """Tied embeddings, frozen parameters, float and integer buffers, and sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(13, 7)
        self.l1 = nn.Linear(7, 11)
        self.bn = nn.LayerNorm(11)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("cnt", torch.tensor(5))
        self.l2 = nn.Linear(11, 7)
        self.frozen = nn.Linear(7, 5).requires_grad_(False)
        self.ln = nn.LayerNorm(7)
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.bn(self.l1(self.emb(x))))
        hidden = self.ln(self.l2(hidden))
        made: torch.Tensor = self.head(hidden).sum() + self.frozen(hidden).sum()
        return made


def grouped(net: nn.Module, groups: str) -> list[dict[str, Any]]:
    trained = [(name, parameter) for name, parameter in net.named_parameters() if parameter.requires_grad]
    if groups == "one":
        return [{"params": [parameter for _, parameter in trained]}]
    if groups == "many":
        return [{"params": [parameter], "lr": 1e-3 / (1 + at)} for at, (_, parameter) in enumerate(trained)]
    plain = [parameter for name, parameter in trained if name.endswith("bias") or name[:2] in ("bn", "ln")]
    ids = set(map(id, plain))
    others = [parameter for _, parameter in trained if id(parameter) not in ids]
    return [{"params": others, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]


def configuration(stage: str, dtype: str) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": int(stage), "sub_group_size": 100 if stage == "3" else int(1e9)},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if dtype == "bf16":
        settings["bf16"] = {"enabled": True}
    if dtype == "fp16":
        settings["fp16"] = {"enabled": True, "initial_scale_power": 2}
    return settings


def train(folder: Path, case: str, rank: int, world: int) -> None:
    deepspeed: Any = import_module("deepspeed")
    stage, dtype, groups = case.split("-")
    settings = configuration(stage, dtype)
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=settings) if stage == "3" else nullcontext():
        net = Net()
    optimizer = torch.optim.AdamW(grouped(net, groups), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=settings)
    for _ in range(2):
        loss = engine((torch.arange(4) + 4 * rank) % 13).float()
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(str(folder / case), tag="global_step2")
    dist.barrier()
    if rank == 0:
        torch.save(truth(folder / case), folder / f"{case}.pt")
    dist.barrier()


def truth(folder: Path) -> dict[str, Any]:
    whole = import_module("deepspeed.utils.zero_to_fp32").get_fp32_state_dict_from_zero_checkpoint(str(folder))
    made: dict[str, Any] = {"weights": {name: tensor.clone() for name, tensor in whole.items()}}
    try:
        convert: Any = import_module("deepspeed.checkpoint.ds_to_universal").main
    except ImportError:
        return made
    universal = folder.with_name(f"{folder.name}-universal")
    arguments = Namespace(
        input_folder=str(folder / "global_step2"),
        output_folder=str(universal),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    try:
        convert(arguments)
    except (RuntimeError, TypeError):  # stage 3 with small sub-groups before 0.19; no arguments in 0.12
        return made
    made["moments"] = {}
    for file in universal.glob("zero/*/exp_avg*.pt"):
        value = torch.load(file, weights_only=False)
        made["moments"][f"{file.parent.name}/{file.stem}"] = value["param"] if isinstance(value, dict) else value
    return made


def run(
    rank: int,
    folder: str,
    world: int,
    port: int,
    cases: list[str],
    make: Callable[[Path, str, int, int], None] = train,
) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    # With gloo, all releases except 0.16 and 0.19 gather into views that autograd tracks.
    gather = torch.no_grad()(dist.all_gather_into_tensor)
    dist.all_gather_into_tensor = lambda output_tensor, *args, **named: gather(output_tensor.data, *args, **named)
    # Compiled on first use, which hangs if a compiler was ever killed.
    backend: Any = import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None
    accelerator = import_module("deepspeed.accelerator").get_accelerator()
    accelerator.is_fp16_supported = lambda: True  # False on a CPU, although it supports everything used here
    import_module("deepspeed").init_distributed(dist_backend="gloo")
    for case in cases:
        make(Path(folder), case, rank, world)
    dist.destroy_process_group()


if __name__ == "__main__":
    from torch.multiprocessing.spawn import spawn

    ranks = int(sys.argv[2])
    spawn(run, (sys.argv[1], ranks, int(sys.argv[3]), sys.argv[4:] or list(CASES)), nprocs=ranks)
