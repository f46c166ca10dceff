from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import enum
import fractions
import functools
import logging
import operator
import pathlib
import pickle
import random
import re
import typing
import uuid
import zoneinfo

import numpy as np
import pytest
import torch

from ckptfix.bytes.sources import Content
from ckptfix.core.facts import Kind
from ckptfix.reading.pickles.executors import runs_code
from ckptfix.reading.pickles.payload import payload_remarks
from ckptfix.reading.torch_files.torch_legacy import read


class Color(enum.Flag):
    RED = 1
    BLUE = 2


class Calls:
    """Pickles as a call of a function."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def found(data: bytes) -> list[str]:
    return [fact.data["name"] for fact in read(Content("some.pkl", data)).remarks if fact.kind is Kind.PAYLOAD]


HEALTHY = {
    "functions that are named": [torch.nn.functional.relu, torch.nn.functional.gelu, torch.relu, len, np.sum],
    "modules": torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.GELU(), torch.nn.LSTM(2, 2)
    ),
    "an optimizer": torch.optim.Adam([torch.nn.Parameter(torch.ones(2))]).state_dict(),
    "torch values": [torch.device("cpu"), torch.float16, torch.Size([2]), torch.strided, torch.ones(2).to_sparse()],
    "numpy values": [
        np.float32(1),
        np.int64(2),
        np.datetime64("2020-01-01"),
        np.array(["a", None], object),
        np.dtype("f4"),
    ],
    "numpy random states": [np.random.RandomState(0), np.random.default_rng(0), np.random.get_state()],
    "numpy masked and record arrays": [
        np.ma.array([1, 2], mask=[False, True]),
        np.zeros(1, [("a", "f4")]).view(np.recarray),
    ],
    "numpy matrix and ufunc": [np.matrix([[1]]), np.add],
    "dates": [datetime.datetime.now(datetime.timezone.utc), datetime.timedelta(1), zoneinfo.ZoneInfo("UTC")],
    "numbers": [decimal.Decimal("1.5"), fractions.Fraction(1, 3), 1j, slice(1, 2), range(3), random.Random(1)],
    "containers": [collections.defaultdict(list), collections.deque([1]), collections.Counter("aa")],
    "paths and names": [pathlib.PurePosixPath("a"), uuid.uuid4(), argparse.Namespace(a=1), logging.getLogger("x")],
    "functions made of functions": [functools.partial(torch.nn.LayerNorm, eps=1e-6), operator.itemgetter(1)],
    "patterns and iterators": [re.compile("a+"), iter([1]), type(None)],
    "types": [typing.Literal["a"], typing.Callable[[int], str], dict[str, int], int | str, list[int]],
    "enums": [Color.RED, Color.RED | Color.BLUE, re.IGNORECASE | re.MULTILINE],
}


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize("values", HEALTHY.values(), ids=HEALTHY)
def test_what_checkpoints_hold_runs_nothing(values, protocol):
    try:
        data = pickle.dumps({"x": values}, protocol)
    except TypeError:
        pytest.skip("torch does not pickle these by the old protocol")
    assert found(data) == []


EXECUTORS = """pathlib.Path.unlink pathlib.PosixPath.write_text functools.reduce uuid._get_command_stdout yaml.load
    setuptools._distutils.spawn.spawn distutils.file_util.write_file torch.onnx.export torch._ops._Ops.load_library
    torch.jit.unsupported_tensor_ops.execWrapper torch.fx.graph_module._forward_from_src __builtin__.reload
    numpy.testing.runstring sklearn.externals.joblib.load copy._reconstruct builtins.map functools.partial()
    builtins.getattr() logging.config.listen keras.models.load_model""".split()


@pytest.mark.parametrize("name", EXECUTORS)
def test_a_function_that_does_something_is_found_by_its_call(name):
    assert runs_code(name)


@pytest.mark.parametrize("name", ["models.yolo.load", "mylib.rebuild", "omegaconf.create", "", ".", "os", "torch."])
def test_functions_of_packages_that_nobody_else_has_are_not_judged(name):
    assert not runs_code(name)


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (Calls(pathlib.Path.write_text, "x"), ["pathlib.Path.write_text"]),
        (Calls(map, pathlib.Path.unlink, ["x"]), ["builtins.map"]),
        (Calls(Calls(functools.partial, torch.nn.init.zeros_, 1)), ["functools.partial"]),
    ],
    ids=["a method", "a function that calls", "the result of a call"],
)
def test_what_a_pickle_calls_is_remarked(value, names):
    if isinstance(value.call[0], Calls):
        # Pickle refuses to write such a call; the opcodes are: the function, its arguments, REDUCE, and once more.
        data = b"\x80\x02cfunctools\npartial\nctorch.nn.init\nzeros_\n\x85R)R."
    else:
        data = pickle.dumps(value, 4)
    assert found(data) == names


def test_a_name_that_is_called_is_remarked_once():
    assert [fact.data["name"] for fact in payload_remarks({"torch.load", "torch.load()", "copy.copy()"})] == [
        "copy.copy",
        "torch.load",
    ]
