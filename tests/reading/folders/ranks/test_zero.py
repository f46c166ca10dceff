"""ZeRO folders that DeepSpeed wrote, compared with the result of its own ``zero_to_fp32``."""

import math
import shutil
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfix
from ckptfix.bytes.sources import Content
from ckptfix.core.facts import Kind
from ckptfix.core.objects import tensors_in
from ckptfix.errors import HostileError, UnreadableError, UsageError
from ckptfix.reading.boxes import row_major_bytes
from ckptfix.reading.formats import read_document
from ckptfix.report.advice import remedies_text
from tests.checks import bytes_of
from tests.cli.programs import run_here
from tests.reading.folders.ranks.genuine import SAMPLES, swap, unpacked

TENSORS = {"a": torch.arange(35.0).reshape(5, 7), "b": torch.tensor(99.0), "c": torch.arange(100.0, 113.0)}
NAMES = sorted(path.name.removesuffix(".tar.xz") for path in SAMPLES.glob("zero*"))
TAG = "global_step2"


def saved(tmp_path: Path, name: str = "zero2_w3_fp32_g1") -> tuple[Path, Any]:
    return unpacked(name, tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_every_stage_is_what_zero_to_fp32_makes_of_it(tmp_path: Path, name: str) -> None:
    folder, truth = saved(tmp_path, name)
    got = ckptfix.open_checkpoint(folder).state_dict()
    # What ZeRO 1 does not write for frozen parameters is in the model states, and zero_to_fp32 loses it.
    assert got.keys() - truth.keys() == ({"frozen.weight", "frozen.bias"} if name.startswith("zero1") else set())
    for key, value in truth.items():
        assert got[key].shape == value.shape, key
        assert bytes_of(got[key].to(value.dtype)) == bytes_of(value), key


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_plain_and_has_the_optimizer_by_name(tmp_path: Path, name: str) -> None:
    folder, truth = saved(tmp_path, name)
    repaired = ckptfix.repair(folder, output=tmp_path / "whole.pth")
    assert [finding.code for finding in repaired.report.findings if finding.level] == []
    whole = torch.load(tmp_path / "whole.pth")
    assert not any(tensor.requires_grad for tensor in whole["module"].values())
    assert whole["global_steps"] == 2
    assert whole["module"]["head.weight"].data_ptr() == whole["module"]["emb.weight"].data_ptr()
    state, groups = whole["optimizer"]["state"], whole["optimizer"]["param_groups"]
    names = [key for group in groups for key in group["params"]]
    assert sorted(names) == sorted(state) == sorted(truth.keys() - {"head.weight", "scale", "cnt"} - FROZEN)
    assert {len(group["params"]) for group in groups} == {"g1": {9}, "g2": {3, 6}, "g9": {1}}[name[-2:]]
    counts = [row["step"] for row in state.values() if isinstance(row["step"], torch.Tensor)]
    assert len({count.data_ptr() for count in counts}) == len(counts), "an optimizer adds to each in place"
    for key, moments in state.items():
        assert moments["step"] == 2
        assert moments["exp_avg"].shape == moments["exp_avg_sq"].shape == truth[key].shape
        assert bool((moments["exp_avg_sq"] >= 0).all())


@pytest.mark.parametrize("name", ["zero2_w2_bf16_g2", "zero3_w2_fp32_g1"])
def test_what_lightning_saved_has_the_names_that_its_trainer_reads(tmp_path: Path, name: str) -> None:
    folder, _ = saved(tmp_path, name)
    plain = torch.load(ckptfix.repair(folder, output=tmp_path / "plain.pth").report.output or "")
    for file in folder.glob("*/*model_states.pt"):
        _change(file, methodcaller("update", {"pytorch-lightning_version": "2.6.6", "hyper_parameters": {"lr": 1e-3}}))
    ckptfix.repair(folder, output=tmp_path / "whole.ckpt")
    whole = torch.load(tmp_path / "whole.ckpt")
    assert not whole.keys() & {"module", "optimizer"}
    assert whole["hyper_parameters"] == {"lr": 1e-3}
    assert whole["state_dict"].keys() == plain["module"].keys()
    assert all(bytes_of(value) == bytes_of(plain["module"][key]) for key, value in whole["state_dict"].items())
    (optimizer,) = whole["optimizer_states"]
    assert optimizer["param_groups"] == plain["optimizer"]["param_groups"]
    assert optimizer["state"].keys() == plain["optimizer"]["state"].keys()
    ckptfix.repair(folder, output=tmp_path / "universal", format="universal")
    again: Any = ckptfix.open_checkpoint(tmp_path / "universal").root
    assert again["optimizer"]["state"].keys() == optimizer["state"].keys()
    assert again["pytorch-lightning_version"] == "2.6.6"


FROZEN = {"frozen.weight", "frozen.bias"}


def test_the_masters_are_those_of_which_the_model_states_hold_a_copy(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path, "zero2_w2_bf16_g2")
    whole = ckptfix.open_checkpoint(folder).state_dict()
    halves = torch.load(folder / TAG / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    assert list(whole) == list(halves)
    for key, half in halves.items():
        assert bytes_of(whole[key].to(half.dtype)) == bytes_of(half), key
    assert {whole[key].dtype for key in FROZEN} == {torch.bfloat16}


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("stage", [2, 3])
def test_moments_are_cut_as_the_masters_are(tmp_path: Path, world: int, stage: int) -> None:
    """Every element has one master and one moment; these differ by 1000, so that they still do by name."""
    (write_zero if stage == 2 else write_zero3)(tmp_path / "saved", TENSORS, world)
    ckptfix.repair(tmp_path / "saved", output=tmp_path / "whole.pth")
    whole = torch.load(tmp_path / "whole.pth")
    for key, value in TENSORS.items():
        assert torch.equal(whole["module"][key], value), key
        assert torch.equal(whole["optimizer"]["state"][key]["exp_avg"], value + 1000), key
    assert whole["optimizer"]["param_groups"] == [{"lr": 0.1, "params": list(TENSORS)}]


@pytest.mark.parametrize("stage", [2, 3])
def test_masters_of_a_half_type_are_read_as_such(tmp_path: Path, stage: int) -> None:
    """As ``bf16_master_weights_and_grads`` keeps them."""
    halves = {key: value.bfloat16() for key, value in TENSORS.items()}
    (write_zero if stage == 2 else write_zero3)(tmp_path, halves, 3)
    got = ckptfix.open_checkpoint(tmp_path).state_dict()
    assert all(bytes_of(got[key]) == bytes_of(value) for key, value in halves.items())


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_of_another_dtype_is_named(tmp_path: Path, stage: int) -> None:
    (write_zero if stage == 2 else write_zero3)(tmp_path, TENSORS, 3)
    name = "single_partition_of_fp32_groups" if stage == 2 else "fp32_flat_groups"

    def halve(states: Any) -> None:
        held = states["optimizer_state_dict"]
        held[name] = [part.bfloat16() for part in held[name]]

    _change(tmp_path / _optim(1), halve)
    with pytest.raises(UnreadableError, match=f"saves: {_optim(1)}, unlike the other 2, by the .*dtype or step; put"):
        ckptfix.open_checkpoint(tmp_path)


def test_the_folder_of_a_tag_is_the_same(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path)
    one, other = ckptfix.open_checkpoint(folder), ckptfix.open_checkpoint(folder / TAG)
    assert one.keys() == other.keys()
    assert one.producer == "DeepSpeed 0.19.8, ZeRO stage 2, 3 ranks"


def test_latest_names_one_of_several_tags(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path)
    (folder / TAG).rename(folder / "later")
    saved(tmp_path)
    (folder / "latest").unlink()
    with pytest.raises(UnreadableError, match=r"holds 2 checkpoints \(global_step2, later\); name one"):
        ckptfix.open_checkpoint(folder)
    (folder / "latest").write_text("later")
    for given in (folder, folder / "latest"):
        assert ckptfix.open_checkpoint(given).path == str(folder / "later")


def test_a_text_file_named_latest_without_ranks_is_a_text_file(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("model.pth")
    with pytest.raises(UnreadableError, match="a text file, not a checkpoint"):
        ckptfix.open_checkpoint(tmp_path / "latest")


def test_a_folder_of_a_trainer_keeps_its_own_weights(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path)
    torch.save({"w": torch.ones(2)}, folder / "pytorch_model.bin")
    assert ckptfix.open_checkpoint(folder).keys() == ["w"]


def test_weights_without_elements_next_to_the_ranks_are_those_of_the_ranks(tmp_path: Path) -> None:
    """``save_pretrained`` under ZeRO 3, which gathers nothing."""
    write_zero3(tmp_path / TAG, TENSORS, world=2)
    torch.save({f"{key}.weight": torch.empty(0) for key in TENSORS}, tmp_path / "pytorch_model.bin")
    got = ckptfix.open_checkpoint(tmp_path).state_dict()
    assert all(torch.equal(got[key], value) for key, value in TENSORS.items())
    for file in (tmp_path / TAG).iterdir():
        file.unlink()
    assert "FIL105" in [finding.code for finding in ckptfix.check(tmp_path).findings]


def test_ten_ranks_are_in_numerical_order(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(30.0).reshape(5, 6), "b": torch.arange(100.0, 115.0)}
    write_zero(tmp_path, tensors, world=12)
    got = ckptfix.open_checkpoint(tmp_path).state_dict()
    assert all(torch.equal(got[key], value) for key, value in tensors.items())


def test_padding_after_each_parameter_is_passed_over(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(5.0), "b": torch.arange(100.0, 107.0), "c": torch.tensor([9.0])}
    write_zero(tmp_path, tensors, world=2, paddings=[3, 1, 3])
    got = ckptfix.open_checkpoint(tmp_path).state_dict()
    assert all(torch.equal(got[key], value) for key, value in tensors.items())


def test_small_and_large_shares_are_put_together_in_any_order(tmp_path: Path) -> None:
    """Short shares are read in blocks, long ones as ranges: across block boundaries, in both directions."""
    numels = [1, 4095, 4096 * 3, 12_289, 0, 7, 40_000, 2, 90_000, 12_287, 5, 12_288, 4000]
    tensors = {f"t{at}": torch.rand(numel) for at, numel in enumerate(numels)}
    write_zero3(tmp_path, tensors, 3)
    checkpoint = ckptfix.open_checkpoint(tmp_path)
    for name in [*tensors, *reversed(tensors), "t1", "t9", "t3", "t11", "t0", "t12"]:
        assert bytes(row_major_bytes(checkpoint.specs[name], name)) == bytes_of(tensors[name]), name


def test_masters_are_said_to_be_those_of_a_training_in_a_half_type(tmp_path: Path) -> None:
    write_zero3(tmp_path, TENSORS, 2)
    assert not ckptfix.check(tmp_path).findings

    def halve(states: Any) -> None:
        states["module"] = OrderedDict((key, value.half()) for key, value in states["module"].items())

    _change(tmp_path / "zero_pp_rank_0_mp_rank_00_model_states.pt", halve)
    (finding,) = ckptfix.check(tmp_path).findings
    assert (finding.code, finding.level, "float16" in finding.evidence.values()) == ("FIL105", 0, True)


def write_zero(
    folder: Path, tensors: dict[str, torch.Tensor], world: int, paddings: list[int] | None = None, **rest: Any
) -> None:
    """Write tensors as ZeRO 2 does: flattened, padded, and cut into partitions."""
    pads = paddings or [0] * len(tensors)
    rows = [
        torch.nn.functional.pad(value.flatten(), (0, pad)) for value, pad in zip(tensors.values(), pads, strict=True)
    ]
    flat = torch.cat(rows)
    length = -(-len(flat) // (2 * world)) * 2
    padded = torch.nn.functional.pad(flat, (0, length * world - len(flat)))
    for rank in range(world):
        part = slice(rank * length, (rank + 1) * length)
        held: dict[str, Any] = {
            "single_partition_of_fp32_groups": [flat[part].clone()],
            "base_optimizer_state": _optimizer([padded[part] + 1000]),
            "partition_count": [world],
            "zero_stage": 2,
            **rest,
        }
        if paddings is not None:
            held["param_alignment_paddings"] = [paddings]
        write_rank(folder, rank, held)
    write_names(folder, "mp_rank_00", tensors, OrderedDict(tensors))


def write_zero3(folder: Path, tensors: dict[str, torch.Tensor], world: int) -> None:
    """Write tensors as ZeRO 3 does: each cut into shares, in sub-groups that may end inside a tensor."""
    shares = [[_share(value, rank, world) for value in tensors.values()] for rank in range(world)]
    for rank in range(world):
        flat = torch.cat(shares[rank])
        groups = [part.clone() for part in flat.split(-(-len(flat) // 2))]
        held = {
            "fp32_flat_groups": groups,
            "optimizer_state_dict": _optimizer([group + 1000 for group in groups]),
            "partition_count": world,
            "zero_stage": 3,
        }
        write_rank(folder, rank, held)
        empty = OrderedDict((key, torch.empty(0)) for key in tensors)
        write_names(folder, f"zero_pp_rank_{rank}_mp_rank_00", tensors, empty, groups=2)


def _share(value: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    length = -(-value.numel() // world)
    part = value.flatten()[rank * length : (rank + 1) * length]
    return torch.nn.functional.pad(part, (0, length - len(part)))


def _optimizer(moments: list[torch.Tensor]) -> dict[str, Any]:
    state = {number: {"step": torch.tensor(3.0), "exp_avg": moment} for number, moment in enumerate(moments)}
    return {"state": state, "param_groups": [{"lr": 0.1, "params": list(state)}]}


def write_rank(folder: Path, rank: int, held: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    torch.save({"optimizer_state_dict": held}, folder / _optim(rank))


def write_names(folder: Path, name: str, tensors: dict[str, Any], module: Any, groups: int = 1) -> None:
    """Write model states; those of stage 3 have names for each of the sub-groups."""
    names = [(key, value.shape) for key, value in tensors.items()]
    step = -(-len(names) // groups)
    shapes = [OrderedDict(names[at * step : (at + 1) * step]) for at in range(groups)]
    states = {"module": module, "buffer_names": [], "param_shapes": shapes, "shared_params": {}}
    torch.save(states, folder / f"{name}_model_states.pt")


def _optim(rank: int, prefix: str = "") -> str:
    return f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def _change(file: Path, change: Callable[[Any], None]) -> None:
    states = torch.load(file, weights_only=False)
    change(states)
    torch.save(states, file)


def _train_on(states: Any) -> None:
    states["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["step"] += 1


def test_a_missing_rank_is_named_and_the_rest_salvaged(tmp_path: Path) -> None:
    folder, truth = saved(tmp_path)
    (folder / TAG / _optim(1)).unlink()
    with pytest.raises(UnreadableError, match=f"lacks 1 rank of 3: {_optim(1)}"):
        ckptfix.open_checkpoint(folder)
    report = ckptfix.repair(folder, output=tmp_path / "part.pth", salvage=True).report
    assert "fetch the missing file" in remedies_text(next(each for each in report.remaining if each.keys).remedies)
    got = torch.load(tmp_path / "part.pth")["module"]
    assert {"emb.weight", "ln.bias"} <= got.keys() < truth.keys()
    assert all(bytes_of(got[key]) == bytes_of(truth[key]) for key in got)


def _holders(root: Any, world: int, stage: int) -> dict[str, set[int]]:
    """Return the ranks with elements of each trained weight, by the names and shapes in model states."""
    found: dict[str, set[int]] = {}
    for group in root["param_shapes"]:
        sizes = {name: math.prod(size.args[0]) for name, size in group.items()}
        length, start = 2 * math.ceil(sum(sizes.values()) / (2 * world)), 0
        for name, numel in sizes.items():
            share = math.ceil(numel / world)
            places = range(start, start + numel)
            found[name] = {at // length for at in places} if stage < 3 else {at // share for at in range(numel)}
            start += numel
    return found


@pytest.mark.parametrize("name", [name for name in NAMES if "_w1_" not in name])
def test_each_missing_rank_costs_only_what_it_held(tmp_path: Path, name: str) -> None:
    """The only rank left of two has partitions without their padding, and not the length of the others."""
    folder, truth = saved(tmp_path, name)
    stage, world = int(name[4]), int(name[7])
    ranks = sorted((folder / TAG).glob("*_optim_states.pt"))
    root = read_document(Content.of_file(str(min((folder / TAG).glob("*model_states.pt"))))).root
    holders = _holders(root, world, stage)
    for number, file in enumerate(ranks):
        hidden = file.rename(tmp_path / "hidden")
        got = ckptfix.open_checkpoint(folder, salvage=True)
        trained = {key: holders[name] for key in truth if (name := root["shared_params"].get(key, key)) in holders}
        assert {key for key in trained if key in got.lost} == {key for key in trained if number in trained[key]}
        assert all(bytes_of(got.read(key)) == bytes_of(truth[key]) for key in trained if number not in trained[key])
        hidden.rename(file)


def test_partitions_of_uncertain_length_are_refused(tmp_path: Path) -> None:
    """The last partition does not end where the group does, so it may begin anywhere."""
    write_zero(tmp_path, TENSORS, world=2)

    def shorten(states: dict[str, Any]) -> None:
        (part,) = states["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        states["optimizer_state_dict"]["single_partition_of_fp32_groups"] = [part[:-1].clone()]

    (tmp_path / _optim(0)).unlink()
    assert ckptfix.open_checkpoint(tmp_path, salvage=True).keys() == ["b", "c"]
    _change(tmp_path / _optim(1), shorten)
    with pytest.raises(UnreadableError, match=r"shapes of 49 numbers, and its 2 partitions hold 22 each"):
        ckptfix.open_checkpoint(tmp_path, salvage=True)


def test_a_small_frozen_weight_has_no_share_on_the_last_ranks(tmp_path: Path) -> None:
    write_zero3(tmp_path, {"a": torch.arange(9.0)}, world=3)
    for rank in range(3):
        share = torch.tensor([rank + 1.0])
        frozen = {"frozen_param_shapes": {"f": torch.Size([2])}, "frozen_param_fragments": {"f": share}}
        _change(tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", methodcaller("update", frozen))
    (tmp_path / "zero_pp_rank_2_mp_rank_00_model_states.pt").unlink()
    got = ckptfix.open_checkpoint(tmp_path, salvage=True)
    assert (got.read("f").tolist(), got.lost) == ([1.0, 2.0], {})
    (tmp_path / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    assert list(ckptfix.open_checkpoint(tmp_path, salvage=True).lost) == ["f"]


@pytest.mark.parametrize(
    ("name", "file", "nbytes"),
    [
        pytest.param("zero2_w3_fp32_g1", "zero_pp_rank_1_mp_rank_00_optim_states.pt", 1200, id="stage-2"),
        pytest.param("zero3_w3_bf16_g2", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", 1248, id="stage-3"),
        pytest.param("tp2_zero2_w4_bf16", "bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt", 1464, id="tensor-parallel"),
        pytest.param("moe_w4_ep2", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", 4632, id="experts"),
    ],
)
def test_what_a_missing_rank_held_is_named(tmp_path: Path, name: str, file: str, nbytes: int) -> None:
    folder, _ = saved(tmp_path, name)
    held = [spec for spec in tensors_in(read_document(Content.of_file(str(folder / TAG / file))).root) if spec.shape]
    assert sum(spec.nbytes for spec in held) == nbytes
    (folder / TAG / file).unlink()
    with pytest.raises(UnreadableError, match=rf"{file}; lacks {nbytes} bytes of \d+ tensors .* lost: fetch") as caught:
        ckptfix.open_checkpoint(folder)
    assert list(caught.value.data["lost"]) == list(ckptfix.open_checkpoint(folder, salvage=True).lost)


@pytest.mark.parametrize(
    ("name", "ranks"), [("zero2_w5_fp16_g9", (1, 3)), ("zero3_w3_bf16_g2", (0, 2)), ("tp2_zero2_w4_bf16", (0, 1))]
)
def test_each_of_several_missing_ranks_has_its_bytes(tmp_path: Path, name: str, ranks: tuple[int, int]) -> None:
    folder, _ = saved(tmp_path, name)
    files = [next((folder / TAG).glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")) for rank in ranks]
    if name.startswith("tp2"):
        files[1] = files[1].with_name(files[1].name.replace("mp_rank_00", "mp_rank_01"))
    single = []
    for file in files:
        file.rename(kept := tmp_path / file.name)
        single.append(lacking_bytes(folder)["nbytes"])
        kept.rename(file)
    for file in files:
        file.unlink()
    data = lacking_bytes(folder)
    assert data["files"] == dict(zip([file.name for file in files], single, strict=True))
    assert data["nbytes"] == sum(single)


def lacking_bytes(folder: Path) -> Any:
    with pytest.raises(UnreadableError) as caught:
        ckptfix.open_checkpoint(folder)
    (data,) = (fact["data"] for fact in caught.value.data["damage"] if fact["kind"] == "bytes-lacking")
    return data


def test_missing_ranks_are_counted_among_all_tensor_parallel_ranks(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path, "tp2_zero2_w4_bf16")
    for name in ("bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt"):
        (folder / TAG / name).unlink()
    with pytest.raises(UnreadableError) as caught:
        ckptfix.open_checkpoint(folder)
    assert str(caught.value).count("lacks 1 rank of 4: bf16_zero_pp_rank_") == 2
    (folder / TAG / "bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt").unlink()
    lacks = r"lacks 1 rank of 4: \S+_rank_1_mp_rank_00_\S+; lacks 2 ranks of 4: \S+_0_mp_rank_01_\S+ \S+_1_mp_rank_01_"
    with pytest.raises(UnreadableError, match=lacks):
        ckptfix.open_checkpoint(folder)


def test_frozen_weights_of_a_missing_rank_are_counted(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path, "zero3_w3_bf16_g2")
    file = folder / TAG / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    held = read_document(Content.of_file(str(file))).root["frozen_param_fragments"]
    file.unlink()
    with pytest.raises(UnreadableError, match=r"frozen\.bias are lost: fetch the missing file,") as caught:
        ckptfix.open_checkpoint(folder)
    _, fact = caught.value.data["damage"]
    assert (fact["data"]["keys"], fact["data"]["nbytes"]) == (
        tuple(held),
        sum(spec.nbytes for spec in held.values()),
    )


def test_a_missing_rank_of_stage_3_leaves_buffers(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path, "zero3_w2_fp32_g1")
    (folder / TAG / _optim(1)).unlink()
    with pytest.raises(UnreadableError, match="lacks 1 rank of 2"):
        ckptfix.open_checkpoint(folder)
    assert ckptfix.open_checkpoint(folder, salvage=True).keys() == ["scale", "cnt", "frozen.weight", "frozen.bias"]


def test_a_rank_of_another_step_is_named(tmp_path: Path) -> None:
    write_zero(tmp_path, TENSORS, world=3)

    _change(tmp_path / _optim(2), _train_on)
    with pytest.raises(UnreadableError, match=f"from different saves: {_optim(2)}, unlike the other 2"):
        ckptfix.open_checkpoint(tmp_path)
    salvaged = ckptfix.open_checkpoint(tmp_path, salvage=True)
    assert [each.kind for each in salvaged.damage][:1] == [Kind.RANKS_OF_ANOTHER_SAVE]
    (tmp_path / _optim(2)).unlink()
    without = ckptfix.open_checkpoint(tmp_path, salvage=True)
    assert salvaged.keys() == without.keys() != []
    assert salvaged.lost.keys() == without.lost.keys() != set()


def test_a_rank_of_another_world_is_named(tmp_path: Path) -> None:
    write_zero(tmp_path, TENSORS, world=3)
    _change(tmp_path / _optim(1), lambda states: states["optimizer_state_dict"].update(partition_count=[4]))
    said = rf"from different saves: {_optim(1)}, unlike the other 2, by the .* step .\[4\] instead of \[3\]"
    with pytest.raises(UnreadableError, match=said):
        ckptfix.open_checkpoint(tmp_path)


def test_names_of_another_save_are_refused(tmp_path: Path) -> None:
    write_zero(tmp_path, TENSORS, world=3)
    write_names(tmp_path, "mp_rank_00", {**TENSORS, "more": torch.ones(50, 50)}, OrderedDict(TENSORS))
    with pytest.raises(UnreadableError, match="group 0 has names and shapes of 2549 numbers"):
        ckptfix.open_checkpoint(tmp_path)


def test_a_file_that_is_cut_short_is_named(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path)
    file = folder / TAG / _optim(0)
    file.write_bytes(file.read_bytes()[:-2000])
    with pytest.raises(UnreadableError, match=_optim(0)):
        ckptfix.open_checkpoint(folder)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_file_that_is_cut_before_its_step_is_named_and_the_rest_salvaged(
    tmp_path: Path, stage: int, world: int
) -> None:
    tensors = {"a": torch.randn(600), "b": torch.randn(2 * 600)}
    (write_zero if stage == 2 else write_zero3)(tmp_path, tensors, world)
    cut = tmp_path / _optim(world - 1)
    data = cut.read_bytes()
    # The largest members come first: the masters and, in the middle, the moments.
    cut.write_bytes(data[: data.index(b"data/0") + 200])
    with pytest.raises(UnreadableError, match=f"{cut.name} that is cut short"):
        ckptfix.open_checkpoint(tmp_path)
    if stage == 2:
        got = ckptfix.open_checkpoint(tmp_path, salvage=True)
        assert (got.keys(), [*got.lost]) == (["a"], ["b"])


@pytest.mark.parametrize(("key", "other"), [("mp_world_size", 4), ("global_steps", 1)])
def test_a_tensor_parallel_rank_of_another_save_is_named(tmp_path: Path, key: str, other: int) -> None:
    folder, _ = unpacked("autotp_zero0_w2", tmp_path)
    _change(folder / TAG / "mp_rank_01_model_states.pt", lambda states: states.update({key: other}))
    for salvage in (False, True):
        with pytest.raises(UnreadableError, match=r"from different saves: .*mp_rank_01_model_states\.pt"):
            ckptfix.open_checkpoint(folder, salvage=salvage)


@pytest.mark.parametrize(
    "name", ["moe_w4_ep2", "moe_zero1_w4_ep2", "autoep_w4_ep2", "autoep_zero3_w4_ep2", "tp2_zero2_w4_bf16"]
)
def test_experts_and_tensor_parallel_ranks_are_joined(tmp_path: Path, name: str) -> None:
    """The truth has the masters and moments that DeepSpeed holds, or the moments of ``ds_to_universal``."""
    folder, truth = unpacked(name, tmp_path)
    report = ckptfix.repair(folder, output=tmp_path / "whole.pth").report
    assert [finding.code for finding in report.findings if finding.level] == []
    whole = torch.load(tmp_path / "whole.pth")
    module, state = whole["module"], whole["optimizer"]["state"]
    for key, value in truth.items():
        parameter, _, field = key.partition("/")
        assert bytes_of(state[parameter][field] if field else module[key]) == bytes_of(value), key
    tied = {"emb.weight", "head.weight", "word_embeddings.weight", "lm_head.weight"} & module.keys()
    names = {key for key in truth if "/" not in key}
    if not name.startswith(("autoep", "moe_zero")):  # of models without ties
        names -= {"head.weight", "lm_head.weight"}
        assert len({module[key].data_ptr() for key in tied}) == 1
    assert state.keys() == names


@pytest.mark.parametrize(
    ("files", "old", "new", "said"),
    [
        ("*_3_*optim_states.pt", b"K\1K\3e", b"K\2K\3e", "group 1 is not on the ranks 1, 3"),
        ("*_0_*model_states.pt", b"(K\0K\1e", b"(K\2K\1e", "experts out of order"),
    ],
    ids=["ranks", "order"],
)
def test_experts_of_stage_3_are_not_guessed(tmp_path: Path, files: str, old: bytes, new: bytes, said: str) -> None:
    """The files say which ranks share them, and which experts each of these has."""
    folder, _ = unpacked("autoep_zero3_w4_ep2", tmp_path)
    (file,) = folder.glob(f"*/{files}")
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data.replace(old, new))
    with pytest.raises(UnreadableError, match=said):
        ckptfix.open_checkpoint(folder)


@pytest.mark.parametrize("name", ["moe_w4_ep2", "autoep_w4_ep2"])
def test_experts_without_masters_are_those_of_their_files(tmp_path: Path, name: str) -> None:
    folder, truth = unpacked(name, tmp_path)
    for file in folder.glob("*/*optim_states.pt"):
        file.unlink()
    got = ckptfix.open_checkpoint(next(folder.glob("*/layer_1_expert_3_*"))).state_dict()
    gates = {f"model.layers.{layer}.mlp.gate.gate.weight" for layer in (0, 1)}  # the same as those of the routers
    assert got.keys() - gates == truth.keys()
    assert all(bytes_of(got[key]) == bytes_of(value.bfloat16()) for key, value in truth.items())


def numbered(folder: Path, truth: Any) -> tuple[Any, list[list[str]]]:
    """Return the optimizer of a folder without ZeRO, and the names of its groups, of which ``truth`` has the state."""
    checkpoint = ckptfix.open_checkpoint(folder)
    root: Any = checkpoint.root
    trained = [key for key in checkpoint.specs if f"{key}/exp_avg" in truth]
    return root.get("optimizer"), truth.pop("/groups", [trained])


@pytest.mark.parametrize("name", ["moe_zero0_w2_ep2", "autotp_zero0_w2"])
def test_optimizers_without_zero_have_the_numbers_of_one_process(tmp_path: Path, name: str) -> None:
    folder, truth = unpacked(name, tmp_path)
    optimizer, groups = numbered(folder, truth)
    report = ckptfix.repair(folder, output=tmp_path / "whole.pth").report
    assert [finding.code for finding in report.findings if finding.level] == []
    whole = torch.load(tmp_path / "whole.pth")
    assert whole["module"].keys() - {"cnt"} == {key for key in truth if "/" not in key}
    optimizer, masters = whole["optimizer"], None
    if name.startswith("moe"):  # in bf16
        masters, optimizer = optimizer["fp32_groups"], optimizer["optimizer_state_dict"]
    numbers = [group["params"] for group in optimizer["param_groups"]]
    assert [*map(len, numbers)] == [*map(len, groups)]
    every = [name for group in groups for name in group]
    assert [number for group in numbers for number in group] == list(range(len(every))) == list(optimizer["state"])
    for number, key in enumerate(every):
        assert bytes_of(whole["module"][key]) == bytes_of(truth[key])
        for field in ("exp_avg", "exp_avg_sq"):
            assert bytes_of(optimizer["state"][number][field]) == bytes_of(truth[f"{key}/{field}"]), (key, field)
        assert optimizer["state"][number]["step"] == (2 if masters is None else 3)  # one is to allocate the state
    if masters is not None:
        for key, master in zip(every, (master for group in masters for master in group), strict=True):
            assert bytes_of(master) == bytes_of(truth[f"{key}/master"]), key
    one = ckptfix.open_checkpoint(next(folder.glob("*/*mp_rank_00*")))
    assert one.keys() == [*whole["module"]]
    assert run_here("check", "--no-values", tmp_path / "saved", cwd=tmp_path).stderr == ""


EXPERTS = "expp_rank_{}_mp_rank_00_optim_states.pt"


@pytest.mark.parametrize("change", ["order", "layers", "flat"])
def test_optimizers_without_zero_that_cannot_be_merged_are_left_out(tmp_path: Path, change: str) -> None:
    """If numbers may belong to parameters in several orders, or the files do not say which experts they are for."""
    folder, truth = unpacked("moe_zero0_w2_ep2", tmp_path)

    def spoil(states: Any) -> None:
        held = states["optimizer"]["optimizer_state_dict"]
        for group in held["param_groups"]:
            if change == "layers" and group.get("moe"):
                group["name"] = "mine"
        for row in held["state"].values() if change == "order" else ():
            row.update(exp_avg=torch.ones(2, 2), exp_avg_sq=torch.ones(2, 2))
        if change == "flat":
            states["optimizer"]["fp32_groups_flat"] = [torch.ones(3)]

    for file in folder.glob("*/expp*"):
        _change(file, spoil)
    checkpoint = ckptfix.open_checkpoint(folder)
    assert [mark.place for mark in checkpoint.remarks if mark.kind is Kind.RANK_LEFT_OUT] == ["optimizer"]
    got = checkpoint.state_dict()
    assert all(bytes_of(got[key]) == bytes_of(value) for key, value in truth.items() if "/" not in key)


@pytest.mark.parametrize("change", ["missing", "cut", "copied", "step"])
def test_ranks_of_optimizers_without_zero_are_all_there_and_of_one_save(tmp_path: Path, change: str) -> None:
    folder, truth = unpacked("moe_zero0_w2_ep2", tmp_path)
    one, other = (folder / TAG / EXPERTS.format(rank) for rank in (0, 1))

    def train_on(states: Any) -> None:
        for row in states["optimizer"]["optimizer_state_dict"]["state"].values():
            row["step"] = row["step"] + 1

    if change == "missing":
        other.unlink()
    elif change == "cut":
        other.write_bytes(other.read_bytes()[:-3000])
    elif change == "copied":
        shutil.copy(one, other)
        (mark,) = [mark for mark in ckptfix.open_checkpoint(folder).remarks if mark.kind is Kind.RANK_REPEATED]
        assert (mark.place, mark.data["other"]) == (other.name, one.name)
        assert ckptfix.repair(folder, output=tmp_path / "whole.pth").report.is_refused
        return
    else:
        _change(other, train_on)
    with pytest.raises(UnreadableError, match=other.name):
        ckptfix.open_checkpoint(folder)
    if change != "step":  # of two ranks, none is the majority
        got = ckptfix.open_checkpoint(folder, salvage=True)
        root: Any = got.root
        assert {*got.keys()} == {key for key in truth if "/" not in key} | {"cnt"}
        assert ("optimizer" in root) is (change == "cut")  # only the end of the archive's directory is lost


def _age(states: Any) -> None:
    """Reduce the model states of a model with experts to what DeepSpeed before 0.19.6 writes."""
    kept = {"module", "lr_scheduler", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "num_experts"}
    for key in states.keys() - kept:
        del states[key]


@pytest.mark.parametrize("name", ["moe_w4_ep2", "moe_zero1_w4_ep2"])
def test_experts_of_older_releases_have_the_names_of_their_slices(tmp_path: Path, name: str) -> None:
    """DeepSpeed 0.12 to 0.19.5 write fewer model states for models with experts."""
    folder, truth = unpacked(name, tmp_path)
    _change(folder / TAG / "mp_rank_00_model_states.pt", _age)
    root: Any = ckptfix.open_checkpoint(folder).root
    got = ckptfix.open_checkpoint(folder).state_dict()
    for key, value in truth.items():
        parameter, _, field = key.partition("/")
        same = row_major_bytes(root["optimizer"]["state"][parameter][field], key) if field else bytes_of(got[key])
        assert bytes(same) == bytes_of(value), key
    (missing, *_) = folder.glob("*/*zero_pp_rank_3*")
    missing.unlink()
    for salvage in (False, True):
        with pytest.raises(UnreadableError, match=r"lacks 1 rank of 4.*; only all ranks together name the weights"):
            ckptfix.open_checkpoint(folder, salvage=salvage)


@pytest.mark.parametrize("name", ["moe_w4_ep2", "autoep_w4_ep2"])
@pytest.mark.parametrize("change", ["missing", "copied", "other"])
def test_files_of_experts_are_all_there_and_their_own(tmp_path: Path, name: str, change: str) -> None:
    folder, _ = unpacked(name, tmp_path)
    file, other = (next(folder.glob(f"*/layer_1_expert_{expert}_*")) for expert in (2, 3))
    if change == "missing":
        for optim in folder.glob("*/*optim_states.pt"):
            optim.unlink()
        file.unlink()
    else:
        shutil.copy(other if change == "copied" else next(folder.glob("*/*zero_pp_rank_1*optim_states.pt")), file)
    with pytest.raises(UnreadableError, match="layer_1_expert_2"):
        ckptfix.open_checkpoint(folder)


def test_a_rank_that_is_cut_short_costs_what_is_gone(tmp_path: Path) -> None:
    """Moments too, which are examined along with the weights."""
    folder, _ = unpacked("moe_w4_ep2", tmp_path)
    file = folder / TAG / _optim(1, "bf16_")
    file.write_bytes(file.read_bytes()[: file.stat().st_size * 2 // 3])
    assert "FIL203" in [finding.code for finding in ckptfix.check(folder, salvage=True).findings]


def test_a_missing_rank_of_experts_costs_those_experts(tmp_path: Path) -> None:
    folder, truth = unpacked("moe_w4_ep2", tmp_path)
    for rank in (1, 3):  # which hold the experts 2 and 3
        (folder / TAG / _optim(rank, "bf16_")).unlink()
    got = ckptfix.open_checkpoint(folder, salvage=True)
    experts = {f"deepspeed_experts.{number}." for number in (2, 3)}
    lost = {key for key in truth if any(expert in key for expert in experts)}
    assert lost <= set(got.lost)
    assert "moe.deepspeed_moe.experts.deepspeed_experts.1.0.weight" in got.specs


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([2, 1], "not what their framework"),
        ([0], "claims 0 ranks"),
        ([1], "partitions hold 2 each"),
        (["2"], "groups on 2"),
    ],
)
def test_partitions_that_do_not_add_up_are_refused(tmp_path: Path, counts: list[Any], message: str) -> None:
    write_zero(tmp_path, {"a": torch.ones(4)}, world=2)
    for rank in range(2):
        _change(tmp_path / _optim(rank), lambda states: states["optimizer_state_dict"].update(partition_count=counts))
    with pytest.raises((UnreadableError, HostileError), match=message):
        ckptfix.open_checkpoint(tmp_path)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_that_lacks_a_part_is_named(tmp_path: Path, stage: int) -> None:
    (write_zero3 if stage == 3 else write_zero)(tmp_path, {"a": torch.arange(40.0), "b": torch.ones(4)}, world=4)
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"

    def shorten(states: dict[str, Any]) -> None:
        states["optimizer_state_dict"][key] = [part[:-3].clone() for part in states["optimizer_state_dict"][key]]

    _change(tmp_path / _optim(1), shorten)
    with pytest.raises(UnreadableError, match=r"zero_pp_rank_1_\w+\.pt (has 9 of 12|holds 5)") as caught:
        ckptfix.open_checkpoint(tmp_path)
    assert _optim(2) not in str(caught.value)
    if stage == 2:
        got = ckptfix.open_checkpoint(tmp_path, salvage=True)
        assert (set(got.lost), got.keys()) == ({"a"}, ["b"])


@pytest.mark.parametrize("pattern", ["(a+)+$", ".*.*.*.*x", "a" * 600])
def test_patterns_that_may_take_for_ever_are_not_run(tmp_path: Path, pattern: str) -> None:
    folder, _ = unpacked("tp2_zero2_w4_bf16", tmp_path)
    info = {"tp_replicated_parameter_patterns": [pattern]}
    for file in (folder / TAG).glob("mp_rank*"):
        _change(file, lambda states: states.update(universal_checkpoint_info=info))
    with pytest.raises(UnreadableError, match="in the place of a pattern"):
        ckptfix.open_checkpoint(folder)


def test_names_of_megatron_divide_what_no_pattern_names(tmp_path: Path) -> None:
    folder, truth = unpacked("tp2_zero2_w4_bf16", tmp_path)
    for file in (folder / TAG).glob("mp_rank*"):
        _change(file, lambda states: states.pop("universal_checkpoint_info"))
    got = ckptfix.open_checkpoint(folder).state_dict()
    assert all(bytes_of(got[key]) == bytes_of(value) for key, value in truth.items() if "/" not in key)


@pytest.mark.parametrize("name", ["zero2_w2_bf16_g2", "zero3_w3_bf16_g2"])
def test_a_file_of_one_rank_stands_for_all(tmp_path: Path, name: str) -> None:
    folder, truth = saved(tmp_path, name)
    for file in (folder / TAG).glob("*zero_pp_rank_1*"):
        checkpoint = ckptfix.open_checkpoint(file)
        assert (checkpoint.format, set(checkpoint.specs)) == ("zero", set(truth))


def test_model_states_that_are_whole_stand_for_themselves(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path, "zero2_w2_bf16_g2")
    checkpoint = ckptfix.open_checkpoint(folder / TAG / "mp_rank_00_model_states.pt")
    assert checkpoint.specs["l1.weight"].dtype == "bfloat16"


def test_the_report_says_which_weights_were_taken(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path, "zero2_w2_bf16_g2")
    (note,) = [finding for finding in ckptfix.check(folder).findings if finding.code == "FIL105"]
    assert "fp32 masters of training in bfloat16" in note.message
    assert remedies_text(note.remedies) == "--dtype bfloat16 writes them as the training used them"
    ckptfix.repair(folder, output=tmp_path / "half.pth", dtype="bfloat16")
    halves = torch.load(folder / TAG / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    written = torch.load(tmp_path / "half.pth")["module"]
    assert {key: value.dtype for key, value in written.items()} == {key: half.dtype for key, half in halves.items()}
    assert all(bytes_of(written[key]) == bytes_of(half) for key, half in halves.items())


@pytest.mark.parametrize("name", ["zero2_w2_bf16_g2", "zero3_w3_bf16_g2", "universal_zero2"])
def test_a_cast_is_of_masters_and_not_of_what_training_used_in_fp32(tmp_path: Path, name: str) -> None:
    """Also under other names."""
    folder, _ = unpacked(name, tmp_path)
    for file in folder.glob("*/*model_states.pt"):
        _change(file, lambda states: states["module"].update(scale=torch.tensor([0.1, 0.2, 0.3])))
    before = ckptfix.open_checkpoint(folder).state_dict()
    ckptfix.repair(folder, output=tmp_path / "half.pth", dtype="bfloat16", rename=("scale=rope.inv_freq",))
    written = torch.load(tmp_path / "half.pth")["module"]
    assert bytes_of(written["rope.inv_freq"]) == bytes_of(before["scale"])
    assert bytes_of(written["l1.weight"]) == bytes_of(before["l1.weight"].bfloat16())
    assert written["head.weight"].data_ptr() == written["emb.weight"].data_ptr()
    assert {value.dtype for key, value in written.items() if value.is_floating_point() and "rope" not in key} == {
        torch.bfloat16
    }


def _remove(file: Path) -> None:
    file.unlink()


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:2000])


@pytest.mark.parametrize(
    ("lose", "ranks"), [(_remove, (1,)), (_remove, (0,)), (_cut, (1,)), (_cut, (0,)), (_cut, (0, 1))]
)
def test_weights_that_the_model_states_have_are_offered_if_a_rank_is_lost(
    tmp_path: Path, lose: Callable[[Path], None], ranks: tuple[int, ...]
) -> None:
    folder, _ = saved(tmp_path, "zero2_w2_bf16_g2")
    for rank in ranks:
        lose(folder / TAG / f"bf16_{_optim(rank)}")
    states = folder / TAG / "mp_rank_00_model_states.pt"
    command = f"take all weights in bfloat16, without the fp32 masters and the optimizer: ckptfix repair {states} -o "
    with pytest.raises(UnreadableError) as caught:
        ckptfix.open_checkpoint(folder)
    assert command in str(caught.value)
    assert ckptfix.repair(states, output=tmp_path / "model.pth").report.source == str(states)
    written = torch.load(tmp_path / "model.pth")["module"]
    halves = torch.load(states, weights_only=False)["module"]
    assert all(bytes_of(written[key]) == bytes_of(half) for key, half in halves.items())
    if ranks == (1,):
        report = ckptfix.check(folder, salvage=True)
        assert any(command in remedy.text for finding in report.left for remedy in finding.remedies)


@pytest.mark.parametrize("lose", [_remove, _cut])
@pytest.mark.parametrize("name", ["tp2_zero2_w4_bf16", "moe_w4_ep2", "moe_zero1_w4_ep2 of 0.16", "autoep_w4_ep2"])
def test_weights_in_several_model_states_are_offered_if_a_rank_is_lost(
    tmp_path: Path, lose: Callable[[Path], None], name: str
) -> None:
    """The file in the command stands for the model states of all tensor-parallel ranks, or with those of experts."""
    folder, truth = unpacked(name.partition(" ")[0], tmp_path)
    (optim,) = folder.glob(f"*/bf16_{_optim(1)}")
    states = optim.with_name("mp_rank_00_model_states.pt")
    if name.endswith(" of 0.16"):
        _change(states, _age)
    whole = ckptfix.open_checkpoint(states)
    assert whole.specs["l1.weight" if "l1.weight" in truth else next(iter(truth))].dtype == "float32"
    lose(optim)
    with pytest.raises(UnreadableError, match="take all weights in bfloat16") as caught:
        ckptfix.open_checkpoint(folder)
    assert f"ckptfix repair {states} -o " in str(caught.value)
    report = ckptfix.repair(states, output=tmp_path / "model.pth").report
    assert report.source == str(states)
    assert any(
        "left out: optimizer (" in finding.message and optim.name in finding.message for finding in report.findings
    )
    written = torch.load(tmp_path / "model.pth")
    weights = {key: value for key, value in truth.items() if "/" not in key}
    assert all(bytes_of(written["module"][key]) == bytes_of(value.bfloat16()) for key, value in weights.items())
    assert (written.get("optimizer"), written["module"].keys()) == (None, {*whole.keys()})


def test_weights_of_the_model_states_are_offered_if_a_rank_is_of_another_step(tmp_path: Path) -> None:
    write_zero(tmp_path, TENSORS, world=3)
    _change(tmp_path / _optim(2), _train_on)
    with pytest.raises(UnreadableError, match="from different saves") as caught:
        ckptfix.open_checkpoint(tmp_path)
    states = tmp_path / "mp_rank_00_model_states.pt"
    offer = f"take all weights in float32, without the optimizer: ckptfix repair {states} -o"
    assert caught.value.worded(lambda option: f"<{option.name}>").partition(" with <salvage>, or ")[2].startswith(offer)


def test_no_one_is_sent_back_to_a_folder_that_lacks_a_rank(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path, "zero2_w2_bf16_g2")
    states, optim = folder / TAG / "mp_rank_00_model_states.pt", folder / TAG / f"bf16_{_optim(1)}"

    def hints() -> list[str]:
        return [finding.message for finding in ckptfix.check(states).findings if "name their folder" in finding.message]

    assert len(hints()) == 1
    for lose in (_cut, _remove):
        lose(optim)
        assert hints() == []


@pytest.mark.parametrize("name", ["zero3_w3_bf16_g2", "zero2_w2_bf16_g2"])
def test_model_states_without_all_weights_are_not_offered(tmp_path: Path, name: str) -> None:
    folder, _ = saved(tmp_path, name)
    (folder / TAG / f"bf16_{_optim(1)}").unlink()
    for file in (folder / TAG).glob("mp_rank*"):
        _change(file, lambda states: states["module"].pop("l1.weight"))
    with pytest.raises(UnreadableError) as caught:
        ckptfix.open_checkpoint(folder)
    assert "take all weights in" not in str(caught.value)


def test_a_cast_of_ranks_trained_in_fp32_is_of_all_floats(tmp_path: Path) -> None:
    folder, _ = unpacked("zero3_w2_fp32_g1", tmp_path)
    ckptfix.repair(folder, output=tmp_path / "half.pth", dtype="bfloat16")
    written = torch.load(tmp_path / "half.pth")["module"]
    assert {value.dtype for value in written.values()} == {torch.bfloat16, torch.int64}


@pytest.mark.parametrize("name", ["zero2_w2_bf16_g2", "zero2_w3_fp32_g1", "moe_w4_ep2", "tp2_zero2_w4_bf16"])
def test_masters_that_are_not_those_of_the_weights_are_named(tmp_path: Path, name: str) -> None:
    folder, _ = unpacked(name, tmp_path)
    key = {"moe_w4_ep2": "ln.bias", "tp2_zero2_w4_bf16": "dense_4h_to_h.weight"}.get(name, "l1.weight")
    assert [finding for finding in ckptfix.check(folder).findings if finding.level] == []

    def change(states: Any) -> None:
        states["module"][key].view(-1)[3] += 1

    _change(folder / TAG / "mp_rank_00_model_states.pt", change)
    (finding,) = [finding for finding in ckptfix.check(folder).findings if finding.level]
    assert (finding.code, finding.keys, finding.evidence["differ"]) == ("FIL105", (key,), 1)
    assert not [finding for finding in ckptfix.check(folder, values=False).findings if finding.level]


@pytest.mark.parametrize("form", [None, "pth", "safetensors"])
def test_a_folder_that_is_well_becomes_a_file_if_a_format_is_asked_for(tmp_path: Path, form: str | None) -> None:
    """``migrate --format pth`` cannot say it in another way."""
    write_zero(tmp_path, {"w": torch.arange(64.0)}, world=2)
    output = ckptfix.repair(tmp_path, format=form, beside=True).report.output
    assert (output is None) == (form is None)
    if output is not None:
        assert torch.equal(ckptfix.open_checkpoint(output).read("w"), torch.arange(64.0))


@pytest.mark.parametrize("given", ["folder", "file"])
def test_no_rank_is_overwritten(tmp_path: Path, given: str) -> None:
    folder, _ = saved(tmp_path)
    rank = folder / TAG / _optim(1)
    source = folder if given == "folder" else folder / TAG / _optim(0)
    for settings in ({"output": rank}, {"in_place": True}):
        with pytest.raises(UsageError):
            ckptfix.repair(source, **settings)


def test_nothing_is_written_of_a_file_that_was_copied_over_another(tmp_path: Path) -> None:
    write_zero(tmp_path, {"w": torch.arange(64.0)}, world=2)
    first, second = (f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2))
    shutil.copy(tmp_path / first, tmp_path / second)
    (mark,) = [mark for mark in ckptfix.open_checkpoint(tmp_path).remarks if mark.kind is Kind.RANK_REPEATED]
    assert (mark.place, mark.data["other"]) == (second, first)
    assert ckptfix.repair(tmp_path, output=tmp_path / "whole.pth").report.is_refused
    assert not (tmp_path / "whole.pth").exists()


@pytest.mark.parametrize("is_named", [False, True])
def test_salvage_does_not_use_the_data_of_a_file_that_was_copied_over_another(tmp_path: Path, is_named: bool) -> None:
    """Torch stores the name of a file in it; without that, either of the two may be the wrong one."""
    tensors = {"a": torch.arange(32.0), "b": torch.arange(32.0, 64.0), "c": torch.arange(64.0, 96.0)}
    write_zero(tmp_path, tensors, world=3)
    files = [tmp_path / _optim(rank) for rank in range(3)]
    for rank, file in enumerate(files):
        torch.save(torch.load(file, weights_only=False), held := tmp_path / (file.name if is_named else "archive.pt"))
        held.replace(files[rank])
    shutil.copy(files[1], files[0])
    report = ckptfix.repair(tmp_path, output=tmp_path / "whole.pth", salvage=True).report
    kept = torch.load(report.output or "")["module"]
    assert kept.keys() == ({"b", "c"} if is_named else {"c"})
    assert all(torch.equal(kept[key], tensors[key]) for key in kept)
    damage = ckptfix.open_checkpoint(tmp_path, salvage=True).damage
    assert [fact.place for fact in damage if fact.kind is Kind.RANK_MISPLACED] == [
        file.name for file in files[: 1 if is_named else 2]
    ]


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_ranks_of_constant_weights_are_alike_by_right(tmp_path: Path, value: float) -> None:
    write_zero(tmp_path, {"w": torch.full((64,), value)}, world=2)
    assert not ckptfix.repair(tmp_path).report.is_refused
    assert not [mark for mark in ckptfix.open_checkpoint(tmp_path).remarks if mark.kind is Kind.RANK_REPEATED]


def test_what_is_tied_to_a_frozen_parameter_of_stage_3_is_that(tmp_path: Path) -> None:
    """As the output layer of a model with tied embeddings, of which only an adapter is trained."""
    write_zero3(tmp_path, TENSORS, world=2)
    frozen = torch.arange(7.0)
    for rank in range(2):
        file = tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        root = torch.load(file, weights_only=False)
        root["module"].update(embed=torch.empty(0), head=torch.empty(0))
        root["frozen_param_shapes"] = OrderedDict(embed=frozen.shape)
        root["frozen_param_fragments"] = OrderedDict(embed=_share(frozen, rank, 2))
        root["shared_params"] = {"head": "embed"} if rank == 0 else {}
        torch.save(root, file)
    got = ckptfix.open_checkpoint(tmp_path).state_dict()
    assert list(got) == [*TENSORS, "embed", "head"]
    assert torch.equal(got["head"], frozen)
    assert got["head"].data_ptr() == got["embed"].data_ptr()
    (tmp_path / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(UnreadableError, match=r"lacks 1 rank of 2: zero_pp_rank_1_mp_rank_00_model_states\.pt"):
        ckptfix.open_checkpoint(tmp_path)
    salvaged = ckptfix.open_checkpoint(tmp_path, salvage=True)
    assert list(salvaged.specs) == list(TENSORS)


@pytest.mark.parametrize("change", ["none", "shifted", "swapped"])
def test_ranks_that_were_renamed_are_named_if_their_order_changed(tmp_path: Path, change: str) -> None:
    write_zero3(tmp_path, TENSORS, world=3)
    for rank in range(3) if change == "shifted" else ():  # from files that were counted from 1
        torch.save(torch.load(tmp_path / _optim(rank), weights_only=False), tmp_path / _optim(rank + 7))
        (tmp_path / _optim(rank + 7)).rename(tmp_path / _optim(rank))
    if change == "swapped":
        swap(tmp_path / _optim(0), tmp_path / _optim(2))
    found = [finding for finding in ckptfix.check(tmp_path).findings if finding.level]
    assert [(finding.code, finding.evidence) for finding in found] == (
        [("FIL105", {"renamed": 2})] if change == "swapped" else []
    )


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    write_zero(tmp_path, TENSORS, world=2)
    shutil.copy(tmp_path / _optim(1), tmp_path / f"bf16_{_optim(1)}")
    with pytest.raises(UnreadableError, match="are files of one rank"):
        ckptfix.open_checkpoint(tmp_path)


def test_model_states_of_another_shape_than_the_masters_are_refused(tmp_path: Path) -> None:
    write_zero(tmp_path, TENSORS, world=2)

    def turn(states: Any) -> None:
        states["module"]["a"] = states["module"]["a"].T.contiguous()

    _change(tmp_path / "mp_rank_00_model_states.pt", turn)
    with pytest.raises(UnreadableError, match="a differ in shape between the model states and the optimizer states"):
        ckptfix.open_checkpoint(tmp_path)


def test_model_states_next_to_files_of_experts_are_not_whole(tmp_path: Path) -> None:
    folder, _ = unpacked("moe_w4_ep2", tmp_path)
    one = ckptfix.open_checkpoint(folder / TAG / "mp_rank_00_model_states.pt")
    assert one.keys() == ckptfix.open_checkpoint(folder).keys()


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("setting", ["lr", "ds_config", "rank"])
def test_a_rank_of_another_run_is_named(tmp_path: Path, stage: int, setting: str) -> None:
    (write_zero if stage == 2 else write_zero3)(tmp_path, TENSORS, 3)
    for rank in range(3):

        def train(states: Any, rank: int = rank) -> None:
            held = states["optimizer_state_dict"]
            inner = held["base_optimizer_state" if stage == 2 else "optimizer_state_dict"]
            states["ds_config"] = {"seed": 2 if (setting, rank) == ("ds_config", 1) else 1, "local_rank": rank}
            inner["param_groups"][0]["lr"] = 0.2 if (setting, rank) == ("lr", 1) else 0.1

        _change(tmp_path / _optim(rank), train)
    marks = [mark for mark in ckptfix.open_checkpoint(tmp_path).remarks if mark.kind is Kind.RANK_FOREIGN]
    assert [mark.place for mark in marks] == ([] if setting == "rank" else [_optim(1)])
    assert [finding.level.name for finding in ckptfix.check(tmp_path).findings] == ["WARNING"] * len(marks)


def test_moments_of_other_groups_than_the_masters_are_left_out(tmp_path: Path) -> None:
    write_zero3(tmp_path, TENSORS, 2)

    def repeat(states: Any) -> None:
        states["optimizer_state_dict"]["optimizer_state_dict"]["param_groups"][0]["params"] = [0, 0]

    for rank in range(2):
        _change(tmp_path / _optim(rank), repeat)
    checkpoint = ckptfix.open_checkpoint(tmp_path)
    root: Any = checkpoint.root
    assert "optimizer" not in root
    (mark,) = checkpoint.remarked(Kind.RANK_LEFT_OUT)
    assert (mark.place, mark.data["why"]) == ("optimizer", "its groups are not those of the weights")


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("change", ["missing", "two dimensions"])
def test_a_rank_with_another_moment_than_the_others_is_named(
    tmp_path: Path, stage: int, rank: int, change: str
) -> None:
    """Also if it is the first, so that the moment is not left out silently."""
    (write_zero if stage == 2 else write_zero3)(tmp_path, TENSORS, 2)

    def spoil(states: Any) -> None:
        held = states["optimizer_state_dict"]["base_optimizer_state" if stage == 2 else "optimizer_state_dict"]
        moment = held["state"][0].pop("exp_avg")
        if change == "two dimensions":
            held["state"][0]["exp_avg"] = moment.reshape(1, -1)

    _change(tmp_path / _optim(rank), spoil)
    checkpoint = ckptfix.open_checkpoint(tmp_path)
    root: Any = checkpoint.root
    assert "optimizer" not in root
    (mark,) = checkpoint.remarked(Kind.RANK_LEFT_OUT)
    assert mark.data["why"].startswith(f"{_optim(rank)} lacks exp_avg,")
    assert all(bytes_of(checkpoint.read(key)) == bytes_of(value) for key, value in TENSORS.items())


def test_moments_of_some_groups_only_are_kept(tmp_path: Path) -> None:
    """As of a group that the optimizer trains by another rule."""
    tensors = {"a": torch.arange(8.0), "b": torch.arange(4.0)}
    for rank in range(2):
        parts = [value.chunk(2)[rank].clone() for value in tensors.values()]
        inner = _optimizer([part + 1000 for part in parts])
        inner["state"][1]["exp_avg_sq"] = parts[1] + 2000
        inner["param_groups"] = [{"params": [0]}, {"params": [1]}]
        held = {"single_partition_of_fp32_groups": parts, "base_optimizer_state": inner, "partition_count": [2, 2]}
        write_rank(tmp_path, rank, {**held, "zero_stage": 2})
    write_names(tmp_path, "mp_rank_00", tensors, OrderedDict(tensors), groups=2)
    root: Any = ckptfix.open_checkpoint(tmp_path).root
    state = root["optimizer"]["state"]
    assert [*state["a"], *state["b"]] == ["step", "exp_avg", "step", "exp_avg", "exp_avg_sq"]
    assert bytes(row_major_bytes(state["b"]["exp_avg_sq"], "b")) == bytes_of(tensors["b"] + 2000)


def test_paddings_below_zero_are_refused(tmp_path: Path) -> None:
    """They would make tensors overlap."""
    write_zero(tmp_path, TENSORS, 2)
    paddings = {"param_alignment_paddings": [[-10, 0, 10]]}
    for rank in range(2):
        _change(tmp_path / _optim(rank), lambda states: states["optimizer_state_dict"].update(paddings))
    with pytest.raises(UnreadableError, match="in the place of paddings"):
        ckptfix.open_checkpoint(tmp_path)


@pytest.mark.parametrize("change", ["copied", "skipped_steps"])
def test_model_states_of_another_rank_or_run_are_named(tmp_path: Path, change: str) -> None:
    """In stage 3 they hold shares of the frozen parameters; the original name of a file may be unknown."""
    folder, _ = saved(tmp_path, "zero3_w3_bf16_g2")
    file, other = (folder / TAG / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in (1, 2))
    root = torch.load(other if change == "copied" else file, weights_only=False)
    with file.open("wb") as opened:
        torch.save(root if change == "copied" else {**root, change: 7}, opened)
    odd = [finding.message for finding in ckptfix.check(folder).findings if finding.level]
    assert len(odd) == 1
    assert file.name in odd[0]
    assert ("same values" if change == "copied" else change) in odd[0]


def test_a_latest_checkpoint_that_is_not_there_is_not_another(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path)
    (folder / "latest").write_text("global_step99")
    with pytest.raises(UnreadableError, match=r"names global_step99, .*; fetch it, or name global_step2"):
        ckptfix.open_checkpoint(folder)
    assert ckptfix.open_checkpoint(folder / TAG).specs


def _of_sat(folder: Path, ranks: int, groups: int = 3) -> dict[str, torch.Tensor]:
    """Write the ranks of a layer as SwissArmyTransformer divides it; return the whole."""
    torch.manual_seed(0)
    layer = "transformer.layers.0.attention."
    whole = {
        "transformer.word_embeddings.weight": torch.randn(16, 8),
        f"{layer}query_key_value.weight": torch.randn(8 * groups, 8),
        f"{layer}query_key_value.bias": torch.randn(8 * groups),
        f"{layer}dense.weight": torch.randn(8, 8),
        f"{layer}dense.bias": torch.randn(8),
        "transformer.layers.0.cross_attention.key_value.weight": torch.randn(16, 8),
        "transformer.layers.0.cross_attention.dense.weight": torch.randn(8, 8),
        "transformer.layers.0.mlp.dense_h_to_4h.weight": torch.randn(32, 8),
        "transformer.layers.0.mlp.dense_4h_to_h.weight": torch.randn(8, 32),
    }
    for rank in range(ranks):
        part = {}
        for key, value in whole.items():
            stacked = value.chunk(groups if "query_" in key else 2 if "key_value" in key else 1)
            axis = 1 if key.endswith(("dense.weight", "4h_to_h.weight")) else 0
            pieces = [piece.chunk(ranks, axis)[rank] for piece in stacked]
            part[key] = value if key.endswith("dense.bias") else torch.cat(pieces, axis).clone()
        folder.mkdir(exist_ok=True)
        torch.save({"module": part}, folder / f"mp_rank_{rank:02d}_model_states.pt")
    return whole


@pytest.mark.parametrize("ranks", [2, 4])
def test_queries_keys_and_values_of_sat_are_joined_each_by_themselves(tmp_path: Path, ranks: int) -> None:
    whole = _of_sat(tmp_path / "100", ranks)
    got = ckptfix.open_checkpoint(tmp_path / "100").state_dict()
    assert list(got) == list(whole)
    assert all(bytes_of(got[key]) == bytes_of(value) for key, value in whole.items())
    (tmp_path / "100" / f"mp_rank_{ranks - 1:02d}_model_states.pt").unlink()
    if ranks > 2:
        with pytest.raises(UnreadableError, match="files of 3 of 4 tensor-parallel ranks"):
            ckptfix.open_checkpoint(tmp_path / "100")


def test_fewer_keys_than_queries_of_sat_are_not_guessed(tmp_path: Path) -> None:
    _of_sat(tmp_path, 2, groups=2)
    with pytest.raises(UnreadableError, match=r"query_key_value.weight, and no rule says how it is split"):
        ckptfix.open_checkpoint(tmp_path)


WHOLE = torch.arange(96.0).reshape(16, 6)


def write_parts(folder: Path, parts: tuple[torch.Tensor, torch.Tensor], **info: Any) -> None:
    """Write the model states of two tensor-parallel ranks of one weight, and what they say of its parts."""
    for rank, part in enumerate(parts):
        states: dict[str, Any] = {
            "module": {"w.weight": part.clone()},
            "buffer_names": [],
            "param_shapes": [{"w.weight": part.shape}],
        }
        states |= {"mp_world_size": 2, "universal_checkpoint_info": info}
        torch.save(states, folder / f"mp_rank_{rank:02d}_model_states.pt")


NAME = r"^w\.weight$"


def rows(*spans: tuple[int, int]) -> torch.Tensor:
    return torch.cat([WHOLE[start:stop] for start, stop in spans])


def sub_parameters(shape: Any, widths: Any = None) -> dict[str, Any]:
    known = {} if widths is None else {"sub_param_shard_widths": {NAME: widths}}
    return {"parameter_with_sub_params": [{"patterns": [NAME], "shape": shape, "partition_dim": 0}], **known}


def piece(size: int, at: int, of_part: int, **more: Any) -> dict[str, Any]:
    """Rows of the weight, and of a part of it, as DeepSpeed writes a piece of a map."""
    return {"shape": [size, 6], "source": [at * 6, [6, 1]], "dest": [of_part * 6, [6, 1]], "locations": [0], **more}


def affine_map(one: list[dict[str, Any]], other: list[dict[str, Any]], version: int = 1) -> dict[str, Any]:
    ranks = {
        rank: {"shard_shape": [sum(each["shape"][0] for each in pieces), 6], "pieces": pieces}
        for rank, pieces in enumerate((one, other))
    }
    return {"affine_map": {"version": version, "params": {NAME: {"logical_shape": [16, 6], "ranks": ranks}}}}


UNEVEN = (rows((0, 5), (8, 12)), rows((5, 8), (12, 16)))
EVEN = (rows((0, 4), (8, 10), (12, 14)), rows((4, 8), (10, 12), (14, 16)))
SHARED = (rows((0, 8), (12, 16)), rows((8, 16)))


@pytest.mark.parametrize(
    ("parts", "info"),
    [
        pytest.param(EVEN, sub_parameters(((8, 4, 4), 6)), id="queries-keys-and-values"),
        pytest.param((rows((0, 4), (8, 12)), rows((4, 8), (12, 16))), sub_parameters((2, -1)), id="two-of-one-size"),
        pytest.param(UNEVEN, sub_parameters([(8, 8), 6], [[5, 3], [4, 4]]), id="not-in-the-middle"),
        pytest.param(
            UNEVEN, affine_map([piece(5, 0, 0), piece(4, 8, 5)], [piece(3, 5, 0), piece(4, 12, 3)]), id="a-map"
        ),
        pytest.param(
            SHARED,
            affine_map([piece(8, 0, 0), piece(4, 12, 8)], [piece(4, 8, 0), piece(4, 12, 4)]),
            id="a-map-with-copies",
        ),
    ],
)
def test_parts_of_several_parameters(tmp_path: Path, parts: Any, info: dict[str, Any]) -> None:
    write_parts(tmp_path, parts, **info)
    assert torch.equal(ckptfix.open_checkpoint(tmp_path).read("w.weight"), WHOLE)


def test_parts_of_autotp_without_zero(tmp_path: Path) -> None:
    """Stage 0 writes no ``param_shapes``."""
    write_parts(tmp_path, (WHOLE[:, :3], WHOLE[:, 3:]), parameter_with_row_parallelism_patterns=[NAME])
    for file in tmp_path.iterdir():
        _change(file, lambda states: states.update(param_shapes=None))
    assert torch.equal(ckptfix.open_checkpoint(tmp_path).read("w.weight"), WHOLE)


@pytest.mark.parametrize(
    ("parts", "info", "said"),
    [
        (EVEN, {"autotp_unsupported_parameter_patterns": {NAME: "fused"}}, "cannot merge the parts of w.weight"),
        (EVEN, affine_map([piece(8, 0, 0, scale=0.5)], [piece(8, 8, 0)]), "multiplied by a factor"),
        (EVEN, affine_map([piece(8, 0, 0)], [piece(8, 8, 0)], version=2), "version 2 of its maps"),
        (EVEN, affine_map([piece(8, 0, 0)], [piece(8, 4, 0)]), "two parts overlap"),
        (EVEN, affine_map([piece(4, 0, 0)], [piece(12, 4, 0)]), "does not match how its ranks split it"),
        (EVEN, affine_map([piece(8, 0, 0)], [piece(8, 10**12, 0)]), "is outside of its shape"),
        (EVEN, affine_map([piece(8, 0, 0)], [piece(8, 8, 0, source=[48, [12, 1]])]), "with the strides"),
        (SHARED, affine_map([piece(8, 0, 0), piece(4, 8, 8)], [piece(4, 8, 0), piece(4, 12, 4)]), "different copies"),
        (EVEN, sub_parameters(((9, 4, 3), 6)), "which 2 ranks do not divide"),
        (EVEN, sub_parameters([(8, 8), 6], [[5, 3], [4, 4]]), "does not match how its ranks split it"),
        (EVEN, sub_parameters(((4, 4), 6)), "does not match how its ranks split it"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_parts_are_not_guessed(tmp_path: Path, parts: Any, info: dict[str, Any], said: str) -> None:
    write_parts(tmp_path, parts, **info)
    with pytest.raises(UnreadableError, match=said):
        ckptfix.open_checkpoint(tmp_path)


def test_copies_of_frozen_weights_are_not_another_set(tmp_path: Path) -> None:
    folder, _ = unpacked("zero2_w2_bf16_g2", tmp_path)
    alone = (folder / "global_step2" / "mp_rank_00_model_states.pt").rename(tmp_path / "mp_rank_00_model_states.pt")
    root: Any = ckptfix.open_checkpoint(alone).root
    assert root["frozen_param_fragments"].keys() == {"frozen.weight", "frozen.bias"}
    assert [finding.code for finding in ckptfix.check(alone).findings] == ["FIL105"]  # it has no masters


def test_the_attribute_of_empty_parameters_is_not_noted(tmp_path: Path) -> None:
    folder, _ = unpacked("zero3_w3_bf16_g2", tmp_path)
    assert {finding.code for finding in ckptfix.check(folder).findings} == {"FIL105"}
