"""A folder is a checkpoint, or the error says which file in it may be meant."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptfix
from ckptfix.errors import UnreadableError
from ckptfix.formats.folders import FOLDER_FORMATS


def test_formats_have_names_of_their_own() -> None:
    names = [form.name for form in FOLDER_FORMATS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        pytest.param([], "an empty folder", id="empty"),
        pytest.param(["README.md"], "without a checkpoint in it; it holds README.md", id="no-checkpoint"),
        pytest.param(["README.md", "b.pth", "a.safetensors"], "files in it: a.safetensors, b.pth$", id="two-files"),
        pytest.param(["config.json", "unet/w.bin", "vae/w.bin"], "files in it: unet/w.bin, vae/w.bin$", id="pipeline"),
        pytest.param([f"{n}.pt" for n in range(9)], "5.pt and 3 more$", id="many"),
    ],
)
def test_other_folders_say_what_is_in_them(tmp_path: Path, files: list[str], said: str) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        torch.save({"a": torch.ones(1)}, tmp_path / name)
    with pytest.raises(UnreadableError, match=said):
        ckptfix.open_checkpoint(tmp_path)


def test_shards_of_the_corpus(corpus: Path) -> None:
    whole = ckptfix.open_checkpoint(corpus / "modern" / "hf_sharded_bin")
    same = ckptfix.open_checkpoint(corpus / "modern" / "dcp_dir", weights="model")
    assert (whole.format, same.format) == ("sharded", "dcp")
    assert all(torch.equal(whole.read(key), same.read(key)) for key in whole.specs)
