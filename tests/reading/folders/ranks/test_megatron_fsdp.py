"""Folders of Megatron-FSDP (``fsdp_dtensor``): gated layers in halves, and an optimizer under the wrappers' names."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import ckptfix
from ckptfix.core.spec import TensorSpec
from ckptfix.reading.folders.ranks.megatron_fsdp import whole_layers
from tests.checks import bytes_of
from tests.reading.folders.ranks.genuine import unpacked

HALF = TensorSpec("float32", (4, 3), (3, 1))
NORMED = TensorSpec("float32", (4, 1), (1, 1))


def halves(prefix: str = "", mark: bool = True, more: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "model": {
            f"{prefix}mlp.linear_fc1.weight_w": HALF,
            f"{prefix}mlp.linear_fc1.weight_v": HALF,
            **dict.fromkeys(more, HALF),
        },
        **({"checkpoint_version": 3.0} if mark else {}),
    }


@pytest.mark.parametrize(
    "root",
    [
        halves(mark=False),
        {"model": {"a.linear_fc1.weight_g": NORMED, "a.linear_fc1.weight_v": HALF}, "checkpoint_version": 3.0},
        {"model": {"conv.weight_w": HALF, "conv.weight_v": HALF}, "checkpoint_version": 3.0},
        {"model": {"mlp.linear_fc1.weight_v": HALF, "embedding.weight": HALF}, "checkpoint_version": 3.0},
        halves(more=("mlp.linear_fc1.weight",)),
        {"model": {"module.a": HALF, "b": HALF, "module.module": 3}, "checkpoint_version": 3.0},
        {"model.a.linear_fc1.weight_w": HALF, "model.a.linear_fc1.weight_v": HALF, "epoch": 3},
        {"model": HALF, "checkpoint_version": 3.0},
    ],
    ids=["other-program", "weight-norm", "other-layer", "one-half", "whole-too", "not-wrapped", "flat", "one-tensor"],
)
def test_what_is_not_in_halves_stays(root: dict[str, Any]) -> None:
    assert whole_layers(root) == root


@pytest.mark.parametrize(
    "rows",
    [
        {"other": {"exp_avg": HALF}},
        {"module.mlp.linear_fc2.weight": {"exp_avg": HALF}, "module.module.mlp.linear_fc2.weight": {"exp_avg": HALF}},
        {"module.mlp.linear_fc2.weight": 3},
    ],
    ids=["unknown", "twice", "no-rows"],
)
def test_an_optimizer_under_names_of_no_weights_stays(rows: dict[str, Any]) -> None:
    root = {**halves(more=("mlp.linear_fc2.weight",)), "optimizer": {"state": rows, "param_to_group_meta": {}}}
    assert whole_layers(root)["optimizer"] == root["optimizer"]


@pytest.mark.parametrize(
    "other",
    [{"exp_avg": NORMED}, {"exp_avg": HALF, "max_exp_avg_sq": HALF}, {"step": 2}],
    ids=["shape", "fields", "no-moments"],
)
def test_moments_that_do_not_fit_stay_in_halves(other: dict[str, Any]) -> None:
    name = "module.mlp.linear_fc1.weight"
    state = {f"{name}_w": {"exp_avg": HALF}, f"{name}_v": other}
    made = whole_layers({**halves("module."), "optimizer": {"state": state}})
    assert made["optimizer"] == {"state": state}
    assert list(made["model"]) == ["mlp.linear_fc1.weight"]


def test_settings_without_those_of_a_parameter_stay() -> None:
    state = {"module.a": {"exp_avg": HALF}, "module.b": {"exp_avg": HALF}}
    settings = {"module.module.a": {"lr": 0.1}}
    model = {"module.a": HALF, "module.b": HALF}
    root = {"model": model, "checkpoint_version": 3.0, "optimizer": {"state": state, "param_to_group_meta": settings}}
    made = whole_layers(root)["optimizer"]
    assert (list(made["state"]), made["param_to_group_meta"]) == (["a", "b"], settings)


def test_a_genuine_folder_is_what_megatron_trained(tmp_path: Path) -> None:
    folder, truths = unpacked("megatron_fsdp_w2", tmp_path)
    assert not ckptfix.check(folder).findings
    ckptfix.repair(folder, output=tmp_path / "whole.pth")
    whole = torch.load(tmp_path / "whole.pth")
    state, groups = whole["optimizer"]["state"], whole["optimizer"]["param_groups"]
    assert whole["model"].keys() == truths["model"].keys() == state.keys()
    for name, value in truths["model"].items():
        assert (whole["model"][name].shape, bytes_of(whole["model"][name])) == (value.shape, bytes_of(value)), name
        for field in ("exp_avg", "exp_avg_sq"):
            moment, wanted = state[name][field], truths[field][name]
            assert (moment.shape, bytes_of(moment)) == (wanted.shape, bytes_of(wanted)), name
        assert state[name]["step"] == 2
    assert [group["wd_mult"] for group in groups] == [1, 0]
    assert sorted(name for group in groups for name in group["params"]) == sorted(state)


def test_the_names_of_the_converter_are_nested(tmp_path: Path) -> None:
    """Megatron's ``checkpoint_inspector.py`` saves names without nesting."""
    values = {f"decoder.layers.0.mlp.linear_fc1.weight_{end}": torch.randn(3, 4) for end in "wv"}
    saved: dict[str, Any] = {f"model.module.{name}": value for name, value in values.items()}
    for number, field in enumerate(("exp_avg", "exp_avg_sq")):
        saved |= {f"optimizer.state.module.module.module.{name}.{field}": v + number for name, v in values.items()}
    save_dcp({**saved, "checkpoint_version": 3.0}, checkpoint_id=tmp_path)
    ckptfix.repair(tmp_path, output=tmp_path / "whole.pth")
    whole = torch.load(tmp_path / "whole.pth")
    name, wanted = "decoder.layers.0.mlp.linear_fc1.weight", torch.cat([*values.values()])
    assert list(whole["model"]) == [name]
    assert torch.equal(whole["model"][name], wanted)
    assert torch.equal(whole["optimizer"]["state"][name]["exp_avg_sq"], wanted + 1)
