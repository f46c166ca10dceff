"""GPT-NeoX's tensor-parallel ranks: sums, means, and its own names of tensors."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptfix
from ckptfix.core.facts import Kind
from ckptfix.errors import UnreadableError
from tests.checks import bytes_of


def save_layer(folder: Path, layer: int, ranks: list[dict[str, torch.Tensor]]) -> None:
    for rank, state in enumerate(ranks):
        torch.save(state, folder / f"layer_{layer:02d}-model_{rank:02d}-model_states.pt")


def save_neox(folder: Path, config: str | None, dtype: torch.dtype = torch.float16) -> list[dict[str, torch.Tensor]]:
    """Save a layer of GPT-NeoX and the last norm on three ranks, whose biases and norms differ; return their states."""
    states = []
    for rank in range(3):
        state = {
            "input_layernorm.weight": torch.randn(4),
            "attention.query_key_value.weight": torch.randn(6, 4),
            "attention.dense.weight": torch.randn(4, 2),
            "attention.dense.bias": torch.randn(4),
            "mlp.dense_h_to_4h.weight": torch.randn(8, 4),
            "mlp.dense_4h_to_h.weight": torch.randn(4, 8),
        }
        states.append({key: (value + rank).to(dtype) for key, value in state.items()})
        states[-1]["attention.dense.bias"][0] = -0.0
    save_layer(folder, 2, states)
    save_layer(folder, 5, [{"norm.weight": state["input_layernorm.weight"] + 1} for state in states])
    if config is not None:
        (folder / "configs").mkdir(exist_ok=True)
        (folder / "configs" / "run.yml").write_text(config)
    return states


RESIDUAL = '{\n  # "gpt_j_residual": false,\n  "gpt-j-residual": true,\n}'


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_biases_of_gpt_neox_are_sums_and_its_norms_means(tmp_path: Path, dtype: torch.dtype) -> None:
    """Bit for bit the result of its own converter."""
    states = save_neox(tmp_path, RESIDUAL, dtype)
    ckptfix.repair(tmp_path, output=tmp_path / "whole.safetensors")
    got = load_file(tmp_path / "whole.safetensors")
    wanted = sum(state["attention.dense.bias"] for state in states)
    assert bytes_of(got["2.attention.dense.bias"]) == bytes_of(wanted)  # type: ignore[arg-type]  # of three tensors
    for key, name, more in (("2.input_layernorm.weight",) * 2 + (0,), ("5.norm.weight", "2.input_layernorm.weight", 1)):
        mean = sum(state[name[2:]] + more for state in states) / 3
        assert bytes_of(got[key]) == bytes_of(mean)  # type: ignore[arg-type]  # as above
    said = {found.keys: found.message for found in ckptfix.check(tmp_path).findings if found.code == "FIL105"}
    assert "sum over 3 ranks" in said["2.attention.dense.bias",]
    assert "mean over 3 ranks" in said["2.input_layernorm.weight", "5.norm.weight"]


@pytest.mark.parametrize("config", ['"gpt-j-residual": false', '"hidden-size": 4'])
def test_without_its_residual_biases_are_copies(tmp_path: Path, config: str) -> None:
    """Whatever its converter does with them, the model adds the bias once."""
    states = save_neox(tmp_path, config)
    assert torch.equal(
        ckptfix.open_checkpoint(tmp_path).read("2.attention.dense.bias"), states[0]["attention.dense.bias"]
    )


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "adds up attention\\.dense\\.bias of its 3 ranks if gpt_j_residual"),
        (f"{RESIDUAL}\ngpt_j_residual: False", "differ in gpt"),
    ],
)
def test_sums_of_gpt_neox_are_not_guessed(tmp_path: Path, config: str | None, said: str) -> None:
    states = save_neox(tmp_path, config)
    with pytest.raises(UnreadableError, match=said):
        ckptfix.open_checkpoint(tmp_path)
    for file in tmp_path.glob("layer_*-model_0[12]-*"):
        file.unlink()
    assert torch.equal(
        ckptfix.open_checkpoint(tmp_path).read("2.attention.dense.bias"), states[0]["attention.dense.bias"]
    )


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize(("config", "is_sum"), [(None, None), (RESIDUAL, True), ("gpt_j_residual: false", False)])
def test_a_model_of_gpt_neox_without_a_pipeline(
    tmp_path: Path, config: str | None, is_sum: bool | None, masters: bool
) -> None:
    """It has all layers in one file per rank, with ZeRO; its norm differs between the ranks."""
    layers = save_neox(tmp_path, config)
    for file in tmp_path.glob("layer_*"):
        file.unlink()
    states = [{f"sequential.2.{key}": value for key, value in state.items()} for state in layers]
    for rank, state in enumerate(states):
        shapes = OrderedDict((key, value.shape) for key, value in state.items())
        held = {"module": state, "buffer_names": [], "param_shapes": [shapes], "mp_world_size": 3}
        torch.save(held, tmp_path / f"mp_rank_{rank:02d}_model_states.pt")
        if masters:
            flat = torch.cat([value.float().flatten() for value in state.values()])
            root = {"single_partition_of_fp32_groups": [flat], "partition_count": [1], "zero_stage": 1}
            torch.save({"optimizer_state_dict": root}, tmp_path / f"zero_pp_rank_0_mp_rank_{rank:02d}_optim_states.pt")
    if is_sum is None:
        with pytest.raises(UnreadableError, match="adds up sequential"):
            ckptfix.open_checkpoint(tmp_path)
        return
    got = ckptfix.open_checkpoint(tmp_path)
    bias, norm = "sequential.2.attention.dense.bias", "sequential.2.input_layernorm.weight"
    parts: list[Any] = [[state[key] for state in states] for key in (bias, norm)]
    assert torch.equal(got.read(bias), sum(parts[0]) if is_sum else parts[0][0].to(got.read(bias).dtype))
    is_mean = is_sum or not masters
    assert torch.equal(got.read(norm), sum(parts[1]) / 3 if is_mean else parts[1][0].float())
    kinds = {mark.kind for mark in got.remarks if mark.place == norm}
    assert kinds == {Kind.RANKS_COMPUTED if is_mean else Kind.RANK_COPIES}


def test_sums_of_gpt_neox_are_lost_with_a_rank(tmp_path: Path) -> None:
    save_neox(tmp_path, RESIDUAL)
    (tmp_path / "layer_02-model_01-model_states.pt").unlink()
    lost = ckptfix.open_checkpoint(tmp_path, salvage=True).lost
    assert {"2.attention.dense.bias", "2.input_layernorm.weight", "2.attention.dense.weight"} <= lost.keys()
    assert "5.norm.weight" not in lost


QUERIES, KEYS, HIDDEN, INNER = 8, 4, 8, 12
"""The rows of queries and of keys, the width of the model, and that of the MLP, on all ranks together."""


def split_thrice(value: torch.Tensor) -> list[torch.Tensor]:
    """Divide queries, keys and values between two ranks, each of which has its share of all three in this order."""
    parts = [kind.chunk(2) for kind in value.split([QUERIES, KEYS, KEYS])]
    return [torch.cat([part[rank] for part in parts]) for rank in range(2)]


def split_halves(value: torch.Tensor) -> list[torch.Tensor]:
    parts = [half.chunk(2) for half in value.chunk(2)]
    return [torch.cat([part[rank] for part in parts]) for rank in range(2)]


def split_rows(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return value.chunk(2)


def split_columns(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return value.chunk(2, 1)


def copied(value: torch.Tensor) -> list[torch.Tensor]:
    return [value, value]


LLAMA = {
    "attention.query_key_value.weight": (torch.randn(QUERIES + 2 * KEYS, HIDDEN), split_thrice),
    "attention.query_key_value.bias": (torch.randn(QUERIES + 2 * KEYS), split_thrice),
    "attention.dense.weight": (torch.randn(HIDDEN, QUERIES), split_columns),
    "input_layernorm.scale": (torch.randn(HIDDEN), copied),
}
GATED = {
    "mlp.linear1.weight": (torch.randn(2 * INNER, HIDDEN), split_halves),
    "mlp.linear1.bias": (torch.randn(2 * INNER), split_halves),
    "mlp.linear2.weight": (torch.randn(HIDDEN, INNER), split_columns),
}
PLAIN = {
    "mlp.linear1.weight": (torch.randn(INNER, HIDDEN), split_rows),
    "mlp.linear2.weight": (torch.randn(HIDDEN, INNER), split_columns),
    "mlp.linear2.bias": (torch.randn(HIDDEN), copied),
}
IN_THREE = {
    "mlp.w1.weight": (torch.randn(INNER, HIDDEN), split_rows),
    "mlp.w3.weight": (torch.randn(INNER, HIDDEN), split_rows),
    "mlp.w2.weight": (torch.randn(HIDDEN, INNER), split_columns),
}
OF_ENGINE = {
    "attention.qkv.weight": (torch.randn(3 * QUERIES, HIDDEN), split_rows),
    "attention.proj.weight": (torch.randn(HIDDEN, QUERIES), split_columns),
    "mlp.layer_norm_weight": (torch.randn(HIDDEN), copied),
    "mlp.fc1_weight": (torch.randn(2 * INNER, HIDDEN), split_halves),
    "mlp.fc2_weight": (torch.randn(HIDDEN, INNER), split_columns),
}


@pytest.mark.parametrize("has_masters", [False, True])
@pytest.mark.parametrize(
    "layer",
    [
        pytest.param({**LLAMA, **GATED}, id="fewer keys than queries, gated"),
        pytest.param({**LLAMA, **PLAIN}, id="fewer keys than queries"),
        pytest.param({**LLAMA, **IN_THREE}, id="a Llama of older releases"),
        pytest.param(OF_ENGINE, id="Transformer Engine"),
    ],
)
def test_layers_are_joined_by_their_own_names(tmp_path: Path, layer: dict[str, Any], has_masters: bool) -> None:
    """As by ``reshard_and_split_qkv`` and ``convert_neox_to_hf.py``, and also in files of all layers with ZeRO."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "run.yml").write_text("hidden_size: 8")
    ranks = [{key: split(value)[rank].clone() for key, (value, split) in layer.items()} for rank in range(2)]
    prefix = "sequential.2." if has_masters else "2."
    if has_masters:
        for rank, state in enumerate(ranks):
            module = {prefix + key: value.bfloat16() for key, value in state.items()}
            shapes = OrderedDict((key, value.shape) for key, value in module.items())
            held = {"module": module, "buffer_names": [], "param_shapes": [shapes], "mp_world_size": 2}
            torch.save(held, tmp_path / f"mp_rank_{rank:02d}_model_states.pt")
            flat = torch.cat([value.flatten() for value in state.values()])
            root = {"single_partition_of_fp32_groups": [flat], "partition_count": [1], "zero_stage": 1}
            torch.save({"optimizer_state_dict": root}, tmp_path / f"zero_pp_rank_0_mp_rank_{rank:02d}_optim_states.pt")
    else:
        save_layer(tmp_path, 2, ranks)
    got = ckptfix.open_checkpoint(tmp_path).state_dict()
    assert got.keys() == {prefix + key for key in layer}
    assert all(bytes_of(got[prefix + key]) == bytes_of(value) for key, (value, _) in layer.items())


def test_the_bias_of_the_second_matrix_is_a_sum(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "run.yml").write_text(RESIDUAL)
    layer = {**LLAMA, **PLAIN}
    ranks = [{key: split(value)[rank].clone() for key, (value, split) in layer.items()} for rank in range(2)]
    save_layer(tmp_path, 2, ranks)
    got = ckptfix.open_checkpoint(tmp_path).read("2.mlp.linear2.bias")
    assert torch.equal(got, 2 * PLAIN["mlp.linear2.bias"][0])
