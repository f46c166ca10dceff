"""Layers of Mamba and of gated delta nets in Megatron, whose projections are several matrices in one tensor."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import ckptfix
from ckptfix.core.spec import TensorSpec
from ckptfix.errors import UnreadableError
from ckptfix.reading.folders.ranks.mixers import rejoined, split_of
from tests.checks import bytes_of
from tests.reading.folders.ranks.genuine import unpacked
from tests.reading.folders.ranks.test_megatron import write_rank

SPEC = TensorSpec("float32", (4, 3), (3, 1))


@pytest.mark.parametrize(
    "names",
    [
        ["a.in_proj.weight"],
        ["a.in_proj.weight.z", "a.in_proj.weight.x"],
        ["a.conv1d.weight.x", "a.conv1d.weight.B", "a.conv1d.weight.C", "a.conv1d.weight"],
        ["a.linear_fc2.weight_w", "a.linear_fc2.weight_v"],
        ["a.query", "a.key", "a.value"],
    ],
    ids=["whole", "not-all", "whole-and-matrices", "not-gated", "not-in-a-tensor"],
)
def test_what_is_not_one_tensor_stays(names: list[str]) -> None:
    entries = dict.fromkeys(names, SPEC)
    assert rejoined(entries) == entries


def test_matrices_of_other_shapes_stay() -> None:
    entries = {"linear_fc1.weight_w": SPEC, "linear_fc1.weight_v": TensorSpec("float32", (4, 5), (5, 1))}
    assert rejoined(entries) == entries


@pytest.mark.parametrize("change", ["rows", "filters", "no-output"])
def test_layers_of_other_sizes_are_not_known(change: str) -> None:
    """Mamba with 8 inner columns, groups of 4 and 2 heads."""
    shapes = {
        "in_proj.weight": (26, 6),
        "conv1d.weight": (16, 1, 4),
        "A_log": (2,),
        "D": (2,),
        "out_proj.weight": (6, 8),
    }
    state = {f"mixer.{name}": TensorSpec("float32", shape, ()) for name, shape in shapes.items()}
    parts = [state["mixer.in_proj.weight"]] * 2
    split = split_of("mixer.in_proj.weight", parts, state)
    assert split is not None
    assert split.shape == (52, 6)
    changed = {"rows": ("in_proj.weight", (27, 6)), "filters": ("conv1d.weight", (17, 1, 4))}
    if change in changed:
        name, shape = changed[change]
        state[f"mixer.{name}"] = TensorSpec("float32", shape, ())
    else:
        del state["mixer.out_proj.weight"]
    assert split_of("mixer.in_proj.weight", parts, state) is None


@pytest.mark.parametrize("kind", ["mamba", "gdn", "mamba_dist", "gdn_dist"])
def test_genuine_layers_are_what_megatron_loads_on_one(tmp_path: Path, kind: str) -> None:
    folder, truths = unpacked("megatron_mixers_tp2", tmp_path)
    got = ckptfix.open_checkpoint(folder / kind).state_dict()
    for key, value in truths[kind.removesuffix("_dist")].items():
        if kind.endswith("_dist"):  # names on disk
            key = key.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
            key = key.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_").replace("conv1d_", "conv1d.")
        key = key if key in got else key.replace(".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm.")
        key = key if key in got else key.replace(".self_attention.linear_qkv.layer_norm_", ".input_layernorm.")
        assert (got[key].shape, bytes_of(got[key])) == (value.shape, bytes_of(value)), key
        del got[key]
    assert not [key for key in got if not key.endswith("_extra_state")]


def test_a_layer_that_is_not_known_is_refused(tmp_path: Path) -> None:
    for rank in range(2):
        state = {"decoder.layers.0.mixer.in_proj.weight": torch.randn(26, 6), "decoder.layers.0.mixer.D": torch.ones(2)}
        write_rank(tmp_path / f"mp_rank_{rank:02d}", state, tensor=2)
    with pytest.raises(UnreadableError, match=r"different values of decoder.layers.0.mixer.in_proj.weight"):
        ckptfix.open_checkpoint(tmp_path)


def test_halves_and_moments_are_joined_in_torch_dist(tmp_path: Path) -> None:
    """As layers that were saved separately (``singleton_local_shards``) have them."""
    halves = {f"decoder.layers.0.mlp.linear_fc1.weight_{end}": torch.randn(3, 4) for end in "wv"}
    saved: dict[str, Any] = {key: value.bfloat16() for key, value in halves.items()}
    for number, field in enumerate(("fp32_param", "exp_avg", "exp_avg_sq")):
        saved |= {f"optimizer.state.{field}.{key}": value + number for key, value in halves.items()}
    save_dcp(saved, checkpoint_id=tmp_path)
    torch.save({"iteration": 3, "optimizer": {"param_groups": [{"lr": 0.1}]}}, tmp_path / "common.pt")
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    ckptfix.repair(tmp_path, output=tmp_path / "whole.pth")
    whole = torch.load(tmp_path / "whole.pth")
    name, wanted = "decoder.layers.0.mlp.linear_fc1.weight", torch.cat([*halves.values()])
    assert torch.equal(whole["model"][name], wanted)
    assert torch.equal(whole["optimizer"]["state"][name]["exp_avg_sq"], wanted + 2)
    assert whole["model"].keys() == whole["optimizer"]["state"].keys() == {name}
