"""Weights that accelerate moved to the disk."""

import json
from pathlib import Path

import pytest
import torch

import ckptfix
from ckptfix.errors import HostileError, UnreadableError
from tests.checks import assert_same

WEIGHTS = {
    "layer.weight": torch.randn(3, 4),
    "layer.bias": torch.randn(3).bfloat16(),
    "scale": torch.tensor(2.5),
    "count": torch.tensor([1, 2, 3]),
    "mask": torch.tensor([True, False]),
    "low": torch.randn(4).to(torch.float8_e4m3fn),
}


def offload(folder: Path) -> Path:
    """Write a folder as ``accelerate.utils.offload_state_dict`` does."""
    folder.mkdir()
    index = {}
    for name, tensor in WEIGHTS.items():
        (folder / f"{name}.dat").write_bytes(bytes(tensor.reshape(-1).view(torch.uint8).numpy()))
        index[name] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    (folder / "index.json").write_text(json.dumps(index, indent=2))
    return folder


def edit(folder: Path, name: str, **entry: object) -> None:
    index = json.loads((folder / "index.json").read_text())
    index[name] = entry
    (folder / "index.json").write_text(json.dumps(index))


def test_a_folder_is_read(tmp_path):
    opened = ckptfix.open_checkpoint(offload(tmp_path / "offload"))
    assert (opened.format, opened.producer) == ("accelerate-offload", "accelerate, weights moved out of memory")
    assert_same(opened.state_dict(), WEIGHTS)
    ckptfix.repair(tmp_path / "offload", output=tmp_path / "out.pth")
    assert_same(torch.load(tmp_path / "out.pth"), WEIGHTS)


def test_it_is_as_accelerate_writes_it(tmp_path):
    accelerate = pytest.importorskip("accelerate.utils")
    accelerate.offload_state_dict(tmp_path / "theirs", WEIGHTS)
    for file in offload(tmp_path / "ours").iterdir():
        assert (tmp_path / "theirs" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("damage", ["gone", "short", "long", "elsewhere"])
def test_a_weight_that_is_not_whole_is_named(tmp_path, damage):
    file = offload(tmp_path / "offload") / "layer.bias.dat"
    if damage == "gone":
        file.unlink()
    elif damage == "elsewhere":
        edit(file.parent, "layer.bias", safetensors_file="/models/model.safetensors", weight_name="layer.bias")
    else:
        file.write_bytes(file.read_bytes()[:-1] if damage == "short" else bytes(7))
    with pytest.raises(UnreadableError, match=r"layer\.bias") as caught:
        ckptfix.open_checkpoint(file.parent)
    assert "/models/model.safetensors" in str(caught.value) or damage != "elsewhere"
    assert ckptfix.open_checkpoint(file.parent, salvage=True).state_dict().keys() == WEIGHTS.keys() - {"layer.bias"}


def test_nothing_but_references_names_where_the_weights_are(tmp_path):
    folder = tmp_path / "offload"
    folder.mkdir()
    (folder / "index.json").write_text(json.dumps({"w": {"safetensors_file": "/m.safetensors", "weight_name": "w"}}))
    with pytest.raises(UnreadableError, match=r"w is in /m\.safetensors"):
        ckptfix.open_checkpoint(folder)


@pytest.mark.parametrize("entry", [{"dtype": "object", "shape": [1]}, {"dtype": "int8", "shape": [-1]}, {"dtype": "x"}])
def test_a_malformed_index_is_an_error(tmp_path, entry):
    edit(offload(tmp_path / "offload"), "w", **entry)
    with pytest.raises(UnreadableError, match="malformed index"):
        ckptfix.open_checkpoint(tmp_path / "offload")


def test_it_does_not_lead_out_of_the_folder(tmp_path):
    (tmp_path / "secret.dat").write_bytes(bytes(4))
    edit(offload(tmp_path / "offload"), "../secret", dtype="float32", shape=[1])
    with pytest.raises(HostileError):
        ckptfix.open_checkpoint(tmp_path / "offload")
