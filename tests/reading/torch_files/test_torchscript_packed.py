"""Quantised layers in TorchScript: the state_dict that torch itself would give of the module."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao import quantization

import ckptfix
from ckptfix.core.finding import Level
from ckptfix.core.objects import Global, Opaque
from ckptfix.errors import HostileError
from ckptfix.reading.torch_files.torchscript import PACKED_DEPTH_LIMIT, python_class, unpacked
from tests.checks import bytes_of
from tests.reading.files import saved
from tests.reading.state_dicts import same
from tests.reading.weights.test_quantized_modules import MODELS, dynamic, without_gradients

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def engine() -> None:
    torch.backends.quantized.engine = torch.backends.quantized.supported_engines[-1]


def scripted(module: nn.Module, folder: Path) -> Path:
    path = folder / "model.pt"
    torch.jit.script(module).save(str(path))
    return path


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_the_state_dict_is_torchs_own_and_loads_strictly(build: Any, tmp_path: Path) -> None:
    module = build()
    report = ckptfix.repair(scripted(module, tmp_path), output=tmp_path / "out.pth").report
    assert (report.exit_code, {finding.code for finding in report.findings}) == (0, {"FIL102"})
    written = torch.load(tmp_path / "out.pth", weights_only=True)
    expected = module.state_dict()
    same(
        {key: without_gradients(value) for key, value in written.items()},
        {key: without_gradients(value) for key, value in expected.items()},
    )
    copy.deepcopy(module).load_state_dict(written, strict=True)


@pytest.mark.parametrize("path", ["scripted", "whole"])
def test_an_lstm_gives_the_same_from_both_forms(path: str, tmp_path: Path) -> None:
    module: Any = dynamic(nn.LSTM(2, 3))
    file = scripted(module, tmp_path) if path == "scripted" else saved(module, tmp_path)
    report = ckptfix.repair(file, output=tmp_path / "out.pth").report
    left = next(finding for finding in report.remaining if finding.level is Level.ERROR)
    assert (left.code, left.level, left.keys) == ("FIL102", Level.ERROR, ("0._all_weight_values.0.param",))
    assert report.output is None
    ckptfix.repair(file, output=tmp_path / "out.pth", ignore=("FIL102",))
    (entry,) = torch.load(tmp_path / "out.pth", weights_only=True).values()
    again = ckptfix.check(tmp_path / "out.pth").findings  # tensors taken from it do not load into any model either
    assert ("FIL102", Level.ERROR) in [(finding.code, finding.level) for finding in again]
    contents, cls = entry["state"]
    assert (entry["class"], cls.rpartition(".")[2]) == ("torch.ScriptObject", "CellParamsBase")
    expected = [bytes_of(weight) for weight in module[0].get_weight().values()]
    assert [bytes_of(part["state"][0][0]) for part in contents[4]] == expected


def test_a_traced_module_lacks_only_constants_of_the_code(tmp_path: Path) -> None:
    module = MODELS["static convolutions"]()
    torch.jit.trace(module, torch.randn(2, 3, 8, 8)).save(str(tmp_path / "model.pt"))
    built = ckptfix.open_checkpoint(tmp_path / "model.pt").state_dict()
    expected = module.state_dict()
    constants = {"add.scale", "add.zero_point", "fc.scale", "fc.zero_point"}
    assert list(built) == [key for key in expected if key not in constants]
    same(
        {key: without_gradients(value) for key, value in built.items()},
        {key: without_gradients(expected[key]) for key in built},
    )


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("__torch__.a.b", "a.b.C"),
        ("__torch__.a.___torch_mangle_12.b", "a.b.C"),
        ("__torch__.a.___torch_mangle_0", "a.C"),
        ("a.__torch__.b", "a.__torch__.b.C"),
    ],
)
def test_the_python_class_of_a_compiled_class(module: str, expected: str) -> None:
    assert str(python_class(Global(module, "C"))) == expected


def test_a_storage_of_packed_parameters_is_verified(tmp_path: Path) -> None:
    module = quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 8)), dtype=torch.qint8)
    path = tmp_path / "model.pt"
    torch.jit.script(module).save(str(path))
    data = bytearray(path.read_bytes())
    data[data.index(bytes_of(module[0].weight()))] ^= 1
    path.write_bytes(data)
    (finding,) = (finding for finding in ckptfix.check(path).findings if finding.code == "FIL201")
    assert finding.keys == ("0._packed_params._packed_params",)


def test_endless_nesting_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(HostileError, match=f"deeper than {PACKED_DEPTH_LIMIT}"):
        unpacked(endless, "model.pt")


def test_shared_objects_are_unpacked_once() -> None:
    value: Any = ()
    for _ in range(60):
        value = (value, value)
    packed = Opaque(Global("__torch__.torch.classes.rnn", "CellParamsBase"), state=(value, 1))
    assert unpacked(packed, "model.pt").state[0][1] == 1
