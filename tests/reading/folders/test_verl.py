"""The folders of verl's saves with Megatron, each a ``torch_dist``: weights, optimizer and random states."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import ckptfix
from ckptfix.core.facts import Kind
from ckptfix.errors import UnreadableError
from ckptfix.reading.folders.rank_shards import OF_VERL
from tests.cli.programs import run_here

STACK = "decoder.layers.mlp.linear_fc1.weight"
NAMES = [f"decoder.layers.{number}.mlp.linear_fc1.weight" for number in range(2)]
WEIGHTS = torch.arange(24.0).reshape(2, 3, 4) + 0.001


def write_part(folder: Path, held: dict[str, Any], **common: Any) -> None:
    save_dcp(
        {**held, "common_state/shard_0_1": [{"content_metadata": {"singleton_local_shards": False}, **common}]},
        checkpoint_id=folder,
    )
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')


def write_verl(folder: Path) -> None:
    """Write a save as verl 0.9 with megatron-core 0.19 does, in bfloat16."""
    fields = enumerate(("fp32_param", "exp_avg", "exp_avg_sq"))
    moments = {f"optimizer.state.{field}.{STACK}": WEIGHTS + 100 * number for number, field in fields}
    groups = [{"lr": 0.1, "wd_mult": 1.0, "params": [0]}]
    optimizer = {"optimizer": {"param_groups": groups, "state": {"common_step": torch.tensor(2)}}}
    write_part(folder / OF_VERL[0], {STACK: WEIGHTS.bfloat16()})
    write_part(folder / OF_VERL[1], moments, optimizer=optimizer, lr_scheduler={"num_steps": 2})
    write_part(folder / OF_VERL[2], {"rng_state/shard_0.0_1.1": [{"torch_rng_state": torch.get_rng_state()}]})
    (folder / "model" / "huggingface").mkdir()
    (folder / "model" / "huggingface" / "config.json").write_text("{}")
    (folder / "ckpt_contents.json").write_text("{}")


@pytest.mark.parametrize("named", ["", "global_step_2", "global_step_2/actor"])
def test_the_parts_are_one_checkpoint(tmp_path: Path, named: str) -> None:
    write_verl(tmp_path / "run" / "global_step_2" / "actor")
    ckptfix.repair(tmp_path / "run" / named, output=tmp_path / "whole.pth")
    whole = torch.load(tmp_path / "whole.pth")
    state = whole["optimizer"]["state"]
    for number, name in enumerate(NAMES):
        assert torch.equal(whole["model"][name], WEIGHTS[number])
        assert torch.equal(state[name]["exp_avg_sq"], WEIGHTS[number] + 200)
        assert state[name]["step"] == 2
    assert whole["optimizer"]["param_groups"][0]["params"] == NAMES
    assert whole["lr_scheduler"] == {"num_steps": 2}
    assert whole["rng_state/shard_0.0_1.1"][0]["torch_rng_state"].numel() == 5056


def test_a_check_of_the_folder_above_has_one_report(tmp_path: Path) -> None:
    write_verl(tmp_path / "global_step_2" / "actor")
    result = run_here("check", tmp_path, cwd=tmp_path)
    assert result.returncode == 0
    assert "nothing wrong in the weights under model" in result.stdout
    assert "dist_ckpt" not in result.stdout


def test_the_weights_alone_are_a_checkpoint(tmp_path: Path) -> None:
    write_verl(tmp_path)
    got = ckptfix.open_checkpoint(tmp_path / "model").state_dict()
    assert {key: value.dtype for key, value in got.items()} == dict.fromkeys(NAMES, torch.bfloat16)


def test_weights_in_two_forms_are_both_named(tmp_path: Path) -> None:
    write_verl(tmp_path)
    save_file({"a": torch.ones(2)}, tmp_path / "model" / "huggingface" / "model.safetensors")
    with pytest.raises(UnreadableError, match=r"name one of .*model/dist_ckpt"):
        ckptfix.open_checkpoint(tmp_path)


def test_weights_of_transformers_beside_the_optimizer_are_the_checkpoint(tmp_path: Path) -> None:
    """As verl writes them unless it is told to use ``dist_checkpointing``."""
    write_verl(tmp_path)
    for file in (tmp_path / OF_VERL[0]).iterdir():
        file.unlink()
    save_file({"a": torch.ones(2)}, tmp_path / "model" / "huggingface" / "model.safetensors")
    assert ckptfix.open_checkpoint(tmp_path).keys() == ["a"]


def test_an_optimizer_that_cannot_be_read_is_damage(tmp_path: Path) -> None:
    write_verl(tmp_path)
    (tmp_path / OF_VERL[1] / ".metadata").write_bytes(b"x")
    with pytest.raises(UnreadableError, match="optimizer/dist_ckpt"):
        ckptfix.open_checkpoint(tmp_path)
    opened = ckptfix.open_checkpoint(tmp_path, salvage=True)
    assert opened.keys() == NAMES
    assert [fact.kind for fact in opened.damage] == [Kind.SHARD_UNREADABLE]


def test_parts_of_two_saves_are_refused(tmp_path: Path) -> None:
    write_verl(tmp_path)
    write_part(tmp_path / OF_VERL[1], {STACK: WEIGHTS}, args=Namespace(num_layers=2))
    with pytest.raises(UnreadableError, match=r"as do the weights; the folders are from two saves"):
        ckptfix.open_checkpoint(tmp_path)
