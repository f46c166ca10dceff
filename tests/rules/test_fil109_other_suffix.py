"""FIL109: a file under the suffix of the other format."""

from __future__ import annotations

import bz2
import gzip
import lzma
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptfix
from ckptfix.core.finding import Level


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
def test_a_suffix_of_the_other_format_is_a_note(tmp_path, name, is_safetensors):
    (finding,) = ckptfix.check(saved(tmp_path / name, is_safetensors)).findings
    assert (finding.code, finding.level) == ("FIL109", Level.NOTE)


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
def test_a_packed_file_under_the_suffix_of_what_is_inside_is_a_note(tmp_path, name, how):
    path = packed(tmp_path / name, how)
    (finding,) = ckptfix.check(path).findings
    assert (finding.code, finding.level) == ("FIL109", Level.NOTE)
    output = tmp_path / f"whole{path.suffix}"
    assert ckptfix.repair(path, output=output).report.exit_code == 0
    assert ckptfix.check(output).findings == ()


@pytest.mark.parametrize(("name", "how"), [("a.pth.gz", "gzip"), ("a.zip", "zip"), ("a.tar", "w:"), ("a", "xz")])
def test_noop_a_packed_file_that_says_so(tmp_path, name, how):
    assert ckptfix.check(packed(tmp_path / name, how)).findings == ()


def test_what_the_note_says_works(tmp_path):
    """A repair with --format writes the file that the name promises."""
    path = saved(tmp_path / "a.safetensors", is_safetensors=False)
    result = ckptfix.repair(path, format="safetensors", output=tmp_path / "b.safetensors")
    assert result.report.exit_code == 0
    assert ckptfix.check(tmp_path / "b.safetensors").findings == ()
