"""FIL109: a file under the suffix of the other format."""

from __future__ import annotations

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


def test_what_the_note_says_works(tmp_path):
    """A repair with --format writes the file that the name promises."""
    path = saved(tmp_path / "a.safetensors", is_safetensors=False)
    result = ckptfix.repair(path, format="safetensors", output=tmp_path / "b.safetensors")
    assert result.report.exit_code == 0
    assert ckptfix.check(tmp_path / "b.safetensors").findings == ()
