"""A folder is a checkpoint, or the error says which file in it may be meant."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptfix
from ckptfix.errors import UnreadableError
from ckptfix.reading.folders.folders import FOLDER_FORMATS, WEIGHTS


def test_formats_have_names_of_their_own() -> None:
    names = [form.NAME for form in FOLDER_FORMATS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        pytest.param([], "an empty folder", id="empty"),
        pytest.param(["README.md"], "without a checkpoint in it; it holds README.md", id="no-checkpoint"),
        pytest.param(["README.md", "b.pth", "a.safetensors"], "files in it: a.safetensors, b.pth$", id="two-files"),
        pytest.param(["config.json", "unet/w.bin", "vae/w.bin"], "files in it: unet/w.bin, vae/w.bin$", id="pipeline"),
        pytest.param(
            [*(f"unet/{n}.safetensors" for n in (1, 2)), "unet/w.safetensors.index.json", "vae/w.bin"],
            "checkpoints in it: unet, vae/w.bin$",
            id="pipeline-of-shards",
        ),
        pytest.param([f"{n}.pt" for n in range(9)], "5.pt and 3 more$", id="many"),
    ],
)
def test_other_folders_say_what_is_in_them(tmp_path: Path, files: list[str], said: str) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        torch.save({"a": torch.ones(1)}, tmp_path / name)
    with pytest.raises(UnreadableError, match=said):
        ckptfix.open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        pytest.param(
            ["saved_model.pb", "variables/variables.index"], "a SavedModel of TensorFlow; load it", id="saved-model"
        ),
        pytest.param(
            ["checkpoint", "m.ckpt-1.index", "m.ckpt-1.data-00000-of-00001"], "a checkpoint of TensorFlow;", id="tf"
        ),
        pytest.param([".snapshot_metadata", "0/model/fc.weight"], "a snapshot of torchsnapshot", id="torchsnapshot"),
        pytest.param(["_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt"], "a checkpoint of Orbax", id="orbax"),
        pytest.param(["w/common.pt", "w/metadata.json", "w/decoder.weight/.zarray"], "arrays of zarr", id="zarr"),
        pytest.param(
            ["blobs/0a", *(f"snapshots/{n}/model.safetensors" for n in "ab")],
            "in it: snapshots/a/model.safetensors, snapshots/b/model.safetensors$",
            id="hub",
        ),
        pytest.param(
            ["blobs/0a", "snapshots/5b/a.txt"], "a cache of the Hugging Face Hub; name", id="hub-of-no-weights"
        ),
        pytest.param(["byteorder", "data/0"], "but not its data.pkl, which has their names; unpack", id="no-pickle"),
        pytest.param(["Manifest.json", "Data/com.apple.CoreML/m.mlmodel"], "a Core ML package", id="core-ml"),
        pytest.param(
            ["zero_to_fp32.py", "step9/zero_pp_rank_0_mp_rank_00_optim_states.pt", "step9/mp_rank_00_model_states.pt"],
            "no rank can be read; fetch it again",
            id="deepspeed",
        ),
        pytest.param(
            ["mp_rank_00/model_optim_rng.pt", "mp_rank_01/model_optim_rng.pt"], "has a rank that cannot", id="megatron"
        ),
    ],
)
def test_folders_of_others_are_named(tmp_path: Path, files: list[str], said: str) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UnreadableError, match=said):
        ckptfix.open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("model.pth", id="file"),
        pytest.param("iter_0000010/mp_rank_00/model_optim_rng.pt", id="one-rank-of-megatron"),
        pytest.param("model_world_size_1_rank_0.pt", id="one-rank-of-fsdp"),
    ],
)
def test_the_only_checkpoint_in_a_folder_is_taken(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
    torch.save({"a": torch.ones(2)}, tmp_path / name)
    for beside in ("saved_model.pb", "latest_checkpointed_iteration.txt"):
        (tmp_path / beside).write_text("10")
    checkpoint = ckptfix.open_checkpoint(tmp_path)
    assert (checkpoint.path, checkpoint.keys()) == (str(tmp_path / name), ["a"])


def test_the_only_folder_of_several_files_is_taken(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / "run" / f"iter_1/mp_rank_0{rank}").mkdir(parents=True)
        save = {"model": {"a.norm.weight": torch.ones(2)}, "iteration": 1, "args": {}}
        torch.save(save, tmp_path / "run" / f"iter_1/mp_rank_0{rank}/model_optim_rng.pt")
    assert ckptfix.open_checkpoint(tmp_path).keys() == ["a.norm.weight"]


def test_a_folder_above_checkpoints_names_them(tmp_path: Path) -> None:
    ranks = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)]
    for name in (
        *(f"checkpoint-2/global_step2/{rank}" for rank in ranks),
        "checkpoint-2/rng_state_0.pth",
        "a/b/.metadata",
        *(f"checkpoint-3/{part}/.metadata" for part in ("pytorch_model_fsdp_0", "optimizer_0")),
        "checkpoint-3/scheduler.pt",
        "c/huggingface/model.safetensors",  # as verl has the weights next to Megatron's optimizer
        "data.pt",  # as verl has the state of its data loader next to `actor`
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(
        UnreadableError, match=r"name one of the checkpoints in it: checkpoint-2, checkpoint-3, a/b, c/huggingface"
    ):
        ckptfix.open_checkpoint(tmp_path)


def test_shards_of_the_corpus(corpus: Path) -> None:
    whole = ckptfix.open_checkpoint(corpus / "modern" / "hf_sharded_bin")
    same = ckptfix.open_checkpoint(corpus / "modern" / "dcp_dir", weights="model")
    assert (whole.format, same.format) == ("sharded", "dcp")
    assert all(torch.equal(whole.read(key), same.read(key)) for key in whole.specs)


@pytest.mark.parametrize("name", [*sorted(WEIGHTS), "pytorch_model_fsdp.bin"])
def test_the_one_file_of_weights_that_a_library_wrote_is_taken(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run-1.5"
    folder.mkdir()
    for other in ("config.json", "tf_model.h5"):
        (folder / other).write_text("{}")
    torch.save({"state": {}, "param_groups": []}, folder / "optimizer.pt")
    weights = {"module.a": torch.ones(2)}
    (save_file if name.endswith(".safetensors") else torch.save)(weights, folder / name)
    checkpoint = ckptfix.open_checkpoint(folder)
    assert (checkpoint.path, checkpoint.keys()) == (str(folder / name), ["module.a"])
    assert ckptfix.repair(folder, beside=True).report.output == str(
        folder / f"{Path(name).stem}.fixed{Path(name).suffix}"
    )


def test_what_the_hf_trainer_saves_is_taken_and_not_the_same_again_of_accelerate(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model_fsdp.bin")
    assert ckptfix.open_checkpoint(tmp_path).path == str(tmp_path / "model.safetensors")


def test_several_files_of_weights_are_not_chosen_from(tmp_path: Path) -> None:
    for name in ("model.safetensors", "pytorch_model.bin"):
        torch.save({"a": torch.ones(2)}, tmp_path / name)
    with pytest.raises(UnreadableError, match=r"files in it: model\.safetensors, pytorch_model\.bin$"):
        ckptfix.open_checkpoint(tmp_path)
