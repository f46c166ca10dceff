"""Checkpoints are equal after reading and writing, for every format, dtype and layout in memory."""

import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.dtypes import DTYPES
from ckptfix.errors import WriteError
from ckptfix.reading.opening import open_state_dict
from tests.checks import bytes_of
from tests.reading.files import WRITERS, opened, read_all, saved, tensors, write
from tests.reading.state_dicts import KINDS, STRIDED, ordered, overlaps, same

TWO_DTYPES = ("two dtypes of one storage", "conjugated and negated views")
TORCH_CANNOT_SAVE = {
    **dict.fromkeys(TWO_DTYPES, "torch.save refuses two dtypes of one storage"),
    **{
        f"views of {name}": "torch.save has no name for it"
        for name in STRIDED
        if name.startswith(("int", "uint")) and int(name.removeprefix("u").removeprefix("int")) < 8
    },
}
MODERN = {f"views of {name}" for name in STRIDED if DTYPES[name].storage is None} | {"pairs of half bytes"}
TORCH_SAVES = [kind for kind in KINDS if kind not in TORCH_CANNOT_SAVE]


def source(kind: str, folder: Path) -> tuple[OrderedDict[str, Any], Checkpoint]:
    """A state_dict and the checkpoint of its file, or of the dict itself where torch cannot save it."""
    state_dict = ordered(KINDS[kind]())
    if kind in TORCH_CANNOT_SAVE:
        return state_dict, open_state_dict(state_dict)
    return state_dict, opened(saved(state_dict, folder))


def ties(state_dict: OrderedDict[str, Any]) -> dict[tuple[str, str], int]:
    """The overlaps that a file can keep: torch reads a storage with one dtype only."""
    classes = {
        key: DTYPES[str(tensor.dtype).removeprefix("torch.")].storage for key, tensor in tensors(state_dict).items()
    }
    return {(one, other): at for (one, other), at in overlaps(state_dict).items() if classes[one] == classes[other]}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["zip", "legacy"])
def test_a_written_pth_equals_its_source(form, kind, tmp_path):
    state_dict, checkpoint = source(kind, tmp_path)
    if form == "legacy" and kind in MODERN:
        with pytest.raises(WriteError, match=r"the container for torch before 1\.6 cannot hold"):
            write(checkpoint, form, tmp_path)
        return
    path = write(checkpoint, form, tmp_path)
    again = opened(path)
    built = again.state_dict()
    same(built, state_dict)
    assert overlaps(built) == ties(state_dict)
    assert (again.metadata or {}) == getattr(state_dict, "_metadata", {})
    assert {key: spec.is_parameter for key, spec in again.specs.items()} == {
        key: isinstance(value, torch.nn.Parameter) for key, value in tensors(state_dict).items()
    }


@pytest.mark.parametrize(
    ("form", "options", "kind"),
    [
        pytest.param(form, options, kind, id=f"{form}{'-mapped' * bool(options)}-{kind}")
        for form, options in (("zip", {}), ("zip", {"mmap": True}), ("legacy", {}))
        for kind in (*TORCH_SAVES, *TWO_DTYPES)
        if form == "zip" or kind not in MODERN
    ],
)
def test_torch_reads_what_is_written(form, options, kind, tmp_path):
    state_dict, checkpoint = source(kind, tmp_path)
    loaded = torch.load(write(checkpoint, form, tmp_path), weights_only=True, map_location="cpu", **options)
    same(loaded if kind in TORCH_SAVES else OrderedDict(loaded), state_dict)  # a dict in memory is a plain one
    assert overlaps(loaded) == ties(state_dict)
    assert {key: type(value) for key, value in loaded.items()} == {
        key: type(value) for key, value in state_dict.items()
    }
    assert getattr(loaded, "_metadata", None) == getattr(state_dict, "_metadata", None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_written_safetensors_equals_its_source(kind, tmp_path):
    state_dict, checkpoint = source(kind, tmp_path)
    if any(
        spec.layout != "strided"
        or DTYPES[spec.dtype].safetensors is None
        or len(spec.shape) < DTYPES[spec.dtype].packed - 1
        for spec in checkpoint.specs.values()
    ):
        with pytest.raises(WriteError, match="write it with format='pth'"):
            write(checkpoint, "safetensors", tmp_path)
        return
    path = write(checkpoint, "safetensors", tmp_path)
    again = opened(path)
    assert list(again.specs) == list(checkpoint.specs)
    built = checkpoint.state_dict()
    for key, tensor in read_all(again).items():
        same(tensor, state_dict[key], key, strides=False)
        assert tensor.is_contiguous()
    assert (again.metadata or {}) == getattr(state_dict, "_metadata", {})
    for key, tensor in load_file(path).items():
        assert (tensor.dtype, tensor.shape, bytes_of(tensor)) == (
            built[key].dtype,
            built[key].shape,
            bytes_of(built[key]),
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_in_memory_is_handed_back_uncopied(kind):
    state_dict = ordered(KINDS[kind]())
    handed_back = open_state_dict(state_dict).state_dict()
    same(handed_back, state_dict)
    for key, tensor in tensors(state_dict).items():
        if tensor.layout == torch.strided and tensor.numel():
            assert handed_back[key].data_ptr() == tensor.data_ptr(), key


LAYOUTS: dict[str, dict[str, Any]] = {
    "zip": {},
    "legacy": {"_use_new_zipfile_serialization": False},
    **{f"zip protocol {number}": {"pickle_protocol": number} for number in (3, 4, 5)},
    **{
        f"legacy protocol {number}": {"pickle_protocol": number, "_use_new_zipfile_serialization": False}
        for number in (3, 4, 5)
    },
}


@pytest.mark.parametrize("kind", TORCH_SAVES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_lazy_tensors_equal_those_of_torch_load(layout, kind, tmp_path):
    state_dict = ordered(KINDS[kind]())
    path = saved(state_dict, tmp_path, **LAYOUTS[layout])
    checkpoint = opened(path)
    # torch writes a legacy file with these dtypes and cannot read it again.
    torch_reads = not (layout.startswith("legacy") and kind in MODERN)
    eager = torch.load(path, weights_only=False) if torch_reads else state_dict
    assert list(checkpoint.entries) == list(eager)
    for key, tensor in read_all(checkpoint).items():
        same(tensor, eager[key].detach().requires_grad_(eager[key].requires_grad), key)
    for built in (checkpoint.state_dict(), checkpoint.state_dict(mmap=True)):
        same(built, eager)
        assert overlaps(built) == overlaps(eager)


@pytest.mark.parametrize("number", range(2, 6))
def test_a_plain_pickle_is_read_like_a_file_of_torch(number, tmp_path):
    state_dict = ordered(KINDS["ties and views of a tie"]())
    path = tmp_path / "plain.pkl"
    path.write_bytes(pickle.dumps(state_dict, protocol=number))
    same(read_all(opened(path)), dict(state_dict))


CONTAINER = {
    "epoch": 3,
    "lr": 0.1,
    "best": float("-inf"),
    "name": "ärger\n",
    "done": True,
    "nothing": None,
    "huge": 1 << 200,
    "negative": -(1 << 40),
    "bytes": b"\0\xff",
    "more": bytearray(b"\x01\xfe"),
    "complex": 1 - 2j,
    "set": {1, "two", (3, 4)},
    "list": [1, [2, (3, [])], {}],
    "tuple": (),
    "numbers as keys": {0: "a", (1, 2): "b", None: "c"},
    "ordered": OrderedDict([("z", 1), ("a", 2)]),
    "many": list(range(2500)),
    "model": {"state_dict": OrderedDict([("w", torch.arange(3.0)), ("b", torch.zeros(1))]), "tag": "x"},
}


@pytest.mark.parametrize("form", WRITERS)
def test_the_rest_of_the_container_is_carried(form, tmp_path):
    checkpoint = opened(saved(CONTAINER, tmp_path))
    again = opened(write(checkpoint, form, tmp_path))
    assert again.container == checkpoint.container == ("model", "state_dict")
    assert isinstance(again.root, dict)
    assert list(again.root) == list(CONTAINER)
    for name, value in CONTAINER.items():
        if name != "model":
            same(again.root[name], value, name) if form != "safetensors" else _same_in_json(again.root[name], value)
    assert again.root["model"]["tag"] == "x"


def _same_in_json(got: object, want: object) -> None:
    assert got == want
    assert type(got) is (dict if isinstance(want, OrderedDict) else type(want))


@pytest.mark.parametrize("form", ["zip", "legacy"])
def test_torch_reads_the_rest_of_the_container(form, tmp_path):
    path = write(opened(saved(CONTAINER, tmp_path)), form, tmp_path)
    same(torch.load(path, weights_only=True), CONTAINER)


@pytest.mark.parametrize("form", ["zip", "legacy"])
@pytest.mark.parametrize("kind", [dict, OrderedDict])
@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("keys", [("w", "b"), (0, 1)])
def test_a_state_dict_keeps_the_class_of_its_container(form, kind, is_wrapped, keys, tmp_path):
    state_dict = kind((key, torch.ones(2)) for key in keys)
    path = write(opened(saved({"model": state_dict} if is_wrapped else state_dict, tmp_path)), form, tmp_path)
    got = torch.load(path, weights_only=True)
    got = got["model"] if is_wrapped else got
    assert type(got) is kind
    assert tuple(got) == keys


@pytest.mark.parametrize("form", ["zip", "legacy"])
def test_an_object_in_two_places_is_written_once(form, tmp_path):
    shared: list[Any] = [1]
    shared.append({"me": shared})
    pair = (shared, shared)
    value = {"a": shared, "b": pair, "c": pair, "state_dict": {"w": torch.ones(1)}}
    got = torch.load(write(opened(saved(value, tmp_path)), form, tmp_path), weights_only=True)
    assert got["a"] is got["b"][0] is got["b"][1]
    assert got["a"][1]["me"] is got["a"]
    assert got["b"] is got["c"]


@st.composite
def views(draw) -> dict[str, torch.Tensor]:
    """Views of one flat buffer: any size, stride and offset that it allows."""
    dtype = draw(st.sampled_from([torch.float32, torch.uint8, torch.bfloat16, torch.float64, torch.int16]))
    base = (torch.arange(64 * dtype.itemsize) % 251).to(torch.uint8).view(dtype)
    made = {}
    for index in range(draw(st.integers(1, 5))):
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        strides = [draw(st.integers(0, 5)) for _ in shape]
        reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size)
        offset = draw(st.integers(0, 63 - reach))
        made[f"k{index}"] = torch.as_strided(base, shape, strides, offset)
    return made


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(state_dict=views(), form=st.sampled_from(["zip", "legacy", "safetensors"]))
def test_any_views_of_one_buffer_survive(tmp_path, state_dict, form):
    checkpoint = opened(saved(state_dict, tmp_path))
    same(read_all(checkpoint), state_dict)
    path = write(checkpoint, form, tmp_path)
    for mmap in (False, True):
        built = opened(path).state_dict(mmap=mmap)
        same(dict(built), state_dict, strides=form != "safetensors")
        assert form == "safetensors" or overlaps(built) == overlaps(state_dict)
    if form != "safetensors":
        same(dict(torch.load(path, weights_only=True)), state_dict)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers(), st.text()), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(extra=plain, form=st.sampled_from(["zip", "legacy", "safetensors"]))
def test_any_plain_data_survives(tmp_path, extra, form):
    value = {"extra": extra, "state_dict": {"w": torch.ones(2)}}
    path = write(opened(saved(value, tmp_path)), form, tmp_path)
    again = opened(path, "state_dict")
    assert again.container == ("state_dict",)
    same(again.root["extra"], extra)  # type: ignore[index]  # the root is a dict
    if form != "safetensors":
        same(torch.load(path, weights_only=True)["extra"], extra)
