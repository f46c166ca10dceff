"""Tensors of many small parts have the bytes and the checksums of their parts."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfix
from ckptfix.bytes.checksums import is_sound, is_unverified
from ckptfix.bytes.sources import SmallParts
from ckptfix.core.spec import Storage
from ckptfix.errors import UnreadableError, WriteError
from ckptfix.reading.folders.ranks import small_parts
from tests.checks import bytes_of

WORLD = 12  # ranks from 10 on have longer names, and with them other archives


def _numbers(key: int, rows: int = 2 * WORLD) -> torch.Tensor:
    return torch.arange(3.0 * rows).view(rows, 3) + 100 * key


def _save(
    folder: Path, dim: int = 0, rows: int = 2 * WORLD, change: Callable[[int, torch.Tensor], torch.Tensor] | None = None
) -> Path:
    """Save 30 tensors that ranks split along a dimension, as FSDP 2 does along the first."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    for rank in range(WORLD):
        mesh = DeviceMesh("cpu", torch.arange(WORLD), _init_backend=False, _rank=rank)
        state: dict[str, Any] = {}
        for key in range(30):
            whole = _numbers(key, rows) if dim == 0 else _numbers(key, rows).T
            whole = whole.contiguous()
            spec = DTensorSpec(mesh, (Shard(dim),), tensor_meta=TensorMeta(whole.shape, whole.stride(), whole.dtype))
            local = (*whole.chunk(WORLD, dim), *[whole[:0]] * WORLD)[rank].clone()
            state[f"blocks.{key}.weight"] = made = DTensor(local, spec, requires_grad=False)
            if change is not None:
                made._local_tensor = change(key, local)
        torch.save(state, folder / f"model_world_size_{WORLD}_rank_{rank}.pt")
    return folder


def _storages(folder: Path) -> list[Storage]:
    return [storage for spec in ckptfix.open_checkpoint(folder).specs.values() for storage in spec.storages]


def _is_small(folder: Path) -> bool:
    (kind,) = {isinstance(storage.parts, SmallParts) for storage in _storages(folder)}
    return kind


def test_each_range_has_the_bytes_of_its_parts(tmp_path: Path) -> None:
    _save(tmp_path)
    for key, storage in enumerate(_storages(tmp_path)):
        assert isinstance(storage.parts, SmallParts)
        assert [part.nbytes for part in storage.parts] == [24] * WORLD == [24] * len(storage.parts)
        whole = _numbers(key).numpy().tobytes()
        for start in range(0, len(whole), 13):
            for stop in (start, start + 1, start + 24, len(whole)):
                assert storage.source.read(start, min(stop, len(whole))) == whole[start:stop], (key, start, stop)


def test_parts_of_unequal_lengths_follow_each_other(tmp_path: Path) -> None:
    """The last ranks have shorter parts, or none."""
    rows = 2 * WORLD - 3
    _save(tmp_path, rows=rows)
    checkpoint = ckptfix.open_checkpoint(tmp_path)
    assert all(bytes_of(checkpoint.read(f"blocks.{key}.weight")) == bytes_of(_numbers(key, rows)) for key in range(30))


def test_blocks_serve_many_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(tmp_path)
    storages = _storages(tmp_path)
    read, taken = os.pread, []

    def counted(descriptor: int, count: int, start: int) -> bytes:
        taken.append(start)
        return read(descriptor, count, start)

    monkeypatch.setattr(os, "pread", counted)
    for storage in storages:
        assert is_unverified(storage)
        assert is_sound(storage)
        assert not is_unverified(storage)
        assert storage.source.read(0, storage.nbytes)
    assert len(taken) < len(storages) * WORLD / 2  # a read for each part would be 2 * 30 * 12


def _as_view(key: int, local: torch.Tensor) -> torch.Tensor:
    """Return a part in the middle of its storage."""
    return torch.cat((local + 7, local, local + 9))[2:4]


def _transposed(key: int, local: torch.Tensor) -> torch.Tensor:
    return local.T.contiguous().T


def _of_odd_keys(key: int, local: torch.Tensor) -> torch.Tensor:
    """Return the parts of a few tensors in storages that are too large."""
    return torch.cat((local, torch.ones(1000, 3)))[:2] if key % 2 else local


@pytest.mark.parametrize(
    ("dim", "change", "is_small"),
    [
        pytest.param(0, _as_view, True, id="views"),
        pytest.param(0, _transposed, False, id="not-row-major"),
        pytest.param(1, None, False, id="not-in-a-row"),
    ],
)
def test_both_ways_make_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dim: int, change: Any, is_small: bool
) -> None:
    (tmp_path / "ranks").mkdir()
    folder = _save(tmp_path / "ranks", dim, change=change)
    assert _is_small(folder) == is_small
    ckptfix.repair(folder, output=tmp_path / "small.pth")
    monkeypatch.setattr(small_parts, "SMALL", 0)
    assert not _is_small(folder)
    ckptfix.repair(folder, output=tmp_path / "each.pth")
    assert (tmp_path / "small.pth").read_bytes() == (tmp_path / "each.pth").read_bytes()
    read = torch.load(tmp_path / "small.pth")
    assert all(
        torch.equal(read[f"blocks.{key}.weight"], _numbers(key) if dim == 0 else _numbers(key).T) for key in range(30)
    )


def test_a_large_part_is_copied_by_itself(tmp_path: Path) -> None:
    _save(tmp_path, change=_of_odd_keys)
    kinds = [isinstance(storage.parts, SmallParts) for storage in _storages(tmp_path)]
    assert kinds == [True, False] * 15


@pytest.mark.parametrize("rank", [0, 1, 9, 10, 11])
def test_a_damaged_part_is_not_written(tmp_path: Path, rank: int) -> None:
    """Neither after a check of the values, nor without one."""
    _save(tmp_path)
    file = tmp_path / f"model_world_size_{WORLD}_rank_{rank}.pt"
    data = bytearray(file.read_bytes())
    place = data.index(_numbers(5)[2 * rank : 2 * rank + 2].numpy().tobytes())
    data[place] ^= 1
    file.write_bytes(data)
    assert [is_sound(storage) for storage in _storages(tmp_path)] == [key != 5 for key in range(30)]
    (found,) = [finding for finding in ckptfix.check(tmp_path).findings if finding.code == "FIL201"]
    assert found.keys == ("blocks.5.weight",)
    ckptfix.repair(tmp_path, output=tmp_path / "whole.pth")
    with pytest.raises(WriteError, match=rf"blocks\.5\.weight \(in {file.name}\) fails its checksum"):
        ckptfix.repair(tmp_path, output=tmp_path / "whole.pth", values=False)
    assert not (tmp_path / "whole.pth").exists()


def test_a_file_that_changes_meanwhile_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(tmp_path)
    read = small_parts._Bytes.read

    def changing(held: Any, start: int, stop: int) -> memoryview:
        os.utime(tmp_path / f"model_world_size_{WORLD}_rank_11.pt", ns=(1, 1))
        return read(held, start, stop)

    monkeypatch.setattr(small_parts._Bytes, "read", changing)
    with pytest.raises(UnreadableError, match=r"rank_11\.pt: changed while it was read"):
        ckptfix.repair(tmp_path, output=tmp_path / "whole.safetensors", values=False)
