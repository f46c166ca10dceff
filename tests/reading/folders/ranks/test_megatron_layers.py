"""How the tensors of Megatron's layers are divided: by their names, by the shapes of others, and by the arguments."""

from argparse import Namespace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfix
from ckptfix.errors import UnreadableError
from tests.checks import bytes_of
from tests.reading.folders.ranks.test_megatron import FFN, HEADS, HIDDEN, write_rank

EXPERTS = "decoder.layers.0.mlp.experts."


def write_grouped(folder: Path, is_flat: bool, sizes: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Write the experts of four ranks, one tensor in each; return the truth, with a tensor for each expert."""
    whole = {}
    for number in range(4):
        whole[f"linear_fc1.weight{number}"] = torch.randn(2 * FFN, HIDDEN)
        whole[f"linear_fc1.bias{number}"] = torch.randn(2 * FFN)
        whole[f"linear_fc2.weight{number}"] = torch.randn(HIDDEN, FFN)
    for rank, place in product(range(2), range(2)):
        state = {}
        for name in ("linear_fc1.weight", "linear_fc1.bias", "linear_fc2.weight"):
            own = [whole[f"{name}{number}"] for number in (2 * place, 2 * place + 1)]
            if "fc2" in name:
                parts = [value.chunk(2, 1)[rank] for value in own]
            elif "moe_mlp_glu_interleave_size" in sizes:
                parts = [value.chunk(2)[rank] for value in own]
            else:
                parts = [torch.cat([half.chunk(2)[rank] for half in value.chunk(2)]) for value in own]
            state[EXPERTS + name] = torch.cat(parts) if is_flat else torch.stack(parts)
        home = folder / f"mp_rank_{rank:02d}_{place:03d}"
        write_rank(home, state, tensor=2, expert=2)
        root = torch.load(home / "model_optim_rng.pt", weights_only=False)
        torch.save({**root, "args": {**vars(root["args"]), **sizes}}, home / "model_optim_rng.pt")
    return {EXPERTS + name: value for name, value in whole.items()}


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("more", [{}, {"moe_mlp_glu_interleave_size": 2}], ids=["halves", "blocks"])
def test_the_experts_of_a_rank_in_one_tensor_are_taken_apart(
    tmp_path: Path, is_flat: bool, more: dict[str, int]
) -> None:
    """As ``TEGroupedLinear`` takes them apart; gates that alternate with other rows are joined as they are."""
    whole = write_grouped(tmp_path, is_flat, {"num_experts": 4, **more})
    got = ckptfix.open_checkpoint(tmp_path).state_dict()
    assert got.keys() == whole.keys()
    assert all(bytes_of(got[key]) == bytes_of(value) for key, value in whole.items())


@pytest.mark.parametrize("sizes", [{}, {"num_experts": 7}, {"num_experts": 0}], ids=str)
def test_a_tensor_of_an_unknown_number_of_experts_is_refused(tmp_path: Path, sizes: dict[str, int]) -> None:
    write_grouped(tmp_path, True, sizes)
    with pytest.raises(UnreadableError, match="has all experts of a rank, and the arguments do not tell how many"):
        ckptfix.open_checkpoint(tmp_path)


class Quantised:
    def __init__(self, codes: torch.Tensor) -> None:
        self.codes = codes


@pytest.mark.parametrize("is_same", [False, True])
def test_weights_that_only_their_class_merges_are_not_those_of_the_first(tmp_path: Path, is_same: bool) -> None:
    for rank in range(2):
        weight: Any = Quantised(torch.full((4,), 1.0 if is_same else rank))
        write_rank(tmp_path / f"mp_rank_{rank:02d}", {"a": torch.ones(2), "b": weight}, tensor=2)
    if is_same:
        assert ckptfix.open_checkpoint(tmp_path).keys() == ["a"]
    else:
        with pytest.raises(UnreadableError, match="hold b as objects that only their class can merge"):
            ckptfix.open_checkpoint(tmp_path)


@pytest.mark.parametrize("is_divided", [False, True], ids=["copied", "divided"])
def test_latent_attention_is_copied_or_divided(tmp_path: Path, is_divided: bool) -> None:
    """Transformer Engine has the down projections whole in each rank, Megatron's own layers divide their rows."""
    prefix, latent, rotary = "decoder.layers.0.self_attention.linear", 6, 2
    down, up = torch.randn(latent + rotary, HIDDEN), torch.randn(4 * HEADS, latent)
    for rank in range(2):
        own = down.chunk(2)[rank] if is_divided else down
        state = {f"{prefix}_kv_down_proj.weight": own.clone(), f"{prefix}_kv_up_proj.weight": up.chunk(2)[rank].clone()}
        write_rank(tmp_path / f"mp_rank_{rank:02d}", state, tensor=2)
    got = ckptfix.open_checkpoint(tmp_path)
    assert not got.remarks
    assert torch.equal(got.read(f"{prefix}_kv_down_proj.weight"), down)
    assert torch.equal(got.read(f"{prefix}_kv_up_proj.weight"), up)


@pytest.mark.parametrize("name", ["mtp.layers.0.eh_proj.weight", "decoder.layers.0.core_attention.softmax_offset"])
def test_what_few_models_have_is_divided_by_rows(tmp_path: Path, name: str) -> None:
    whole = torch.zeros(HEADS, 2 * HIDDEN) if "eh" in name else torch.zeros(HEADS)  # the same on both ranks
    for rank in range(2):
        write_rank(tmp_path / f"mp_rank_{rank:02d}", {name: whole.chunk(2)[rank].clone()}, tensor=2)
    got = ckptfix.open_checkpoint(tmp_path).read(name)
    assert (got.shape, bytes_of(got)) == (whole.shape, bytes_of(whole))


def test_a_down_projection_that_may_be_divided_is_not_guessed(tmp_path: Path) -> None:
    """It has more rows than the up projection has columns, so it may be whole, with rows of the rotary part."""
    prefix = "decoder.layers.0.self_attention.linear"
    for rank in range(2):
        state = {
            f"{prefix}_kv_down_proj.weight": torch.randn(8, HIDDEN),
            f"{prefix}_kv_up_proj.weight": torch.ones(4, 6),
        }
        write_rank(tmp_path / f"mp_rank_{rank:02d}", state, tensor=2)
    with pytest.raises(UnreadableError, match=r"different values of .*linear_kv_down_proj\.weight, and no rule"):
        ckptfix.open_checkpoint(tmp_path)


@pytest.mark.parametrize("version", [0, 1.0])
def test_queries_keys_and_values_of_old_releases_are_put_in_order(tmp_path: Path, version: float) -> None:
    width = HIDDEN // HEADS
    whole = torch.randn(HEADS, 3, width, HIDDEN)
    bias = torch.randn(HEADS, 3, width)
    order = (1, 0, 2) if version == 0 else (0, 2, 1)
    args = Namespace(tensor_model_parallel_size=2, pipeline_model_parallel_size=1, num_attention_heads=HEADS)
    for rank in range(2):
        weight = whole.chunk(2)[rank].permute(*order, 3).reshape(-1, HIDDEN).clone()
        encoder = {
            "layers.0.attention.query_key_value.weight": weight,
            "layers.0.attention.query_key_value.bias": bias.chunk(2)[rank].permute(*order).reshape(-1).clone(),
        }
        home = tmp_path / f"mp_rank_{rank:02d}"
        home.mkdir()
        root = {
            "args": args,
            "checkpoint_version": version,
            "iteration": 1,
            "model": {"language_model": {"encoder": encoder}},
        }
        torch.save(root, home / "model_optim_rng.pt")
    got = ckptfix.open_checkpoint(tmp_path)
    assert got.container == ("model", "language_model", "encoder")
    assert torch.equal(got.read("layers.0.attention.query_key_value.weight"), whole.reshape(-1, HIDDEN))
    assert torch.equal(got.read("layers.0.attention.query_key_value.bias"), bias.reshape(-1))
