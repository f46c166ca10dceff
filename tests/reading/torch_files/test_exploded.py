import io
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.errors import CkptfixError, HostileError, UnreadableError, UsageError
from tests.checks import assert_same

WEIGHTS = {"fc.bias": torch.tensor([float("nan"), -0.0]), "fc.weight": torch.arange(6.0).reshape(2, 3)}


def unpack(data: io.BytesIO, folder: Path, keep_root: bool = True) -> Path:
    archive = zipfile.ZipFile(data)
    for info in archive.infolist():
        path = folder / (info.filename if keep_root else info.filename.partition("/")[2])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(archive.read(info))
    return folder


@pytest.fixture(params=[True, False], ids=["inside the archive's own folder", "without that folder"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    buffer = io.BytesIO()
    torch.save({f"module.{key}": value for key, value in WEIGHTS.items()}, buffer)
    return unpack(buffer, tmp_path / "model", keep_root=request.param)


def inner(folder: Path, name: str) -> Path:
    return next(folder.rglob(name))


def test_the_folder_reads_as_the_file_did(folder: Path) -> None:
    (folder / ".DS_Store").write_bytes(b"x")
    (folder / "__MACOSX").mkdir()
    opened = ckptfix.open_checkpoint(folder)
    assert (opened.format, opened.path) == ("torch-folder", str(folder))
    assert_same(dict(opened.state_dict()), {f"module.{key}": value for key, value in WEIGHTS.items()})


def test_it_is_repaired_into_one_file_next_to_it(folder: Path) -> None:
    done = ckptfix.repair(folder, beside=True)
    output = folder.with_name("model.fixed.pth")
    assert done.report.output == str(output)
    assert_same(torch.load(output), WEIGHTS)
    assert output.stat().st_mode & 0o111 == 0
    with pytest.raises(UsageError, match="the checkpoint is a folder; name an output"):
        ckptfix.repair(folder, in_place=True)


def test_a_torchscript_archive_may_be_unpacked_too(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    module = torch.jit.script(nn.BatchNorm1d(2))
    torch.jit.save(module, buffer)
    opened = ckptfix.open_checkpoint(unpack(buffer, tmp_path / "model"))
    assert opened.format == "torchscript"
    assert_same(dict(opened.state_dict()), dict(module.state_dict()))


def test_noop_a_folder_with_an_ordinary_pickle(tmp_path: Path) -> None:
    (tmp_path / "data.pkl").write_bytes(b"\x80\x02}.")
    with pytest.raises(UnreadableError, match="folder"):
        ckptfix.open_checkpoint(tmp_path)


def test_a_storage_that_is_gone_is_named(folder: Path) -> None:
    inner(folder, "0").unlink()
    with pytest.raises(UnreadableError, match="lacks its storage data/0"):
        ckptfix.open_checkpoint(folder)


def test_a_storage_that_is_cut_short_is_named(folder: Path) -> None:
    inner(folder, "1").write_bytes(b"short")
    with pytest.raises((HostileError, UnreadableError), match="has 5 of the 24 bytes of its storage data/1"):
        ckptfix.open_checkpoint(folder)


def test_a_link_out_of_the_folder_is_not_followed(folder: Path, tmp_path: Path) -> None:
    storage = inner(folder, "0")
    secret = tmp_path / "secret"
    storage.rename(secret)
    storage.symlink_to(secret)
    with pytest.raises(CkptfixError, match="lacks its storage data/0"):
        ckptfix.open_checkpoint(folder)


def test_a_file_of_the_folder_is_not_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    (file,) = tmp_path.rglob("data.pkl")
    with pytest.raises(UnreadableError, match=r"data\.pkl of an unpacked torch file.*name the folder"):
        ckptfix.open_checkpoint(file)
    with pytest.raises(UnreadableError, match=r"storage of an unpacked torch file.*name the folder that has data\.pkl"):
        ckptfix.open_checkpoint(file.parent / "data" / "0")


def test_an_unpacked_file_is_always_reported(folder: Path, tmp_path: Path) -> None:
    """torch.load reads no folder."""
    report = ckptfix.check(folder, values=False)
    assert any("unpacked into a folder" in finding.message for finding in report.findings)
    ckptfix.repair(folder, output=tmp_path / "whole.pth", values=False)
    assert "FIL102" not in {finding.code for finding in ckptfix.check(tmp_path / "whole.pth", values=False).findings}
