"""nanotron's files of one parameter and rank each: written as ``serialize/weights.py`` does."""

import json
from itertools import accumulate
from pathlib import Path
from shutil import rmtree

import pytest
import torch
from safetensors.torch import save_file

import ckptfix
from ckptfix.core.facts import Kind
from ckptfix.errors import HostileError, UnreadableError

SLICES = "local_global_slices_pairs"
LAYER = "model.decoder.{}.pp_block"
# How each parameter is divided: the axis, and the matrices that are stacked along it, each divided by itself.
SPLITS = {
    "model.token_position_embeddings.pp_block.token_embedding.weight": (0, None),
    **{f"{LAYER.format(at)}.attn.qkv_proj.weight": (0, (8, 4, 4)) for at in (2, 10)},
    **{f"{LAYER.format(at)}.attn.o_proj.weight": (1, None) for at in (2, 10)},
    **{f"{LAYER.format(at)}.input_layernorm.weight": None for at in (2, 10)},
}


def write(folder: Path, ranks: int, step: str = "10") -> dict[str, torch.Tensor]:
    """Write a model of two layers, on two stages of a pipeline; return it."""
    torch.manual_seed(0)
    root, whole = folder / step, {}
    for name, split in SPLITS.items():
        whole[name] = value = torch.randn(16, 8).bfloat16() if split else torch.randn(8)
        *modules, leaf = name.split(".")
        place = root.joinpath("model", *modules)
        place.mkdir(parents=True, exist_ok=True)
        if split is None:
            save_file({"data": value}, place / f"model_{leaf}.safetensors", metadata={})
            continue
        axis, chunks = split
        stage = int(".10." in name)
        starts = [0, *accumulate(chunks or ())]
        for rank in range(ranks):
            length = value.shape[axis] // ranks
            pairs: list[tuple[tuple[int | None, int | None], tuple[int, int]]]
            pairs = [((None, None), (rank * length, (rank + 1) * length))]
            if chunks:
                pairs = [
                    (
                        (start // ranks, (start + size) // ranks),
                        (start + rank * size // ranks, start + (rank + 1) * size // ranks),
                    )
                    for start, size in zip(starts, chunks, strict=False)
                ]
            part = torch.cat([value.narrow(axis, start, stop - start) for _, (start, stop) in pairs], axis)
            other = "None,None,None"
            said = [[[f"{start},{stop},None", other][:: 1 - 2 * axis] for start, stop in pair] for pair in pairs]
            notes = {
                "version": "1.4",
                SLICES: ";".join("#".join(map("|".join, pair)) for pair in said),
                "unsharded_shape": str(tuple(value.shape)),
            }
            file = place / f"model_{leaf}_pp-rank-{stage}-of-2_tp-rank-{rank}-of-{ranks}.safetensors"
            save_file({"data": part, "_no_weight_decay": torch.tensor(True)}, file, metadata=notes)
    (root / "optimizer").mkdir()
    (root / "optimizer" / "optimizer_config.json").write_text("{}")
    (root / "checkpoint_metadata.json").write_text(json.dumps({"version": "1.4", "tp": ranks, "dp": 1, "metas": {}}))
    (folder / "latest.txt").write_text(step)
    return whole


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("given", ["", "10", next(iter(SPLITS)).replace(".", "/")])
def test_the_parts_are_the_model(tmp_path: Path, ranks: int, given: str) -> None:
    whole = write(tmp_path, ranks)
    place = tmp_path / given
    if not place.exists():  # the folder of one parameter
        place = next((tmp_path / "10" / "model" / given).parent.glob("*tp-rank-0*"))
    checkpoint = ckptfix.open_checkpoint(place)
    got = checkpoint.state_dict()
    # Layers by their numbers, and the dtypes as they were.
    assert [key for key in got if "o_proj" in key] == [key for key in whole if "o_proj" in key]
    assert got.keys() == whole.keys()
    assert all(torch.equal(got[key], value) and got[key].dtype == value.dtype for key, value in whole.items())
    assert [fact.place for fact in checkpoint.remarks if fact.kind is Kind.RANK_LEFT_OUT] == ["optimizer"]


def test_an_empty_folder_of_the_optimizer_is_not_left_out(tmp_path: Path) -> None:
    write(tmp_path, 2)
    (tmp_path / "10" / "optimizer" / "optimizer_config.json").unlink()
    assert not any(fact.kind is Kind.RANK_LEFT_OUT for fact in ckptfix.open_checkpoint(tmp_path).remarks)


@pytest.mark.parametrize("lost", [None, 2])
def test_experts_are_divided_among_groups_too(tmp_path: Path, lost: int | None) -> None:
    """Newer releases name the group of experts after the tensor-parallel rank, and write sizes of numpy."""
    write(tmp_path, 2)
    name, whole = f"{LAYER.format(2)}.mlp.experts.merged_gate_up_proj", torch.randn(4, 6)
    *modules, leaf = name.split(".")
    place = (tmp_path / "10" / "model").joinpath(*modules)
    place.mkdir(parents=True)
    for part in range(4):
        group, rank = divmod(part, 2)
        rows, columns = slice(2 * group, 2 * group + 2), slice(3 * rank, 3 * rank + 3)
        said = f"None,None,None|None,None,None#{2 * group},{2 * group + 2},None|{3 * rank},{3 * rank + 3},None"
        file = place / f"model_{leaf}_pp-rank-0-of-2_tp-rank-{rank}-of-2_exp-rank-{group}-of-2.safetensors"
        notes = {"version": "1.4", SLICES: said, "unsharded_shape": "(np.int64(4), 6)"}
        if part != lost:
            save_file({"data": whole[rows, columns].contiguous()}, file, metadata=notes)
    if lost is not None:
        with pytest.raises(UnreadableError, match=r"_pp-rank-0-of-2_tp-rank-0-of-2_exp-rank-1-of-2\.safetensors"):
            ckptfix.open_checkpoint(tmp_path)
        return
    assert torch.equal(ckptfix.open_checkpoint(tmp_path).state_dict()[name], whole)


def test_the_latest_of_several_saves(tmp_path: Path) -> None:
    write(tmp_path, 2, "5")
    whole = write(tmp_path, 2)
    key, value = next(iter(whole.items()))
    save_file({"data": value[:1]}, next((tmp_path / "5").rglob("*tp-rank-0*")))  # not part of the latest
    assert torch.equal(ckptfix.open_checkpoint(tmp_path).read(key), value)


def one(folder: Path, name: str, rank: int = 1, ranks: int = 2) -> Path:
    (found,) = folder.rglob(f"{name}/model_weight_*_tp-rank-{rank}-of-{ranks}.safetensors")
    return found


def test_a_missing_rank_is_named_and_the_rest_salvaged(tmp_path: Path) -> None:
    whole = write(tmp_path, 2)
    for file in tmp_path.rglob("*tp-rank-1-of-2*"):
        file.unlink()
    said = r"lacks 1 rank of 2: model_weight_pp-rank-\d-of-2_tp-rank-1-of-2\.safetensors"
    with pytest.raises(UnreadableError, match=rf"{said}; lacks {5 * 16 * 8 * 2 // 2} bytes of 5 tensors"):
        ckptfix.open_checkpoint(tmp_path)
    got = ckptfix.open_checkpoint(tmp_path, salvage=True)
    assert set(got.specs) == {key for key in whole if key.endswith("layernorm.weight")}
    assert set(got.lost) == whole.keys() - set(got.specs)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_file_of_one_parameter_is_named_with_its_folder(tmp_path: Path, rank: int) -> None:
    whole = write(tmp_path, 2)
    name = f"{LAYER.format(10)}.attn.o_proj.weight"
    *modules, leaf = name.split(".")
    file = f"model/{'/'.join(modules)}/model_{leaf}_pp-rank-1-of-2_tp-rank-{rank}-of-2.safetensors"
    (tmp_path / "10" / file).unlink()
    with pytest.raises(UnreadableError, match=f"lacks the shard {file} with 1 key; lacks 128 bytes of 1 tensor"):
        ckptfix.open_checkpoint(tmp_path)
    got = ckptfix.open_checkpoint(tmp_path, salvage=True)
    assert set(got.lost) == {name}
    assert all(torch.equal(got.read(key), value) for key, value in whole.items() if key != name)


@pytest.mark.parametrize(("layer", "stage"), [(10, 1), (2, 0)])
@pytest.mark.parametrize("layers", [None, 2, 1])
def test_a_missing_stage_is_named(tmp_path: Path, layer: int, stage: int, layers: int | None) -> None:
    """Unless the configuration says that all layers are there: a stage may have only tied parameters."""
    whole = write(tmp_path, 2)
    for folder in (f"decoder/{layer}", *(["token_position_embeddings"] if stage == 0 else [])):
        rmtree(tmp_path / "10/model/model" / folder)
    if layers:
        (tmp_path / "10/model_config.json").write_text(json.dumps({"hidden_size": 8, "num_hidden_layers": layers}))
    kept = {name for name in whole if "decoder" in name and f".{layer}." not in name}
    kept |= {name for name in whole if "embedding" in name and stage == 1}
    if layers == 1:
        assert set(ckptfix.open_checkpoint(tmp_path).specs) == kept
        return
    with pytest.raises(UnreadableError, match=rf"lacks the shard model_\*_pp-rank-{stage}-of-2_\*\.safetensors"):
        ckptfix.open_checkpoint(tmp_path)
    report = ckptfix.repair(tmp_path, output=tmp_path / "whole.pth", salvage=True).report
    assert report.exit_code == 1
    assert torch.load(tmp_path / "whole.pth", weights_only=True).keys() == kept


@pytest.mark.parametrize("is_other", [False, True], ids=["missing", "another-kind"])
def test_a_parameter_that_one_layer_lacks_is_named(tmp_path: Path, is_other: bool) -> None:
    """Unless that layer has another one in its place, like a dense layer among those with experts."""
    write(tmp_path, 2)
    folder = tmp_path / "10/model/model/decoder/10/pp_block/attn/o_proj"
    rmtree(folder) if not is_other else folder.rename(folder.with_name("dense"))
    report = ckptfix.repair(tmp_path, output=tmp_path / "whole.pth").report
    found = [finding for finding in report.findings if "in every layer" in finding.message]
    assert [finding.keys for finding in found] == [(f"{LAYER.format(10)}.attn.o_proj.weight",)] * (not is_other)
    assert report.exit_code == int(not is_other)
    write(tmp_path / "whole", 2)
    assert not [finding for finding in ckptfix.check(tmp_path / "whole").findings if finding.level]


def test_an_unreadable_file_of_a_whole_parameter_is_lost(tmp_path: Path) -> None:
    whole = write(tmp_path, 2)
    name = f"{LAYER.format(2)}.input_layernorm.weight"
    (tmp_path / "10/model" / Path(*name.split(".")[:-1]) / "model_weight.safetensors").write_bytes(b"")
    with pytest.raises(UnreadableError, match="take 6 of 7 tensors"):
        ckptfix.open_checkpoint(tmp_path)
    report = ckptfix.repair(tmp_path, output=tmp_path / "whole.pth", salvage=True).report
    assert (report.exit_code, [left.keys for left in report.left]) == (1, [(name,)])
    assert torch.load(tmp_path / "whole.pth", weights_only=True).keys() == whole.keys() - {name}


@pytest.mark.parametrize(("ranks", "is_part"), [(2, True), (1, False)])
def test_one_rank_apart_is_a_part(tmp_path: Path, ranks: int, is_part: bool) -> None:
    write(tmp_path / "saves", ranks)
    file = one(tmp_path / "saves", "token_embedding", 0, ranks)
    copy = file.rename(tmp_path / file.name)
    assert [finding.code for finding in ckptfix.check(copy).findings] == ["FIL105"] * is_part


@pytest.mark.parametrize("given", ["", "10", "10/model/model/decoder/2/pp_block/attn/o_proj"])
@pytest.mark.parametrize("has_metadata", [True, False])
def test_a_save_is_found_without_its_metadata(tmp_path: Path, given: str, has_metadata: bool) -> None:
    whole = write(tmp_path, 2)
    if not has_metadata:
        (tmp_path / "10/checkpoint_metadata.json").unlink()
    copied = one(tmp_path, "token_embedding")
    copied.with_name(f"{copied.stem} (1).safetensors").write_bytes(copied.read_bytes())
    copied.with_name("model_weight (1).safetensors").write_bytes(copied.read_bytes())
    for place in (tmp_path / given, one(tmp_path, "decoder/2/pp_block/attn/o_proj")):
        got = ckptfix.open_checkpoint(place).state_dict()
        assert got.keys() == whole.keys()
        assert all(torch.equal(got[key], value) for key, value in whole.items())


@pytest.mark.parametrize(
    ("notes", "said"),
    [
        ({}, "not what their framework writes"),
        (
            {SLICES: "None,None,None|None,None,None#0,17,None|None,None,None"},
            "the slice 0,17,None",
        ),
        ({SLICES: "None,None,None|None,None,None#0,8,None|None,None,None"}, "have 64 of the 128"),
        ({SLICES: "0,8,2|None,None,None#8,16,None|None,None,None"}, "the slice 0,8,2"),
        ({"unsharded_shape": "(99999999999, 99999999999)"}, "the slice|of the .* elements"),
    ],
    ids=["nothing", "larger-than-the-whole", "overlapping", "every-second-row", "a-shape-that-lies"],
)
def test_a_part_that_lies_is_refused(tmp_path: Path, notes: dict[str, str], said: str) -> None:
    write(tmp_path, 2)
    file = one(tmp_path, "token_embedding")
    usual = {"version": "1.4", "unsharded_shape": "(16, 8)"}
    usual[SLICES] = "None,None,None|None,None,None#8,16,None|None,None,None"
    save_file({"data": torch.zeros(8, 8).bfloat16()}, file, metadata={**usual, **notes} if notes else {})
    with pytest.raises((UnreadableError, HostileError), match=said):
        ckptfix.open_checkpoint(tmp_path)


def test_a_part_that_does_not_say_so_is_not_taken_for_the_whole(tmp_path: Path) -> None:
    """As releases before 1.2 wrote them; one is missing."""
    write(tmp_path, 2)
    one(tmp_path, "token_embedding", 0).unlink()
    save_file({"data": torch.zeros(8, 8)}, one(tmp_path, "token_embedding"))
    for salvage in (False, True):
        with pytest.raises(UnreadableError):
            ckptfix.open_checkpoint(tmp_path, salvage=salvage)


@pytest.mark.parametrize("is_other", [False, True], ids=["equal", "different"])
def test_copies_that_differ_are_named(tmp_path: Path, is_other: bool) -> None:
    """In files without checksums."""
    write(tmp_path, 2)
    every = "None,None,None|None,None,None"
    for rank in range(2):
        value = torch.full((16, 8), float(rank * is_other))
        notes = {"unsharded_shape": "(16, 8)", SLICES: f"{every}#{every}"}
        save_file({"data": value}, one(tmp_path, "token_embedding", rank), metadata=notes)
    if is_other:
        with pytest.raises(UnreadableError, match="token_embedding"):
            ckptfix.open_checkpoint(tmp_path)
    else:
        assert not ckptfix.open_checkpoint(tmp_path).damage


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    write(tmp_path, 2)
    file = one(tmp_path, "token_embedding")
    file.with_name(file.name.replace("pp-rank-0", "pp-rank-1")).write_bytes(file.read_bytes())
    with pytest.raises(UnreadableError, match="are files of one rank"):
        ckptfix.open_checkpoint(tmp_path)
