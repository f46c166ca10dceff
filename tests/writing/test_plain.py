import argparse
import collections
import dataclasses
import datetime
import decimal
import fractions
import functools
import pathlib
import re
import types
import uuid
import zoneinfo
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import nn

import ckptfix
from ckptfix.core.objects import Global, Opaque
from ckptfix.errors import HostileError, UnreadableError
from ckptfix.writing.plain import natural_form, plain_root, today
from tests.attacks.crafted import around, get, name, put, text, torch_zip
from tests.reading.files import opened, saved, write


def plain(value: Any, folder: pathlib.Path) -> tuple[Any, list[tuple[str, str, str]]]:
    """What is written for a value next to the weights, and what is reported."""
    checkpoint = opened(saved({"state_dict": {"w": torch.ones(1)}, "x": value}, folder))
    root, conversions = plain_root(checkpoint)
    return root["x"], [(made.where, made.before, made.after) for made in conversions]


@pytest.mark.parametrize(
    "value",
    [None, 1, 1.5, "a", b"a", [1, (2,)], {"a": 1}, {1: 2}, OrderedDict(a=1), {1, 2}, 1j, bytearray(b"a")],
    ids=lambda value: type(value).__name__,
)
def test_noop_objects_that_torch_accepts(value, tmp_path):
    got, said = plain(value, tmp_path)
    assert (got, type(got), said) == (value, type(value), [])


NAMESPACE = argparse.Namespace(lr=0.1, nested=argparse.Namespace(a=1))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (NAMESPACE, {"lr": 0.1, "nested": {"a": 1}}),
        (types.SimpleNamespace(a=1), {"a": 1}),
        (pathlib.PurePosixPath("/a/b"), "/a/b"),
        (collections.defaultdict(list, a=[1]), {"a": [1]}),
        (collections.deque([1, 2]), [1, 2]),
        (np.float64(0.5), 0.5),
        (np.int32(-7), -7),
        (np.bool_(True), True),
        (np.dtype("float32"), "f4"),
        (datetime.datetime(2024, 5, 6, 7, 8, 9, 10), "2024-05-06T07:08:09.000010"),
        (datetime.date(2024, 5, 6), "2024-05-06"),
        (uuid.UUID(int=255), str(uuid.UUID(int=255))),
        (fractions.Fraction(1, 3), "1/3"),
        (decimal.Decimal("1.50"), "1.50"),
        (torch.torch_version.TorchVersion("2.13.0+cpu"), "2.13.0+cpu"),
        (range(2, 9), [2, 3, 4, 5, 6, 7, 8]),
        (range(5, 1, -2), [5, 3]),
        (range(10_000), list(range(10_000))),
        (range(10_001), {"class": "range", "args": [0, 10_001, 1]}),
        (range(2**70), {"class": "range", "args": [0, 2**70, 1]}),
        (slice(1, 2, None), {"class": "slice", "args": [1, 2, None]}),
        (frozenset({1}), {1}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_known_class_gets_a_plain_form_and_is_listed(value, expected, tmp_path):
    got, said = plain(value, tmp_path)
    assert got == expected
    assert said
    assert {place.split(".")[0] for place, _, _ in said} == {"x"}


def test_an_array_becomes_a_tensor(tmp_path):
    got, said = plain(np.arange(3.0), tmp_path)
    assert got.shape == (3,)
    assert said == [("x", "numpy.ndarray", "torch.Tensor")]


def crafted(folder: pathlib.Path, **extras: bytes) -> Any:
    path = folder / "crafted.pth"
    path.write_bytes(torch_zip(around(**extras)))
    return plain_root(opened(path))[0]


@pytest.mark.parametrize("module", ["builtins", "__builtin__"])
@pytest.mark.parametrize(
    ("kind", "args", "expected"),
    [
        pytest.param("slice", b"K\x01K\x02N\x87", {"class": "slice", "args": [1, 2, None]}, id="slice"),
        pytest.param("range", b"K\x01K\x05K\x02\x87", [1, 3], id="range"),
        pytest.param("xrange", b"K\x01K\x05K\x02\x87", [1, 3], id="xrange"),
        pytest.param("range", b"K\x01K\x05K\x00\x87", {"class": "range", "args": [1, 5, 0]}, id="a step of 0"),
        pytest.param("range", b"N\x85", {"class": "range", "args": [None]}, id="no number"),
        pytest.param("range", b")", {"class": "range", "args": []}, id="no argument"),
        pytest.param("object", b")", {}, id="object"),
    ],
)
def test_python_2_and_3_name_the_same_classes(module, kind, args, expected, tmp_path):
    assert crafted(tmp_path, x=name(f"{module}.{kind}") + args + b"R")["x"] == expected


def test_a_bare_name_becomes_text_and_is_listed(tmp_path):
    assert plain(..., tmp_path) == (
        "builtins.Ellipsis",
        [("x", "builtins.Ellipsis", "the text 'builtins.Ellipsis'")],
    )


def test_an_unknown_class_becomes_its_contents(tmp_path):
    state = b")\x81}" + text("a") + b"K\x01sb"
    assert crafted(tmp_path, x=name("m.A") + state)["x"] == {"a": 1}
    assert crafted(tmp_path, x=name("m.A") + text("b") + b"\x85R")["x"] == {"class": "m.A", "args": ("b",)}
    assert crafted(tmp_path, x=name("m.A"))["x"] == "m.A"
    assert crafted(tmp_path, x=name("m.A") + b")\x81")["x"] == "m.A"


def test_layouts_are_kept_and_storages_become_tensors(tmp_path):
    path = saved(
        {"state_dict": {"w": torch.ones(1)}, "x": torch.sparse_csr, "y": torch.arange(3.0).storage()}, tmp_path
    )
    ckptfix.repair(path, output=tmp_path / "out.pth")
    loaded = torch.load(tmp_path / "out.pth", weights_only=True)
    assert loaded["x"] is torch.sparse_csr
    assert torch.equal(loaded["y"], torch.arange(3.0))


def test_a_key_of_a_known_class_is_listed_too(tmp_path):
    assert plain({np.int64(3): 1}, tmp_path) == ({3: 1}, [("x", "key numpy._core.multiarray.scalar", "int")])


def test_a_list_in_itself_is_kept(tmp_path):
    got = crafted(tmp_path, x=b"]" + put(9) + get(9) + b"a")["x"]
    assert got[0] is got


def test_an_object_in_itself_is_cut(tmp_path):
    got = crafted(tmp_path, x=name("m.A") + b")\x81" + put(9) + b"}" + text("me") + get(9) + b"sb")["x"]
    assert got == {"me": "<m.A>"}


def test_two_keys_that_become_one_are_reported(tmp_path):
    with pytest.raises(UnreadableError, match="two keys at x"):
        crafted(tmp_path, x=b"}(" + text("pathlib.PosixPath") + b"N" + name("pathlib.PosixPath") + b"Nu")


def test_endlessly_nested_data_is_refused(tmp_path):
    with pytest.raises(HostileError, match="nested deeper than"):
        crafted(tmp_path, x=b"N" + b"\x85" * 5000)


@dataclasses.dataclass(slots=True)
class Slotted:
    """A class without an instance dict."""

    a: int = 1


def written(value: Any, folder: Path) -> Any:
    """What a value next to the weights is in a repaired file."""
    path = saved({"state_dict": {"w": torch.ones(1)}, "x": value}, folder)
    assert ckptfix.repair(path, output=folder / "out.pth").report.exit_code == 0
    return torch.load(folder / "out.pth", weights_only=True)["x"]


class Names(list[str]):
    """A list of a class of its own."""


class Made:
    """What a call makes, which has a state_dict among its attributes."""

    def __init__(self, number: int, **attributes: Any) -> None:
        self.number, self.attributes = number, attributes

    def __reduce__(self) -> Any:
        return Made, (self.number,), self.attributes


HOURS = datetime.timezone(datetime.timedelta(hours=-3, minutes=-30))
MOMENT = datetime.datetime(2024, 5, 6, 7, 8, 9)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (pathlib.PureWindowsPath("C:\\a\\b"), "C:\\a\\b"),
        (pathlib.PureWindowsPath("a/b"), "a\\b"),
        (pathlib.PurePosixPath("/"), "/"),
        (pathlib.PurePosixPath(), "."),
        (pathlib.PurePosixPath("a/../b"), "a/../b"),
        (MOMENT.replace(tzinfo=datetime.timezone.utc), "2024-05-06T07:08:09+00:00"),
        (MOMENT.replace(tzinfo=HOURS), "2024-05-06T07:08:09-03:30"),
        (MOMENT.replace(fold=1), "2024-05-06T07:08:09"),
        (
            MOMENT.replace(tzinfo=zoneinfo.ZoneInfo("UTC")),
            {"class": "datetime.datetime", "local": "2024-05-06T07:08:09", "tzinfo": "UTC"},
        ),
        (datetime.time(1, 2, 3, 4, fold=1), "01:02:03.000004"),
        (datetime.timedelta(-1, 2, 3), -86397.999997),
        (HOURS, "-03:30"),
        (np.complex64(1 + 2j), 1 + 2j),
        (np.str_("aé"), "aé"),
        (np.bytes_(b"ab"), b"ab"),
        (np.array(5, ">i4")[()], 5),
        (np.datetime64(3, "D"), {"class": "numpy.generic", "dtype": "M8[D]", "data": b"\3" + bytes(7)}),
        (np.dtype("M8[25s]"), "M8[25s]"),
        (np.dtype([("a", "f4"), ("b", "i8")]), [["a", "f4", 0], ["b", "i8", 4]]),
        (
            np.array([["a", "bc"]]),
            {"class": "numpy.ndarray", "dtype": "U2", "shape": (1, 2), "data": ["a", "bc"]},
        ),
        (np.array([b"a"]), {"class": "numpy.ndarray", "dtype": "S1", "shape": (1,), "data": [b"a"]}),
        (
            np.zeros(1, [("a", "u1")]),
            {"class": "numpy.ndarray", "dtype": [["a", "u1", 0]], "shape": (1,), "data": b"\0"},
        ),
        (np.array([1, None], object), {"class": "numpy.ndarray", "dtype": "O8", "shape": (2,), "data": [1, None]}),
        (
            functools.partial(nn.LayerNorm, eps=1e-6),
            {
                "class": "functools.partial",
                "function": "torch.nn.modules.normalization.LayerNorm",
                "keywords": {"eps": 1e-6},
            },
        ),
        (re.compile("a+"), {"pattern": "a+", "flags": 32}),
        (Slotted(), {"a": 1}),
        (Names("ab"), ["a", "b"]),
        ({Made(1, a=2)}, [{"class": f"{__name__}.Made", "args": (1,), "state": {"a": 2}}]),
        (collections.Counter("aab"), collections.Counter("aab")),
        (int, "builtins.int"),
        (len, "builtins.len"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_has_the_form_that_a_reader_would_write(value, expected, tmp_path):
    assert written(value, tmp_path) == expected


class Key:
    """A class whose objects differ only in their address."""


class Own(torch.optim.SGD):
    """An optimizer whose class torch does not have."""


@pytest.mark.parametrize("method", [torch.optim.SGD, Own, functools.partial(torch.optim.Adafactor, beta2_decay=-0.8)])
def test_an_optimizer_of_any_class_becomes_its_state_dict(method, tmp_path):
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = method(parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.arange(3.0)
    optimizer.step()
    got, expected = written(optimizer, tmp_path), optimizer.state_dict()
    assert (got["param_groups"], got["state"].keys()) == (expected["param_groups"], expected["state"].keys())
    method(parameters, lr=1.0).load_state_dict(got)


def test_a_dict_keyed_by_parameters_is_carried(tmp_path):
    weights = {name: nn.Parameter(torch.full((2,), float(number))) for number, name in enumerate("ab")}
    path = saved({"state_dict": {"a": weights["a"]}, "x": {key: name for name, key in weights.items()}}, tmp_path)
    ckptfix.repair(path, output=tmp_path / "out.pth")
    got = torch.load(tmp_path / "out.pth", weights_only=True)
    assert [(key.tolist(), name) for key, name in got["x"].items()] == [([0, 0], "a"), ([1, 1], "b")]
    assert got["state_dict"]["a"].data_ptr() == next(iter(got["x"])).data_ptr()


def test_objects_of_one_class_as_keys_are_distinguished(tmp_path):
    got = written({Key(): 1, Key(): 2}, tmp_path)
    assert sorted(got.values()) == [1, 2]


def test_an_optimizer_becomes_its_state_dict(tmp_path):
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    groups: list[dict[str, Any]] = [{"params": [first]}, {"params": [second], "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    second.grad = torch.arange(3.0)
    optimizer.step()
    got = written(optimizer, tmp_path)
    expected = optimizer.state_dict()
    assert got["param_groups"] == expected["param_groups"]
    assert got["state"].keys() == expected["state"].keys() == {1}
    assert torch.equal(got["state"][1]["momentum_buffer"], torch.arange(3.0))
    torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=1.0).load_state_dict(got)


def test_a_scheduler_keeps_its_numbers(tmp_path):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    got = written(torch.optim.lr_scheduler.StepLR(optimizer, 3), tmp_path)
    assert (got["step_size"], got["optimizer"]["param_groups"][0]["params"]) == (3, [0])


def config(cls: str, pairs: dict[str, Any], **state: Any) -> Opaque:
    module, _, name = cls.rpartition(".")
    made = Opaque(Global(module, name), state=state)
    made.own_pairs().update(pairs)
    return made


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (config("yacs.config.CfgNode", {"A": 1}, __immutable__=True), {"A": 1}),
        (config("box.box.Box", {"a": 1}, _box_config={}), {"a": 1}),
        (config("box.box_list.BoxList", {}, items=[1], box_options={}), [1]),
        (config("fastcore.foundation.L", {}, items=[1]), [1]),
        (config("UserList.UserList", {}, data=[1]), [1]),
        (config("UserDict.IterableUserDict", {}, data={"a": 1}), {"a": 1}),
        (config("ml_collections.config_dict.config_dict.ConfigDict", {}, _fields={"a": 1}, _locked=True), {"a": 1}),
        (config("addict.addict.Dict", {"a": 1}, a=1), {"a": 1}),
        (Opaque(Global("mmengine.config.config", "ConfigDict"), ({"a": 1},)), {"a": 1}),
        (config("easydict.EasyDict", {"a": 1}, a=1), {"a": 1}),
        (config("lightning_fabric.utilities.data.AttributeDict", {"a": 1}), {"a": 1}),
        (config("omegaconf.dictconfig.DictConfig", {}, _metadata=None, _content={"a": 1}), {"a": 1}),
        (Opaque(Global("pathlib._local", "PosixPath"), ("/", "a", "b")), "/a/b"),
        (Opaque(Global("datetime", "timezone"), (5,)), {"class": "datetime.timezone", "args": [5]}),
        (
            Opaque(Global("datetime", "timedelta"), (1 << 60, 0, 0)),
            {"class": "datetime.timedelta", "args": [1 << 60, 0, 0]},
        ),
        (Opaque(Global("datetime", "time"), (b"",)), {"class": "datetime.time", "args": [b""]}),
        (Opaque(Global("uuid", "UUID"), state={"int": "x"}), {"int": "x"}),
        (Opaque(Global("functools", "partial"), (1,)), {"class": "functools.partial", "args": (1,), "state": None}),
        (config("torch.optim.sgd.SGD", {}, param_groups=[5], state={}), {"param_groups": [5], "state": {}}),
    ],
)
def test_plain_forms_of_classes_without_their_package(value, expected):
    assert natural_form(value) == expected


def test_names_of_python_2_are_shown_as_those_of_python_3():
    assert today(Global("__builtin__", "long")) == "builtins.int"
    assert today(Global("copy_reg", "long")) == "copyreg.long"


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(Opaque(Global("collections", "Counter"), ({}, 1, 2, 3, 4, 5, 6)), id="a counter of seven"),
        pytest.param(Opaque(Global("collections", "Counter"), (5,)), id="a counter of a number"),
        pytest.param(Opaque(Global("torch", "device"), ()), id="no device"),
        pytest.param(Opaque(Global("torch", "device"), (5, "cuda")), id="a device the wrong way round"),
        pytest.param(Opaque(Global("torch", "device"), ("cqu",)), id="a device with a flipped bit"),
        pytest.param(Opaque(Global("torch", "device"), ("cuda", -1)), id="a device before the first"),
        pytest.param(Opaque(Global("torch", "device"), ("cuda:0", 1)), id="a device of two numbers"),
        pytest.param(Opaque(Global("torch", "Size"), (1, 2)), id="a size that is no tuple"),
        pytest.param(Opaque(Global("torch", "Size"), ((1, "2"),)), id="a size of text"),
        pytest.param(Opaque(Global("collections", "Counter"), ([["a"]],)), id="a counter of lists"),
    ],
)
def test_functions_that_torch_does_not_allow_are_written_as_data(value, tmp_path):
    checkpoint = opened(saved({"state_dict": {"w": torch.ones(1)}}, tmp_path))
    checkpoint = replace(checkpoint, root={"state_dict": {}, "x": value})
    loaded = torch.load(write(checkpoint, "zip", tmp_path), weights_only=True)
    assert loaded["x"] == str(value.cls) or loaded["x"]["class"] == str(value.cls)


@pytest.mark.parametrize("args", [("cpu",), ("cuda", 3), ("cuda:3",), ("meta",), ("privateuseone", 0)])
def test_noop_a_device_of_torch_stays_one(args, tmp_path):
    checkpoint = opened(saved({"state_dict": {"w": torch.ones(1)}}, tmp_path))
    checkpoint = replace(checkpoint, root={"state_dict": {}, "x": Opaque(Global("torch", "device"), args)})
    assert torch.load(write(checkpoint, "zip", tmp_path), weights_only=True)["x"] == torch.device(*args)


class Holder(nn.Module):
    """A module with no parameter of its own."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held


def test_weights_in_an_object_made_by_a_call_are_written_once(tmp_path):
    path = saved(Made(1, model=nn.DataParallel(nn.Linear(2, 3)).state_dict()), tmp_path)
    ckptfix.repair(path, output=tmp_path / "out.pth")
    got = torch.load(tmp_path / "out.pth", weights_only=True)
    assert (got.pop("model").keys(), got) == ({"weight", "bias"}, {"class": f"{__name__}.Made", "args": (1,)})


def test_state_of_no_group_is_carried_unchanged(tmp_path):
    optimizer = torch.optim.SGD([weight := nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))], momentum=0.9)
    weight.grad = torch.ones(2)
    optimizer.step()
    del optimizer.param_groups[0]["params"][0]
    assert [key.tolist() for key in written(optimizer, tmp_path)["state"]] == [weight.tolist()]


@pytest.mark.parametrize("around", [lambda made: made, lambda made: {"model": made}], ids=["bare", "in a dict"])
@pytest.mark.parametrize(
    ("held", "where"),
    [
        (nn.Linear(2, 3).state_dict(), ["held"]),
        ([nn.Linear(2, 3)], ["held", 0]),
        (types.SimpleNamespace(net=nn.Linear(2, 3)), ["held", "net"]),
    ],
    ids=["state_dict", "list", "object"],
)
def test_weights_in_an_attribute_of_a_module_are_written(held, where, around, tmp_path):
    source = saved(around(Holder(held)), tmp_path)
    repaired = ckptfix.repair(source, output=tmp_path / "out.pth")
    value = torch.load(tmp_path / "out.pth", weights_only=True)
    for step in [*repaired.checkpoint.container]:
        value = value[step]
    assert [*repaired.checkpoint.container][-len(where) :] == where
    assert {key: list(tensor.shape) for key, tensor in value.items()} == {"weight": [3, 2], "bias": [3]}
