"""The code of a torch.fx graph: what torch writes passes, and nothing else."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.graph_module import reduce_graph_module

import ckptfix
from ckptfix.core.finding import Level
from ckptfix.reading.pickles.payload import is_graph_code
from tests.reading.files import opened, saved
from tests.reading.state_dicts import same


class Net(nn.Module):
    """Calls of modules, methods, functions, operators and getattr; a name that is a built-in's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.fc = nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, input, other=None):
        x = self.blocks(input).mean(dim=(2, 3))
        y = nn.functional.gelu(self.fc(x)) * self.scale + torch.arange(2, dtype=torch.float32)
        y = torch.nn.functional.interpolate(y[None, None], size=(4, 4), mode="bilinear")
        return {"a": y[..., :1].contiguous(), "b": [torch.cat([y, y], 1), -x.max().item(), x.shape[0] // 2]}


def traced() -> torch.fx.GraphModule:
    return torch.fx.symbolic_trace(Net())


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_a_graph_gives_its_state_dict_and_a_warning(zipped, tmp_path):
    graph = traced()
    path = saved(graph, tmp_path, _use_new_zipfile_serialization=zipped)
    built: Any = opened(path).state_dict()
    expected: Any = graph.state_dict()
    same(dict(built), {key: tensor.requires_grad_(built[key].requires_grad) for key, tensor in expected.items()})
    assert list(built._metadata.items()) == list(expected._metadata.items())
    findings = ckptfix.check(path, select=("FIL",)).findings
    assert [(finding.code, finding.level) for finding in findings] == [
        ("FIL901", Level.WARNING),
        ("FIL102", Level.WARNING),
    ]
    assert ckptfix.repair(path, output=tmp_path / "out.pth").report.exit_code == 0
    traced().load_state_dict(torch.load(tmp_path / "out.pth", weights_only=True), strict=True)
    assert b"def forward" not in (tmp_path / "out.pth").read_bytes()
    assert ckptfix.check(tmp_path / "out.pth", select=("FIL",)).findings == ()


class Attack:
    """Pickles as a graph whose code is not torch's."""

    def __init__(self, body: dict[str, Any], imports: str) -> None:
        self.body, self.imports = body, imports

    def __reduce__(self) -> Any:
        return reduce_graph_module, (self.body, self.imports)


@pytest.mark.parametrize(
    ("code", "imports"),
    [
        ("def forward(self, x):\n    import os\n    os.system('touch PWNED')\n    return x", ""),
        ("def forward(self, x):\n    return system('touch PWNED')", "from os import system"),
    ],
    ids=["in the code", "in the imports"],
)
def test_code_that_does_more_is_an_error_and_nothing_is_written(code, imports, tmp_path):
    graph = traced()
    path = saved(Attack({**graph.__dict__, "_graph": None, "_code": code}, imports), tmp_path)
    (finding,) = ckptfix.check(path, select=("FIL901",)).findings
    assert finding.level == Level.ERROR
    assert "reduce_graph_module" in finding.message
    report = ckptfix.repair(path, output=tmp_path / "out.pth").report
    assert (report.exit_code, report.output) == (1, None)
    assert ckptfix.repair(path, output=tmp_path / "out.pth", disarm=True).report.exit_code == 0
    assert sorted(torch.load(tmp_path / "out.pth")) == sorted(graph.state_dict())


class Armed:
    """Pickles as a call of exec."""

    def __reduce__(self) -> Any:
        return exec, ("1",)


def test_graph_code_and_a_payload_are_both_reported(tmp_path):
    path = saved({"model": traced(), "x": Armed()}, tmp_path)
    findings = ckptfix.check(path, select=("FIL901",)).findings
    assert [finding.level for finding in findings] == [Level.ERROR, Level.WARNING]
    assert ckptfix.repair(path, output=tmp_path / "out.pth").report.output is None


IMPORTS = (
    "NoneType = type(None)\nfrom math import inf\nfrom torch import device\nimport torch\n"
    "import torch.fx._pytree as fx_pytree\nimport torch.utils._pytree as pytree\nfrom _operator import iadd as _iadd\n"
    "from mmdet.models import f as mmdet_models_f\nfrom torch.nn.functional import relu as relu_1\n"
    "from typing import Dict as typing_Dict\nfrom builtins import str as str\nfrom a.b import Sparse as a_b_Sparse"
)


def forward(line: str) -> str:
    return f"\n\n\ndef forward(self, x):\n    {line};  x = None\n    return y\n    "


HARMLESS = [
    "y = self.L__self___fc(x)",
    "y = torch.ops.aten.select.int(x, 0, 1)",
    "y = torch.ops.quantized.add.default(x, 1)",
    "y = torch._C._nn.linear(x, self.w, None)",
    "y = x.to(torch.float16).view(-1, 3)[(slice(None, None, None), 0)]",
    "y = getattr(self.layer, '0')(x)",
    "y = getattr(getattr(self.layer, '0'), '1').fc(x)",
    'y = getattr(self, "net/conv1d_34_1/convolution__9")(x)',
    "y, = fx_pytree.tree_flatten_spec(([x], {}), self._in_spec)",
    "torch.fx._symbolic_trace.wrap('mmdet_models_f');  y = mmdet_models_f(x)",
    "_set_grad_enabled = torch._C._set_grad_enabled(False);  y = x  # File: a.py:3 in forward, code: import os",
    "y : typing_Dict[str, typing_Dict[str, a_b_Sparse]] = x",
    "y = torch.empty(1, layout = torch.strided, device = device(type='cpu')) + inf",
]


@pytest.mark.parametrize("line", HARMLESS)
def test_noop_code_that_torch_writes(line):
    assert is_graph_code({"_code": forward(line)}, IMPORTS)


@pytest.mark.parametrize(
    "line",
    [
        "import os",
        "y = __import__('os')",
        "y = eval('1')",
        "y = [e := eval, e('1')]",
        "y = open('f', 'w')",
        "y = torch.load('f')",
        "y = torch.os.system('x')",
        "y = torch.nn.functional.importlib.import_module('os')",
        "y = torch.nn.functional; z = y.warnings.sys.modules",
        "y = torch.nn.functional.torch.multiprocessing.Process(x)",
        "y = torch.hub.load('a', 'b')",
        "y = torch.serialization",
        "y = getattr(torch, 'os')",
        "y = x.sys",
        "y = x.__class__",
        "y = getattr(x, '__class__')",
        "y = getattr(x, '_' + '_cla' + 'ss_' + '_')",
        "y = getattr(x, '_' '_class_' '_')",
        "y = getattr(x, 'sys')",
        "y = getattr(x, y)",
        "y = " + 100 * "getattr(" + "x" + 100 * ", '0')",
        "y = getattr; z = y(x, '0')",
        "y = f'{open}'",
        "y = Rf'{x}'",
        "y = getattr(x, '\\x5f_class__')",
        "y = torch.ops.load_library('x')",
        "y = (lambda: 1)()",
        "y = torch.utils.cpp_extension.load_inline('a')",
        "y = ().os",
        "y = \uff45\uff56\uff41\uff4c('1')",
        "y = '''\n''' ; exec(1) ; 'b'",
        "y = x  # a comment\r    exec('1')",
        "y = (a for a in x).gi_frame.f_builtins['e' 'val']('1')",
        "y = torch.ones(3).numpy().tofile('f')",
        "y = torch.ones(3);  getattr(y, 'tofile')('f')",
        "y = self.to_folder('f')",
        "y = input('a')",
        "y = mmdet_models_f.load('f')",
        "y = mmdet_models_f",
        "y = torch.fx.graph_module.reduce_graph_module({'_code': 'exec(1)'}, '')",
        "y = fx_pytree.json.load(x)",
        "y = torch.utils.hooks.load(x)",
    ],
)
def test_other_code_is_not_graph_code(line):
    assert not is_graph_code({"_code": forward(line)}, IMPORTS)


@pytest.mark.parametrize(
    "line",
    [
        "import os",
        "from os import system as f",
        "import torch.os as o",
        "from builtins import eval as f",
        "from pathlib import Path",
        "from operator import attrgetter",
        "from operator import methodcaller as m",
        "print(1)",
        "import torch; x = 1",
        "from torch.serialization import load",
        "from numpy import load",
        "from inspect import os",
        "from collections import _sys as s",
        "from mylib import sys",
        "from typing import get_type_hints",
        "from torch import load",
        "import inspect as i",
        "import torch as t",
    ],
)
def test_other_imports_are_not_graph_code(line):
    assert not is_graph_code({"_code": forward("y = x")}, f"{IMPORTS}\n{line}")


def test_the_text_that_torch_runs_is_examined():
    assert not is_graph_code({"_code": "", "code": forward("exec(1)")}, IMPORTS)  # an empty one gives way to the other
    block, code = "import torch\nfrom collections import OrderedDict", forward("y = x").lstrip("\n")
    assert is_graph_code({"_code": code}, f"{block}\n")
    assert not is_graph_code({"_code": f", _sys\n{code}"}, block)  # both are run as one text


@pytest.mark.parametrize("body", [None, 5, {"_code": 5}, {"_code": "x" * (9 << 20)}])
def test_objects_without_code_are_not_graph_code(body):
    assert not is_graph_code(body, IMPORTS)
