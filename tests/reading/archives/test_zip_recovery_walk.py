"""Members of an archive without its directory: what follows the last one shows whether it is complete."""

from pathlib import Path

import pytest
import torch

import ckptfix
from tests.reading.archives.zips import Zip, saved

WEIGHTS = {f"layer{n}.weight": torch.arange(1.0 + n, 36 + n).reshape(5, 7) for n in range(3)}
LAST = "archive/data/2"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.pth"


def left(file: Path, data: bytes) -> list[str]:
    file.write_bytes(data)
    checkpoint = ckptfix.open_checkpoint(file, salvage=True)
    assert all(torch.equal(checkpoint.read(key), WEIGHTS[key]) for key in checkpoint.specs)
    return checkpoint.keys()


@pytest.mark.parametrize("behind", [0, 1, 3, 15])
def test_a_cut_in_the_descriptor_loses_no_tensor(file: Path, behind: int) -> None:
    archive = Zip(saved(WEIGHTS))
    end = archive.starts[LAST] + archive.sizes[LAST]
    assert left(file, bytes(archive.data[: end + behind])) == list(WEIGHTS)


@pytest.mark.parametrize("gone", [1, 8, 64])
def test_bytes_that_are_missing_inside_show_after_the_storage(file: Path, gone: int) -> None:
    archive = Zip(saved(WEIGHTS))
    start, end = archive.starts[LAST], archive.starts[LAST] + archive.sizes[LAST]
    data = archive.data[: start + 20] + archive.data[start + 20 + gone : end + 16] + bytes(range(1, 100))
    assert left(file, bytes(data)) == list(WEIGHTS)[:2]


def test_other_bytes_at_the_end_lose_the_storages_they_overwrite(file: Path) -> None:
    archive = Zip(saved(WEIGHTS))
    start = archive.starts[LAST] + 40
    archive.data[start:] = b"\xff" * (len(archive.data) - start)
    assert left(file, bytes(archive.data)) == list(WEIGHTS)[:2]
