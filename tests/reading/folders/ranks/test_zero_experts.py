"""The files of experts in DeepSpeed's folders: what is lost with one that is missing."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfix
from ckptfix.core.facts import Kind
from ckptfix.errors import HostileError, UnreadableError
from tests.checks import bytes_of
from tests.reading.folders.ranks.genuine import unpacked

LOST = "two.deepspeed_moe.experts.deepspeed_experts.5."


def _lacking(checkpoint: ckptfix.Checkpoint) -> list[str]:
    return [name for fact in checkpoint.remarked(Kind.EXPERTS_LACKING) for name in fact.data["names"]]


@pytest.mark.parametrize(
    "name", ["moe_w4_ep2", "moe_zero0_w2_ep2", "moe_zero1_w4_ep2", "autoep_w4_ep2", "autoep_zero3_w4_ep2"]
)
def test_noop_genuine_saves_have_all_files_of_experts(tmp_path: Path, name: str) -> None:
    folder, _ = unpacked(name, tmp_path)
    checkpoint = ckptfix.open_checkpoint(folder)
    assert (_lacking(checkpoint), list(checkpoint.damage)) == ([], [])


@pytest.mark.parametrize("change", ["missing", "unreadable"])
def test_a_missing_expert_without_masters_costs_its_own_weights(tmp_path: Path, change: str) -> None:
    """The optimizer is whole."""
    folder, truth = unpacked("moe_zero0_w2_ep2", tmp_path)
    (file,) = folder.glob("*/layer_1_expert_5_*")
    if change == "missing":
        file.unlink()
        said = (
            rf"lacks the file of 1 of 12 experts: {file.name}; lacks 84 bytes of 2 tensors .* are lost: fetch the mis"
        )
    else:
        file.write_bytes(b"")
        said = rf"cannot be read.*{file.name}.*; lacks 84 bytes of 2 tensors .* are lost: fetch the file"
    with pytest.raises(UnreadableError, match=said) as caught:
        ckptfix.open_checkpoint(folder)
    assert caught.value.data["lost"] == {f"{LOST}weight": ["bfloat16", [6, 6]], f"{LOST}bias": ["bfloat16", [6]]}
    ckptfix.repair(folder, output=tmp_path / "rest.pth", salvage=True)
    rest = torch.load(tmp_path / "rest.pth")
    weights = {key: value for key, value in truth.items() if "/" not in key and not key.startswith(LOST)}
    assert rest["module"].keys() - {"cnt"} == weights.keys()
    assert all(bytes_of(rest["module"][key]) == bytes_of(value) for key, value in weights.items())
    assert "optimizer" in rest


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("change", ["missing", "unreadable"])
def test_the_optimizer_of_lost_experts_is_named_with_its_bytes(tmp_path: Path, change: str, rank: int) -> None:
    folder, truth = unpacked("moe_zero0_w2_ep2", tmp_path)
    (file,) = folder.glob(f"*/expp_rank_{rank}_*")
    saved: Any = torch.load(file, weights_only=False)["optimizer"]
    inner, masters = saved["optimizer_state_dict"], saved["fp32_groups"]
    groups = [(at, group) for at, group in enumerate(inner["param_groups"]) if group.get("moe")]
    rows = [inner["state"][number] for _, group in groups for number in group["params"]]
    held = [value for row in rows for value in row.values() if isinstance(value, torch.Tensor)]
    held += [master for at, _ in groups for master in masters[at]]
    if change == "missing":
        file.unlink()
    else:
        file.write_bytes(b"")
    with pytest.raises(UnreadableError, match=f"{file.name}.*take all 46 tensors with"):
        ckptfix.open_checkpoint(folder)
    got = ckptfix.open_checkpoint(folder, salvage=True)
    (fact,) = [fact for fact in got.damage if fact.kind is Kind.BYTES_LACKING]
    assert (fact.data["nbytes"], len(fact.data["keys"])) == (sum(value.nbytes for value in held), len(held))
    number = 4 * rank  # of eight experts
    assert f"exp_avg of two.deepspeed_moe.experts.deepspeed_experts.{number}.weight" in fact.data["keys"]
    assert [fact.place for fact in got.damage if fact.kind is Kind.EXTRAS_LOST] == ["optimizer"]
    report = ckptfix.repair(folder, output=tmp_path / "rest.pth", salvage=True).report
    assert report.exit_code == 1
    rest = torch.load(tmp_path / "rest.pth")
    assert all(bytes_of(value) == bytes_of(truth[key]) for key, value in rest["module"].items() if key in truth)
    assert "optimizer" not in rest


def test_experts_of_a_layer_without_any_file_have_no_names(tmp_path: Path) -> None:
    folder, truth = unpacked("moe_zero0_w2_ep2", tmp_path)
    for file in folder.glob("*/layer_1_*"):
        file.unlink()
    with pytest.raises(
        UnreadableError, match=r"files of 8 of 12 experts: .*unknown names .* experts of layer 1: fetch"
    ):
        ckptfix.open_checkpoint(folder)
    got = ckptfix.open_checkpoint(folder, salvage=True)
    assert {*got.keys()} - {"cnt"} == {key for key in truth if "/" not in key and "two.deepspeed_moe.exp" not in key}


@pytest.mark.parametrize("is_named", [False, True])
def test_model_states_say_that_there_are_experts(tmp_path: Path, is_named: bool) -> None:
    folder, truth = unpacked("moe_zero0_w2_ep2", tmp_path)
    for file in [*folder.glob("*/layer_*"), *folder.glob("*/expp_*")]:
        file.unlink()
    (states,) = folder.glob("*/*.pt")
    opened = states if is_named else folder
    said = "files of 12 of 12 experts: layer_0_expert_0_mp_rank_00_model_states.pt, .* and 8 more; .*unknown names .* "
    with pytest.raises(UnreadableError, match=f"{said}experts of layer 0; experts of layer 1: fetch the missing files"):
        ckptfix.open_checkpoint(opened)
    got = ckptfix.open_checkpoint(opened, salvage=True)
    assert {*got.keys()} - {"cnt"} == {key for key in truth if "/" not in key and ".deepspeed_experts." not in key}
    assert all(bytes_of(value) == bytes_of(truth[key]) for key, value in got.state_dict().items() if key in truth)
    root: Any = got.root
    assert "optimizer" not in root  # it has the moments of some experts only


@pytest.mark.parametrize("name", ["moe_w4_ep2", "moe_zero1_w4_ep2", "autoep_w4_ep2"])
@pytest.mark.parametrize("lost", ["layer_1_expert_2_*", "layer_*"])
def test_an_expert_with_masters_is_only_noted(tmp_path: Path, name: str, lost: str) -> None:
    folder, truth = unpacked(name, tmp_path)
    files = sorted(folder.glob(f"*/{lost}"))
    for file in files:
        file.unlink()
    checkpoint = ckptfix.open_checkpoint(folder)
    assert (_lacking(checkpoint), list(checkpoint.damage)) == ([file.name for file in files][:4], [])
    got = checkpoint.state_dict()
    assert all(bytes_of(got[key]) == bytes_of(value) for key, value in truth.items() if "/" not in key)
    (note,) = [each.message for each in ckptfix.check(folder).findings if "DeepSpeed does not resume" in each.message]
    assert files[0].name in note


@pytest.mark.parametrize("name", ["moe_zero1_w4_ep2", "autoep_w4_ep2"])
@pytest.mark.parametrize("left", [0.0, 0.5])
def test_a_damaged_expert_with_masters_is_only_noted(tmp_path: Path, name: str, left: float) -> None:
    folder, truth = unpacked(name, tmp_path)
    (file,) = folder.glob("*/layer_1_expert_2_*")
    file.write_bytes((data := file.read_bytes())[: int(len(data) * left)])
    checkpoint = ckptfix.open_checkpoint(folder)
    assert [fact.data["names"] for fact in checkpoint.remarked(Kind.EXPERTS_DAMAGED)] == [(file.name,)]
    got = checkpoint.state_dict()
    assert all(bytes_of(got[key]) == bytes_of(value) for key, value in truth.items() if "/" not in key)
    (states,) = folder.glob("*/*_1_mp_rank_00_optim_states.pt")
    states.unlink()
    with pytest.raises(UnreadableError, match=states.name) as caught:
        ckptfix.open_checkpoint(folder)
    assert "take all weights in" not in str(caught.value)  # this expert's are not there


def test_a_missing_part_of_a_stack_costs_the_stack(tmp_path: Path) -> None:
    folder, truth = unpacked("autoep_w4_ep2", tmp_path)
    for file in [*folder.glob("*/*optim_states.pt"), *folder.glob("*/layer_1_expert_2_*")]:
        file.unlink()
    got = ckptfix.open_checkpoint(folder, salvage=True)
    stacks = {f"model.layers.1.mlp.experts.w{number}" for number in (1, 2, 3)}
    assert {*got.lost} == stacks
    (fact,) = [fact for fact in got.damage if fact.kind is Kind.BYTES_LACKING]
    assert fact.data["nbytes"] == sum(truth[key].numel() for key in stacks) // 4 * 2  # of four experts, in bfloat16


@pytest.mark.parametrize("by_all", [True, False])
def test_tensor_parallel_ranks_have_files_of_their_own_if_most_experts_do(tmp_path: Path, by_all: bool) -> None:
    for rank in range(2):
        states: dict[str, Any] = {"module": {"w": torch.ones(2)}, "mp_world_size": 2, "num_experts": [3]}
        torch.save(states, tmp_path / f"mp_rank_0{rank}_model_states.pt")
        for expert in range(3):
            key = f"moe.deepspeed_experts.{expert}.weight"
            if (by_all and (expert, rank) != (1, 1)) or (not by_all and rank == 0):
                file = tmp_path / f"layer_0_expert_{expert}_mp_rank_0{rank}_model_states.pt"
                torch.save({key: torch.full((2,), float(expert))}, file)
    said = "layer_0_expert_1_mp_rank_01" if by_all else "1 of 2 ranks hold moe.deepspeed_experts.0.weight"
    with pytest.raises(UnreadableError, match=said):
        ckptfix.open_checkpoint(tmp_path)


def test_more_experts_than_any_model_has_are_refused(tmp_path: Path) -> None:
    states: dict[str, Any] = {"module": {"w": torch.ones(2)}, "num_experts": [1 << 19, 1 << 20]}
    torch.save(states, tmp_path / "mp_rank_00_model_states.pt")
    torch.save(
        {"moe.deepspeed_experts.0.weight": torch.ones(2)}, tmp_path / "layer_0_expert_0_mp_rank_00_model_states.pt"
    )
    with pytest.raises(HostileError, match="claims 1572864 experts"):
        ckptfix.open_checkpoint(tmp_path)


@pytest.mark.parametrize("sample", ["moe_w4_ep2", "moe_zero0_w2_ep2"])
def test_the_file_of_another_expert_is_named_and_not_used(tmp_path: Path, sample: str) -> None:
    """In ZeRO, the optimizer states have the masters of its weights."""
    saved, _ = unpacked(sample, tmp_path)
    truth = ckptfix.open_checkpoint(saved).state_dict()
    (folder,) = saved.glob("global_step*")
    name = "layer_1_expert_0_mp_rank_00_model_states.pt"
    shutil.copy(folder / name.replace("expert_0", "expert_3"), folder / name)
    match = rf"cannot be used \({name} has the data of (two|moe2)\.deepspeed_moe\.experts\.deepspeed_experts\.3\."
    with pytest.raises(UnreadableError, match=match):
        ckptfix.open_checkpoint(saved)
    found = ckptfix.open_checkpoint(saved, salvage=True)
    gone = {"two.deepspeed_moe.experts.deepspeed_experts.0"} if sample == "moe_zero0_w2_ep2" else set()
    assert {key.rpartition(".")[0] for key in found.lost} == gone
    got = found.state_dict()
    assert got.keys() == truth.keys() - found.lost.keys()
    assert all(bytes_of(got[key]) == bytes_of(truth[key]) for key in got)
