"""Folders with a file for each layer: DeepSpeed's pipelines, and GPT-NeoX's."""

import shutil
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfix
from ckptfix.core.facts import Kind
from ckptfix.errors import UnreadableError
from tests.checks import bytes_of
from tests.reading.folders.ranks.genuine import swap, unpacked

TAG = "global_step1"


def test_the_masters_of_all_stages_under_the_names_of_the_whole_model(tmp_path: Path) -> None:
    folder, truth = unpacked("pipeline_pp2", tmp_path)
    got = ckptfix.open_checkpoint(folder).state_dict()
    assert got.keys() == truth.keys()
    assert next(iter(got)) == "tied_modules.embed.word_embeddings.weight"
    for key, value in truth.items():
        assert bytes_of(got[key]) == bytes_of(value), key


def test_the_optimizer_is_there_by_name(tmp_path: Path) -> None:
    folder, truth = unpacked("pipeline_pp2", tmp_path)
    ckptfix.repair(folder, output=tmp_path / "whole.pth")
    optimizer = torch.load(tmp_path / "whole.pth")["optimizer"]
    assert optimizer["state"].keys() == truth.keys() == set(optimizer["param_groups"][0]["params"])
    for key, moments in optimizer["state"].items():
        assert moments["exp_avg"].shape == truth[key].shape, key
        assert moments["step"] == 1


def test_optimizers_that_differ_between_stages_are_left_out_with_a_note(tmp_path: Path) -> None:
    folder, truth = unpacked("pipeline_pp2", tmp_path)
    root: Any = ckptfix.open_checkpoint(folder).root
    rate = struct.pack(">d", root["optimizer"]["param_groups"][0]["lr"])
    (file,) = (folder / TAG).glob("*zero_pp_rank_0_mp_rank_01_optim_states.pt")
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name).replace(rate, struct.pack(">d", 0.5)) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    checkpoint = ckptfix.open_checkpoint(folder)
    assert checkpoint.keys() == list(truth)
    assert "optimizer" in [mark.place for mark in checkpoint.remarks if mark.kind is Kind.RANK_LEFT_OUT]


def test_without_masters_the_layers_say_the_weights(tmp_path: Path) -> None:
    folder, truth = unpacked("pipeline_pp2", tmp_path)
    for file in (folder / TAG).glob("*optim_states.pt"):
        file.unlink()
    got = ckptfix.open_checkpoint(folder).state_dict()
    assert got.keys() == truth.keys()
    for key, value in truth.items():
        assert bytes_of(got[key]) == bytes_of(value.bfloat16()), key


def test_the_states_of_a_stage_stand_for_the_folder(tmp_path: Path) -> None:
    folder, truth = unpacked("pipeline_pp2", tmp_path)
    for place in (folder / TAG, folder / TAG / "mp_rank_01_model_states.pt"):
        assert ckptfix.open_checkpoint(place).keys() == list(truth)


TIED = "tied_modules.embed.word_embeddings.weight"


@pytest.mark.parametrize(
    ("name", "said", "keys"),
    [
        ("layer_03-model_states.pt", r"the shard layer_03-model_states\.pt", ["3.ln.weight", "3.fc.bias"]),
        ("layer_00-model_states.pt", "the shard the layer of tied_modules.embed", [TIED]),
    ],
)
def test_weights_of_a_missing_layer_are_the_masters_or_else_lost(
    tmp_path: Path, name: str, said: str, keys: list[str]
) -> None:
    folder, truth = unpacked("pipeline_pp2", tmp_path)
    (folder / TAG / name).unlink()
    with pytest.raises(UnreadableError, match=f"lacks {said}.* the 15 tensors of the others"):
        ckptfix.open_checkpoint(folder)
    report = ckptfix.repair(folder, output=tmp_path / "masters.pth", salvage=True).report
    assert (report.exit_code, len(report.left)) == (1, 1)
    got = torch.load(tmp_path / "masters.pth")
    assert got["optimizer"]["state"].keys() == got["module"].keys() == truth.keys()
    assert all(bytes_of(got["module"][key]) == bytes_of(value) for key, value in truth.items())
    for file in (folder / TAG).glob("*optim_states.pt"):
        file.unlink()
    report = ckptfix.repair(folder, output=tmp_path / "halves.pth", salvage=True).report
    lost = {key for finding in report.left for key in finding.keys}
    assert lost >= set(keys)
    (fact,) = (fact for fact in ckptfix.open_checkpoint(folder, salvage=True).damage if fact.kind is Kind.BYTES_LACKING)
    assert fact.data["nbytes"] == sum(2 * truth[key].numel() for key in lost)
    halves = torch.load(tmp_path / "halves.pth")["module"]
    assert halves.keys() == truth.keys() - lost
    assert all(bytes_of(value) == bytes_of(truth[key].bfloat16()) for key, value in halves.items())


@pytest.mark.parametrize("change", ["unlink", "empty"])
def test_without_the_masters_of_a_stage_all_weights_are_those_of_the_layers(tmp_path: Path, change: str) -> None:
    folder, truth = unpacked("pipeline_pp2", tmp_path)
    file = folder / TAG / "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt"
    file.unlink() if change == "unlink" else file.write_bytes(b"")
    with pytest.raises(UnreadableError, match=file.name) as caught:
        ckptfix.open_checkpoint(folder)
    assert "take all 15 tensors" in str(caught.value)
    report = ckptfix.repair(folder, output=tmp_path / "whole.pth", salvage=True).report
    assert (report.exit_code, [finding.code for finding in report.left]) == (1, ["FIL203"])
    assert "its weights are the copies in bfloat16" in report.left[0].message
    got = torch.load(tmp_path / "whole.pth")
    assert "optimizer" not in got or got["optimizer"] is None
    assert got["module"].keys() == truth.keys()
    assert all(bytes_of(got["module"][key]) == bytes_of(value.bfloat16()) for key, value in truth.items())
    lacking = {f"{field} of {key}": 4 * truth[key].numel() for key in truth if key[0] in "45" for field in FIELDS}
    facts = ckptfix.open_checkpoint(folder, salvage=True).damage
    (fact,) = (fact for fact in facts if fact.kind is Kind.BYTES_LACKING)
    assert (set(fact.data["keys"]), fact.data["nbytes"]) == (set(lacking), sum(lacking.values()))


@pytest.mark.parametrize("stage", [0, 1])
def test_with_masters_of_a_stage_cut_all_weights_are_those_of_the_layers(tmp_path: Path, stage: int) -> None:
    folder, truth = unpacked("pipeline_pp2", tmp_path)
    file = folder / TAG / f"bf16_zero_pp_rank_0_mp_rank_0{stage}_optim_states.pt"
    file.write_bytes((data := file.read_bytes())[: len(data) // 2])
    got = ckptfix.open_checkpoint(folder, salvage=True)
    assert all(bytes_of(value) == bytes_of(truth[key].bfloat16()) for key, value in got.state_dict().items())
    assert {*got.keys()} == {*truth}
    assert not got.remarked(Kind.MASTERS)
    assert Kind.COPIES_TAKEN in {fact.kind for fact in got.damage}
    (fact,) = (fact for fact in got.damage if fact.kind is Kind.BYTES_LACKING)
    layers = "23" if stage == 0 else "45"  # the tied layer has its master in the other stage too
    assert {key for key in fact.data["keys"] if key.startswith("fp32 of ")} == {
        f"fp32 of {key}" for key in truth if key[0] in layers
    }
    assert not truth.keys() & {*fact.data["keys"]}


@pytest.mark.parametrize("change", ["copy", "swap"])
@pytest.mark.parametrize("has_masters", [True, False])
def test_renamed_layers_do_not_change_the_masters(tmp_path: Path, change: str, has_masters: bool) -> None:
    folder, truth = unpacked("pipeline_pp2", tmp_path)
    one, other = (folder / TAG / f"layer_0{number}-model_states.pt" for number in (3, 4))
    if change == "swap":
        swap(one, other)
    else:
        shutil.copy(one, other)
    for file in folder.glob("*/*optim_states.pt") if not has_masters else ():
        file.unlink()
    got = ckptfix.repair(folder, output=tmp_path / "whole.pth")
    (said,) = [each.message for each in got.report.left if "was saved as layer" in each.message]
    assert said.startswith(other.name)
    assert got.report.exit_code == 1
    assert (tmp_path / "whole.pth").exists() is has_masters
    if has_masters:
        weights = torch.load(tmp_path / "whole.pth")["module"]
        assert weights.keys() == truth.keys()
        assert all(bytes_of(value) == bytes_of(truth[key]) for key, value in weights.items())


def test_a_layer_with_other_parameters_is_named(tmp_path: Path) -> None:
    folder, _ = unpacked("pipeline_pp2", tmp_path)
    file = folder / TAG / "layer_02-model_states.pt"
    shutil.copy(folder / TAG / "layer_05-model_states.pt", file)
    with pytest.raises(UnreadableError, match=f"{file.name} was saved as layer_05-model_states, but comes before"):
        ckptfix.open_checkpoint(folder)


@pytest.mark.parametrize(
    ("blocks", "skipped"),
    [
        ([2, 3, 4, 6, 7], ["layer_05-model_00-model_states.pt"]),
        ([2, 3, 4, 5, 6, 7], []),
        ([2, 4, 6, 8], []),  # every other layer has no parameters
        ([2, 3, 6, 7], []),  # two stacks
    ],
)
def test_a_gap_in_a_stack_of_equal_layers_is_noted(tmp_path: Path, blocks: list[int], skipped: list[str]) -> None:
    for layer in (0, *blocks, 10):
        state = {"weight": torch.ones(4, 4) * layer} if layer in blocks else {"head.weight": torch.ones(layer + 1, 4)}
        save_layer(tmp_path, layer, [state])
    checkpoint = ckptfix.open_checkpoint(tmp_path)
    assert [fact.place for fact in checkpoint.remarked(Kind.LAYER_SKIPPED)] == skipped
    notes = [each for each in ckptfix.check(tmp_path).findings if "unless this layer has no" in each.message]
    assert (len(notes), ckptfix.check(tmp_path).exit_code) == (len(skipped), 0)


FIELDS = ("fp32", "exp_avg", "exp_avg_sq")


def test_without_the_model_states_of_a_stage_the_layers_are_kept(tmp_path: Path) -> None:
    folder, truth = unpacked("pipeline_pp2", tmp_path)
    (folder / TAG / "mp_rank_01_model_states.pt").unlink()
    with pytest.raises(UnreadableError, match=r"lacks 1 rank of 2: mp_rank_01_model_states\.pt"):
        ckptfix.open_checkpoint(folder)
    report = ckptfix.repair(folder, output=tmp_path / "whole.pth", salvage=True).report
    assert (report.exit_code, {finding.code for finding in report.left}) == (1, {"FIL203"})
    got = torch.load(tmp_path / "whole.pth")["module"]
    assert got.keys() == truth.keys()
    assert all(bytes_of(got[key]) == bytes_of(value.bfloat16()) for key, value in truth.items())


def save_layer(folder: Path, layer: int, ranks: list[dict[str, Any]]) -> None:
    for rank, state in enumerate(ranks):
        torch.save(state, folder / f"layer_{layer:02d}-model_{rank:02d}-model_states.pt")


def divided(attention: str) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    whole = {
        "input_layernorm.weight": torch.randn(4),
        f"{attention}.query_key_value.weight": torch.randn(12, 4),
        f"{attention}.query_key_value.bias": torch.randn(12),
        f"{attention}.dense.weight": torch.randn(4, 4),
        f"{attention}.dense.bias": torch.randn(4),
        "mlp.dense_h_to_4h.weight": torch.randn(16, 4),
        "mlp.dense_4h_to_h.weight": torch.randn(4, 16),
    }
    axes = {"dense.weight": 1, "dense_4h_to_h.weight": 1, "norm.weight": None, "dense.bias": None}
    ranks: list[dict[str, Any]] = [{}, {}]
    for key, value in whole.items():
        axis = next((axis for end, axis in axes.items() if key.endswith(end)), 0)
        for rank, part in enumerate([value, value] if axis is None else value.chunk(2, axis)):
            ranks[rank][key] = part.clone()
    return ranks, whole


def test_tensor_parallel_ranks_of_a_layer_are_joined(tmp_path: Path) -> None:
    ranks, whole = divided("self_attention")
    save_layer(tmp_path, 3, ranks)
    embedding = torch.randn(10, 4)
    save_layer(tmp_path, 0, [{"word_embeddings.weight": part.clone()} for part in embedding.chunk(2)])
    got = ckptfix.open_checkpoint(tmp_path).state_dict()
    assert list(got) == ["0.word_embeddings.weight", *(f"3.{key}" for key in whole)]
    assert torch.equal(got["0.word_embeddings.weight"], embedding)
    assert all(torch.equal(got[f"3.{key}"], value) for key, value in whole.items())


@pytest.mark.parametrize("given", [".", "layer_03-model_01-model_states.pt", "mp_rank_02_model_states.pt"])
def test_the_masters_of_tensor_parallel_stages(tmp_path: Path, given: str) -> None:
    """Two stages of one layer on two tensor-parallel ranks each: ``mp_rank`` counts ranks within stages."""
    wanted: dict[str, torch.Tensor] = {}
    moments: dict[str, torch.Tensor] = {}
    for stage, layer in enumerate((0, 3)):
        ranks, whole = divided("self_attention")
        save_layer(tmp_path, layer, [{key: part.bfloat16() for key, part in state.items()} for state in ranks])
        for model, state in enumerate(ranks, 2 * stage):
            named = {f"{layer}.{key}": part for key, part in state.items()}
            shapes = OrderedDict((key, part.shape) for key, part in named.items())
            states = {"module": None, "buffer_names": [], "param_shapes": [shapes], "mp_world_size": 2}
            torch.save(states, tmp_path / f"mp_rank_{model:02d}_model_states.pt")
            flat = torch.cat([part.flatten() for part in named.values()])
            inner = {"state": {0: {"step": 1, "exp_avg": flat + 1}}, "param_groups": [{"lr": 1.0, "params": [0]}]}
            held = {"single_partition_of_fp32_groups": [flat], "base_optimizer_state": inner}
            root = {"optimizer_state_dict": {**held, "partition_count": [1], "zero_stage": 1}}
            torch.save(root, tmp_path / f"zero_pp_rank_0_mp_rank_{model:02d}_optim_states.pt")
        wanted |= {f"{layer}.{key}": value for key, value in whole.items()}
        moments |= {f"{layer}.{key}": value + 1 for key, value in whole.items()}
    checkpoint = ckptfix.open_checkpoint(tmp_path / given)
    got = checkpoint.state_dict()
    assert list(got) == list(wanted)
    assert all(torch.equal(got[key], value) for key, value in wanted.items())
    ckptfix.repair(tmp_path, output=tmp_path / "whole.pth")
    state = torch.load(tmp_path / "whole.pth")["optimizer"]["state"]
    assert all(torch.equal(state[key]["exp_avg"], value) for key, value in moments.items())


@pytest.mark.parametrize("change", ["unlink", "empty"])
def test_a_missing_rank_of_a_layer_is_named_with_its_bytes(tmp_path: Path, change: str) -> None:
    ranks, whole = divided("self_attention")
    save_layer(tmp_path, 3, ranks)
    save_layer(tmp_path, 4, ranks)
    file = tmp_path / "layer_04-model_01-model_states.pt"
    file.unlink() if change == "unlink" else file.write_bytes(b"")
    divisions = {key for key in whole if "norm" not in key and not key.endswith("dense.bias")}
    nbytes = sum(ranks[1][key].nbytes for key in divisions)
    with pytest.raises(UnreadableError, match=rf"{file.name}.* lacks {nbytes} bytes of {len(divisions)} tensors"):
        ckptfix.open_checkpoint(tmp_path)
    checkpoint = ckptfix.open_checkpoint(tmp_path, salvage=True)
    assert checkpoint.lost.keys() == {f"4.{key}" for key in divisions}
    got = checkpoint.state_dict()
    assert all(torch.equal(got[f"3.{key}"], value) for key, value in whole.items())
    assert all(torch.equal(got[f"4.{key}"], value) for key, value in whole.items() if key not in divisions)
