import json
import os
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save

from ckptfix import open_checkpoint
from ckptfix.bytes.sources import MemoryBytes
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.objects import Global, Opaque
from ckptfix.core.spec import Storage, TensorSpec
from ckptfix.errors import UnreadableError
from ckptfix.reading.opening import open_state_dict
from ckptfix.reading.tensors import build_state_dict, build_tensor, spec_of_tensor
from tests.checks import bytes_of, is_mapped
from tests.reading.state_dicts import STRIDED, ordered, pattern, same


def checkpoint(**entries: object) -> Checkpoint:
    return Checkpoint("f", "test", entries)


def stored(count: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(dtype, (count,), (1,), Storage("0", MemoryBytes(bytes(8 * count))))


def test_a_live_tensor_is_not_copied_and_its_ties_are_kept():
    weight = torch.ones(4, 4)
    entries = open_state_dict({"a": weight, "b": weight, "c": weight[1]}).specs
    assert entries["a"].view == entries["b"].view
    assert entries["a"].storage is entries["c"].storage
    assert build_tensor(entries["c"]).data_ptr() == weight[1].data_ptr()


def test_tensors_inside_of_other_entries_are_specs_and_come_back():
    entry = {"scale": torch.ones(2), "pair": (torch.zeros(1), None), "list": [torch.ones(1)]}
    made = open_state_dict({"w": torch.ones(1), "x._extra_state": entry})
    inner = made.entries["x._extra_state"]
    assert isinstance(inner, dict)
    assert isinstance(inner["scale"], TensorSpec)
    back = made.state_dict()["x._extra_state"]
    assert (back["scale"].tolist(), back["pair"][0].tolist(), back["list"][0].tolist()) == ([1, 1], [0], [1])


def test_a_key_that_stands_twice_is_refused():
    with pytest.raises(UnreadableError, match="a key occurs twice"):
        open_state_dict({1: torch.ones(1), "1": torch.ones(1)})


def test_a_tensor_of_the_meta_device_stays_one():
    spec = spec_of_tensor(torch.empty(3, device="meta"))
    assert not spec.has_data
    assert build_tensor(spec).device.type == "meta"


@pytest.mark.parametrize(
    "value",
    [5, "a", None, Opaque(Global("m", "A")), Opaque(Global("torch", "Size"), ("abc",)), Global("torch", "load")],
    ids=["a number", "a text", "None", "an object", "a size that is none", "a function"],
)
def test_an_entry_that_is_not_a_tensor_is_handed_on(value):
    assert build_state_dict(checkpoint(w=stored(1), x=value))["x"] is value


def test_dtypes_and_sizes_are_built():
    made = build_state_dict(checkpoint(a=Global("torch", "float16"), b=Opaque(Global("torch", "Size"), ((1, 2),))))
    assert (made["a"], made["b"]) == (torch.float16, torch.Size([1, 2]))


def test_an_entry_that_holds_itself_is_built():
    loop: list[object] = [stored(1)]
    loop.append(loop)
    made = build_state_dict(checkpoint(x=loop, y=OrderedDict(a=loop)))
    assert made["x"][1] is made["x"] is made["y"]["a"]


def test_a_shared_entry_is_built_once():
    shared: object = (stored(1),)
    for _ in range(100):
        shared = [shared, shared]
    made = build_state_dict(checkpoint(x=shared))["x"]
    assert made[0] is made[1]


def test_an_endlessly_nested_entry_is_refused():
    deep: object = ()
    for _ in range(100_000):
        deep = (deep,)
    with pytest.raises(UnreadableError, match="nested too deeply"):
        build_state_dict(checkpoint(x=deep))


def test_what_torch_refuses_is_reported_in_one_line():
    spec = TensorSpec("float32", (2,), (1,), stored(2).storage, math_bits={"conj": True})
    with pytest.raises(UnreadableError, match="f: torch refuses a tensor of float32"):
        build_tensor(spec, "f")


def test_only_the_bytes_that_a_tensor_covers_are_read():
    taken = []

    class Watched(MemoryBytes, frozen=True):
        def read(self, start: int, stop: int) -> memoryview:
            taken.append((start, stop))
            return super().read(start, stop)

    spec = TensorSpec("float32", (2,), (1,), Storage("0", Watched(bytes(1000))), 10)
    assert build_tensor(spec).untyped_storage().nbytes() == 8
    assert taken == [(40, 48)]


def file_of(state_dict: Mapping[str, Any], folder: Path) -> Path:
    torch.save(ordered(state_dict), folder / "model.pth")
    return folder / "model.pth"


@pytest.mark.parametrize("name", STRIDED)
def test_safetensors_are_mapped_where_their_elements_can_lie(name, tmp_path):
    state_dict = {"bytes": torch.arange(3, dtype=torch.uint8), "w": pattern(STRIDED[name], 4, 6)}
    try:
        raw = save(state_dict)
    except (ValueError, KeyError, SafetensorError):
        pytest.skip(f"safetensors has no tag for {name}")
    length = int.from_bytes(raw[:8], "little")
    for pad in range(9):
        path = tmp_path / f"{pad}.safetensors"
        path.write_bytes((length + pad).to_bytes(8, "little") + raw[8 : 8 + length] + b" " * pad + raw[8 + length :])
        got = open_checkpoint(path).state_dict(mmap=True)
        same(got["w"], state_dict["w"])
        starts = json.loads(raw[8 : 8 + length])["w"]["data_offsets"][0] + 8 + length + pad
        assert is_mapped(got["w"], path) is (starts % STRIDED[name].itemsize == 0)
        assert is_mapped(got["bytes"], path)
        assert not is_mapped(open_checkpoint(path).state_dict()["w"], path)


def test_writing_to_a_mapped_tensor_does_not_change_the_file(tmp_path):
    path = file_of({"w": torch.ones(5000), "tied": torch.zeros(3)}, tmp_path)
    before = path.read_bytes()
    path.chmod(0o444)
    checkpoint = open_checkpoint(path)
    mapped = checkpoint.state_dict(mmap=True)
    mapped["w"].mul_(3)
    assert path.read_bytes() == before
    assert checkpoint.state_dict()["w"].eq(1).all()
    assert checkpoint.state_dict(mmap=True)["w"].eq(1).all()


def test_a_mapped_tensor_outlives_its_file_and_a_new_one_under_its_name(tmp_path):
    path = file_of({"w": torch.ones(5000)}, tmp_path)
    mapped = open_checkpoint(path).state_dict(mmap=True)
    other = tmp_path / "other"
    other.write_bytes(b"")
    other.rename(path)
    assert mapped["w"].eq(1).all()
    path.unlink()
    assert mapped["w"].eq(1).all()


def test_a_mapped_tensor_is_saved_without_the_rest_of_its_file(tmp_path):
    path = file_of({"small": torch.ones(3), "large": torch.zeros(100_000)}, tmp_path)
    torch.save({"small": open_checkpoint(path).state_dict(mmap=True)["small"]}, tmp_path / "small.pth")
    assert (tmp_path / "small.pth").stat().st_size < 5000


def test_storages_that_an_unmapped_entry_shares_are_read(tmp_path):
    weight = torch.ones(4)
    path = file_of({"w": weight, "x._extra_state": {"same": weight}, "alone": torch.ones(2)}, tmp_path)
    checkpoint = open_checkpoint(path)
    made = build_state_dict(checkpoint, ["w", "alone"])
    assert [is_mapped(tensor, path) for tensor in (made["w"], made["x._extra_state"]["same"], made["alone"])] == [
        0,
        0,
        1,
    ]
    assert made["w"].data_ptr() == made["x._extra_state"]["same"].data_ptr()


@pytest.mark.parametrize("mmap", [False, True])
def test_a_flipped_bit_is_refused_mapped_or_read(mmap, tmp_path):
    path = file_of({"w": torch.ones(5000)}, tmp_path)
    raw = bytearray(path.read_bytes())
    raw[raw.index(bytes_of(torch.ones(5000))) + 7] ^= 1
    path.write_bytes(raw)
    with pytest.raises(UnreadableError, match="the storage of w fails its checksum"):
        open_checkpoint(path).state_dict(mmap=mmap)


@pytest.mark.parametrize("mmap", [False, True])
def test_a_file_that_was_cut_after_it_was_opened_is_refused_mapped_or_read(mmap, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(save({"w": torch.ones(5000)}))
    checkpoint = open_checkpoint(path)
    os.truncate(path, 300)
    with pytest.raises(UnreadableError, match="ends inside a storage"):
        checkpoint.state_dict(mmap=mmap)
