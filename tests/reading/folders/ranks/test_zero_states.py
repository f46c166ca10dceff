"""DeepSpeed's folders without the model states of the first rank, or of a tensor-parallel rank."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfix
from ckptfix.core.facts import Kind
from ckptfix.errors import UnreadableError
from tests.checks import bytes_of
from tests.reading.folders.ranks.genuine import swap, unpacked
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
    lacks = f"lacks the model states {file.name}; tensors with unknown names are lost"
    with pytest.raises(UnreadableError, match=f"{lacks}.*, in one dimension unless a model or another"):
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


@pytest.mark.parametrize("name", ["zero3_w1_bf16_g1", "zero3_w3_bf16_g2"])
def test_partitions_of_stage_3_have_no_names(tmp_path: Path, name: str) -> None:
    """The last rank's optimizer states are missing, too; the others say how many ranks there were."""
    folder, _ = unpacked(name, tmp_path)
    world = int(name[7])
    for file in folder.glob("*/*zero_pp_rank_2_mp_rank_00_optim_states.pt"):
        file.unlink()
    names = [_hide(folder, f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt").name for rank in range(world)]
    for salvage in (False, True):
        with pytest.raises(UnreadableError, match=f"lacks the model states {', '.join(names)}; .* file has the names"):
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


_SPLIT = {"word_embeddings.weight", "dense_h_to_4h.weight", "dense_h_to_4h.bias", "dense_4h_to_h.weight"}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_named", [False, True])
def test_a_lost_tensor_parallel_rank_without_zero_costs_what_was_split(
    tmp_path: Path, rank: int, is_named: bool
) -> None:
    folder, truth = unpacked("autotp_zero0_w2", tmp_path)
    file = _hide(folder, f"mp_rank_0{rank}_model_states.pt")
    weights = {key: value for key, value in truth.items() if key.rpartition(".")[2] == "weight" and "/" not in key}
    split = {key for key in weights if "_proj" in key or key == "lm_head.weight"}
    nbytes = sum(weights[key].numel() * 4 for key in split) // 2
    opened = file.with_name(f"mp_rank_0{1 - rank}_model_states.pt") if is_named else folder
    left_out = "has lost tensors in optimizer, which is left out"
    said = f"lacks the model states {file.name}; {left_out}; lacks {nbytes} bytes of {len(split)} tensors .* lost: "
    with pytest.raises(UnreadableError, match=said) as caught:
        ckptfix.open_checkpoint(opened)
    assert {*caught.value.data["lost"]} == split
    ckptfix.repair(opened, output=tmp_path / "rest.pth", salvage=True)
    rest = torch.load(tmp_path / "rest.pth")
    assert rest["module"].keys() == weights.keys() - split
    assert _equal(rest["module"], weights)
    assert "optimizer" not in rest


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_tensor_parallel_rank_costs_what_was_split(tmp_path: Path, rank: int) -> None:
    folder, truth = unpacked("tp2_zero2_w4_bf16", tmp_path)
    names = [file.name for file in sorted(folder.glob(f"*/*mp_rank_0{rank}*"))]
    for name in names:
        _hide(folder, name)
    moments = sum(truth[key].numel() * 4 * 3 for key in _SPLIT) // 2  # and the masters
    unknown = 3 * 4 + 2 * 8 * 2  # no rule says that inv_freq and the frozen weights are copies
    said = (
        f"model states {names[2]}; lacks 2 ranks of 4: {names[0]}, {names[1]}; lacks {moments + unknown} bytes of 15 "
    )
    with pytest.raises(UnreadableError, match=said):
        ckptfix.open_checkpoint(folder)
    got = ckptfix.open_checkpoint(folder, salvage=True)
    assert {*got.lost} == _SPLIT | {"lm_head.weight", "inv_freq", "frozen.weight", "frozen.bias"}
    assert {*got.keys()} == {"norm.weight", "norm.bias", "dense_4h_to_h.bias"}
    assert _equal(got.state_dict(), truth)


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_masters_of_a_tensor_parallel_rank_that_are_lost_leave_the_copies(tmp_path: Path, damage: str) -> None:
    folder, truth = unpacked("tp2_zero2_w4_bf16", tmp_path)
    whole = ckptfix.open_checkpoint(folder).state_dict()
    for file in sorted(folder.glob("*/*mp_rank_01_optim_states.pt")):
        if damage == "missing":
            _hide(folder, file.name)
        else:
            file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UnreadableError, match=r"_mp_rank_01_optim_states.*take all weights in bfloat16"):
        ckptfix.open_checkpoint(folder)
    got = ckptfix.open_checkpoint(folder, salvage=True)
    assert {*got.lost} == _SPLIT | {"lm_head.weight"}
    assert {"norm.weight", "inv_freq", "frozen.weight"} <= {*got.keys()}
    assert _equal(got.state_dict(), whole)
    copy = ckptfix.open_checkpoint(next(folder.glob("*/mp_rank_00_model_states.pt"))).state_dict()
    assert all(bytes_of(copy[key]) == bytes_of(truth[key].to(copy[key].dtype)) for key in _SPLIT)


@pytest.mark.parametrize("degree", [3000, 1 << 30])
def test_more_tensor_parallel_ranks_than_can_be_listed_are_refused(tmp_path: Path, degree: int) -> None:
    states = {"module": {"w": torch.ones(2)}, "mp_world_size": degree}
    for rank in range(2):
        torch.save(states, tmp_path / f"mp_rank_0{rank}_model_states.pt")
    if degree == 3000:
        with pytest.raises(UnreadableError, match="has files of 2 of 3000 tensor-parallel ranks; fetch the others"):
            ckptfix.open_checkpoint(tmp_path)
    else:
        assert ckptfix.open_checkpoint(tmp_path).keys() == ["w"]


def test_noop_model_states_of_one_rank_are_whole(tmp_path: Path) -> None:
    key = "moe.deepspeed_moe.experts.deepspeed_experts.0.weight"
    facts: list[dict[str, Any]] = [{"mp_world_size": 1}, {}, {"num_experts": []}, {"num_experts": [1]}]
    for number, more in enumerate(facts):
        folder = tmp_path / str(number)
        folder.mkdir()
        file = folder / "mp_rank_00_model_states.pt"
        torch.save({"module": {"w": torch.ones(2), key: torch.ones(2)}, "ds_version": "0.19", **more}, file)
        for path in (folder, file):
            assert ckptfix.open_checkpoint(path).keys() == ["w", key]


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


@pytest.mark.parametrize("name", ["zero3_w1_bf16_g1", "zero3_w2_fp32_g1", "zero3_w3_bf16_g2"])
@pytest.mark.parametrize("is_named", [False, True])
def test_optimizer_states_of_stage_3_that_are_all_missing_are_named(tmp_path: Path, name: str, is_named: bool) -> None:
    """Buffers and frozen weights, which have no masters, are kept."""
    folder, _ = unpacked(name, tmp_path)
    whole = ckptfix.open_checkpoint(folder)
    names = sorted(file.name for file in folder.glob("*/*optim_states.pt"))
    for file in folder.glob("*/*optim_states.pt"):
        file.unlink()
    opened = next(folder.glob("*/*_model_states.pt")) if is_named else folder
    with pytest.raises(UnreadableError, match=f"lacks {len(names)} ranks? of .*{', '.join(names)}; lacks"):
        ckptfix.open_checkpoint(opened)
    got = ckptfix.open_checkpoint(opened, salvage=True)
    assert {*got.keys()} >= {key for key in whole.specs if key.startswith("frozen.") or key in ("scale", "cnt")}
    assert {*got.keys()} | {*got.lost} == {*whole.keys()}
    assert all(bytes_of(value) == bytes_of(whole.read(key)) for key, value in got.state_dict().items())
    assert {"emb.weight", "head.weight", "l1.weight"} <= {*got.lost}


@pytest.mark.parametrize("name", ["zero1_w3_bf16_g2", "zero2_w2_bf16_g2", "tp2_zero2_w4_bf16", "pipeline_pp2"])
def test_model_states_without_masters_have_a_note(tmp_path: Path, name: str) -> None:
    folder, _ = unpacked(name, tmp_path)

    def said() -> list[str]:
        return [each.message for each in ckptfix.check(folder).findings if "has no optimizer states" in each.message]

    assert not said()
    for file in folder.glob("*/*optim_states.pt"):
        file.unlink()
    assert len(said()) == 1
    assert ckptfix.check(folder).exit_code == 0


@pytest.mark.parametrize(("source", "target"), [(1, 0), (0, 1), (2, 0), (0, 2), (1, 2)])
@pytest.mark.parametrize(
    "form", ["bf16_zero_pp_rank_{}_mp_rank_00_optim_states", "zero_pp_rank_{}_mp_rank_00_model_states"]
)
def test_of_two_copies_the_file_with_the_name_of_another_rank_is_named(
    tmp_path: Path, form: str, source: int, target: int
) -> None:
    folder, _ = unpacked("zero3_w3_bf16_g2", tmp_path)
    (tag,) = folder.glob("global_step*")
    shutil.copy(tag / f"{form.format(source)}.pt", tag / f"{form.format(target)}.pt")
    found = ckptfix.open_checkpoint(folder).remarked(Kind.RANK_RENAMED)
    assert [(fact.place, fact.data["other"]) for fact in found] == [(f"{form.format(target)}.pt", form.format(source))]
    assert ckptfix.repair(folder, output=tmp_path / "whole.pth").report.is_refused


@pytest.mark.parametrize(
    ("name", "source", "target"),
    [
        ("zero2_w2_bf16_g2", "bf16_zero_pp_rank_0_mp_rank_00", "bf16_zero_pp_rank_1_mp_rank_00"),
        ("zero2_w3_fp32_g1", "zero_pp_rank_2_mp_rank_00", "zero_pp_rank_0_mp_rank_00"),
        ("tp2_zero2_w4_bf16", "bf16_zero_pp_rank_1_mp_rank_01", "bf16_zero_pp_rank_0_mp_rank_00"),
    ],
)
def test_copies_of_other_sizes_are_named(tmp_path: Path, name: str, source: str, target: str) -> None:
    folder, truth = unpacked(name, tmp_path)
    (tag,) = folder.glob("global_step*")
    shutil.copy(tag / f"{source}_optim_states.pt", tag / f"{target}_optim_states.pt")
    with pytest.raises(UnreadableError, match=f"{target}_optim_states.pt was saved as {source}_optim_states"):
        ckptfix.open_checkpoint(folder)
    got = ckptfix.open_checkpoint(folder, salvage=True).state_dict()
    (tag / f"{target}_optim_states.pt").unlink()
    without = ckptfix.open_checkpoint(folder, salvage=True).state_dict()
    assert got.keys() == without.keys()
    assert 0 < len(got.keys() & truth.keys()) < len(truth)
    assert all(bytes_of(got[key]) == bytes_of(truth[key].to(got[key].dtype)) for key in got.keys() & truth.keys())


def test_swapped_files_are_both_left_out(tmp_path: Path) -> None:
    """Of three files of stage 3 in the order 1, 2, 0, only the last is out of order, and all have the wrong names."""
    folder, truth = unpacked("zero3_w3_bf16_g2", tmp_path)
    (tag,) = folder.glob("global_step*")
    files = [tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(3)]
    swap(files[0], files[1])
    held = ckptfix.open_checkpoint(folder, salvage=True)
    places = [fact.place for fact in held.damage if fact.kind is Kind.RANK_MISPLACED]
    assert places == [file.name for file in files[:2]]
    got = held.state_dict()
    assert all(bytes_of(got[key]) == bytes_of(truth[key].to(got[key].dtype)) for key in got)
    swap(files[1], files[2])
    with pytest.raises(UnreadableError, match="no rank can be read"):
        ckptfix.open_checkpoint(folder, salvage=True)
