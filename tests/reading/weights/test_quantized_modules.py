"""Whole models with quantised layers: the state_dict that torch itself would give."""

import copy
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao import quantization
from torch.ao.nn import quantized
from torch.ao.nn.quantized import reference
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

import ckptfix
from ckptfix.core.finding import Level
from ckptfix.core.objects import Global, Opaque
from ckptfix.reading.weights.quantized_modules import packed_entries, quantized_version
from tests.reading.files import opened, saved
from tests.reading.state_dicts import same

pytestmark = pytest.mark.filterwarnings("ignore")


def dynamic(*layers: nn.Module, how: Any = None, dtype: Any = torch.qint8) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: nn.Module = quantization.quantize_dynamic(nn.Sequential(*layers), how or {type(layers[0])}, dtype=dtype)
    return made


class Net(nn.Module):
    """A network of convolutions for static quantisation."""

    def __init__(self) -> None:
        super().__init__()
        self.quant = quantization.QuantStub()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
        self.free = nn.Conv2d(4, 4, 1, bias=False)
        self.add = quantized.FloatFunctional()
        self.fc = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.bn(self.conv(self.quant(x))))
        y: torch.Tensor = self.fc(self.add.add(self.free(x), x).mean((2, 3)))
        return y


@cache
def static() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net: Any = quantization.fuse_modules(Net().eval(), [["conv", "bn", "relu"]])
        net.qconfig = quantization.get_default_qconfig("qnnpack")
        prepared = quantization.prepare(net)
        prepared(torch.randn(2, 3, 8, 8))
        made: nn.Module = quantization.convert(prepared)
    return made


def of_reference(**how: Any) -> nn.Module:
    """A model as the tools for other hardware get it: float weights, and how to quantise them."""
    import torch.ao.quantization.fx._decomposed  # noqa: F401  # the operators that TorchScript compiles it with

    return nn.Sequential(reference.Linear.from_float(nn.Linear(4, 3), how))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dynamic linear": lambda: dynamic(nn.Linear(4, 3), nn.LayerNorm(3)),
    "dynamic linear without bias": lambda: dynamic(nn.Linear(4, 3, bias=False)),
    "dynamic linear in halves": lambda: dynamic(nn.Linear(4, 3), dtype=torch.float16),
    "linear per channel": lambda: dynamic(nn.Linear(4, 3), how={nn.Linear: quantization.per_channel_dynamic_qconfig}),
    "reference per tensor": lambda: of_reference(
        qscheme=torch.per_tensor_affine, dtype=torch.quint8, scale=2.0, zero_point=3
    ),
    "reference per channel": lambda: of_reference(
        qscheme=torch.per_channel_affine, dtype=torch.qint8, scale=torch.ones(3), zero_point=torch.zeros(3), axis=0
    ),
    "embedding": lambda: dynamic(
        nn.Embedding(8, 16), how={nn.Embedding: quantization.float_qparams_weight_only_qconfig}
    ),
    "bag of four bits": lambda: dynamic(
        nn.EmbeddingBag(8, 16), how={nn.EmbeddingBag: quantization.float_qparams_weight_only_qconfig_4bit}
    ),
    "static convolutions": static,
}


@pytest.fixture(autouse=True)
def _engine() -> Any:
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm" if "fbgemm" in torch.backends.quantized.supported_engines else before
    yield
    torch.backends.quantized.engine = before


def without_gradients(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().requires_grad_(False)
    return tuple(map(without_gradients, value)) if isinstance(value, tuple) else value


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_the_state_dict_is_torchs_own_and_loads_strictly(build, zipped, tmp_path):
    model = build()
    path = saved(model, tmp_path, _use_new_zipfile_serialization=zipped)
    built: Any = opened(path).state_dict()
    expected: Any = model.state_dict()
    same(
        {key: without_gradients(value) for key, value in built.items()},
        {key: without_gradients(value) for key, value in expected.items()},
    )
    assert list(built._metadata.items()) == list(expected._metadata.items())
    report = ckptfix.repair(path, output=tmp_path / "out.pth").report
    assert (report.exit_code, [finding.code for finding in report.findings]) == (0, ["FIL102"])
    copy.deepcopy(model).load_state_dict(torch.load(tmp_path / "out.pth", weights_only=True), strict=True)


def test_the_model_computes_what_it_did(tmp_path):
    model, data = MODELS["dynamic linear"](), torch.randn(5, 4)
    ckptfix.repair(saved(model, tmp_path), output=tmp_path / "out.pth")
    other = MODELS["dynamic linear"]()
    other.load_state_dict(torch.load(tmp_path / "out.pth"))
    assert torch.equal(model(data), other(data))


class Functional(nn.Module):
    """A layer without a module, whose packed weights torch.fx hangs on the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))

    def forward(self, x):  # torch.fx cannot pickle annotations that are text
        return nn.functional.linear(x, self.weight)


def of_fx() -> nn.Module:
    data = (torch.randn(2, 3),)
    prepared = prepare_fx(Functional().eval(), quantization.get_default_qconfig_mapping(), data)
    prepared(*data)
    made: nn.Module = convert_fx(prepared)
    return made


@pytest.mark.parametrize("whole", [True, False], ids=["whole model", "state_dict"])
@pytest.mark.parametrize(
    ("build", "key"),
    [(lambda: dynamic(nn.LSTM(4, 3)), "0._all_weight_values.0.param"), (of_fx, "_packed_weight_0")],
    ids=["LSTM", "torch.fx"],
)
def test_what_only_a_script_object_can_hold_is_an_error_and_data_where_that_was_asked_for(build, key, whole, tmp_path):
    model = build()
    path = saved(model if whole else model.state_dict(), tmp_path)
    report = ckptfix.repair(path, output=tmp_path / "out.pth").report
    (left,) = report.remaining
    assert (left.code, left.level, left.keys) == ("FIL102", Level.ERROR, (key,))
    assert (report.exit_code, report.output) == (1, None)
    ckptfix.repair(path, output=tmp_path / "out.pth", ignore=("FIL102",))
    written = torch.load(tmp_path / "out.pth", weights_only=True)
    assert list(written) == list(model.state_dict())
    assert written[key]["state"][1].endswith("ParamsBase")


@pytest.mark.parametrize("build", ["dynamic linear", "dynamic linear in halves"])
def test_packed_weights_are_not_a_note_where_safetensors_cannot_hold_them(build, tmp_path):
    path = saved(MODELS[build]().state_dict(), tmp_path)
    report = ckptfix.repair(path, output=tmp_path / "out.safetensors").report
    left, *notes = report.remaining
    assert [note.level for note in notes] == [Level.NOTE]  # the dtype next to it
    assert (left.code, left.level, left.keys) == ("FIL104", Level.ERROR, ("0._packed_params._packed_params",))
    assert (report.exit_code, report.output) == (1, None)
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("build", ["dynamic linear", "bag of four bits", "static convolutions"])
def test_a_quantised_state_dict_is_clean(build, tmp_path):
    model = MODELS[build]()
    path = saved(model.state_dict(), tmp_path)
    assert ckptfix.check(path).findings == ()
    ckptfix.repair(path, output=tmp_path / "out.pth")
    copy.deepcopy(model).load_state_dict(torch.load(tmp_path / "out.pth", weights_only=True), strict=True)


def subclasses(cls: type[nn.Module]) -> set[type[nn.Module]]:
    return {cls}.union(*(subclasses(child) for child in cls.__subclasses__()))


def test_the_versions_are_those_of_torchs_classes():
    known = {cls for cls in subclasses(nn.Module) if cls.__module__.startswith("torch.")}
    of_norms = {cls for cls in known if issubclass(cls, nn.modules.batchnorm._NormBase)}
    wrong = {
        f"{cls.__module__}.{cls.__name__}"
        for cls in known - of_norms
        if cls._version != (quantized_version(Opaque(Global(cls.__module__, cls.__name__))) or 1)
        and not cls.__name__.startswith("_")
    }
    assert wrong <= {"torch.ao.quantization.observer.UniformQuantizationObserverBase"}  # no file holds a base class


def holder(name: str, **state: Any) -> Opaque:
    parts: dict[str, Any] = {"_parameters": {}, "_buffers": {}, "_modules": {}}
    return Opaque(Global("torch.ao.nn.quantized.modules.linear", name), state={**parts, **state})


@pytest.mark.parametrize(
    "module",
    [
        holder("LinearPackedParams", _packed_params=5),
        holder("LinearPackedParams", _packed_params=Opaque(Global("torch", "ScriptObject"), state=((1, 2), "x"))),
        holder("EmbeddingPackedParams", _packed_weight=Opaque(Global("torch", "ScriptObject"), state=((1,), "x"))),
        holder("QFunctional", scale="a", zero_point=1 << 70),
        Opaque(Global("torch.ao.nn.quantized.modules.conv", "Conv2d"), state=(1,) * 15),
    ],
    ids=["no object", "no tensors", "too short", "no numbers", "no convolution"],
)
def test_an_odd_state_gives_nothing(module):
    from ckptfix.reading.weights.modules import is_module, module_state_dict

    assert not is_module(module) or list(module_state_dict(module, "f")) == []


@pytest.mark.parametrize("buffers", [5, ["weight_scale"], {"weight_scale": 5}], ids=["number", "list", "odd entry"])
def test_odd_notes_of_a_reference_module_stay_what_they_are(buffers):
    module = holder("Linear", weight_qscheme=[], weight_dtype={}, _buffers=buffers)
    found = dict(packed_entries(module, {}))
    assert found.pop("weight_scale", 5) == 5
    assert found == {"weight_qscheme": [], "weight_dtype": {}}


def test_a_scale_beyond_float32_is_infinite():
    from ckptfix.reading.tensors import build_tensor
    from ckptfix.reading.weights.modules import module_state_dict

    entries = module_state_dict(holder("QFunctional", scale=1e300, zero_point=-3), "f")
    assert [build_tensor(spec).item() for spec in entries.values()] == [float("inf"), -3]
