"""Write folders of Megatron on a CPU: ``python mcore.py FOLDER 4 PORT [CASE …]``, in an environment with megatron-core.

A case is ``TENSOR-PIPELINE-CHUNKS-gelu|swiglu-mha|gqa-tied|untied``. Beside the ranks of each (``CASE``) there is the
same model as ``torch_dist`` (``CASE-dist``), and what Megatron itself loads of that on one rank (``CASE.pt``)."""

import os
import sys
from argparse import Namespace
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

GRIDS = ((1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 1), (1, 2, 2), (2, 2, 2))
KINDS = product(("gelu", "swiglu"), ("mha", "gqa"), ("tied", "untied"))
CASES = tuple("-".join(map(str, (*grid, *kind))) for kind, grid in product(KINDS, GRIDS) if grid != (1, 1, 1))
LAYERS, VOCABULARY = 4, 64


def chunks_of(grid: tuple[int, int, int], gated: bool, groups: int, is_tied: bool) -> list[Any]:
    """Return this rank's part of a GPT: one model, or one for each chunk of its stage."""
    state = import_module("megatron.core.parallel_state")
    tensor, pipeline, virtual = grid
    config = import_module("megatron.core.transformer.transformer_config").TransformerConfig(
        num_layers=LAYERS,
        hidden_size=16,
        num_attention_heads=4,
        num_query_groups=groups,
        ffn_hidden_size=24,
        use_cpu_initialization=True,
        gated_linear_unit=gated,
        activation_func=torch.nn.functional.silu if gated else torch.nn.functional.gelu,
        normalization="LayerNorm",
        add_bias_linear=not gated,
        add_qkv_bias=True,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        pipeline_dtype=torch.float32,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )
    layer = import_module("megatron.core.models.gpt.gpt_layer_specs").get_gpt_layer_local_spec()
    model = import_module("megatron.core.models.gpt.gpt_model").GPTModel
    made = []
    for chunk in range(virtual):
        place: dict[str, Any] = {"vp_stage": chunk, "ignore_virtual": False} if virtual > 1 else {}
        torch.manual_seed(123)
        net = model(
            config,
            layer,
            vocab_size=VOCABULARY,
            max_sequence_length=8,
            pre_process=state.is_pipeline_first_stage(**place),
            post_process=state.is_pipeline_last_stage(**place),
            share_embeddings_and_output_weights=is_tied,
            position_embedding_type="rope",
            vp_stage=chunk if virtual > 1 else None,
        )
        for name, parameter in net.named_parameters():
            if parameter.ndim == 1 and "linear_fc1" not in name and "linear_qkv" not in name:
                parameter.data.add_(torch.arange(parameter.numel()) * 0.01)
        made.append(net)
    return made


def begin(grid: tuple[int, int, int]) -> None:
    state = import_module("megatron.core.parallel_state")
    state.destroy_model_parallel()
    tensor, pipeline, virtual = grid
    state.initialize_model_parallel(tensor, pipeline, virtual if virtual > 1 else None)


def make(folder: Path, case: str) -> None:
    state, saving = import_module("megatron.core.parallel_state"), import_module("megatron.core.dist_checkpointing")
    tensor, pipeline, virtual, activation, heads, tie = case.split("-")
    grid, is_tied = (int(tensor), int(pipeline), int(virtual)), tie == "tied"
    args = Namespace(
        tensor_model_parallel_size=grid[0],
        pipeline_model_parallel_size=grid[1],
        virtual_pipeline_model_parallel_size=grid[2] if grid[2] > 1 else None,
        num_layers=LAYERS,
        hidden_size=16,
        num_attention_heads=4,
        swiglu=activation == "swiglu",
        padded_vocab_size=VOCABULARY,
        untie_embeddings_and_output_weights=not is_tied,
    )
    kind = activation == "swiglu", 2 if heads == "gqa" else 4, is_tied
    begin(grid)
    chunks = chunks_of(grid, *kind)
    names = ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]
    common = {"args": args, "checkpoint_version": 3.0, "iteration": 1}
    ranks = state.get_tensor_model_parallel_rank(), state.get_pipeline_model_parallel_rank()
    if state.get_data_parallel_rank() == 0:
        last = f"_{ranks[1]:03d}" if grid[1] > 1 else ""
        home = folder / case / "iter_0000001" / f"mp_rank_{ranks[0]:02d}{last}"
        home.mkdir(parents=True)
        states = {name: chunk.state_dict_for_save_checkpoint() for name, chunk in zip(names, chunks, strict=True)}
        torch.save({**common, **states}, home / "model_optim_rng.pt")
    sharded = folder / f"{case}-dist"
    sharded.mkdir(exist_ok=True)
    dist.barrier()
    states = {name: chunk.sharded_state_dict() for name, chunk in zip(names, chunks, strict=True)}
    saving.save({**common, **states}, str(sharded))
    dist.barrier()
    begin((1, 1, 1))
    (whole,) = chunks_of((1, 1, 1), *kind)
    loaded = saving.load(whole.sharded_state_dict(), str(sharded))
    if dist.get_rank() == 0:
        torch.save(
            {key: value for key, value in loaded.items() if isinstance(value, torch.Tensor)}, folder / f"{case}.pt"
        )
    dist.barrier()


def run(rank: int, folder: str, world: int, cases: list[str]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    # Stands in for the functions of a GPU that dist_checkpointing calls.
    for name, answer in {"synchronize": None, "current_device": "cpu", "current_stream": None}.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    setattr(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor)  # noqa: B010 - mypy allows no assignment
    for case in cases:
        # Megatron creates about thirty groups per case, and gloo keeps threads for each until it is destroyed.
        store = f"file://{Path(folder).absolute()}/{case}.store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
        make(Path(folder), case)
        import_module("megatron.core.parallel_state").destroy_model_parallel()
        dist.destroy_process_group()


if __name__ == "__main__":
    from torch.multiprocessing.spawn import spawn

    ranks = int(sys.argv[2])
    spawn(run, (sys.argv[1], ranks, sys.argv[4:] or list(CASES)), nprocs=ranks)
