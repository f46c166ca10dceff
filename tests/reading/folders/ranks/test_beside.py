"""Optimizers in separate files and folders next to the ranks of a model, as verl and accelerate save them."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfix
from ckptfix.core.facts import Kind
from ckptfix.errors import UnreadableError
from tests.checks import bytes_of
from tests.reading.folders.ranks.genuine import unpacked
from tests.reading.folders.ranks.test_fsdp import dtensor

WHOLE = torch.arange(12.0).reshape(6, 2)
VERL = ("model_world_size_2_rank_{}.pt", "optim_world_size_2_rank_{}.pt")
TORCH_CHECKPOINTING = ("model_{}.pt", "optimizer_{}.pt")
ACCELERATE = ("pytorch_model_fsdp_0_rank{}.bin", "optimizer_0_rank{}.bin")


def optimizer(name: object, moment: Any, step: float = 3.0) -> dict[str, Any]:
    return {
        "state": {name: {"step": torch.tensor(step), "exp_avg": moment}},
        "param_groups": [{"lr": 0.1, "params": [name]}],
    }


def save(folder: Path, names: tuple[str, str], name: object) -> None:
    for rank in range(2):
        torch.save({"w": dtensor(rank, WHOLE), "mean": torch.ones(2)}, folder / names[0].format(rank))
        torch.save(optimizer(name, dtensor(rank, WHOLE + 1)), folder / names[1].format(rank))
    if names is TORCH_CHECKPOINTING:
        (folder / "metadata.pkl").write_bytes(pickle.dumps({"metadata": {}, "world_size": 2, "version": "2.0"}))


def left_out(checkpoint: ckptfix.Checkpoint) -> dict[str, str]:
    return {fact.place: fact.data["why"] for fact in checkpoint.remarks if fact.kind is Kind.RANK_LEFT_OUT}


@pytest.mark.parametrize(
    ("names", "name"),
    [(VERL, 0), (ACCELERATE, "w"), (TORCH_CHECKPOINTING, "w")],
    ids=["verl", "accelerate", "torch_checkpointing"],
)
@pytest.mark.parametrize("given", ["", "model", "optimizer"])
def test_the_optimizer_is_read_with_the_model(tmp_path: Path, names: tuple[str, str], name: object, given: str) -> None:
    save(tmp_path, names, name)
    source = tmp_path / names[given == "optimizer"].format(1) if given else tmp_path
    ckptfix.repair(source, output=(out := tmp_path / "whole.pth"))
    whole = torch.load(out, weights_only=True)
    assert torch.equal(whole["model"]["w"], WHOLE)
    assert torch.equal(whole["optimizer"]["state"][name]["exp_avg"], WHOLE + 1)
    assert whole["optimizer"]["param_groups"] == [{"lr": 0.1, "params": [name]}]


def test_noop_numbers_are_ranks_only_next_to_the_metadata(tmp_path: Path) -> None:
    save(tmp_path, TORCH_CHECKPOINTING, "w")
    (tmp_path / "metadata.pkl").unlink()
    with pytest.raises(ckptfix.UnreadableError, match="not a sharded checkpoint; name one of the files"):
        ckptfix.open_checkpoint(tmp_path)


def test_what_else_is_next_to_the_model_is_named(tmp_path: Path) -> None:
    save(tmp_path, VERL, 0)
    for rank in range(2):
        torch.save({"rng": {"cpu": torch.get_rng_state()}}, tmp_path / f"extra_state_world_size_2_rank_{rank}.pt")
    assert left_out(ckptfix.open_checkpoint(tmp_path)) == {"extra_state_world_size_2_rank_*.pt": ""}
    (found,) = ckptfix.check(tmp_path).findings
    assert found.message.endswith("cannot be merged and is left out: extra_state_world_size_2_rank_*.pt")


def test_an_optimizer_that_lacks_a_rank_is_lost(tmp_path: Path) -> None:
    save(tmp_path, ACCELERATE, "w")
    (tmp_path / "optimizer_0_rank1.bin").unlink()
    with pytest.raises(UnreadableError, match=r"lacks 1 rank of 2: optimizer_0_rank1\.bin"):
        ckptfix.open_checkpoint(tmp_path)
    report = ckptfix.repair(tmp_path, output=tmp_path / "whole.pth", salvage=True).report
    assert (report.exit_code, [finding.code for finding in report.left]) == (1, ["FIL203"])
    whole = torch.load(tmp_path / "whole.pth")
    assert list(whole) == ["w", "mean"]
    assert torch.equal(whole["w"], WHOLE)


def test_an_optimizer_that_cannot_be_merged_leaves_the_weights_unchanged(tmp_path: Path) -> None:
    """An optimizer that comes from two saves, or has only flat parameters."""
    save(tmp_path, ACCELERATE, "w")
    one, other = (tmp_path / ACCELERATE[1].format(rank) for rank in range(2))
    for why in ("optimizer_0_rank1.bin, unlike the other 1, by the state.w.step", ""):
        if why:
            torch.save(optimizer("w", dtensor(1, WHOLE + 1), step=4.0), other)
        else:
            for rank, file in enumerate((one, other)):
                torch.save(optimizer(0, torch.full((6,), float(rank))), file)
        checkpoint: Any = ckptfix.open_checkpoint(tmp_path)
        assert torch.equal(checkpoint.read("w"), WHOLE)
        assert (list(checkpoint.damage), list(checkpoint.root)) == ([], ["w", "mean"])
        ((place, found),) = left_out(checkpoint).items()
        assert (place, why in found) == ("optimizer_0_rank*.bin", True), found


def test_the_optimizer_of_another_set_is_not_taken(tmp_path: Path) -> None:
    save(tmp_path, VERL, 0)
    for rank in range(2):
        torch.save({"w": dtensor(rank, WHOLE + 2)}, tmp_path / f"model_ema_world_size_2_rank_{rank}.pt")
    checkpoint: Any = ckptfix.open_checkpoint(tmp_path / "model_ema_world_size_2_rank_0.pt")
    assert torch.equal(checkpoint.read("w"), WHOLE + 2)
    assert list(checkpoint.root) == ["w"]


def tie_in_ranks(folder: Path, key: str, other: str) -> None:
    """Add a second name of a weight to the files of two ranks."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for rank in range(2):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        root = torch.load(folder / f"model.rank_{rank}.pth", weights_only=False)
        root["model"][other] = root["model"][key]
        torch.save(root, folder / f"model.rank_{rank}.pth")
        dist.destroy_process_group()


@pytest.mark.parametrize("frozen", [False, True])
def test_moments_by_name_have_the_shapes_of_flattened_weights(tmp_path: Path, frozen: bool) -> None:
    """As accelerate's folder of torch.distributed.checkpoint next to ``LOCAL_STATE_DICT``.

    The optimizer has tied weights once."""
    from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

    folder, truth = unpacked("fsdp1_local_names_w2", tmp_path)
    weights = truth.get("model", truth)
    tie_in_ranks(folder, "head.weight", "tied.weight")
    flat = {key: value for key, value in weights.items() if value.dim() > 1}
    moments = {key: {"exp_avg": torch.zeros_like(value)} for key, value in weights.items()}
    if frozen:
        del moments[next(iter(flat))]
    state = {"optimizer": {"state": moments, "param_groups": [{"params": list(moments)}]}}
    save_dcp(state, checkpoint_id=folder / "optimizer_0", no_dist=True)
    weights["tied.weight"] = weights["head.weight"]
    got = ckptfix.open_checkpoint(folder)
    assert got.keys() == list(weights)
    assert got.specs["tied.weight"] is got.specs["head.weight"]
    assert [key for key, spec in got.specs.items() if spec.shape != weights[key].shape] == list(flat)[:frozen]
    assert all(bytes_of(got.read(key)) == bytes_of(value) for key, value in weights.items())
    assert ("FIL105" in [finding.code for finding in ckptfix.check(folder).findings if finding.level]) is frozen
