"""FIL202: a hole in a dense tensor is a note, one of whole sectors a warning; zeros that were meant are neither."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptfix
from ckptfix.core.finding import Level
from tests.checks import check_noop


def _dense(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, torch.Size(shape).numel() + 1).reshape(shape)


def _with_zeros(start: int, stop: int, *shape: int) -> torch.Tensor:
    tensor = _dense(*shape)
    tensor.view(-1)[start:stop] = 0
    return tensor


def _sparse() -> torch.Tensor:
    tensor = _with_zeros(300, 600, 40, 33)
    tensor[::2, ::2] = 0
    return tensor


def _notes(file: Path, tensor: torch.Tensor) -> list[tuple[str, ...]]:
    torch.save({"weight": tensor, "other": _dense(3)}, file, _use_new_zipfile_serialization=False)
    found = [finding for finding in ckptfix.check(file).findings if finding.code == "FIL202"]
    assert all(finding.level is Level.NOTE for finding in found)
    return [finding.keys for finding in found]


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(_dense(40, 33), id="nothing_is_zero"),
        pytest.param(torch.zeros(40, 33), id="all_is_zero"),
        pytest.param(_with_zeros(33 * 4, 33 * 12, 40, 33), id="whole_rows_are_pruned"),
        pytest.param(_with_zeros(33 * 30, 33 * 40, 40, 33), id="the_last_rows_pad_a_vocabulary"),
        pytest.param(_with_zeros(300, 400, 40, 33), id="the_run_is_shorter_than_a_sector"),
        pytest.param(_with_zeros(300, 600, 1320), id="a_vector_such_as_the_bias_of_q_k_and_v"),
        pytest.param(_sparse(), id="other_numbers_are_zero_too"),
        pytest.param(_with_zeros(300, 600, 40, 33).long(), id="whole_numbers"),
    ],
)
def test_noop(tensor: torch.Tensor, tmp_path: Path) -> None:
    assert _notes(tmp_path / "file.pth", tensor) == []


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_noop_on_an_empty_matrix(dtype: torch.dtype, shape: tuple[int, int], tmp_path: Path) -> None:
    save_file({"scale": torch.empty(shape, dtype=dtype), "weight": _dense(4, 3)}, tmp_path / "file.safetensors")
    assert ckptfix.check(tmp_path / "file.safetensors", select=("FIL202",)).findings == ()


def test_noop_in_memory() -> None:
    check_noop({"weight": _with_zeros(300, 600, 40, 33)}, "FIL202")


@pytest.mark.parametrize(
    ("start", "stop", "levels"),
    [
        pytest.param(300, 600, [Level.NOTE], id="a_long_run"),
        pytest.param(301, 301 + 128, [Level.WARNING], id="a_sector"),
        pytest.param(300, 300 + 640, [Level.WARNING], id="five_sectors"),
        pytest.param(33 * 4, 33 * 12, [], id="whole_rows"),
        pytest.param(300, 400, [], id="less_than_a_sector"),
    ],
)
def test_a_hole_from_before_the_file_was_saved(tmp_path: Path, start: int, stop: int, levels: list[Level]) -> None:
    """The checksums agree: the hole was lost from another file, so its sectors do not matter."""
    torch.save({"weight": _with_zeros(start, stop, 40, 33)}, tmp_path / "file.pth")
    found = ckptfix.check(tmp_path / "file.pth", select=("FIL202",)).findings
    assert [finding.level for finding in found] == levels


def test_noop_for_pruned_rows_of_whole_sectors_with_checksums(tmp_path: Path) -> None:
    torch.save({"weight": _with_zeros(32 * 4, 32 * 12, 40, 32)}, tmp_path / "file.pth")
    assert ckptfix.check(tmp_path / "file.pth", select=("FIL202",)).findings == ()


@pytest.mark.parametrize(
    ("start", "stop"),
    [
        pytest.param(300, 600, id="in_the_middle"),
        pytest.param(0, 300, id="at_the_start"),
        pytest.param(900, 1290, id="near_the_end"),
    ],
)
def test_a_hole_is_noted(start: int, stop: int, tmp_path: Path) -> None:
    assert _notes(tmp_path / "file.pth", _with_zeros(start, stop, 40, 33)) == [("weight",)]


def test_a_hole_over_several_blocks_is_one_hole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptfix.bytes.sources.BLOCK", 256)
    assert _notes(tmp_path / "file.pth", _with_zeros(300, 600, 40, 33)) == [("weight",)]


@pytest.mark.parametrize("length", [512, 1536, 16384])
@pytest.mark.parametrize("shift", [0, 4, 8, 17], ids=lambda shift: f"the data begins {shift} bytes after a sector")
def test_lost_sectors_are_a_warning(tmp_path: Path, length: int, shift: int) -> None:
    """Whole sectors of the file read as zeros, for any alignment of its tensors."""
    weight = torch.randn(96, 129)
    header = json.dumps({"weight": {"dtype": "F32", "shape": [96, 129], "data_offsets": [0, weight.nbytes]}})
    header += " " * ((shift - 8 - len(header)) % 512)
    raw = bytearray(struct.pack("<Q", len(header)) + header.encode() + weight.numpy().tobytes())
    raw[4096 : 4096 + length] = bytes(length)
    (tmp_path / "file.safetensors").write_bytes(raw)
    (finding,) = ckptfix.check(tmp_path / "file.safetensors", select=("FIL202",)).findings
    assert (finding.code, finding.level, finding.keys) == ("FIL202", Level.WARNING, ("weight",))


def test_the_file_may_end_within_the_last_sector(tmp_path: Path) -> None:
    save_file({"weight": torch.randn(8, 1290)}, tmp_path / "file.safetensors")
    raw = bytearray((tmp_path / "file.safetensors").read_bytes())
    start = (len(raw) - 3000) // 512 * 512
    assert len(raw) % 512 > 8
    (tmp_path / "file.safetensors").write_bytes(raw[:start] + bytes(len(raw) - start))
    (finding,) = ckptfix.check(tmp_path / "file.safetensors").findings
    assert (finding.code, finding.level) == ("FIL202", Level.WARNING)


@pytest.mark.parametrize(
    ("shapes", "start", "stop", "keys"),
    [
        pytest.param([(200, 16)], 8192, 12288, ["0"], id="a-block-of-many-rows"),
        pytest.param([(200, 16)], 8192, 12288 + 64, [], id="rows-and-no-block"),
        pytest.param([(200, 512)], 8192, 12288, [], id="a-block-of-two-rows"),
        pytest.param([(40, 33), (20,), (40, 33)], 9216, 9728, ["0", "2"], id="a-sector-over-three-tensors"),
        pytest.param([(40, 33), (20,), (40, 33)], 9216, 9696, [], id="less-than-a-sector"),
    ],
)
def test_a_lost_block_of_whole_rows_or_over_several_tensors(tmp_path, shapes, start, stop, keys) -> None:
    weights = {str(index): torch.randn(shape) for index, shape in enumerate(shapes)}
    sizes = [weight.nbytes for weight in weights.values()]
    header = {
        key: {"dtype": "F32", "shape": list(weight.shape), "data_offsets": [sum(sizes[:at]), sum(sizes[: at + 1])]}
        for at, (key, weight) in enumerate(weights.items())
    }
    text = json.dumps(header).ljust(4096 - 8)  # the data begins at a block
    raw = bytearray(struct.pack("<Q", len(text)) + text.encode())
    for weight in weights.values():
        raw += weight.numpy().tobytes()
    raw[start:stop] = bytes(stop - start)
    (tmp_path / "file.safetensors").write_bytes(raw)
    found = [finding for finding in ckptfix.check(tmp_path / "file.safetensors").findings if finding.level]
    assert [(finding.code, sorted(finding.keys)) for finding in found] == ([("FIL202", keys)] if keys else [])
