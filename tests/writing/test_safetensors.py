"""The tensors after the header keep their alignment to pages, where possible."""

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptfix
from ckptfix.bytes.copying import LARGE, PAGE
from ckptfix.bytes.sources import located
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.errors import WriteError
from ckptfix.reading.opening import open_file
from ckptfix.writing.safetensors import tied_keys
from tests.checks import bytes_of
from tests.reading.files import opened, write
from tests.reading.state_dicts import same
from tests.writing.test_torch_files import places


def renamed(checkpoint: Checkpoint, prefix: str) -> Checkpoint:
    entries = {prefix + key: value for key, value in checkpoint.entries.items()}
    return Checkpoint(checkpoint.path, checkpoint.format, entries, root=entries)


LARGE_ONE = torch.arange(LARGE // 4, dtype=torch.float32)


@pytest.mark.parametrize("length", range(0, 4200, 271))
def test_renamed_tensors_keep_their_page_offset(length, tmp_path):
    state_dict = {"a": torch.ones(3), "b": LARGE_ONE, "c": torch.ones(5), "d": LARGE_ONE + 1}
    save_file(state_dict, tmp_path / "source.safetensors")
    checkpoint = renamed(opened(tmp_path / "source.safetensors"), "x" * length)
    path = write(checkpoint, "safetensors", tmp_path)
    before, after = places(checkpoint), places(opened(path))
    assert {(after[key].offset - before[key].offset) % PAGE for key in before} == {0}
    same(dict(load_file(path)), {"x" * length + key: value for key, value in state_dict.items()})


def test_a_header_of_small_tensors_is_not_padded_to_a_page(tmp_path):
    save_file({"a": torch.ones(3), "b": torch.ones(5)}, tmp_path / "source.safetensors")
    path = write(renamed(opened(tmp_path / "source.safetensors"), "x" * 100), "safetensors", tmp_path)
    assert path.stat().st_size < 1000


def test_dropped_tensors_do_not_move_the_alignment(tmp_path):
    save_file({"a": torch.ones(3), "b": LARGE_ONE}, tmp_path / "source.safetensors")
    checkpoint = opened(tmp_path / "source.safetensors")
    entries = {"b": checkpoint.entries["b"]}
    path = write(Checkpoint(checkpoint.path, checkpoint.format, entries, root=entries), "safetensors", tmp_path)
    shift = places(opened(path))["b"].offset - places(checkpoint)["b"].offset
    # 8 is what the format asks of the header; the dropped 12 bytes are not a multiple of it.
    assert places(opened(path))["b"].offset % 8 == 0
    assert shift % PAGE == 0 or places(checkpoint)["b"].offset % 8 != 0
    same(dict(load_file(path)), {"b": LARGE_ONE})


@pytest.mark.parametrize("damaged", [False, True])
def test_a_storage_with_views_is_verified_while_it_is_copied(damaged, tmp_path):
    weight = torch.arange(100_000.0)
    state_dict = {"view": weight[5:], "whole": weight, "other": weight[:7]}
    torch.save(state_dict, tmp_path / "source.pth")
    content = bytearray((tmp_path / "source.pth").read_bytes())
    content[content.index(weight.numpy().tobytes()) + 7] ^= damaged
    (tmp_path / "source.pth").write_bytes(content)
    checkpoint = opened(tmp_path / "source.pth")
    if damaged:
        with pytest.raises(WriteError, match="the storage of view and of 2 more fails its checksum"):
            write(checkpoint, "safetensors", tmp_path)
    else:
        same(dict(load_file(write(checkpoint, "safetensors", tmp_path))), state_dict)


def test_a_converted_file_is_read_once(tmp_path, monkeypatch):
    """The proof of the checksum takes the bytes that are at hand for the copy."""
    torch.save({"a": LARGE_ONE}, tmp_path / "source.pth")
    checkpoint = opened(tmp_path / "source.pth")
    read: list[int] = []
    real = os.preadv

    def noted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        read.append(buffers[0].nbytes)
        return real(descriptor, buffers, offset)

    monkeypatch.setattr("os.preadv", noted)
    write(checkpoint, "safetensors", tmp_path)
    assert sum(read) == LARGE_ONE.nbytes


def test_a_lost_entry_with_tensors_is_reported(tmp_path):
    """Whatever rules were selected."""
    torch.save({"weight": torch.ones(3), "packed": (torch.ones(2), None)}, tmp_path / "model.pth")
    with pytest.raises(WriteError, match="cannot hold packed"):
        ckptfix.repair(tmp_path / "model.pth", output=tmp_path / "out.safetensors", select=("KEY",))
    assert [path.name for path in tmp_path.iterdir()] == ["model.pth"]


def offsets_of(path: Path) -> dict[str, int]:
    """Where each tensor of a file begins."""
    checkpoint = open_file(str(path))
    places = {key: located(spec.storage.source) for key, spec in checkpoint.specs.items() if spec.storage is not None}
    return {key: place.offset for key, place in places.items() if place is not None}


def test_every_tensor_is_aligned_and_the_keys_keep_their_order(tmp_path):
    state_dict = {
        "flags": torch.tensor([True, False, True]),
        "half": torch.ones(3, dtype=torch.float16),
        "double": torch.ones(5, dtype=torch.float64),
        "byte": torch.ones(1, dtype=torch.uint8),
        "single": torch.ones(3),
        "empty": torch.ones(0, dtype=torch.int64),
    }
    ckptfix.repair(state_dict, output=tmp_path / "model.safetensors")
    assert list(open_file(str(tmp_path / "model.safetensors")).specs) == list(state_dict)
    offsets = offsets_of(tmp_path / "model.safetensors")
    assert {key: start % state_dict[key].itemsize for key, start in offsets.items()} == dict.fromkeys(state_dict, 0)
    assert all(torch.equal(value, state_dict[key]) for key, value in load_file(tmp_path / "model.safetensors").items())


WEIGHT, WHOLE = torch.randn(3, 2), torch.arange(6.0)


@pytest.mark.parametrize(
    ("state_dict", "remarks"),
    [
        pytest.param({"a": WEIGHT, "b": WEIGHT.clone()}, [], id="equal tensors"),
        pytest.param({"a": WHOLE[:3], "b": WHOLE[3:]}, [], id="neighbours in one storage"),
        pytest.param({"a": WEIGHT[:0], "b": WEIGHT[:0]}, [], id="empty tensors"),
        pytest.param({"a": WEIGHT, "b": WEIGHT, "c": WEIGHT}, ["lacks 2 keys (b, c)"], id="a tie"),
        pytest.param({"a": WHOLE[:4], "b": WHOLE[2:]}, ["2 tensors that share memory (a, b)"], id="an overlap"),
        pytest.param({"a": WHOLE, "b": WHOLE.view(2, 3)}, ["2 tensors that share memory (a, b)"], id="a view"),
    ],
)
def test_data_that_plain_readers_miss_is_reported(state_dict, remarks, tmp_path):
    for name in ("model.pth", "model.safetensors"):
        said = ckptfix.repair(state_dict, output=tmp_path / name).report.remarks
        assert len(said) == (len(remarks) if name.endswith("safetensors") else 0)
        assert all(part in remark for part, remark in zip(remarks, said, strict=False))


@pytest.mark.parametrize("settings", [{}, {"shard_size": "1GB"}], ids=["one file", "shards"])
def test_untied_tensors_are_written_separately(settings: dict[str, Any], tmp_path):
    state_dict = {"a": WEIGHT, "b": WEIGHT, "c": WHOLE}
    report = ckptfix.repair(state_dict, output=tmp_path / "model.safetensors", untie=True, **settings).report
    (file,) = tmp_path.glob("*.safetensors")
    found = load_file(file)
    assert report.remarks == ()
    assert {key: bytes_of(value) for key, value in found.items()} == {
        key: bytes_of(value) for key, value in state_dict.items()
    }


def test_interleaved_ties_come_back_in_the_order_of_the_state_dict(tmp_path):
    one, two = torch.ones(3), torch.zeros(4)
    torch.save(OrderedDict(a=one, b=two, c=one, d=two, e=one, f=torch.empty(2, device="meta")), tmp_path / "a.pth")
    assert tied_keys(opened(tmp_path / "a.pth")) == {"c": "a", "d": "b", "e": "a"}
    assert list(tied_keys(opened(tmp_path / "a.pth"))) == ["c", "d", "e"]


def test_more_metadata_than_the_header_can_be_read_with_is_refused_before_writing(tmp_path, monkeypatch):
    state_dict: Any = OrderedDict(w=torch.zeros(2))
    state_dict._metadata = OrderedDict((f"layers.{number}", {"version": 1}) for number in range(20_000))
    monkeypatch.setattr("ckptfix.bytes.limits.MEMORY", 8 << 20)  # the text of the rows asks for a little more
    torch.save(state_dict, tmp_path / "model.pth")
    with pytest.raises(WriteError, match="exceed the header of a safetensors file; write it with"):
        ckptfix.repair(tmp_path / "model.pth", output=tmp_path / "out.safetensors", values=False)
    assert not (tmp_path / "out.safetensors").exists()


def test_an_expanded_tensor_is_refused(tmp_path):
    torch.save({"w": torch.zeros(()).expand(1 << 27)}, tmp_path / "a.pth")
    checkpoint = ckptfix.open_checkpoint(tmp_path / "a.pth")
    assert checkpoint.specs["w"].nbytes == 1 << 29
    with pytest.raises(ckptfix.WriteError, match="repeat 4 stored bytes"):
        ckptfix.repair(tmp_path / "a.pth", output=tmp_path / "a.safetensors", values=False)
    assert not (tmp_path / "a.safetensors").exists()


def test_many_overlapping_views_are_refused(tmp_path):
    """Each of them is small; a .pth keeps them as they are."""
    base = torch.full((2000,), 0.1)
    torch.save({f"k{at}": base.as_strided((1000, 255), (0, 1), at) for at in range(300)}, tmp_path / "a.pth")
    with pytest.raises(ckptfix.WriteError, match="repeat 8000 stored bytes"):
        ckptfix.repair(tmp_path / "a.pth", output=tmp_path / "a.safetensors", values=False)
    assert not (tmp_path / "a.safetensors").exists()
