"""Shards of torch's HuggingFaceStorageWriter, put together."""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from shutil import copyfile

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save

import ckptfix
from ckptfix.core.facts import clause
from ckptfix.core.finding import Level
from ckptfix.errors import HostileError, UnreadableError
from tests.checks import assert_same

WHOLE = {"b": torch.ones(5), "v": torch.arange(24.0).reshape(4, 6), "w": torch.arange(60.0).reshape(10, 6)}
Chunks = Mapping[str, tuple[tuple[int, ...], torch.Tensor]]


def write_shard(folder: Path, rank: int, chunks: Chunks) -> Path:
    """The file that a rank writes, as torch 2.13 lays it out."""
    info = {key: {"saved_offsets": offsets} for key, (offsets, _) in chunks.items()}
    notes = {"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0", "format": "pt"}
    path = folder / f"shard-{rank:05}-model-00001-of-00001.safetensors"
    save_file({key: part.contiguous() for key, (_, part) in chunks.items()}, path, notes)
    return path


@pytest.fixture
def shards(tmp_path: Path) -> tuple[Path, Path]:
    """Two ranks: one tensor cut along its rows, one along its columns, one whole."""
    w, v, b = WHOLE["w"], WHOLE["v"], WHOLE["b"]
    return (
        write_shard(tmp_path, 1, {"w": ((0, 0), w[:5]), "v": ((0, 0), v[:, :2])}),
        write_shard(tmp_path, 2, {"w": ((5, 0), w[5:]), "v": ((0, 2), v[:, 2:]), "b": ((0,), b)}),
    )


@pytest.mark.parametrize("distributed", [False, True], ids=["with an index", "a shard for each rank"])
def test_what_torch_wrote_comes_back(distributed: bool, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is no process group
        writer = HuggingFaceStorageWriter(str(tmp_path), save_distributed=distributed)
        save(dict(WHOLE), storage_writer=writer, no_dist=True)
    checkpoint = ckptfix.open_checkpoint(tmp_path)
    assert checkpoint.format == ("dcp-safetensors" if distributed else "sharded-safetensors")
    assert_same({key: checkpoint.read(key) for key in sorted(checkpoint.keys())}, WHOLE)


def test_chunks_are_put_together(shards: tuple[Path, Path], tmp_path: Path) -> None:
    for given in (tmp_path, *shards):  # a shard has parts under the names of the whole
        checkpoint = ckptfix.open_checkpoint(given)
        assert_same({key: checkpoint.read(key) for key in sorted(checkpoint.keys())}, WHOLE)
    report = ckptfix.repair(tmp_path, output=tmp_path / "one.safetensors").report
    assert [(finding.code, finding.level) for finding in report.findings] == [("FIL203", Level.NOTE)]
    assert report.exit_code == 0


def test_that_no_file_says_how_many_there_are_is_noted(shards: tuple[Path, Path], tmp_path: Path) -> None:
    shards[1].unlink()
    (finding,) = ckptfix.check(tmp_path).findings
    assert shards[0].name in finding.message
    assert not ckptfix.check(tmp_path, like=tmp_path).findings  # the model says how large they are


def test_a_shard_that_was_copied_over_another(shards: tuple[Path, Path], tmp_path: Path) -> None:
    copyfile(shards[0], shards[1])
    report = ckptfix.repair(tmp_path, output=tmp_path / "one.safetensors").report
    assert ("FIL105", Level.WARNING) in [(finding.code, finding.level) for finding in report.findings]
    assert not (tmp_path / "one.safetensors").exists()


def test_shards_with_different_values_of_a_part(shards: tuple[Path, Path], tmp_path: Path) -> None:
    write_shard(tmp_path, 3, {"w": ((5, 0), WHOLE["w"][5:] + 1)})
    with pytest.raises(UnreadableError, match="different values of w from several ranks"):
        ckptfix.open_checkpoint(tmp_path)


def test_a_missing_shard_costs_the_tensors_in_it(shards: tuple[Path, Path], tmp_path: Path) -> None:
    shards[0].unlink()
    with pytest.raises(UnreadableError, match=r"lacks the shards of 1 rank, the first shard-00001.*1 of 3 tensors"):
        ckptfix.open_checkpoint(tmp_path)
    checkpoint = ckptfix.open_checkpoint(tmp_path, salvage=True)
    assert_same(checkpoint.state_dict(), {"b": WHOLE["b"]})
    assert sorted(checkpoint.lost) == ["v", "w"]


def test_a_shard_that_is_cut_short(shards: tuple[Path, Path], tmp_path: Path) -> None:
    shards[1].write_bytes(shards[1].read_bytes()[:-4])
    with pytest.raises(UnreadableError, match="that is cut short"):
        ckptfix.open_checkpoint(tmp_path)
    checkpoint = ckptfix.open_checkpoint(tmp_path, salvage=True)
    assert sorted(checkpoint.keys()) == ["b", "v"]
    assert sorted(checkpoint.lost) == ["w"]


def test_shards_without_a_whole_tensor(shards: tuple[Path, Path], tmp_path: Path) -> None:
    shards[0].unlink()
    shards[1].write_bytes(b"not a shard")
    with pytest.raises(UnreadableError, match=r"cannot be read.*; no tensor is whole"):
        ckptfix.open_checkpoint(tmp_path, salvage=True)


def test_tensors_may_continue_in_a_last_shard_that_cannot_be_read(shards: tuple[Path, Path], tmp_path: Path) -> None:
    shards[1].write_bytes(b"not a shard")
    report = ckptfix.repair(tmp_path, salvage=True, output=tmp_path / "one.safetensors").report
    assert any(shards[0].name in finding.message for finding in report.findings)
    assert report.exit_code == 1


def test_a_shard_of_another_save(shards: tuple[Path, Path], tmp_path: Path) -> None:
    write_shard(tmp_path, 2, {"w": ((5, 0), WHOLE["w"][5:].half()), "b": ((0,), WHOLE["b"])})
    checkpoint = ckptfix.open_checkpoint(tmp_path, salvage=True)
    assert "is not complete: the chunks of w differ in their dtypes" in map(clause, checkpoint.damage)


@pytest.mark.parametrize("offsets", [b"[0, -]", b"[0   ]"], ids=["of no JSON", "of fewer dimensions"])
def test_a_damaged_note(shards: tuple[Path, Path], tmp_path: Path, offsets: bytes) -> None:
    shards[0].write_bytes(shards[0].read_bytes().replace(b"[0, 0]", offsets))
    with pytest.raises(UnreadableError, match="damaged note DCP_SHARDING_INFO"):
        ckptfix.open_checkpoint(tmp_path)


def test_a_link_out_of_the_folder(shards: tuple[Path, Path], tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / shards[0].name).symlink_to(shards[0])
    with pytest.raises(HostileError, match="leads outside the folder"):
        ckptfix.open_checkpoint(folder)
