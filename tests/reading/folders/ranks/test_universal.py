"""Universal checkpoints that DeepSpeed's ``ds_to_universal.py`` made."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfix
from ckptfix.core.finding import Level
from ckptfix.errors import UnreadableError, WriteError
from tests.checks import bytes_of
from tests.reading.folders.ranks.genuine import unpacked

TAG = "global_step2_universal"
STAGES = ["universal_zero2", "universal_zero3"]


@pytest.mark.parametrize("name", STAGES)
def test_it_is_what_zero_to_fp32_makes_of_the_ranks(tmp_path: Path, name: str) -> None:
    folder, truth = unpacked(name, tmp_path)
    got = ckptfix.open_checkpoint(folder).state_dict()
    assert got.keys() == truth.keys()
    for key, value in truth.items():
        assert got[key].shape == value.shape, key
        assert bytes_of(got[key].to(value.dtype)) == bytes_of(value), key


@pytest.mark.parametrize("name", STAGES)
def test_a_repair_writes_one_plain_file_with_ties_dtypes_and_the_optimizer(tmp_path: Path, name: str) -> None:
    folder, _ = unpacked(name, tmp_path)
    report = ckptfix.repair(folder, output=tmp_path / "whole.pth").report
    assert [finding.code for finding in report.findings if finding.level] == []
    whole = torch.load(tmp_path / "whole.pth")
    weights = whole["module"]
    assert weights["head.weight"].data_ptr() == weights["emb.weight"].data_ptr()
    assert weights["cnt"].dtype == torch.int64
    assert weights["frozen.weight"].dtype == (torch.bfloat16 if name.endswith("2") else torch.float32)
    for key, moments in whole["optimizer"]["state"].items():
        assert moments["exp_avg"].shape == weights[key].shape, key
        saved = torch.load(folder / TAG / "zero" / key / "exp_avg.pt")
        saved = saved["param"] if name.endswith("2") else saved.reshape(weights[key].shape)
        assert bytes_of(moments["exp_avg"]) == bytes_of(saved), key
        assert moments["step"] == 2, key
    sizes = [len(group["params"]) for group in whole["optimizer"]["param_groups"]]
    assert sizes == ([3, 6] if name.endswith("2") else [9])


def test_the_folder_of_the_tag_and_its_model_states_are_the_same_checkpoint(tmp_path: Path) -> None:
    folder, _ = unpacked(STAGES[0], tmp_path)
    keys = ckptfix.open_checkpoint(folder).keys()
    assert ckptfix.open_checkpoint(folder / TAG).keys() == keys
    for part in ("mp_rank_00_model_states.pt", "zero", "zero/l1.weight", "zero/l1.weight/fp32.pt"):
        assert ckptfix.open_checkpoint(folder / TAG / part).keys() == keys, part


def test_a_parameter_without_model_states_is_a_file_of_its_own(tmp_path: Path) -> None:
    folder, _ = unpacked(STAGES[0], tmp_path)
    (folder / TAG / "mp_rank_00_model_states.pt").unlink()
    assert ckptfix.open_checkpoint(folder / TAG / "zero/l1.weight/fp32.pt").keys() == ["param"]


@pytest.mark.parametrize("change", ["missing", "unreadable"])
def test_masters_without_model_states_have_the_names_of_their_folders(tmp_path: Path, change: str) -> None:
    folder, _ = unpacked(STAGES[0], tmp_path)
    whole = ckptfix.open_checkpoint(folder)
    trained = {key for key in whole.specs if key.partition(".")[0] in {"emb", "l1", "l2", "bn", "ln"}}
    file = folder / TAG / "mp_rank_00_model_states.pt"
    file.unlink() if change == "missing" else file.write_bytes(b"")
    with pytest.raises(UnreadableError, match=r"mp_rank_00_model_states\.pt.* unknown names are lost: .*salvage=True"):
        ckptfix.open_checkpoint(folder / TAG)
    report = ckptfix.repair(folder, output=tmp_path / "rest.pth", salvage=True).report
    rest = torch.load(tmp_path / "rest.pth")["module"]
    assert rest.keys() == trained  # without those that the converter cast, such as the tied head.weight
    assert all(bytes_of(rest[key]) == bytes_of(whole.read(key)) for key in trained)
    assert any("names of its groups" in finding.message for finding in report.findings)


def test_flat_masters_without_model_states_get_their_shapes_from_a_target(tmp_path: Path) -> None:
    folder, _ = unpacked(STAGES[1], tmp_path)
    whole = ckptfix.open_checkpoint(folder)
    like = tmp_path / "like.pth"
    torch.save({key: torch.zeros_like(value) for key, value in whole.state_dict().items()}, like)
    for file in (folder / TAG).glob("*model_states.pt"):
        file.unlink()
    with pytest.raises(UnreadableError, match=r"lacks the model states zero_pp_rank_0_mp_rank_00_model_states\.pt; "):
        ckptfix.open_checkpoint(folder)
    ckptfix.repair(folder, output=tmp_path / "new.pth", salvage=True, like=like, fill=str(like))
    new = torch.load(tmp_path / "new.pth")["module"]
    trained = {place.name for place in (folder / TAG / "zero").iterdir() if place.is_dir()}
    assert len(trained) == 9
    assert all(new[key].shape == whole.specs[key].shape for key in trained)
    assert [key for key in trained if bytes_of(new[key]) != bytes_of(whole.read(key))] == []


@pytest.mark.parametrize("rank", [0, 1])
def test_missing_model_states_of_a_rank_of_stage_3_cost_only_frozen_weights(tmp_path: Path, rank: int) -> None:
    """Those of any rank have the names and ties; each has a share of the frozen weights."""
    folder, _ = unpacked(STAGES[1], tmp_path)
    whole = ckptfix.open_checkpoint(folder)
    file = folder / TAG / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
    fragments = torch.load(file, weights_only=False)["frozen_param_fragments"].values()
    file.unlink()
    lost = sum(fragment.nbytes for fragment in fragments) - 8 * rank  # without the padding at the end of both
    said = rf"lacks 1 rank of 2: {file.name}; lacks {lost} bytes of 2 tensors .* frozen\.bias are lost"
    with pytest.raises(UnreadableError, match=said):
        ckptfix.open_checkpoint(folder)
    got = ckptfix.open_checkpoint(folder, salvage=True)
    assert {*got.lost} == {"frozen.weight", "frozen.bias"}
    assert {*got.keys()} == {*whole.keys()} - {*got.lost}
    assert all(bytes_of(got.read(key)) == bytes_of(whole.read(key)) for key in got.specs)
    assert got.specs["head.weight"].view == got.specs["emb.weight"].view


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("l1.weight", "lacks the shard zero/l1.weight with 1 key"),
        ("l1.weight/fp32.pt", "lacks the shard zero/l1.weight/fp32.pt with 1 key"),
        ("l1.weight/fp32.pt", "zero/l1.weight/fp32.pt: the file is empty"),
    ],
)
def test_a_missing_master_is_named_and_the_others_are_kept(tmp_path: Path, name: str, lost: str, said: str) -> None:
    folder, truth = unpacked(name, tmp_path)
    place = folder / TAG / "zero" / lost
    if said.startswith("lacks"):
        shutil.rmtree(place) if place.is_dir() else place.unlink()
    else:
        place.write_bytes(b"")
    loss = "924 bytes of 3 tensors" if lost == "l1.weight" else "308 bytes of 1 tensor"  # with its moments
    with pytest.raises(UnreadableError, match=f"{said}.* lacks {loss}"):
        ckptfix.open_checkpoint(folder)
    report = ckptfix.repair(folder, output=tmp_path / "whole.pth", salvage=True).report
    assert ([finding.keys for finding in report.left], report.exit_code) == ([("l1.weight",)], 1)
    got = torch.load(tmp_path / "whole.pth")["module"]
    assert got.keys() == truth.keys() - {"l1.weight"}
    for key, value in got.items():
        assert bytes_of(value.to(truth[key].dtype)) == bytes_of(truth[key]), key


def test_the_copy_in_the_model_states_is_offered_if_a_master_is_lost(tmp_path: Path) -> None:
    """Stages 1 and 2 have all weights in the training's dtype; the command in the error takes them."""
    folder, _ = unpacked("universal_zero2", tmp_path)
    states = folder / TAG / "mp_rank_00_model_states.pt"
    (folder / TAG / "zero" / "l1.weight" / "fp32.pt").unlink()
    shutil.rmtree(folder / TAG / "zero" / "emb.weight")
    with pytest.raises(
        UnreadableError, match=r"or take all weights in bfloat16, .* repair .*mp_rank_00_model_states.pt"
    ):
        ckptfix.open_checkpoint(folder)
    report = ckptfix.repair(states, output=tmp_path / "copy.pth").report
    assert report.source == str(states)
    assert any("left out: optimizer (lacks 2 shards" in finding.message for finding in report.findings)
    copies = torch.load(states, weights_only=False)["module"]
    whole = torch.load(tmp_path / "copy.pth")
    assert "optimizer" not in whole
    assert whole["module"].keys() == copies.keys()
    assert all(bytes_of(whole["module"][key]) == bytes_of(value) for key, value in copies.items())
    held = ckptfix.open_checkpoint(folder, salvage=True)
    assert copies.keys() - held.keys() == {"emb.weight", "head.weight", "l1.weight"}
    assert {held.specs[key].dtype for key in ("l1.bias", "l2.weight")} == {"float32"}


@pytest.mark.parametrize("name", STAGES)
def test_a_universal_checkpoint_that_lacks_a_parameter_is_written_if_it_is_filled(tmp_path: Path, name: str) -> None:
    """Its moments stay lost; those of the others are kept, and the optimizer is in step with the weights."""
    folder, truth = unpacked(name, tmp_path)
    ckptfix.repair(folder, output=tmp_path / "whole.pth")
    shutil.rmtree(folder / TAG / "zero" / "l1.weight")
    output = tmp_path / "out"
    with pytest.raises(WriteError, match=r"needs all weights of its optimizer, and l1\.weight is lost; complete it"):
        ckptfix.repair(folder, output=output, salvage=True, format="universal")
    report = ckptfix.repair(folder, output=output, salvage=True, fill=tmp_path / "whole.pth", format="universal").report
    assert not report.left
    found = ckptfix.open_checkpoint(output)
    assert all(bytes_of(found.read(key).to(truth[key].dtype)) == bytes_of(truth[key]) for key in truth)
    root: Any = found.root
    state = root["optimizer"]["state"]
    assert [key for key in state if not state[key]] == ["l1.weight"]
    assert all({"exp_avg", "exp_avg_sq", "step"} <= state[key].keys() for key in state if key != "l1.weight")


@pytest.mark.parametrize("lost", ["emb.weight", "emb.weight/fp32.pt"])
def test_the_optimizer_without_the_lost_parameters_loads(tmp_path: Path, lost: str) -> None:
    """``emb.weight`` is tied to ``head.weight``, which the optimizer does not have."""
    folder, truth = unpacked("universal_zero2", tmp_path)
    place = folder / TAG / "zero" / lost
    shutil.rmtree(place) if place.is_dir() else place.unlink()
    report = ckptfix.repair(folder, output=tmp_path / "whole.pth", salvage=True).report
    assert "OPT101" not in [finding.code for finding in report.left]
    whole = torch.load(tmp_path / "whole.pth")
    module, optimizer = whole["module"], whole["optimizer"]
    groups = optimizer["param_groups"]
    assert {name for group in groups for name in group["params"]} == optimizer["state"].keys()
    assert not {"emb.weight", "head.weight"} & {*module, *optimizer["state"]}
    made = torch.optim.AdamW([{"params": [module[name].requires_grad_() for name in g["params"]]} for g in groups])
    numbers = {name: at for at, name in enumerate(name for group in groups for name in group["params"])}
    state = {numbers[name]: held for name, held in optimizer["state"].items()}
    made.load_state_dict(
        {"state": state, "param_groups": [{**g, "params": [numbers[name] for name in g["params"]]} for g in groups]}
    )
    torch.save(truth, tmp_path / "fill.pth")
    output, fill = tmp_path / "out", tmp_path / "fill.pth"
    assert not ckptfix.repair(folder, output=output, salvage=True, fill=fill, format="universal").report.left
    again: Any = ckptfix.open_checkpoint(output).root
    assert [name for name, held in again["optimizer"]["state"].items() if not held] == ["emb.weight"]


@pytest.mark.parametrize("moments", [True, False])
def test_a_missing_master_of_tensor_parallel_ranks_has_the_shape_of_the_whole(tmp_path: Path, moments: bool) -> None:
    """By its moments, or else by the patterns of names; the model states have the shape of a part."""
    folder, _ = unpacked(STAGES[0], tmp_path)
    states = folder / TAG / "mp_rank_00_model_states.pt"
    torch.save({**torch.load(states, weights_only=False), "mp_world_size": 2, "universal_checkpoint_info": {}}, states)
    for file in (folder / TAG / "zero" / "l1.weight").iterdir():
        file.unlink()
    if moments:
        torch.save({"param": torch.ones(11, 14), "cat_dim": 1}, folder / TAG / "zero" / "l1.weight" / "exp_avg.pt")
    lost = ckptfix.open_checkpoint(folder, salvage=True).lost["l1.weight"]
    assert lost is not None
    assert lost.shape == ((11, 14) if moments else (22, 7))


@pytest.mark.parametrize("field", ["exp_avg", "exp_avg_sq", "step"])
def test_a_missing_moment_is_damage(tmp_path: Path, field: str) -> None:
    folder, _ = unpacked(STAGES[0], tmp_path)
    file = folder / TAG / "zero" / "ln.weight" / f"{field}.pt"
    file.unlink()
    with pytest.raises(UnreadableError, match=rf"lacks the shard zero/ln\.weight/{field}\.pt") as caught:
        ckptfix.open_checkpoint(folder)
    facts = [fact for fact in caught.value.data["damage"] if fact["kind"] == "bytes-lacking"]
    lost = [] if field == "step" else [{"nbytes": 4 * 7, "keys": (f"{field} of ln.weight",)}]
    assert [fact["data"] for fact in facts] == lost
    assert "ln.weight" in ckptfix.open_checkpoint(folder, salvage=True).specs
    report = ckptfix.repair(folder, output=tmp_path / "whole.pth", salvage=True).report
    (left,) = [finding for finding in report.left if finding.code != "OPT102"]  # about the step
    assert (left.code, report.exit_code) == ("FIL203", 1)
    assert f"data other than weights is lost: the file lacks the shard zero/ln.weight/{field}.pt" in left.message


@pytest.mark.parametrize("names", [["optimizer_state.pt"], ["ln.weight/exp_avg.pt", "ln.weight/exp_avg_sq.pt"]])
def test_files_of_the_optimizer_that_cannot_be_read_are_a_loss(tmp_path: Path, names: list[str]) -> None:
    folder, truth = unpacked(STAGES[0], tmp_path)
    for name in names:
        (folder / TAG / "zero" / name).write_bytes(b"PK, and nothing of it")
    report = ckptfix.repair(folder, output=tmp_path / "whole.pth", salvage=True).report
    (left,) = report.left
    assert (left.code, left.level, report.exit_code) == ("FIL203", Level.ERROR, 1)
    assert "data other than weights is lost" in left.message
    assert all(f"zero/{name}" in left.message for name in names)
    assert torch.load(tmp_path / "whole.pth")["module"].keys() == truth.keys()


def test_missing_groups_of_the_optimizer_are_named(tmp_path: Path) -> None:
    folder, _ = unpacked(STAGES[0], tmp_path)
    (folder / TAG / "zero" / "optimizer_state.pt").unlink()
    (note,) = (found for found in ckptfix.check(folder).findings if "left out" in found.message)
    assert note.message == "left out: optimizer (fetch zero/optimizer_state.pt, which has its groups)"


def test_parameters_with_one_moment_or_none_are_whole(tmp_path: Path) -> None:
    """As with Lion, and with optimizers that have other moments for some parameters."""
    folder, _ = unpacked(STAGES[0], tmp_path)
    for file in (folder / TAG / "zero").glob("*/exp_avg_sq.pt"):
        file.unlink()
    (folder / TAG / "zero" / "ln.weight" / "exp_avg.pt").unlink()
    assert "ln.weight" in ckptfix.open_checkpoint(folder).specs


def test_masters_of_another_model_are_refused(tmp_path: Path) -> None:
    folder, _ = unpacked(STAGES[0], tmp_path)
    (folder / TAG / "zero" / "l1.weight").rename(folder / TAG / "zero" / "l9.weight")
    torch.save({"param": torch.ones(11, 7)}, folder / TAG / "zero" / "l9.weight" / "fp32.pt")
    with pytest.raises(UnreadableError, match=r"the model states do not name l9\.weight"):
        ckptfix.open_checkpoint(folder)


@pytest.mark.parametrize(
    ("file", "shape"), [("fp32", (3, 4, 5)), ("fp32", (7, 11)), ("exp_avg", (22, 7)), ("exp_avg", (76,))]
)
def test_tensors_of_other_shapes_are_refused(tmp_path: Path, file: str, shape: tuple[int, ...]) -> None:
    folder, _ = unpacked(STAGES[0], tmp_path)
    torch.save({"param": torch.ones(shape), "cat_dim": 0}, folder / TAG / "zero" / "l1.weight" / f"{file}.pt")
    said = re.escape(f"has the shape {list(shape)}, and the model states say [11, 7]")
    with pytest.raises(UnreadableError, match=said):
        ckptfix.open_checkpoint(folder)


@pytest.mark.parametrize(
    ("source", "file"),
    [("optimizer_state.pt", "ln.bias/exp_avg_sq.pt"), ("l1.weight/exp_avg.pt", "bn.bias/step.pt")],
)
def test_files_that_hold_something_else_are_refused(tmp_path: Path, source: str, file: str) -> None:
    folder, _ = unpacked(STAGES[0], tmp_path)
    shutil.copy(folder / TAG / "zero" / source, folder / TAG / "zero" / file)
    with pytest.raises(UnreadableError, match=f"{file}: holds no"):
        ckptfix.open_checkpoint(folder)


@pytest.mark.parametrize("kind", ["fp32", "exp_avg"])
def test_files_of_another_parameter_are_named(tmp_path: Path, kind: str) -> None:
    folder, _ = unpacked(STAGES[0], tmp_path)
    shutil.copy(*(folder / TAG / "zero" / name / f"{kind}.pt" for name in ("l2.bias", "ln.bias")))
    (odd,) = (finding for finding in ckptfix.check(folder).findings if finding.level)
    assert odd.code == "FIL105"
    assert "ln.bias" in (odd.keys[0] if kind == "fp32" else odd.message)


def test_the_highest_moments_of_amsgrad_may_equal_the_moments(tmp_path: Path) -> None:
    folder, _ = unpacked(STAGES[0], tmp_path)
    parameters = folder / TAG / "zero"
    for file in parameters.glob("*/exp_avg_sq.pt"):
        shutil.copy(file, file.with_name("max_exp_avg_sq.pt"))
    assert not [finding for finding in ckptfix.check(folder).findings if finding.level]
    shutil.copy(*(parameters / name / "max_exp_avg_sq.pt" for name in ("l2.bias", "ln.bias")))
    (odd,) = (finding for finding in ckptfix.check(folder).findings if finding.level)
    assert "ln.bias/max_exp_avg_sq.pt" in odd.message
    assert "l2.bias/max_exp_avg_sq.pt" in odd.message


@pytest.mark.parametrize("name", STAGES)
def test_files_that_macos_writes_beside_others_are_not_moments(tmp_path: Path, name: str) -> None:
    folder, truth = unpacked(name, tmp_path)
    for file in list(folder.rglob("*")):
        file.with_name(f"._{file.name}").write_bytes(b"\x00\x05\x16\x07")
    assert ckptfix.open_checkpoint(folder).state_dict().keys() == truth.keys()


@pytest.mark.parametrize("name", STAGES)
def test_a_master_that_was_copied_over_another_is_named(tmp_path: Path, name: str) -> None:
    """Stage 3 has no copies of the masters in the model states to compare them with."""
    folder, truth = unpacked(name, tmp_path)
    shutil.copy(folder / TAG / "zero/l1.bias/fp32.pt", folder / TAG / "zero/bn.weight/fp32.pt")
    messages = [finding.message for finding in ckptfix.check(folder).findings if finding.code == "FIL105"]
    if name == "universal_zero2":
        assert any(re.match(r"1 fp32 master of 9 differ", message) for message in messages)
        return
    assert any(
        "zero/l1.bias/fp32.pt holds the same values as zero/bn.weight/fp32.pt" in message for message in messages
    )
    got = ckptfix.open_checkpoint(folder, salvage=True).state_dict()
    assert truth.keys() - got.keys() == {"l1.bias", "bn.weight"}
    assert all(bytes_of(got[key]) == bytes_of(truth[key]) for key in got if got[key].dtype == truth[key].dtype)


@pytest.mark.parametrize("field", ["fp32", "exp_avg"])
@pytest.mark.parametrize("name", STAGES)
def test_a_file_with_another_shape_is_lost_and_the_rest_is_kept(tmp_path: Path, name: str, field: str) -> None:
    folder, truth = unpacked(name, tmp_path)
    shutil.copy(folder / TAG / f"zero/l1.weight/{field}.pt", folder / TAG / f"zero/l1.bias/{field}.pt")
    with pytest.raises(UnreadableError, match=rf"l1\.bias/{field}\.pt: has the shape"):
        ckptfix.open_checkpoint(folder)
    got = ckptfix.open_checkpoint(folder, salvage=True).state_dict()
    assert truth.keys() - got.keys() == ({"l1.bias"} if field == "fp32" else set())
    assert all(bytes_of(got[key]) == bytes_of(truth[key]) for key in got if got[key].dtype == truth[key].dtype)
