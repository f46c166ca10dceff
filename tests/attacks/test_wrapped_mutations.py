"""Archives and compressed files with random damage: the result is a checkpoint or a ``CkptfixError``."""

import io
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save as save_safetensors

from tests.attacks.test_mutations import campaign
from tests.reading.archives.test_wrapped import WRAPPERS, zipped
from tests.reading.torch_files.test_torch_tar import made

CASES = 600
"""Mutations in each of the three shares; ``campaign`` with another seed and more rounds runs longer."""

WEIGHTS = {"fc.weight": torch.arange(1.0, 41).reshape(8, 5), "fc.bias": torch.arange(1.0, 9)}


def saved(legacy: bool = False) -> bytes:
    buffer = io.BytesIO()
    torch.save(WEIGHTS, buffer, _use_new_zipfile_serialization=not legacy)
    return buffer.getvalue()


INNER = {
    "zip": saved(),
    "legacy": saved(legacy=True),
    "safetensors": save_safetensors(WEIGHTS),
    "numpy": pickle.dumps({key: value.numpy() for key, value in WEIGHTS.items()}, 2),
    "torch-0.1": made(),
}


def unpacked(data: bytes) -> dict[str, bytes]:
    archive = zipfile.ZipFile(io.BytesIO(data))
    return {info.filename: archive.read(info) for info in archive.infolist()}


def write_samples(folder: Path) -> list[Path]:
    """Return a file of every kind of checkpoint in every wrapper."""
    files = {
        f"{number:02}-{kind}": wrap(data)
        for number, wrap in enumerate(WRAPPERS.values())
        for kind, data in INNER.items()
        if kind in ("zip", "legacy") or number % 4 == 0
    }
    for name, method in {"deflated": 8, "bzip2": 12, "lzma": 14}.items():
        files[f"torch-{name}"] = zipped(unpacked(INNER["zip"]), method)
        files[f"outer-{name}"] = zipped({"model.pth": INNER["legacy"]}, method)
    for name, data in files.items():
        (folder / f"{name}.bin").write_bytes(data)
    return [folder / f"{name}.bin" for name in files]


@pytest.mark.parametrize("share", range(3))
def test_damage_ends_in_a_checkpoint_or_a_typed_error(
    share: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples, place = tmp_path / "samples", tmp_path / "place"
    samples.mkdir()
    place.mkdir()
    monkeypatch.chdir(tmp_path)
    chosen = write_samples(samples)[share::3]
    assert campaign(chosen, -(-CASES // len(chosen)), share, place) >= CASES
