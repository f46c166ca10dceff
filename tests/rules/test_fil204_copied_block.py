"""FIL204: a block of the file that is another one's, and all that is equal by right."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path

import pytest
import torch

import ckptfix
from ckptfix.core.finding import Finding, Level
from tests.checks import check_noop
from tests.rules.healthy import HEALTHY, build


def _file(path: Path, tensors: dict[str, torch.Tensor], shift: int = 0) -> bytearray:
    """The bytes of a safetensors file whose data begins ``shift`` bytes after a block of the disk."""
    entries, end = {}, 0
    for key, tensor in tensors.items():
        dtype = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[tensor.dtype]
        entries[key] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [end, end := end + tensor.nbytes]}
    header = json.dumps(entries)
    header += " " * ((shift - 8 - len(header)) % 4096)
    data = b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors.values())
    return bytearray(struct.pack("<Q", len(header)) + header.encode() + data)


def _found(path: Path, raw: bytearray) -> list[Finding]:
    path.write_bytes(raw)
    return list(ckptfix.check(path, select=("FIL204",)).findings)


def _weights(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {f"layers.{at}.weight": torch.randn(96, 129).to(dtype) for at in range(3)}


def _equal_rows() -> torch.Tensor:
    """A vocabulary that was extended by copies of one row of 4 KiB."""
    weight = torch.randn(40, 1024)
    weight[30:] = weight[:30].mean(0)
    return weight


EQUAL_BY_RIGHT = {
    "random": _weights(),
    "copied layers": {"a.weight": (same := torch.randn(96, 129)), "b.weight": same.clone(), "c.weight": same.clone()},
    "copied layers of whole blocks": {"a.weight": (same := torch.randn(64, 64)), "b.weight": same.clone()},
    "half of a layer": {"a.weight": torch.cat([same, same]), "b.weight": same.clone()},
    "copied rows": {"embed.weight": _equal_rows()},
    "zeros": {"a.weight": torch.zeros(96, 129)},
    "constant": {"a.weight": torch.full((96, 129), 0.02)},
    "identity": {"a.weight": torch.eye(128)},
    "few values": {"a.weight": torch.tensor([-1.0, 1.0]).repeat(64, 100)},
    "ternary": {"a.weight": torch.randint(-1, 2, (200, 129)).float()},
    "repeated kernels": {"a.weight": torch.randn(64, 64, 1, 3, 3).repeat(1, 1, 5, 1, 1)},
    "a vector": {"a.bias": (vector := torch.randn(5000)), "b.bias": vector.clone()},
}


@pytest.mark.parametrize("shift", [0, 8, 1024])
@pytest.mark.parametrize("name", EQUAL_BY_RIGHT)
def test_noop(name: str, shift: int, tmp_path: Path) -> None:
    assert _found(tmp_path / "f.safetensors", _file(tmp_path, EQUAL_BY_RIGHT[name], shift)) == []


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_models_are_quiet(name: str, tmp_path: Path) -> None:
    torch.save(build(name).state_dict(), tmp_path / "f.pth", _use_new_zipfile_serialization=False)
    assert ckptfix.check(tmp_path / "f.pth", select=("FIL204",)).findings == ()


def test_noop_in_memory() -> None:
    check_noop(_weights(), "FIL204")


@pytest.mark.parametrize("shift", [0, 8, 24, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("source", "target", "blocks"), [(3, 7, 1), (2, 9, 2), (9, 2, 1)])
def test_a_block_from_another_place(tmp_path: Path, shift: int, dtype, source: int, target: int, blocks: int) -> None:
    raw = _file(tmp_path, _weights(dtype), shift)
    size = 4096 * blocks
    raw[4096 * target : 4096 * target + size] = raw[4096 * source : 4096 * source + size]
    (finding,) = _found(tmp_path / "f.safetensors", raw)
    assert finding.level is Level.WARNING
    places = sorted([4096 * source, 4096 * target])
    assert [sorted(pair) for pair in finding.evidence["bytes_of_file"]] == [places]


def test_a_block_of_a_tensor_that_is_read_in_pieces(tmp_path: Path) -> None:
    raw = _file(tmp_path, {"a.weight": torch.randn(2000, 1501)}, 24)
    raw[4096 * 2000 : 4096 * 2001] = raw[4096 * 700 : 4096 * 701]
    (finding,) = _found(tmp_path / "f.safetensors", raw)
    assert [sorted(pair) for pair in finding.evidence["bytes_of_file"]] == [[4096 * 700, 4096 * 2000]]


def test_noop_where_a_checksum_says_more(tmp_path: Path) -> None:
    weight = torch.randn(96, 129)
    weight.view(-1)[4096:5120] = weight.view(-1)[1024:2048]
    torch.save({"a.weight": weight}, tmp_path / "f.pth")
    assert ckptfix.check(tmp_path / "f.pth", select=("FIL204",)).findings == ()


def test_a_long_copy_is_compared_in_pieces(tmp_path: Path) -> None:
    weights = {f"layers.{at}.weight": torch.randn(400, 8193) for at in range(2)}
    raw = _file(tmp_path, weights)
    half, start = len(raw) // 2 // 4096 * 4096, 40 * 4096
    raw[half + start : half + start + (10 << 20)] = raw[start : start + (10 << 20)]
    tracemalloc.start()
    try:
        (finding,) = _found(tmp_path / "f.safetensors", raw)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    assert finding.evidence["bytes_of_file"] == [[start, half + start]]
