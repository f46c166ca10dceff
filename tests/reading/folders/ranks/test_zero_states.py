"""DeepSpeed's folders without the model states of the first rank, or of a tensor-parallel rank."""

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfix
from ckptfix.errors import UnreadableError
from tests.checks import bytes_of
from tests.reading.folders.ranks.genuine import unpacked
from tests.reading.folders.ranks.test_zero import TENSORS, write_zero


def _hide(folder: Path, name: str) -> Path:
    """Remove a file of the only tag."""
    (file,) = folder.glob(f"*/{name}")
    file.unlink()
    return file


def _equal(weights: Any, truth: Any) -> bool:
    return all(bytes_of(weights[key]) == bytes_of(truth[key]) for key in weights)


@pytest.mark.parametrize("name", ["zero3_w3_bf16_g2", "zero3_w2_fp32_g1", "zero3_w5_fp16_g9"])
@pytest.mark.parametrize("change", ["missing", "unreadable"])
def test_the_states_of_another_rank_of_stage_3_stand_for_those_of_the_first(
    tmp_path: Path, name: str, change: str
) -> None:
    """Only the shares of frozen weights are lost; ties, which only the first rank lists, are kept."""
    folder, truth = unpacked(name, tmp_path)
    whole = ckptfix.open_checkpoint(folder)
    file = _hide(folder, "zero_pp_rank_0_mp_rank_00_model_states.pt")
    if change == "unreadable":
        file.write_bytes(b"")
    with pytest.raises(UnreadableError, match=rf"{file.name}.* lacks \d+ bytes of 2 tensors .*frozen\.bias are lost"):
        ckptfix.open_checkpoint(folder)
    report = ckptfix.repair(folder, output=tmp_path / "rest.pth", salvage=True).report
    rest = torch.load(tmp_path / "rest.pth")
    module = rest["module"]
    assert truth.keys() - module.keys() == {"frozen.weight", "frozen.bias"}
    assert module["head.weight"].data_ptr() == module["emb.weight"].data_ptr()
    assert _equal(module, {**truth, "scale": whole.read("scale")})
    assert "optimizer" in rest
    assert any("buffers and settings are those of zero_pp_rank_1_" in finding.message for finding in report.findings)


def test_nothing_is_lost_without_frozen_weights(tmp_path: Path) -> None:
    folder, truth = unpacked("autoep_zero3_w4_ep2", tmp_path)
    file = _hide(folder, "zero_pp_rank_0_mp_rank_00_model_states.pt")
    with pytest.raises(UnreadableError, match=f"lacks 1 rank of 4: {file.name}: .* take all 25 tensors with"):
        ckptfix.open_checkpoint(folder)
    weights = {key: value for key, value in truth.items() if "/" not in key}
    assert _equal(weights, ckptfix.open_checkpoint(folder, salvage=True).state_dict())


@pytest.mark.parametrize("name", ["zero1_w3_bf16_g2", "zero2_w2_bf16_g2", "zero2_w5_fp16_g9"])
def test_masters_without_model_states_have_names_and_get_shapes_from_a_target(tmp_path: Path, name: str) -> None:
    folder, truth = unpacked(name, tmp_path)
    whole = ckptfix.open_checkpoint(folder)
    truth = {key: whole.read(key) for key in whole.specs}  # with frozen weights
    file = _hide(folder, "mp_rank_00_model_states.pt")
    with pytest.raises(
        UnreadableError, match=f"lacks the model states {file.name}; tensors with unknown names are lost"
    ):
        ckptfix.open_checkpoint(folder)
    flat = ckptfix.open_checkpoint(folder, salvage=True)
    trained = {"emb", "l1", "l2", "bn", "ln"}
    assert {*flat.keys()} == {key for key in truth if key.partition(".")[0] in trained}
    assert all(bytes_of(flat.read(key)) == bytes_of(truth[key]) for key in flat.specs)
    (finding,) = [each for each in ckptfix.check(folder, salvage=True).findings if "flattened by ZeRO" in each.message]
    assert [remedy.options for remedy in finding.remedies] != []
    like = tmp_path / "like.pth"
    torch.save({key: torch.zeros_like(value) for key, value in truth.items()}, like)
    ckptfix.repair(folder, output=tmp_path / "new.pth", salvage=True, like=like, fill=str(like))
    new = torch.load(tmp_path / "new.pth")
    module = new["module"]
    assert module.keys() == truth.keys()
    assert all(module[key].shape == value.shape for key, value in truth.items())
    assert _equal({key: module[key] for key in flat.specs}, truth)
    assert "optimizer" not in new  # its moments have no shapes either


def test_partitions_of_stage_3_have_no_names(tmp_path: Path) -> None:
    folder, _ = unpacked("zero3_w1_bf16_g1", tmp_path)
    file = _hide(folder, "zero_pp_rank_0_mp_rank_00_model_states.pt")
    for salvage in (False, True):
        with pytest.raises(UnreadableError, match=f"lacks the model states {file.name}; no other file has the names"):
            ckptfix.open_checkpoint(folder, salvage=salvage)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_tensor_parallel_rank_without_model_states_has_its_masters(tmp_path: Path, rank: int) -> None:
    folder, truth = unpacked("tp2_zero2_w4_bf16", tmp_path)
    weights = {key: value for key, value in truth.items() if "/" not in key}
    file = _hide(folder, f"mp_rank_0{rank}_model_states.pt")
    with pytest.raises(
        UnreadableError, match=rf"lacks the model states {file.name}; lacks \d+ bytes of 3 tensors"
    ) as caught:
        ckptfix.open_checkpoint(folder)
    assert {*caught.value.data["lost"]} == {"inv_freq", "frozen.weight", "frozen.bias"}
    got = ckptfix.open_checkpoint(folder, salvage=True)
    assert _equal(got.state_dict(), weights)
    assert {*got.keys()} == weights.keys()
    root: Any = got.root
    assert {*root["optimizer"]["state"]} == {key for key in weights if f"{key}/exp_avg" in truth}


def test_tensor_parallel_ranks_without_any_model_states_are_not_joined(tmp_path: Path) -> None:
    folder, _ = unpacked("tp2_zero2_w4_bf16", tmp_path)
    files = [_hide(folder, f"mp_rank_0{rank}_model_states.pt") for rank in (0, 1)]
    with pytest.raises(UnreadableError, match=f"fetch {files[0].name}, {files[1].name}"):
        ckptfix.open_checkpoint(folder, salvage=True)


def test_experts_are_kept_without_model_states(tmp_path: Path) -> None:
    folder, truth = unpacked("moe_zero0_w2_ep2", tmp_path)
    file = _hide(folder, "mp_rank_00_model_states.pt")
    with pytest.raises(
        UnreadableError, match=f"lacks the model states {file.name}; tensors with unknown names are lost"
    ):
        ckptfix.open_checkpoint(folder)
    got = ckptfix.open_checkpoint(folder, salvage=True)
    assert {*got.keys()} == {key for key in truth if "/" not in key and ".deepspeed_experts." in key}
    assert _equal(got.state_dict(), truth)


class FragmentAddress:
    """Stands for the class of DeepSpeed."""

    def __init__(self, start: int, numel: int) -> None:
        self.start, self.numel = start, numel


def test_slices_that_are_listed_in_another_order_have_their_places(tmp_path: Path) -> None:
    """As with ``round_robin_gradients``."""
    starts = dict(zip(TENSORS, (0, 35, 36), strict=True))
    slices = {name: FragmentAddress(starts[name], TENSORS[name].numel()) for name in reversed(TENSORS)}
    write_zero(tmp_path, TENSORS, world=1, param_slice_mappings=[slices])
    (tmp_path / "mp_rank_00_model_states.pt").unlink()
    got = ckptfix.open_checkpoint(tmp_path, salvage=True).state_dict()
    assert got.keys() == TENSORS.keys()
    assert _equal(got, TENSORS)
