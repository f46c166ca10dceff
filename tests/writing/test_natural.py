"""The natural forms of objects, as the written file has them; ``test_plain`` holds those of the commonest classes."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import functools
import pathlib
import re
import zoneinfo
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.core.objects import Global, Opaque
from ckptfix.writing.natural import natural_form, today
from tests.reading.files import saved


@dataclasses.dataclass(slots=True)
class Slotted:
    """A class without an instance dict."""

    a: int = 1


def written(value: Any, folder: Path) -> Any:
    """What a value beside the weights is in a repaired file."""
    path = saved({"state_dict": {"w": torch.ones(1)}, "x": value}, folder)
    assert ckptfix.repair(path, output=folder / "out.pth").report.exit_code == 0
    return torch.load(folder / "out.pth", weights_only=True)["x"]


HOURS = datetime.timezone(datetime.timedelta(hours=-3, minutes=-30))
MOMENT = datetime.datetime(2024, 5, 6, 7, 8, 9)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (pathlib.PureWindowsPath("C:\\a\\b"), "C:\\a\\b"),
        (pathlib.PureWindowsPath("a/b"), "a\\b"),
        (pathlib.PurePosixPath("/"), "/"),
        (pathlib.PurePosixPath(), ""),
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
        (collections.Counter("aab"), collections.Counter("aab")),
        (int, "builtins.int"),
        (len, "builtins.len"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_has_the_form_that_a_reader_would_write(value, expected, tmp_path):
    assert written(value, tmp_path) == expected


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


def test_a_scheduler_keeps_its_figures(tmp_path):
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
def test_a_form_without_its_package_and_odd_ones(value, expected):
    assert natural_form(value) == expected


def test_a_name_of_python_2_is_said_as_that_of_python_3():
    assert today(Global("__builtin__", "long")) == "builtins.int"
    assert today(Global("copy_reg", "long")) == "copyreg.long"
