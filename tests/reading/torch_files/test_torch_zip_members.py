import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfix
from ckptfix.errors import UnreadableError
from tests.checks import assert_same

WEIGHTS: dict[str, torch.Tensor] = {
    "double": torch.linspace(-1, 1, 7, dtype=torch.float64),
    "float": torch.linspace(-1, 1, 7),
    "half": torch.linspace(-1, 1, 7).half(),
    "bfloat": torch.linspace(-1, 1, 7).bfloat16(),
    "complex": torch.complex(torch.arange(3.0), -torch.arange(3.0)),
    "long": torch.arange(-3, 4),
    "bytes": torch.arange(7, dtype=torch.uint8),
    "bool": torch.tensor([True, False]),
    "scalar": torch.tensor(3),
    "empty": torch.zeros(0),
    "part": torch.arange(12.0)[3:9].reshape(2, 3).t(),
}


def element(tensor: torch.Tensor) -> int:
    return tensor.element_size() // (2 if tensor.is_complex() else 1)


def swapped(data: bytes, width: int) -> bytes:
    return b"".join(data[at : at + width][::-1] for at in range(0, len(data), width))


def rewritten(path: Path, change: dict[str, Any], rename: tuple[str, str] = ("", "")) -> None:
    """Write a torch file again with other members; a value of None leaves one out."""
    archive = zipfile.ZipFile(path)
    members = {info.filename.partition("/")[2]: archive.read(info) for info in archive.infolist()} | change
    with zipfile.ZipFile(path, "w") as again:
        for name, data in members.items():
            if data is not None:
                again.writestr(f"archive/{name.replace(*rename)}" if rename[0] else f"archive/{name}", data)


def test_big_endian_storages_are_swapped(tmp_path: Path) -> None:
    """``torch.save`` there writes its memory as it is, and says so in the record ``byteorder``."""
    path = tmp_path / "model.pth"
    torch.save(WEIGHTS, path)
    archive = zipfile.ZipFile(path)
    storages = {
        f"data/{number}": swapped(archive.read(f"{path.stem}/data/{number}"), element(tensor))
        for number, tensor in enumerate(WEIGHTS.values())
    }
    rewritten(path, {**storages, "byteorder": b"big"})
    assert_same(torch.load(path), WEIGHTS)  # the file is what torch takes for one
    assert_same(dict(ckptfix.open_checkpoint(path).state_dict()), WEIGHTS)
    ckptfix.repair(path, output=tmp_path / "out.pth")
    assert_same(torch.load(tmp_path / "out.pth"), WEIGHTS)


def test_noop_a_legacy_file_of_a_big_endian_machine(tmp_path: Path) -> None:
    """Its storages are little-endian on every machine; only the facts about the machine differ."""
    path = tmp_path / "model.pth"
    torch.save(WEIGHTS, path, _use_new_zipfile_serialization=False)
    data = path.read_bytes()
    at = data.index(b"little_endian")
    flag = data.index(b"\x88", at)
    path.write_bytes(data[:flag] + b"\x89" + data[flag + 1 :])
    assert_same(torch.load(path), WEIGHTS)
    assert_same(dict(ckptfix.open_checkpoint(path).state_dict()), WEIGHTS)


def test_the_preview_of_the_zip_format_kept_its_storages_in_another_folder(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    torch.save(WEIGHTS, path)
    rewritten(path, {"byteorder": None, ".format_version": None, ".data/serialization_id": None}, ("data/", "tensors/"))
    assert_same(dict(ckptfix.open_checkpoint(path).state_dict()), WEIGHTS)


def test_two_unpacked_files_in_one_archive_are_named(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(WEIGHTS, buffer)
    archive = zipfile.ZipFile(buffer)
    path = tmp_path / "two.zip"
    with zipfile.ZipFile(path, "w") as both:
        for root in ("first", "second"):
            for info in archive.infolist():
                both.writestr(f"{root}/{info.filename.partition('/')[2]}", archive.read(info))
    with pytest.raises(UnreadableError, match="two unpacked torch files, first/ and second/"):
        ckptfix.open_checkpoint(path)
