"""FIL204: a block of the file that is another one's, and all that is equal by right."""

import json
import struct
import tracemalloc
from pathlib import Path

import pytest
import torch

import ckptfix
from ckptfix.core.finding import Finding, Level
from ckptfix.values.scan import kernel
from tests.checks import check_noop
from tests.rules.healthy import HEALTHY, build


def _file(path: Path, tensors: dict[str, torch.Tensor], shift: int = 0) -> bytearray:
    """The bytes of a safetensors file whose data begins ``shift`` bytes after a block of the disk."""
    entries, end = {}, 0
    for key, tensor in tensors.items():
        dtype = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}[tensor.dtype]
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


def test_noop_healthy_models(tmp_path: Path) -> None:
    for name in HEALTHY:
        torch.save(build(name).state_dict(), tmp_path / "f.pth", _use_new_zipfile_serialization=False)
        assert ckptfix.check(tmp_path / "f.pth", select=("FIL204",)).findings == (), name


def test_noop_in_memory() -> None:
    check_noop(_weights(), "FIL204")


@pytest.mark.parametrize("shift", [0, 8, 24, 1000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("source", "target", "blocks"), [(3, 8, 1), (2, 9, 2), (9, 2, 1)])
def test_a_block_from_another_place(tmp_path: Path, shift: int, dtype, source: int, target: int, blocks: int) -> None:
    raw = _file(tmp_path, _weights(dtype), shift)
    size = 4096 * blocks
    raw[4096 * target : 4096 * target + size] = raw[4096 * source : 4096 * source + size]
    (finding,) = _found(tmp_path / "f.safetensors", raw)
    assert finding.level is Level.WARNING
    ((at, to),), (length,) = finding.evidence["bytes_of_file"], finding.evidence["length"]
    at, to = (at, to) if (at < to) == (source < target) else (to, at)
    assert (to - at, length <= size) == (4096 * (target - source), True)
    assert 0 <= at - 4096 * source < 256  # the rest is the end of another tensor


def test_a_block_of_a_tensor_that_is_read_in_pieces(tmp_path: Path) -> None:
    raw = _file(tmp_path, {"a.weight": torch.randn(2000, 1501)}, 24)
    raw[4096 * 2000 : 4096 * 2001] = raw[4096 * 700 : 4096 * 701]
    (finding,) = _found(tmp_path / "f.safetensors", raw)
    assert [sorted(pair) for pair in finding.evidence["bytes_of_file"]] == [[4096 * 700, 4096 * 2000]]


def _tiled_columns(times: int) -> torch.Tensor:
    """Queries that share a few heads, which the file has for each."""
    return torch.randn(96, 160).repeat(1, times)


def _updated(weight: torch.Tensor, share: float) -> torch.Tensor:
    """A moving average in few bits, most of which an update does not change."""
    return torch.where(torch.rand(weight.shape) < share, weight + 0.5, weight)


def _positions() -> torch.Tensor:
    """Half of each row encodes the height and half the width, as in MAE."""
    halves = torch.randn(16, 300)
    return torch.cat([halves.repeat_interleave(16, 0), halves.repeat(16, 1)], 1)


def _young_head(classes: int, inputs: int, steps: int = 5, lr: float = 1e-3) -> torch.Tensor:
    """A last layer that started at zero, after a few steps on few of its classes: the other rows are nearly equal."""
    torch.manual_seed(0)
    body, head = torch.nn.Linear(64, inputs), torch.nn.Linear(inputs, classes)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    optimizer = torch.optim.SGD(head.parameters(), lr)
    for _ in range(steps):
        labels = torch.nn.functional.one_hot(torch.randint(0, classes, (16,)), classes).float()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(head(body(torch.randn(16, 64)).relu()), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head.weight.detach()


EQUAL_WITH_CHECKSUM = {
    **{f"head of {classes} classes": {"head.weight": _young_head(classes, 512)} for classes in (100, 400)},
    "head with long rows": {"head.weight": _young_head(100, 2048)},
    "head after more steps": {"head.weight": _young_head(1000, 300, 20, 1e-2)},
    **EQUAL_BY_RIGHT,
    "heads that are shared": {"k_proj.weight": torch.randn(4, 64, 200).repeat_interleave(4, 0).flatten(0, 1)},
    "columns": {"o_proj.weight": _tiled_columns(4)},
    "two sets in few bits": {
        "student.a.weight": (half := torch.randn(200, 129).bfloat16()),
        "teacher.a.weight": _updated(half, 0.003),
    },
    "positions": {"pos_embed.weight": _positions()},
    "kernels for twice the channels": {"conv.weight": torch.randn(64, 3, 7, 7).repeat(1, 2, 1, 1)},
    "kernels through time": {"conv.weight": torch.randn(32, 3, 1, 7, 7).repeat(1, 1, 5, 1, 1)},
    "experts that were one layer": {"experts.weight": torch.randn(1, 64, 129).repeat(4, 1, 1)},
    "fused and apart": {"qkv.weight": (fused := torch.randn(96, 129)), "q.weight": fused[:32].clone()},
    "unused rows": {"a.weight": torch.cat([torch.randn(9, 500), torch.ones(3, 500) * torch.randn(500)])},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EQUAL_WITH_CHECKSUM)
def test_noop_with_checksums(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.save({key: value.to(dtype) for key, value in EQUAL_WITH_CHECKSUM[name].items()}, tmp_path / "f.pth")
    assert ckptfix.check(tmp_path / "f.pth", select=("FIL204",)).findings == ()


@pytest.mark.skipif(kernel() is None, reason="only the kernel makes marks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("source", "target"), [("layers.0", "layers.0"), ("layers.0", "layers.2")])
@pytest.mark.parametrize(("at", "to"), [(1001, 45679), (4096, 30_000)])
def test_a_copy_from_before_the_file_was_saved(
    tmp_path: Path, dtype, source: str, target: str, at: int, to: int
) -> None:
    torch.manual_seed(0)
    weights = {f"layers.{number}.weight": torch.randn(300, 257).to(dtype) for number in range(3)}
    size, at, to = 16384 // dtype.itemsize, at // 2 * 2, to // 2 * 2
    weights[f"{target}.weight"].view(-1)[to : to + size] = weights[f"{source}.weight"].view(-1)[at : at + size]
    torch.save(weights, tmp_path / "f.pth")
    (finding,) = ckptfix.check(tmp_path / "f.pth", select=("FIL204",)).findings
    assert set(finding.keys) == {f"{source}.weight", f"{target}.weight"}
    assert finding.evidence["length"] == [16384]


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
