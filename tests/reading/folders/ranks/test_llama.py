"""Llama's consolidated shards: a random model, divided as fairscale's layers divide it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfix
from ckptfix.core.facts import Kind
from ckptfix.errors import UnreadableError

DIM, HEADS, HIDDEN, VOCABULARY = 32, 8, 48, 40


def model(groups: int) -> dict[str, torch.Tensor]:
    """A model of two layers, in bfloat16, with ``groups`` key-value heads."""
    narrow = DIM // HEADS * groups
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (VOCABULARY, DIM)}
    for layer in range(2):
        shapes |= {
            f"layers.{layer}.attention.wq.weight": (DIM, DIM),
            f"layers.{layer}.attention.wk.weight": (narrow, DIM),
            f"layers.{layer}.attention.wv.weight": (narrow, DIM),
            f"layers.{layer}.attention.wo.weight": (DIM, DIM),
            f"layers.{layer}.feed_forward.w1.weight": (HIDDEN, DIM),
            f"layers.{layer}.feed_forward.w2.weight": (DIM, HIDDEN),
            f"layers.{layer}.feed_forward.w3.weight": (HIDDEN, DIM),
            f"layers.{layer}.attention_norm.weight": (DIM,),
            f"layers.{layer}.ffn_norm.weight": (DIM,),
        }
    shapes |= {"norm.weight": (DIM,), "output.weight": (VOCABULARY, DIM), "rope.freqs": (DIM // HEADS // 2,)}
    return {key: torch.randn(shape).bfloat16() for key, shape in shapes.items()}


COLUMNS = ("wo.weight", "w2.weight")
COPIES = ("norm.weight", "rope.freqs")


def write_llama(folder: Path, ranks: int, groups: int = HEADS, by_columns: bool = False, **params: Any) -> Any:
    """Write a model as Meta does; Llama 1 and 2 divide the token embeddings by columns."""
    whole = model(groups)
    for rank in range(ranks):
        state = {}
        for key, value in whole.items():
            if key.endswith(COPIES):
                state[key] = value.clone()
                continue
            axis = int(key.endswith(COLUMNS) or (by_columns and key.startswith("tok")))
            parts, number = ranks, rank
            if key.endswith(("wk.weight", "wv.weight")) and groups < ranks:
                parts, number = groups, rank * groups // ranks
            state[key] = value.chunk(parts, axis)[number].clone()
        torch.save(state, folder / f"consolidated.{rank:02d}.pth")
    sizes = {"dim": DIM, "n_layers": 2, "n_heads": HEADS, "n_kv_heads": groups, "vocab_size": VOCABULARY, **params}
    (folder / "params.json").write_text(json.dumps(sizes))
    return whole


@pytest.mark.parametrize("by_columns", [False, True], ids=["llama-3", "llama-2"])
@pytest.mark.parametrize("groups", [8, 2])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_shards_are_the_model(tmp_path: Path, ranks: int, groups: int, by_columns: bool) -> None:
    whole = write_llama(tmp_path, ranks, groups, by_columns)
    got = ckptfix.open_checkpoint(tmp_path).state_dict()
    assert list(got) == list(whole)
    assert all(torch.equal(got[key], value) for key, value in whole.items())


def test_the_vocabulary_of_llama_1_is_not_in_its_params(tmp_path: Path) -> None:
    whole = write_llama(tmp_path, 4, by_columns=True, vocab_size=-1)
    assert torch.equal(ckptfix.open_checkpoint(tmp_path).read("tok_embeddings.weight"), whole["tok_embeddings.weight"])


def test_experts_of_llama_4(tmp_path: Path) -> None:
    up, down = torch.randn(4, 6, 8), torch.randn(4, 8, 6)
    for rank in range(2):
        torch.save(
            {
                "layers.0.feed_forward.experts.moe_w_in_eD_F": up.chunk(2, -1)[rank].clone(),
                "layers.0.feed_forward.experts.moe_w_out_eF_D": down.chunk(2, -2)[rank].clone(),
            },
            tmp_path / f"consolidated.{rank:02d}.pth",
        )
    got = ckptfix.open_checkpoint(tmp_path).state_dict()
    assert torch.equal(got["layers.0.feed_forward.experts.moe_w_in_eD_F"], up)
    assert torch.equal(got["layers.0.feed_forward.experts.moe_w_out_eF_D"], down)


def test_a_norm_that_differs_is_that_of_the_first(tmp_path: Path) -> None:
    whole = write_llama(tmp_path, 2)
    state = torch.load(tmp_path / "consolidated.01.pth")
    state["norm.weight"] += 1
    torch.save(state, tmp_path / "consolidated.01.pth")
    got = ckptfix.open_checkpoint(tmp_path)
    assert torch.equal(got.read("norm.weight"), whole["norm.weight"])
    assert [mark.place for mark in got.remarks if mark.kind is Kind.RANK_COPIES] == ["norm.weight"]


def test_a_tensor_that_no_rule_knows_is_not_guessed(tmp_path: Path) -> None:
    write_llama(tmp_path, 2)
    for rank in range(2):
        state = torch.load(tmp_path / f"consolidated.{rank:02d}.pth")
        torch.save({**state, "adapter.gate": torch.full((3,), float(rank))}, tmp_path / f"consolidated.{rank:02d}.pth")
    with pytest.raises(UnreadableError, match=r"different values of adapter.gate, and no rule"):
        ckptfix.open_checkpoint(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_llama(tmp_path, 4)
    (tmp_path / "consolidated.02.pth").unlink()
    with pytest.raises(UnreadableError, match=r"lacks 1 rank of 4: consolidated\.02\.pth"):
        ckptfix.open_checkpoint(tmp_path)


def test_shards_of_two_models_do_not_go_together(tmp_path: Path) -> None:
    write_llama(tmp_path, 2)
    state = torch.load(tmp_path / "consolidated.01.pth")
    state["layers.0.feed_forward.w1.weight"] = torch.ones(5, DIM + 1).bfloat16()
    torch.save(state, tmp_path / "consolidated.01.pth")
    with pytest.raises(UnreadableError, match=r"the parts of layers\.0\.feed_forward\.w1\.weight do not go together"):
        ckptfix.open_checkpoint(tmp_path)


def test_a_shard_stands_for_all(tmp_path: Path) -> None:
    whole = write_llama(tmp_path, 2)
    assert ckptfix.open_checkpoint(tmp_path / "consolidated.01.pth").keys() == list(whole)
