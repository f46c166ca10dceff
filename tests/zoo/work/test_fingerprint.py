"""Equal tensors have one fingerprint, whatever the file; others have others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptfix.reading.opening import open_file
from ckptfix.zoo.work.fingerprint import fingerprints


def of(tmp_path: Path, tensors: dict[str, torch.Tensor], name: str = "a.pth") -> dict[str, str]:
    torch.save(tensors, tmp_path / name)
    return fingerprints(open_file(str(tmp_path / name)))


def test_equal_tensors_have_one_fingerprint_in_every_format(tmp_path: Path):
    from safetensors.torch import save_file

    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(5, dtype=torch.int64)}
    save_file(tensors, tmp_path / "a.safetensors")
    torch.save({"state_dict": tensors}, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    expected = of(tmp_path, tensors)
    assert fingerprints(open_file(str(tmp_path / "a.safetensors"))) == expected
    assert fingerprints(open_file(str(tmp_path / "old.pth"))) == expected
    assert all(len(bytes.fromhex(value)) == 16 for value in expected.values())


def test_dtype_shape_and_bytes_count(tmp_path: Path):
    whole = torch.arange(6, dtype=torch.int32)
    tensors = {
        "base": whole,
        "shape": whole.reshape(2, 3).clone(),
        "dtype": whole.view(torch.float32).clone(),
        "value": whole.clone().index_fill_(0, torch.tensor([5]), 9),
        "transposed": whole.reshape(2, 3).t(),
        "empty": torch.empty(0),
        "scalar": torch.tensor(1.0),
    }
    found = of(tmp_path, tensors)
    assert len(set(found.values())) == len(tensors)


def test_a_part_of_a_storage_is_the_same_as_its_copy(tmp_path: Path):
    whole = torch.randn(100)
    found = of(tmp_path, {"view": whole[10:20], "copy": whole[10:20].clone()})
    assert found["view"] == found["copy"]


def test_nan_is_compared_by_its_bytes(tmp_path: Path):
    found = of(tmp_path, {"a": torch.full((4,), torch.nan), "b": torch.full((4,), torch.nan)})
    assert found["a"] == found["b"]


def test_zeros_and_negative_zeros_differ(tmp_path: Path):
    found = of(tmp_path, {"a": torch.zeros(4), "b": -torch.zeros(4)})
    assert found["a"] != found["b"]


def test_what_repeats_its_storage_a_thousand_times_has_none(tmp_path: Path):
    overlapping = torch.zeros(2000).as_strided((1000, 1000), (1, 1))
    assert list(of(tmp_path, {"overlapping": overlapping, "expanded": torch.ones(1).expand(1000)})) == ["expanded"]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_sparse_and_quantised_tensors_have_one(tmp_path: Path):
    sparse = torch.eye(3).to_sparse()
    found = of(
        tmp_path, {"sparse": sparse, "again": sparse.clone(), "quantised": quantised(0.1), "other": quantised(0.2)}
    )
    assert found["sparse"] == found["again"]
    assert found["quantised"] != found["other"]


def quantised(scale: float) -> torch.Tensor:
    scales = torch.full((2,), scale, dtype=torch.float64)
    return torch.quantize_per_channel(torch.zeros(2, 2), scales, torch.zeros(2, dtype=torch.int64), 0, torch.qint8)
