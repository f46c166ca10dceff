"""Write folders of DeepSpeed's AutoTP training on a CPU: ``python autotp.py FOLDER WORLD PORT CASE …``, where
``zero.py`` runs, with transformers.

A case is ``STAGE-DTYPE-MODEL``: stage 0 to 3; fp32 or bf16; llama, tied, qwen2, neox or opt. Tensors are divided
over two ranks. Its truth, ``CASE.pt``, has what DeepSpeed gathers from the live model: the weights of the training, and
the moments, for which they take the place of the weights at stage 0, and otherwise come from ``ds_to_universal``."""

import sys
from argparse import Namespace
from collections.abc import Iterator
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

SIZES = {"vocab_size": 34, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
GATED = {"intermediate_size": 24, "num_key_value_heads": 2, "tie_word_embeddings": False}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", GATED),
    "tied": ("Llama", {**GATED, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", GATED),
    "neox": ("GPTNeoX", {"intermediate_size": 64, "tie_word_embeddings": False}),
    "opt": ("OPT", {"ffn_dim": 24, "word_embed_proj_dim": 16, "tie_word_embeddings": False}),
}
FIELDS = ("exp_avg", "exp_avg_sq")


def train(folder: Path, case: str, rank: int, world: int) -> None:
    deepspeed: Any = import_module("deepspeed")
    transformers: Any = import_module("transformers")
    stage, dtype, kind = case.split("-")
    settings = {**import_module("zero").configuration(stage, dtype), "train_micro_batch_size_per_gpu": 2}
    settings["tensor_parallel"] = {"autotp_size": 2}
    settings["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    torch.manual_seed(0)
    name, more = MODELS[kind]
    config = getattr(transformers, f"{name}Config")(max_position_embeddings=32, **SIZES, **more)
    net: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    engine, *_ = deepspeed.initialize(model=net, model_parameters=[*net.parameters()], config=settings)
    words = torch.Generator().manual_seed(rank // 2)
    for _ in range(2):
        text = torch.randint(1, 33, (2, 8), generator=words)
        engine.backward(engine(input_ids=text, labels=text).loss)
        engine.step()
    engine.save_checkpoint(str(folder / case), tag="global_step2")
    truth = {key: value.clone() for key, value in (engine._consolidated_16bit_state_dict() or {}).items()}
    if stage == "0":
        truth |= gathered(engine)
    elif rank == 0:
        truth |= dict(universal(folder / case))
    if rank == 0:
        torch.save(truth, folder / f"{case}.pt")
    dist.barrier()


def gathered(engine: Any) -> dict[str, torch.Tensor]:
    """Return the moments by name, gathered as DeepSpeed gathers the weights."""
    optimizer = engine.optimizer
    halves, wide = (chain(*getattr(optimizer, name, [])) for name in ("fp16_groups", "fp32_groups"))
    masters = dict(zip(halves, wide, strict=True))
    made: dict[str, torch.Tensor] = {}
    for field in (*FIELDS, *(["master"] if masters else [])):
        for parameter in engine.module.parameters():
            master = masters.get(parameter, parameter)
            state = {**getattr(optimizer, "optimizer", optimizer).state[master], "master": master.detach()}
            parameter.data = state[field].clone()
        whole = engine._consolidated_16bit_state_dict() or {}
        made |= {f"{key}/{field}": value.clone() for key, value in whole.items()}
    return made


def universal(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the moments of DeepSpeed's own converter."""
    output = folder.with_name(f"{folder.name}-universal")
    arguments = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    convert: Any = import_module("deepspeed.checkpoint.ds_to_universal").main
    paths = {"input_folder": str(folder / "global_step2"), "output_folder": str(output)}
    convert(Namespace(**paths, **arguments, inject_missing_state=True))
    for file in output.glob("zero/*/exp_avg*.pt"):
        value = torch.load(file, weights_only=False)
        yield f"{file.parent.name}/{file.stem}", value["param"] if isinstance(value, dict) else value


if __name__ == "__main__":
    from torch.multiprocessing.spawn import spawn

    ranks = int(sys.argv[2])
    for number, case in enumerate(sys.argv[4:]):  # AutoTP keeps settings in the process
        own = (sys.argv[1], ranks, int(sys.argv[3]) + number, [case], train)
        spawn(import_module("zero").run, own, nprocs=ranks)
