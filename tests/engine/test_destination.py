"""Whether the result differs from the source is decided in one place."""

from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptfix
from ckptfix.reading.opening import open_file
from tests.reading.folders.ranks.genuine import unpacked

PLAIN = {"fc.weight": torch.arange(6.0).reshape(2, 3)}
WRAPPED = {f"module.{key}": value for key, value in PLAIN.items()}


def zipped(file, state_dict):
    torch.save(state_dict, file)


def stored(file, state_dict):
    save_file(state_dict, file)


def legacy(file, state_dict):
    torch.save(state_dict, file, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize(
    ("save", "suffix", "settings"),
    [
        pytest.param(zipped, ".pth", {}, id="nothing to repair"),
        pytest.param(zipped, ".pth", {"format": "pth"}, id="the format that it has"),
        pytest.param(zipped, ".pth", {"for_torch": "1.6"}, id="a release that reads zips"),
        pytest.param(legacy, ".pth", {"for_torch": "1.4.0"}, id="an old release that reads the old container"),
        pytest.param(legacy, ".pth", {"for_torch": "2.6"}, id="a new release that reads the old container too"),
        pytest.param(stored, ".safetensors", {"for_torch": "1.4.0"}, id="safetensors"),
    ],
)
@pytest.mark.parametrize("how", ["beside", "in place", "only changes"])
def test_a_file_that_would_be_the_same_is_not_written(how, save, suffix, settings: dict[str, Any], tmp_path):
    source = tmp_path / f"model{suffix}"
    save(source, PLAIN)
    ways: dict[str, dict[str, Any]] = {
        "beside": {"beside": True},
        "in place": {"in_place": True},
        "only changes": {"output": tmp_path / f"out{suffix}", "only_changes": True},
    }
    repaired = ckptfix.repair(source, **ways[how], **settings)
    assert (repaired.is_changed, repaired.report.output) == (False, None)


def test_the_container_of_an_old_torch_is_a_change(tmp_path):
    zipped(tmp_path / "model.pth", PLAIN)
    repaired = ckptfix.repair(tmp_path / "model.pth", beside=True, for_torch="1.4.0")
    assert repaired.is_changed
    assert repaired.report.output is not None
    assert open_file(repaired.report.output).format == "torch-legacy"


@pytest.mark.parametrize(
    ("state_dict", "settings"),
    [
        pytest.param(WRAPPED, {}, id="an edit"),
        pytest.param(PLAIN, {"format": "safetensors"}, id="another format"),
        pytest.param(PLAIN, {"shard_size": "1GB"}, id="shards"),
    ],
)
def test_a_change_is_written_and_a_dry_run_says_the_same(state_dict, settings: dict[str, Any], tmp_path):
    zipped(tmp_path / "model.pth", state_dict)
    how: dict[str, Any] = {"beside": True, **settings}
    assert ckptfix.repair(tmp_path / "model.pth", dry_run=True, **how).is_changed
    written = ckptfix.repair(tmp_path / "model.pth", **how)
    assert written.is_changed
    assert written.report.output is not None


@pytest.mark.parametrize("sample", ["fsdp2_w4", "megatron_dist_tp2pp2", "zero3_w2_fp32_g1", "universal_zero2"])
@pytest.mark.parametrize("named", [".", "..", "{folder}"])
def test_the_working_folder_itself_is_a_checkpoint(sample, named, tmp_path, monkeypatch):
    saved, _ = unpacked(sample, tmp_path)
    tag = saved / "latest_universal"
    folder = next((file.parent for file in saved.rglob("*optim_states.pt")), saved)
    folder = saved / tag.read_text() if tag.is_file() else folder
    (folder / "empty").mkdir()
    monkeypatch.chdir(folder / "empty" if named == ".." else folder)
    source = named.format(folder=folder)
    found, wanted = ckptfix.check(source).findings, ckptfix.check(folder).findings
    assert [finding.code for finding in found] == [finding.code for finding in wanted]
    repaired = ckptfix.repair(source, beside=True, format="safetensors")
    assert repaired.report.output == str(folder.with_name(f"{folder.name}.fixed.safetensors"))
