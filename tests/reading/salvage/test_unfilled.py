"""Zeros at the end of a file: from training, or from an interrupted transfer."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

import ckptfix
from ckptfix.errors import UnreadableError
from tests.reading.files import saved

State = Mapping[str, torch.Tensor]


def dense(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)) + 10


def as_safetensors(state_dict: State, folder: Path) -> Path:
    path = folder / "model.safetensors"
    path.write_bytes(save(dict(state_dict)))
    return path


def as_legacy(state_dict: State, folder: Path) -> Path:
    path = folder / "model.pth"
    torch.save(dict(state_dict), path, _use_new_zipfile_serialization=False)
    return path


HEALTHY: dict[str, State] = {
    "the lora_B of a fresh adapter": {"q.lora_A.weight": dense(8, 64), "q.lora_B.weight": torch.zeros(64, 8)},
    "a zero bias": {"a.weight": dense(64, 64), "b.bias": torch.zeros(512)},
    "zero convolutions": {"a": dense(64, 64), "zero.0.weight": torch.zeros(64, 64), "zero.1.weight": torch.zeros(99)},
    "padded rows of a vocabulary": {"a": torch.cat([dense(100, 64), torch.zeros(28, 64)])},
    "padded rows and a zero bias": {"a": torch.cat([dense(100, 64), torch.zeros(28, 64)]), "b": torch.zeros(256)},
    "dead channels": {"a": dense(64, 64), "running_mean": torch.cat([dense(100), torch.zeros(412)])},
    "a triangular mask": {"a": dense(64, 64), "mask": torch.triu(torch.ones(64, 64))},
    "a sparse matrix and a zero one": {"a": torch.eye(64, 512), "b": torch.zeros(64, 8)},
    "numbers that are no floats": {f"l{n}": torch.tensor([[1, 2, 3, 0]] * 10 + [[0] * 4] * 90) for n in range(3)},
    "numbers as small as the squares of an optimizer": {"a": dense(64, 64) * 1e-40, "b": torch.zeros(64, 64)},
    "a row of one number": {
        "a": torch.cat([dense(64, 64), torch.eye(64)[:1], torch.zeros(28, 64)]),
        "b": torch.zeros(64, 64),
    },
    "nothing but zeros": {f"l{n}": torch.zeros(64, 64) for n in range(3)},
}


@pytest.mark.parametrize("salvage", [False, True])
@pytest.mark.parametrize("form", [as_safetensors, as_legacy])
@pytest.mark.parametrize("state_dict", [pytest.param(value, id=case) for case, value in HEALTHY.items()])
def test_zeros_that_were_saved_are_not_doubted(
    state_dict: State, form: Callable[[State, Path], Path], salvage: bool, tmp_path: Path
) -> None:
    checkpoint = ckptfix.open_checkpoint(form(state_dict, tmp_path), salvage=salvage)
    assert checkpoint.damage == ()
    assert set(checkpoint.specs) == set(state_dict)


def unfilled(path: Path, zeros: int) -> Path:
    content = path.read_bytes()
    path.write_bytes(content[:-zeros] + bytes(zeros))
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("form", [as_safetensors, as_legacy])
@pytest.mark.parametrize(("share", "whole"), [(0.5, 2), (0.9, 4)], ids=["through tensors", "inside the last one"])
def test_a_transfer_that_stopped_inside_of_a_row_is_damage(
    share: float, whole: int, form: Callable[[State, Path], Path], dtype: torch.dtype, tmp_path: Path
) -> None:
    state_dict = {f"l{number}": dense(64, 64).to(dtype) for number in range(5)}
    size = sum(tensor.nbytes for tensor in state_dict.values())
    # An odd number of bytes: it is inside of a row whatever the file has around its tensors.
    path = unfilled(form(state_dict, tmp_path), int(size * (1 - share)) + 101)
    with pytest.raises(UnreadableError, match=rf"reserved but never filled.*{whole} of 5 tensors"):
        ckptfix.open_checkpoint(path)
    report = ckptfix.check(path, salvage=True)
    assert "FIL203" in {finding.code for finding in report.findings}
    checkpoint = ckptfix.open_checkpoint(path, salvage=True)
    assert len(checkpoint.specs) == whole
    for key in checkpoint.specs:
        assert torch.equal(checkpoint.read(key), state_dict[key])


def test_a_zip_has_its_directory_at_the_end(tmp_path: Path) -> None:
    path = unfilled(saved({f"l{number}": dense(64, 64) for number in range(5)}, tmp_path), 20_000)
    with pytest.raises(UnreadableError, match="reserved but never filled"):
        ckptfix.open_checkpoint(path)


@pytest.mark.parametrize("size", [3000, 60_000, 90_000], ids=["cut again", "cut after a tensor", "too large"])
def test_a_transfer_that_stopped_in_a_file_of_another_size(size: int, tmp_path: Path) -> None:
    """A file grows in steps while it is fetched, and a file system that crashed ends in a sector of zeros."""
    state_dict = {f"l{number}": dense(64, 64) for number in range(5)}
    path = as_safetensors(state_dict, tmp_path)
    content = path.read_bytes()[: len(path.read_bytes()) - 4 * 64 * 64 * 4 + 5001]
    path.write_bytes(content + bytes(size))
    with pytest.raises(UnreadableError, match=rf"last {size}.*never filled.*1 of 5 tensors"):
        ckptfix.open_checkpoint(path)
    assert list(ckptfix.open_checkpoint(path, salvage=True).specs) == ["l0"]


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("zeros", [600, 3000])
def test_zeros_at_the_cut_are_not_data_of_a_view(zeros: int, legacy: bool, tmp_path: Path) -> None:
    """The file ends with zeros inside a storage that two tensors view."""
    flat = dense(4096)
    path = tmp_path / "views.pth"
    torch.save({"first": flat[:1000], "second": flat[1000:]}, path, _use_new_zipfile_serialization=not legacy)
    content = path.read_bytes()
    at = content.index(flat.numpy().tobytes())
    path.write_bytes(content[: at + 3601] + bytes(zeros))
    with pytest.raises(UnreadableError):
        ckptfix.open_checkpoint(path)
    with pytest.raises(UnreadableError, match="no tensor in it is complete"):
        ckptfix.open_checkpoint(path, salvage=True)
    path.write_bytes(content[: at + 4001] + bytes(zeros))
    checkpoint = ckptfix.open_checkpoint(path, salvage=True)
    assert list(checkpoint.specs) == ["first"]
    assert torch.equal(checkpoint.read("first"), flat[:1000])


@pytest.mark.parametrize("row", [32, 33])
def test_a_transfer_that_stopped_inside_of_the_last_number_of_a_row(row: int, tmp_path: Path) -> None:
    state_dict = {"a": dense(64, row), "b": dense(64, row)}
    path = as_safetensors(state_dict, tmp_path)
    content = path.read_bytes()
    start = len(content) - 2 * 64 * row * 4
    for cut in (start + 20 * row * 4 - 1, start + 20 * row * 4 + 1):
        path.write_bytes(content[:cut] + bytes(len(content) - cut))
        with pytest.raises(UnreadableError, match="never filled"):
            ckptfix.open_checkpoint(path)
