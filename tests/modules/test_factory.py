"""Targets made by a factory: where it is searched, what it costs, and what users see if it fails."""

import sys
from pathlib import Path

import pytest
import torch

from ckptfix.errors import TargetError
from ckptfix.modules.factory import build_module, target_from_factory

SOURCE = """
import torch
from torch import nn

print("imported")

def net(width=3):
    return nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width))

class Net(nn.Module):
    def __init__(self, width=2):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.b.weight = self.a.weight
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

instance = nn.Linear(2, 2)

def needs_values():
    return nn.Linear(2, int(torch.full((1,), 3).item()))

def pair():
    return nn.Linear(2, 2), 3

def inner():
    raise ValueError("no such backbone")

def fails():
    return inner()

def leaves():
    raise SystemExit(2)

def counted():
    calls.append(torch.zeros(1).device.type)
    return nn.Linear(2, 2)

calls = []
number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest):
    """The name of a module with factories, in a working directory that Python does not import from."""
    name = f"factories_{abs(hash(request.node.nodeid))}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    yield name
    sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("name", "arguments", "width"),
    [
        pytest.param("net", (), 3, id="a function"),
        pytest.param("net", {"width": 5}, 5, id="keyword arguments"),
        pytest.param("net", [4], 4, id="positional arguments"),
    ],
)
def test_function(module, name, arguments, width):
    target = target_from_factory(f"{module}:{name}", arguments)
    assert target.slots["0.weight"].shape == (width, 2)
    assert target.label == f"{module}:{name}"
    assert target.remarks == ()


def test_class_with_a_tie_and_a_transient_buffer(module):
    target = target_from_factory(f"{module}:Net")
    assert target.ties == (("a.weight", "b.weight"),)
    assert target.transient == {"scratch"}


def test_instance(module):
    target = target_from_factory(f"{module}:instance")
    assert target.initial is not None
    assert torch.equal(target.initial()["weight"], sys.modules[module].instance.weight)
    assert not target.is_deferred


def test_values_are_made_on_first_use_and_once(module):
    target = target_from_factory(f"{module}:counted")
    calls = sys.modules[module].calls
    assert calls == ["meta"]
    assert target.is_deferred
    assert target.initial is not None
    target.initial(), target.initial()
    assert calls == ["meta", "cpu"]


@pytest.mark.parametrize("name", ["net", "needs_values"])
def test_values_follow_the_seed(module, name):
    values = []
    for seed in (0, 0, 1):
        initial = target_from_factory(f"{module}:{name}", seed=seed).initial
        assert initial is not None
        values.append(next(iter(initial().values())))
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])


def test_a_factory_that_needs_real_tensors_is_reported(module):
    target = target_from_factory(f"{module}:needs_values")
    assert target.slots["weight"].shape == (3, 2)
    assert "cannot be built on the meta device" in target.remarks[0]


def test_the_caller_s_state_is_left_unchanged(module, capsys):
    random, path = torch.get_rng_state(), list(sys.path)
    initial = target_from_factory(f"{module}:net").initial
    assert initial is not None
    initial()
    assert torch.equal(torch.get_rng_state(), random)
    assert sys.path == path
    assert capsys.readouterr() == ("", "imported\n")


@pytest.mark.parametrize(
    ("spec", "arguments", "says"),
    [
        pytest.param("{module}", (), "write it as pkg.mod:factory", id="no colon"),
        pytest.param("no_such_module:net", (), "run from the folder that contains no_such_module", id="no module"),
        pytest.param("{module}:nett", (), "did you mean net?", id="a slip"),
        pytest.param("{module}:zzz", (), "see what", id="no attribute"),
        pytest.param("{module}:number", (), "is of type int", id="neither callable nor model"),
        pytest.param("{module}:pair", (), "returned an object of type tuple", id="more than a model"),
        pytest.param("{module}:instance", [1], "omit model_args=", id="arguments for a model"),
        pytest.param("{module}:net", {"depth": 1}, "model_args=", id="an argument that it does not take"),
    ],
)
def test_one_line_names_the_remedy(module, spec, arguments, says):
    with pytest.raises(TargetError) as caught:
        target_from_factory(spec.format(module=module), arguments)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.traceback_text == ""


def test_the_user_s_error_has_the_user_s_frames_only(module, tmp_path):
    with pytest.raises(TargetError, match="raised ValueError: no such backbone") as caught:
        target_from_factory(f"{module}:fails")
    text = caught.value.traceback_text
    files = [line.split('"')[1] for line in text.splitlines() if line.startswith("  File ")]
    assert files == [str(tmp_path / f"{module}.py")] * 2
    assert text.endswith("ValueError: no such backbone\n")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        pytest.param("def f(:\n", "SyntaxError", id="does not parse"),
        pytest.param("import no_such_dependency\n", "No module named 'no_such_dependency'", id="a missing dependency"),
        pytest.param("raise SystemExit(2)\n", "SystemExit", id="parses arguments on import"),
        pytest.param(
            "def __getattr__(name):\n    import no_such_dependency\n",
            "No module named 'no_such_dependency'",
            id="a missing dependency of a name that is imported when it is asked for",
        ),
    ],
)
def test_a_module_that_cannot_be_imported(module, tmp_path, source, says):
    (tmp_path / f"{module}.py").write_text(source)
    with pytest.raises(TargetError, match=says) as caught:
        target_from_factory(f"{module}:f")
    assert f"{module}.py" in caught.value.traceback_text
    assert "ckptfix" not in caught.value.traceback_text


def test_a_factory_that_leaves_the_process(module):
    with pytest.raises(TargetError, match="SystemExit"):
        target_from_factory(f"{module}:leaves")


def test_build_module_has_the_initial_values_of_the_target(module):
    built = build_module(f"{module}:net", {"width": 4}, seed=1)
    initial = target_from_factory(f"{module}:net", {"width": 4}, seed=1).initial
    assert initial is not None
    assert torch.equal(built.state_dict()["0.weight"], initial()["0.weight"])
