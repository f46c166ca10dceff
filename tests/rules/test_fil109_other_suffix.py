"""FIL109: a file under the suffix of the other format."""

import bz2
import gzip
import lzma
import pickle
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import ckptfix
from ckptfix.core.finding import Level
from ckptfix.errors import UsageError


def saved(path: Path, is_safetensors: bool) -> Path:
    save: Any = save_file if is_safetensors else torch.save
    save({"weight": torch.ones(2)}, path)
    return path


@pytest.mark.parametrize("name", ["a.model", "a", "a.safetensors.tmp", "pytorch_model.ema"])
@pytest.mark.parametrize("is_safetensors", [True, False])
def test_noop_other_suffixes_say_nothing(tmp_path, name, is_safetensors):
    assert ckptfix.check(saved(tmp_path / name, is_safetensors)).findings == ()


@pytest.mark.parametrize("name", ["a.pth", "a.PT", "epoch.ckpt", "pytorch_model.bin"])
def test_noop_the_formats_own_suffix(tmp_path, name):
    assert ckptfix.check(saved(tmp_path / name, is_safetensors=False)).findings == ()
    assert ckptfix.check(saved(tmp_path / "a.safetensors", is_safetensors=True)).findings == ()


@pytest.mark.parametrize(
    ("name", "is_safetensors"), [("a.pth", True), ("a.Bin", True), ("a.ckpt", True), ("a.safetensors", False)]
)
def test_a_suffix_of_the_other_format_is_written_as_its_name_promises(tmp_path, name, is_safetensors):
    """The reader of files with this suffix refuses the file and loads the result of a plain repair."""
    path = saved(tmp_path / name, is_safetensors)
    load: Any = torch.load if is_safetensors else load_file
    with pytest.raises((pickle.UnpicklingError, SafetensorError)):
        load(path)
    report = ckptfix.check(path)
    assert [(each.code, each.level) for each in report.findings] == [("FIL109", Level.WARNING)]
    assert report.exit_code == 1
    result = ckptfix.repair(path, beside=True).report
    assert result.exit_code == 0
    assert str(result.output).endswith(f".fixed{path.suffix}")
    assert torch.equal(load(result.output)["weight"], torch.ones(2))
    ckptfix.repair(path, in_place=True)
    assert load(path).keys() == {"weight"}


def test_what_the_promised_format_cannot_hold_is_kept(tmp_path):
    """A training checkpoint under the name of a safetensors file keeps its optimizer."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    path = tmp_path / "a.safetensors"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    result = ckptfix.repair(path, beside=True).report
    assert result.exit_code == 0
    assert result.output == str(tmp_path / "a.fixed.pth")
    assert torch.load(result.output)["optimizer"]["state"][0]["momentum_buffer"].shape == (2, 2)
    with pytest.raises(UsageError, match="keeps the name"):
        ckptfix.repair(path, in_place=True)


def packed(path: Path, how: str) -> Path:
    """A torch file, packed under the name of one that is not."""
    inner = saved(path.with_name("inner.pth"), path.suffix == ".safetensors")
    if how in ("w:", "w:xz"):
        with tarfile.open(path, how) as archive:  # type: ignore[call-overload] # the mode is one of two literals
            archive.add(inner, "inner.pth")
    elif how == "zip":
        with zipfile.ZipFile(path, "w") as members:
            members.write(inner, "inner.pth")
    else:
        path.write_bytes({"gzip": gzip, "bzip2": bz2, "xz": lzma}[how].compress(inner.read_bytes()))
    return path


@pytest.mark.parametrize("how", ["gzip", "bzip2", "xz", "zip", "w:", "w:xz"])
@pytest.mark.parametrize("name", ["a.pth", "a.safetensors"])
def test_a_packed_file_under_the_suffix_of_what_is_inside_is_unpacked(tmp_path, name, how):
    path = packed(tmp_path / name, how)
    report = ckptfix.check(path)
    assert [(each.code, each.level) for each in report.findings] == [("FIL109", Level.WARNING)]
    assert report.exit_code == 1
    result = ckptfix.repair(path, beside=True).report
    assert result.exit_code == 0
    assert ckptfix.check(str(result.output)).findings == ()


@pytest.mark.parametrize(("name", "how"), [("a.pth.gz", "gzip"), ("a.zip", "zip"), ("a.tar", "w:"), ("a", "xz")])
def test_noop_a_packed_file_that_says_so(tmp_path, name, how):
    assert ckptfix.check(packed(tmp_path / name, how)).findings == ()
