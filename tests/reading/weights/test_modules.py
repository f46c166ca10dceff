import functools
import pickle
import sys
from collections import OrderedDict
from types import ModuleType
from typing import Any

import pytest
import torch

import ckptfix
from ckptfix.core.finding import Level
from ckptfix.core.objects import Global, Opaque
from ckptfix.core.spec import TensorSpec
from ckptfix.errors import HostileError
from ckptfix.reading.weights.modules import is_module, module_state_dict
from tests.reading.files import opened, saved
from tests.reading.state_dicts import same


class Net(torch.nn.Module):
    """A module with everything that a state_dict considers, and everything that it ignores."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4))
        self.head = torch.nn.Linear(4, 2, bias=False)
        self.tied = torch.nn.Linear(4, 2, bias=False)
        self.tied.weight = self.head.weight
        self.again = self.head
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("kept", torch.arange(3))
        self.register_buffer("passing", torch.arange(4), persistent=False)
        self.register_parameter("none", None)
        self.plain = torch.ones(5)


@pytest.mark.parametrize(
    ("new", "protocol"), [(True, 2), (False, 2), (False, 0)], ids=["zip", "legacy", "legacy of protocol 0"]
)
def test_a_pickled_module_gives_its_state_dict_without_its_class(new, protocol, tmp_path):
    net = Net()
    path = saved(net, tmp_path, _use_new_zipfile_serialization=new, pickle_protocol=protocol)
    built: Any = opened(path).state_dict()
    expected: Any = net.state_dict()
    same(dict(built), {key: tensor.requires_grad_(built[key].requires_grad) for key, tensor in expected.items()})
    assert built["head.weight"].data_ptr() == built["tied.weight"].data_ptr() == built["again.weight"].data_ptr()
    assert {path: row.get("version") for path, row in built._metadata.items()} == {
        path: row.get("version") for path, row in expected._metadata.items()
    }


class OnManifold(torch.nn.Parameter):
    """As geoopt's parameter, it pickles as a call of its own."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return rebuilt, (self.detach().as_subclass(torch.Tensor),)


def rebuilt(data: torch.Tensor) -> OnManifold:
    return OnManifold(data)


@pytest.mark.parametrize("whole", [True, False])
def test_a_parameter_that_its_own_function_builds_is_never_left_out_in_silence(whole, tmp_path):
    model = torch.nn.Linear(2, 2)
    model.weight = OnManifold(torch.ones(2, 2))
    path = saved(model if whole else {**model.state_dict(), "weight": model.weight}, tmp_path)
    for file in (path, ckptfix.repair(path, output=tmp_path / "out.pth").report.output or ""):
        report = ckptfix.check(file)
        (finding,) = (each for each in report.findings if each.level is Level.ERROR)
        assert (finding.code, finding.keys, report.exit_code) == ("FIL102", ("weight",), 1)


class ManifoldParameter(torch.nn.Parameter):
    """Pickles as the class of this name in geoopt does."""

    __module__ = "geoopt.tensor"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        build, args = super().__reduce_ex__(protocol)
        of_manifold: tuple[Any, ...] = ({}, ManifoldParameter, OrderedDict(c=1.0), self.requires_grad)
        return functools.partial(_rebuild_manifold_tensor, build_fn=build), args + of_manifold


def _rebuild_manifold_tensor(*args: Any, build_fn: Any) -> torch.Tensor:
    made: torch.Tensor = build_fn(*args[:-4])
    return made


_rebuild_manifold_tensor.__module__ = "geoopt.tensor"


def test_a_parameter_on_a_manifold_of_geoopt_keeps_its_bits(tmp_path, monkeypatch):
    geoopt = ModuleType("geoopt.tensor")
    geoopt.__dict__.update(ManifoldParameter=ManifoldParameter, _rebuild_manifold_tensor=_rebuild_manifold_tensor)
    monkeypatch.setitem(sys.modules, "geoopt", geoopt)
    monkeypatch.setitem(sys.modules, "geoopt.tensor", geoopt)
    model = torch.nn.Linear(2, 2)
    model.weight = ManifoldParameter(torch.rand(2, 2))
    report = ckptfix.repair(saved(model, tmp_path), output=tmp_path / "out.pth").report
    assert (report.exit_code, {finding.code for finding in report.findings}) == (0, {"FIL102"})
    same(torch.load(tmp_path / "out.pth"), model.state_dict(), strides=False)


def test_the_persistent_states_of_a_metric_are_in_the_state_dict(tmp_path):
    torchmetrics = pytest.importorskip("torchmetrics")
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torchmetrics.MeanMetric(), torchmetrics.MaxMetric())
    metric: Any = net[2]
    metric.persistent(True)
    metric.update(torch.ones(2))
    expected: Any = net.state_dict()
    built: Any = opened(saved(net, tmp_path)).state_dict()
    assert "2.max_value" in expected
    same(dict(built), dict(expected), strides=False)


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_method_that_was_saved_and_not_called_stands_for_its_module(protocol, tmp_path):
    net = Net()
    built: Any = opened(saved(net.state_dict, tmp_path, pickle_protocol=protocol)).state_dict()
    assert set(built) == set(net.state_dict())


class OtherMethod:
    """Pickles as ``getattr(module, "load_state_dict")``."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (Net(), "load_state_dict")


def test_another_method_of_a_module_stands_for_nothing(tmp_path):
    with pytest.raises(ckptfix.UnreadableError, match="no weights"):
        opened(saved(OtherMethod(), tmp_path))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_hook_of_spectral_norm_has_its_row(tmp_path):
    net = torch.nn.Sequential(torch.nn.utils.spectral_norm(torch.nn.Linear(3, 4)))
    expected: Any = net.state_dict()
    built: Any = opened(saved(net, tmp_path)).state_dict()
    assert list(built._metadata.items()) == list(expected._metadata.items())
    kept: Any = opened(saved(expected, tmp_path)).state_dict()
    assert list(kept._metadata.items()) == list(expected._metadata.items())
    assert ckptfix.check(saved(expected, tmp_path)).findings == ()


def test_a_compiled_module_gives_the_one_in_it(tmp_path):
    net: Any = torch.compile(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)))
    path = saved(net, tmp_path)
    built: Any = opened(path).state_dict()
    expected: Any = net.state_dict()
    assert list(built) == list(expected)
    assert list(built._metadata.items()) == list(expected._metadata.items())
    assert [finding.code for finding in ckptfix.check(path, select=("FIL",)).findings] == ["FIL102"]


@pytest.mark.parametrize("whole", [True, False], ids=["whole model", "state_dict"])
def test_lazy_parameters_that_never_ran_are_left_out_and_named(whole, tmp_path):
    net = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.Linear(4, 2))
    path = saved(net if whole else net.state_dict(), tmp_path)
    report = ckptfix.repair(path, output=tmp_path / "out.pth").report
    (left,) = report.remaining
    assert (left.code, left.keys) == ("FIL102", ("0.weight", "0.bias"))
    assert list(torch.load(tmp_path / "out.pth", weights_only=True)) == ["1.weight", "1.bias"]


def test_a_module_that_packs_itself_in_a_way_of_its_own_is_kept_as_it_is():
    packed = Opaque(Global("m", "Packed"), state=(TensorSpec("float32", ()), True))
    entries = module_state_dict(module({"a": packed, "b": Opaque(Global("m", "Empty"), state=(1,))}), "f")
    assert list(entries) == ["p", "a"]
    assert entries["a"] is packed


def module(children: dict[str, Any], **more: Any) -> Opaque:
    state = {"_parameters": {"p": TensorSpec("float32", ())}, "_buffers": {}, "_modules": children, **more}
    return Opaque(Global("m", "Net"), state=state)


def test_an_object_with_half_of_it_is_not_a_module():
    assert is_module(module({}))
    assert not is_module(Opaque(Global("m", "Net"), state={"_parameters": {}, "_buffers": {}}))
    assert not is_module({"_parameters": {}, "_buffers": {}, "_modules": {}})


@pytest.mark.parametrize("odd", [5, "p", ["p"], None, {"p": 1}])
def test_an_odd_set_of_passing_buffers_hides_nothing(odd):
    assert list(module_state_dict(module({}, _non_persistent_buffers_set=odd), "f")) == ["p"]


def test_children_that_are_not_modules_are_passed_over():
    assert list(module_state_dict(module({"a": None, "b": 5, "c": module({})}), "f")) == ["p", "c.p"]


def test_modules_that_never_end_are_refused():
    endless = module({})
    endless.state["_modules"]["me"] = endless
    with pytest.raises(HostileError, match="do not use this file"):
        module_state_dict(endless, "f")
    wide = module({})
    for _ in range(50):
        wide = module({"a": wide, "b": wide})
    with pytest.raises(HostileError, match="do not use this file"):
        module_state_dict(wide, "f")
    full = module({}, _buffers={f"b{index}": TensorSpec("float32", ()) for index in range(300)})
    with pytest.raises(HostileError, match="do not use this file"):
        module_state_dict(module({str(index): full for index in range(1000)}), "f")


def test_a_block_that_is_shared_by_many_layers_is_in_each_of_them():
    block = module({name: module({}) for name in "abcd"})
    state_dict = module_state_dict(module({str(index): block for index in range(1000)}), "f")
    assert len(state_dict) == 1 + 1000 * 5


def test_a_module_of_stylegan_gives_its_weights_without_its_source(tmp_path, monkeypatch):
    """Its pickle is a call with the source of the class and the instance dict; loading it executes the source."""

    def _reconstruct_persistent_obj(meta):
        raise NotImplementedError

    class EasyDict(dict):
        pass

    class Generator(torch.nn.Linear):
        def __reduce__(self):
            meta = EasyDict(type="class", version=6, module_src="import os", class_name="Generator")
            return _reconstruct_persistent_obj, (EasyDict(meta, state=self.__dict__),)

    for name, value in (("torch_utils.persistence", _reconstruct_persistent_obj), ("dnnlib.util", EasyDict)):
        value.__module__, value.__qualname__ = name, value.__name__
        monkeypatch.setitem(sys.modules, name.partition(".")[0], ModuleType(name.partition(".")[0]))
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        setattr(sys.modules[name], value.__name__, value)
    (tmp_path / "network.pkl").write_bytes(pickle.dumps({"G_ema": Generator(3, 2)}))
    checkpoint = opened(tmp_path / "network.pkl")
    assert (checkpoint.container, checkpoint.keys()) == (("G_ema",), ["weight", "bias"])
