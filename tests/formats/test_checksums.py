"""A damaged storage never goes into a file that would make it look sound."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfix
from ckptfix.errors import WriteError

STATE: dict[str, torch.Tensor] = {"weight": torch.arange(64.0), "view": torch.arange(100.0)[:10]}


def flipped(folder: Path, number: int | None) -> Path:
    """A file with one bit of a storage flipped; None leaves all as they were saved."""
    path = folder / "model.pth"
    torch.save(STATE, path)
    if number is not None:
        with zipfile.ZipFile(path) as archive:
            offset = archive.getinfo(f"model/data/{number}").header_offset
        content = bytearray(path.read_bytes())
        lengths = content[offset + 26 : offset + 30]
        start = offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
        content[start + 16] ^= 1
        path.write_bytes(content)
    return path


UNREAD: list[Any] = [
    pytest.param({"values": False}, id="no values"),
    pytest.param({"select": ("KEY",)}, id="other rules"),
]


@pytest.mark.parametrize("settings", UNREAD)
@pytest.mark.parametrize("form", [{"format": "safetensors"}, {"for_torch": "1.0"}, {}], ids=["safe", "legacy", "zip"])
def test_sound_storages_are_written(form, settings, tmp_path):
    ckptfix.repair(flipped(tmp_path, None), output=tmp_path / "out", **form, **settings)
    assert (tmp_path / "out").exists()


@pytest.mark.parametrize("settings", UNREAD)
@pytest.mark.parametrize(
    ("number", "form", "key"),
    [
        pytest.param(0, {"format": "safetensors"}, "weight", id="the other container has no checksum"),
        pytest.param(0, {"for_torch": "1.0"}, "weight", id="the legacy container has none"),
        pytest.param(1, {}, "view", id="a part of a storage gets a checksum of its own"),
    ],
)
def test_damage_is_not_laundered(number, form, key, settings, tmp_path):
    source = flipped(tmp_path, number)
    with pytest.raises(WriteError, match=f"the storage of {key} fails its checksum.*--salvage"):
        ckptfix.repair(source, output=tmp_path / "out", **form, **settings)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.pth"]


def test_a_whole_storage_keeps_the_checksum_that_tells_of_its_damage(tmp_path):
    ckptfix.repair(flipped(tmp_path, 0), output=tmp_path / "out.pth", values=False)
    assert [finding.code for finding in ckptfix.check(tmp_path / "out.pth").findings] == ["FIL201"]


@pytest.mark.parametrize("form", ["pth", "safetensors"])
def test_nothing_is_written_while_damage_remains(form, tmp_path):
    source = flipped(tmp_path, 0)
    report = ckptfix.repair(source, output=tmp_path / "out", format=form).report
    assert (report.exit_code, report.output) == (1, None)
    assert "nothing is written while a storage fails its checksum; --salvage leaves its tensors out" in report.remarks
    ckptfix.repair(source, output=tmp_path / "out", format=form, salvage=True)
    assert ckptfix.open_checkpoint(tmp_path / "out").keys() == ["view"]
