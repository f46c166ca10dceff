import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptfix
from ckptfix.core.finding import Level
from ckptfix.errors import WriteError
from ckptfix.report.advice import remedies_text
from tests.checks import check_noop
from tests.reading.folders.ranks.genuine import SAMPLES, unpacked

CODE = "FIL105"

# FSDP 1's flat parameters lack their shapes, and the mixers are several checkpoints.
WHOLE = sorted(
    name
    for path in SAMPLES.glob("*.tar.xz")
    if not (name := path.name.removesuffix(".tar.xz")).startswith(("fsdp1_local", "megatron_mixers"))
)


@pytest.mark.parametrize(
    "state_dict",
    [
        pytest.param({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, id="healthy"),
        pytest.param({"weight": torch.ones(2, 3), "bias": torch.empty(0)}, id="one-empty-tensor"),
        pytest.param({"a.min_val": torch.empty(0), "a.max_val": torch.empty(0), "w": torch.ones(1)}, id="observers"),
        pytest.param({"emb.weight": torch.empty(0, 4), "out.weight": torch.empty(3, 0)}, id="empty-with-a-rank"),
    ],
)
def test_noop(state_dict: dict[str, Any]) -> None:
    check_noop(state_dict, CODE)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        pytest.param("model-00001-of-00001.safetensors", 0, id="the-only-one"),
        pytest.param("model-2-of-3.safetensors", 0, id="another-numbering"),
        pytest.param("model-00002-of-00005.fixed.safetensors", 0, id="repaired-by-itself"),
        pytest.param("model-00002-of-00005.safetensors", 5, id="one-of-five"),
        pytest.param("pytorch_model-00001-of-00002.bin", 2, id="one-of-two"),
    ],
)
def test_a_numbered_shard_alone(tmp_path: Path, name: str, count: int) -> None:
    write = save_file if name.endswith("safetensors") else torch.save
    write({"weight": torch.ones(2)}, tmp_path / name)
    report = ckptfix.check(tmp_path / name, select=(CODE,))
    said = [(finding.level.name, finding.message) for finding in report.findings]
    assert [level for level, _ in said] == ["NOTE"] * bool(count)
    assert all(f"one of {count} shards" in message and "name the folder" in message for _, message in said)
    assert report.exit_code == 0


def test_a_folder_of_shards_is_whole(tmp_path: Path) -> None:
    for number in (1, 2):
        save_file({f"{number}.weight": torch.ones(2)}, tmp_path / f"model-0000{number}-of-00002.safetensors")
    assert ckptfix.check(tmp_path, select=(CODE,)).findings == ()


@pytest.mark.parametrize("name", WHOLE)
def test_nothing_is_wrong_with_a_folder_of_all_ranks(name: str, tmp_path: Path) -> None:
    report = ckptfix.check(unpacked(name, tmp_path)[0])
    assert [found for found in report.findings if found.level > Level.NOTE] == []
    assert report.exit_code == 0


def test_a_rank_of_megatron(tmp_path: Path) -> None:
    args = argparse.Namespace(tensor_model_parallel_size=2, pipeline_model_parallel_size=4)
    saved = {"args": args, "checkpoint_version": 3.0, "iteration": 9, "model": {"embed.weight": torch.ones(2, 2)}}
    torch.save(saved, tmp_path / "model_optim_rng.pt")
    (finding,) = ckptfix.check(tmp_path / "model_optim_rng.pt", select=(CODE,)).findings
    assert "one of 8 ranks" in finding.message
    assert "files of all ranks" in remedies_text(finding.remedies)


def test_model_states_of_zero_3(tmp_path: Path) -> None:
    module = {"a.weight": torch.empty(0), "norm.weight": torch.ones(4), "head.weight": torch.empty(0)}
    path = tmp_path / "mp_rank_00_model_states.pt"
    torch.save({"module": module, "ds_version": "0.14.0", "param_shapes": []}, path)
    report = ckptfix.repair(path, output=tmp_path / "fixed.pt").report
    (finding,) = [found for found in report.findings if found.code == CODE]
    assert not (tmp_path / "fixed.pt").exists()
    assert finding.keys == ("a.weight", "head.weight")
    assert "files of all ranks" in remedies_text(finding.remedies)
    assert report.exit_code == 1


def test_model_states_that_are_whole_beside_their_masters(tmp_path: Path) -> None:
    folder, _ = unpacked("zero2_w2_bf16_g2", tmp_path)
    path = folder / "global_step2" / "mp_rank_00_model_states.pt"
    (finding,) = ckptfix.check(path, select=(CODE,)).findings
    assert (finding.level, str(path.parent) in finding.message) == (Level.NOTE, True)
    for other in path.parent.glob("*optim_states.pt"):
        other.unlink()
    (finding,) = ckptfix.check(path, select=(CODE,)).findings
    assert (finding.level, "has no optimizer states" in finding.message) == (Level.NOTE, True)


def test_flattened_parameters(tmp_path: Path) -> None:
    path = tmp_path / "rank0.pt"
    torch.save({"_fsdp_wrapped_module._flat_param": torch.ones(9), "bn.running_mean": torch.ones(3)}, path)
    (finding,) = ckptfix.check(path, select=(CODE,)).findings
    assert finding.keys == ("_fsdp_wrapped_module._flat_param",)
    assert finding.fix is None


def test_model_states_that_are_whole(corpus: Path) -> None:
    path = corpus / "2.6.0" / "deepspeed_module_key.pt"
    assert ckptfix.check(path, weights="module", select=(CODE,)).findings == ()


def test_some_tensors_have_no_values():
    state = {"a.weight": torch.ones(3, 3), "b.weight": torch.empty(3, 3, device="meta")}
    (finding,) = ckptfix.check(state).findings
    assert (finding.code, finding.keys) == ("FIL105", ("b.weight",))


@pytest.mark.parametrize(
    ("names", "count"),
    [
        pytest.param(["model-rank-0-part-0.safetensors", "model-rank-0-part-1.safetensors"], 0, id="vllm-on-one"),
        pytest.param(["model-rank-0-part-0.safetensors", "model-rank-1-part-0.safetensors"], 1, id="vllm"),
        pytest.param(["reshard-model_part-0.pt", "reshard-model_part-1.pt"], 1, id="metaseq"),
        pytest.param(["model_tp0_pp0.pt", "model_tp0_pp1.pt"], 1, id="internevo"),
        pytest.param(["model_tp0_pp0.pt"], 0, id="internevo-on-one"),
        pytest.param(["model_tp0_pp0_dp0.pt", "model_tp0_pp0_dp1.pt"], 1, id="internevo-fsdp"),
        pytest.param(["model_tp0_wp0_pp0.pt", "model_tp0_wp1_pp0.pt"], 1, id="internevo-isp"),
        pytest.param(
            [f"model_weight_pp-rank-0-of-1_tp-rank-{rank}-of-2.safetensors" for rank in (0, 1)], 1, id="nanotron"
        ),
        pytest.param(["model_weight_pp-rank-0-of-2_tp-rank-0-of-1.safetensors"], 0, id="nanotron-on-one"),
        pytest.param(["rank0.safetensors", "rank1.safetensors"], 0, id="files-of-ranks"),
        pytest.param(["rank0.safetensors", "rank1.safetensors", "config.json"], 1, id="tensorrt"),
        pytest.param(["mp_rank_00/model_weights.ckpt"], 1, id="nemo"),
        pytest.param(["weights/model_weights.ckpt"], 0, id="another-folder"),
    ],
)
def test_plain_tensors_of_one_rank(tmp_path: Path, names: list[str], count: int) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        if name == "config.json":
            (tmp_path / name).write_text('{"mapping": {"tp_size": 2}}')
        else:
            write = save_file if name.endswith("safetensors") else torch.save
            write({"weight": torch.ones(2)}, tmp_path / name)
    findings = ckptfix.check(tmp_path / names[0], select=(CODE,)).findings
    assert len(findings) == count
    assert all("split, under the names of the full weights" in finding.message for finding in findings)


def test_ranks_next_to_the_weights_that_a_trainer_wrote(tmp_path: Path) -> None:
    """As the trainer of transformers does under DeepSpeed: the file has no optimizer, and no masters."""
    folder, truth = unpacked("zero2_w2_bf16_g2", tmp_path)
    names = {"model": folder / "model.safetensors", "another": tmp_path / "latest" / "model.safetensors"}
    for path in names.values():
        path.parent.mkdir(exist_ok=True)
        save_file({"l1.weight": truth["l1.weight"].bfloat16()}, path)
    (names["another"].parent / "latest").write_text("global_step2")  # of ranks that are not there
    assert ckptfix.check(names["another"], select=(CODE,)).findings == ()
    for given in (folder, names["model"]):
        (finding,) = ckptfix.check(given, select=(CODE,)).findings
        assert (finding.level, str(folder / "global_step2") in finding.message) == (Level.NOTE, True)
        with pytest.raises(WriteError, match=r"name .*global_step2$"):
            ckptfix.repair(given, output=tmp_path / "universal", format="universal")
    said = [finding.message for finding in ckptfix.check(folder / "global_step2", select=(CODE,)).findings]
    assert said == ["the weights are the fp32 masters of training in bfloat16"]
