"""Ranks of fairscale's FSDP, made by its own rule for the parts of a flat parameter (``_get_shard``)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import ckptfix
from ckptfix.errors import UnreadableError
from ckptfix.reading.folders.rank_shards import rank_shard
from tests.checks import bytes_of

UNITS = {
    "decoder": {"embed.weight": torch.randn(7, 3)},
    "decoder.layers.0": {"fc.weight": torch.randn(5, 3), "fc.bias": torch.randn(5), "norm.weight": torch.randn(1)},
}
WHOLE = {f"{path}.{name}": value for path, unit in UNITS.items() for name, value in unit.items()}


def write_fairscale(folder: Path, world: int, **metadata: Any) -> None:
    folder.mkdir(exist_ok=True)
    for rank in range(world):
        state: dict[str, Any] = {"decoder.version": torch.tensor([3.0])}
        found = []
        for path, unit in UNITS.items():
            flat = torch.cat([value.reshape(-1) for value in unit.values()])
            chunks = [*flat.chunk(world), *[flat[:0]] * world][:world]
            padding = chunks[0].numel() - chunks[rank].numel()
            state[f"{path}.flat_param_0"] = functional.pad(chunks[rank], [0, padding]).clone()
            numels, shapes = [value.numel() for value in unit.values()], [value.shape for value in unit.values()]
            held = {"names": list(unit), "shapes": shapes, "numels": numels, "padding": padding}
            shared = [("decoder.embed.weight", "decoder.output.weight")] if path == "decoder.layers.0" else []
            extra = {"no_broadcast_optim_state": False, "shared_param_info": shared}
            found.append({"fsdp_path": path, "params": {"flat_param_0": held}, **extra, **metadata})
        saved = {"param_metadata": found, "buffer_names": ["decoder.version"]}
        optimizer = {"state": {0: {"step": 1}}, "param_groups": [{"params": [0]}]}
        root: dict[str, Any] = {
            "model": state,
            "shard_metadata": saved,
            "last_optimizer_state": optimizer,
            "extra": {"epoch": 2},
        }
        root |= {"args": None, "optimizer_history": [{"num_updates": 2}], "epoch": 2}  # as fairseq
        torch.save(root, folder / f"checkpoint_last-shard{rank}.pt")


@pytest.mark.parametrize("world", [2, 3, 8, 11])
@pytest.mark.parametrize("given", ["folder", "file"])
def test_the_parts_are_the_whole(tmp_path: Path, world: int, given: str) -> None:
    write_fairscale(tmp_path / "ranks", world)
    source = tmp_path / "ranks" if given == "folder" else tmp_path / "ranks" / "checkpoint_last-shard1.pt"
    assert ckptfix.repair(source, output=tmp_path / "whole.pth").report.exit_code == 0
    got = torch.load(tmp_path / "whole.pth")
    assert got.keys() == {"model", "extra", "args", "optimizer_history", "epoch"}
    weights = got["model"]
    assert weights.keys() == WHOLE.keys() | {"decoder.output.weight", "decoder.version"}
    assert all(
        bytes_of(weights[key]) == bytes_of(value) and weights[key].shape == value.shape for key, value in WHOLE.items()
    )
    assert weights["decoder.output.weight"].data_ptr() == weights["decoder.embed.weight"].data_ptr()


def test_a_missing_rank_is_named_and_the_rest_salvaged(tmp_path: Path) -> None:
    write_fairscale(tmp_path, 8)  # of which the last holds only padding
    (tmp_path / "checkpoint_last-shard6.pt").unlink()
    with pytest.raises(UnreadableError, match=r"checkpoint_last-shard6\.pt; lacks 24 bytes of 3 tensors"):
        ckptfix.open_checkpoint(tmp_path)
    checkpoint = ckptfix.open_checkpoint(tmp_path, salvage=True)
    assert torch.equal(checkpoint.read("decoder.layers.0.fc.weight"), WHOLE["decoder.layers.0.fc.weight"])
    assert "decoder.embed.weight" in checkpoint.lost


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize("change", ["update", "epoch", "world", "dtype"])
def test_a_rank_of_another_save_is_named(tmp_path: Path, odd: int, change: str) -> None:
    write_fairscale(tmp_path, 4)
    write_fairscale(tmp_path / "others", 3)
    file = tmp_path / f"checkpoint_last-shard{odd}.pt"
    root = torch.load(tmp_path / "others" / file.name if change == "world" else file)
    if change == "update":
        root["optimizer_history"][-1]["num_updates"] = 3
    if change == "epoch":
        root["epoch"] = 3
    if change == "dtype":
        root["model"] = {key: value.half() for key, value in root["model"].items()}
    torch.save(root, file)
    with pytest.raises(
        UnreadableError, match=f"different saves: {file.name}, unlike the other 3, by the step, lengths"
    ):
        ckptfix.open_checkpoint(tmp_path)
    salvaged = ckptfix.open_checkpoint(tmp_path, salvage=True)
    file.unlink()
    assert salvaged.keys() == ckptfix.open_checkpoint(tmp_path, salvage=True).keys()


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"no_broadcast_optim_state": True}, "its own experts"),
        (
            {"params": {"flat_param_0": {"names": ["w"], "shapes": [(2, 2)], "numels": [1 << 40]}}},
            r"claims \d+ ranks",
        ),
        ({"params": {"flat_param_0": {"names": ["w"], "shapes": [(-1,)], "numels": [-1]}}}, "not what their framework"),
    ],
)
def test_what_does_not_add_up_is_refused(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    write_fairscale(tmp_path, 2, **metadata)
    with pytest.raises(ckptfix.errors.CkptfixError, match=message):
        ckptfix.open_checkpoint(tmp_path)


def test_a_flat_parameter_that_is_missing_is_named(tmp_path: Path) -> None:
    write_fairscale(tmp_path, 2)
    for file in tmp_path.iterdir():
        root = torch.load(file, weights_only=False)
        del root["model"]["decoder.flat_param_0"]
        torch.save(root, file)
    with pytest.raises(UnreadableError, match="its state_dict lacks some of the 2 flat parameters of the metadata"):
        ckptfix.open_checkpoint(tmp_path)


def test_a_parameter_with_such_a_name_is_one(tmp_path: Path) -> None:
    torch.save({"model": {"flat_param_0": torch.ones(2)}}, tmp_path / "model.pt")
    checkpoint = ckptfix.open_checkpoint(tmp_path / "model.pt")
    assert rank_shard(checkpoint.root, checkpoint.specs) is None


def test_a_rank_alone_is_not_the_model(tmp_path: Path) -> None:
    write_fairscale(tmp_path, 2)
    (tmp_path / "checkpoint_last-shard1.pt").unlink()
    with pytest.raises(UnreadableError, match=r"lacks 1 rank of 2: checkpoint_last-shard1\.pt; lacks \d+ bytes"):
        ckptfix.open_checkpoint(tmp_path)
    (tmp_path / "checkpoint_last-shard0.pt").rename(alone := tmp_path / "model.pt")
    found = [finding for finding in ckptfix.check(alone).findings if finding.code == "FIL105"]
    assert [finding.keys for finding in found] == [("decoder.flat_param_0", "decoder.layers.0.flat_param_0")]
