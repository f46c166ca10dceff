"""The state of low-bit optimizers is repaired bit for bit; what cannot be read is reported."""

import enum
import importlib
import pickle
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.core.finding import Level
from ckptfix.core.rename_map import MapRule, RenameMap
from ckptfix.smoke.exam import read_state_dict

subclass_8bit = pytest.importorskip("torchao.optim.subclass_8bit", reason="pip install torchao")


KINDS = {
    "8bit": lambda shape: subclass_8bit.OptimState8bit.zeros(shape, True, 256),
    "4bit": lambda shape: importlib.import_module("torchao.optim.subclass_4bit").OptimState4bit.zeros(shape, True, 128),
    "fp8": lambda shape: importlib.import_module("torchao.optim.subclass_fp8").OptimStateFp8.zeros(shape, 256),
}


def parts_of(moment: Any) -> dict[str, torch.Tensor]:
    """The bytes of the tensors that a moment is made of."""
    return {name: getattr(moment, name).view(torch.uint8) for name in moment.__tensor_flatten__()[0]}


def low_bit(shape: tuple[int, ...] = (16, 32), kind: str = "8bit") -> Any:
    """A moment as torchao keeps it, with codes of its own."""
    made = KINDS[kind](shape)
    for part in parts_of(made).values():
        part.random_(0, 100)
    return made


def state(moment: Any) -> dict[str, Any]:
    row = {"step": torch.tensor(3.0), "exp_avg": moment, "exp_avg_sq": moment}
    return {"state": {0: row}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrap", [False, True], ids=["as-it-is", "renamed"])
def test_the_state_is_carried_bit_for_bit(tmp_path, wrap, kind):
    model, moment = nn.Linear(32, 16), low_bit(kind=kind)
    weights = {("module." if wrap else "") + key: value for key, value in model.state_dict().items()}
    torch.save({"model": weights, "optimizer": state(moment)}, tmp_path / "a.pth")
    report = ckptfix.repair(tmp_path / "a.pth", model, output=tmp_path / "b.pth").report
    assert [finding.code for finding in report.findings if finding.code != "KEY102"] == ["OPT102"]
    assert report.exit_code == 0
    row = torch.load(tmp_path / "b.pth", weights_only=True)["optimizer"]["state"][0]
    assert type(row["exp_avg"]) is type(moment)
    assert row["exp_avg"].__tensor_flatten__() == moment.__tensor_flatten__()
    for name, part in parts_of(moment).items():
        assert torch.equal(parts_of(row["exp_avg"])[name], part)


def test_blocks_are_not_split(tmp_path):
    """A layer that is dropped takes its state with it; the others keep theirs whole."""
    model = nn.Sequential(nn.Linear(32, 16, bias=False), nn.Linear(16, 32, bias=False))
    kept = low_bit((16, 32))
    rows = {number: {"step": torch.tensor(1.0), "exp_avg": one} for number, one in enumerate([kept, low_bit((32, 16))])}
    optimizer = {"state": rows, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    torch.save({"model": model.state_dict(), "optimizer": optimizer}, tmp_path / "a.pth")
    report = ckptfix.repair(tmp_path / "a.pth", model[:1], output=tmp_path / "b.pth", unsafe_fixes=True).report
    assert report.exit_code == 0
    made = torch.load(tmp_path / "b.pth", weights_only=True)["optimizer"]
    assert made["param_groups"][0]["params"] == list(made["state"]) == [0]
    assert torch.equal(made["state"][0]["exp_avg"].codes, kept.codes)


class OwnState(subclass_8bit.OptimState8bit):  # type: ignore[misc, name-defined]  # torchao has no types
    """A moment of the user's own class."""


def test_an_unknown_class_is_named(tmp_path):
    made = low_bit()
    moment = OwnState(made.codes, made.scale, made.qmap, made.signed)
    torch.save({"model": nn.Linear(32, 16).state_dict(), "optimizer": state(moment)}, tmp_path / "a.pth")
    settings: dict[str, Any] = {"output": tmp_path / "b.pth", "force": True}
    report = ckptfix.repair(tmp_path / "a.pth", **settings).report
    found = [finding for finding in report.remaining if finding.code == "OPT102"]
    assert [finding.level for finding in found] == [Level.ERROR]
    assert "OwnState" in found[0].message
    again = ckptfix.check(tmp_path / "b.pth")
    assert [finding.code for finding in again.remaining] == ["OPT102"], "it was taken apart"
    report = ckptfix.repair(tmp_path / "b.pth", drop_optimizer=True, **settings | {"output": tmp_path / "c.pth"}).report
    assert report.exit_code == 0
    report = ckptfix.repair(tmp_path / "b.pth", keep_optimizer=True, **settings | {"output": tmp_path / "d.pth"}).report
    assert report.exit_code == 0


class Method(enum.IntEnum):
    SIGN = 1


@pytest.mark.parametrize(("option", "named"), [
    (Method.SIGN, "Method"), (nn.functional.relu, "relu"), (types.SimpleNamespace(a=1), ""), (torch.float16, ""),
    ((0.9, 0.99), ""), (np.float64(0.1), ""), (Path("runs"), ""),
], ids=["enum", "function", "namespace", "dtype", "betas", "number", "path"])  # fmt: skip
def test_an_option_without_a_plain_form_is_named(tmp_path, option, named):
    """An optimizer takes its options from the file: with a dict in the place of an enum, it makes other steps."""
    optimizer = {"state": {0: {"exp_avg": torch.ones(2, 2)}}, "param_groups": [{"kind": option, "params": [0]}]}
    torch.save({"model": {"w.weight": torch.ones(2, 2)}, "optimizer": optimizer}, tmp_path / "a.pth")
    report = ckptfix.repair(tmp_path / "a.pth", output=tmp_path / "b.pth").report
    found = [finding.message for finding in report.remaining if finding.code == "OPT102"]
    assert report.exit_code == bool(named) == len(found)
    assert all(f"options of {getattr(option, '__module__', '')}" in each and "(kind)" in each for each in found)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param({"step": 3, "exp_avg": torch.ones(2, 2)}, id="plain"),
        pytest.param({"state1": torch.ones(4, dtype=torch.uint8), "absmax1": torch.ones(1)}, id="bitsandbytes"),
        pytest.param({}, id="nothing"),
    ],
)
def test_noop_plain_state(tmp_path, row):
    optimizer = {"state": {0: row}, "param_groups": [{"params": [0]}]}
    torch.save({"model": {"w.weight": torch.ones(2, 2)}, "optimizer": optimizer}, tmp_path / "a.pth")
    assert [finding.code for finding in ckptfix.check(tmp_path / "a.pth").findings] == []


def blockwise(shape: tuple[int, ...]) -> dict[str, Any]:
    """The row that AdamW8bit of bitsandbytes 0.50 keeps of a parameter of so many elements."""
    codes = {f"state{n}": torch.randint(0, 255, shape, dtype=torch.uint8) for n in (1, 2)}
    maps = {f"qmap{n}": torch.linspace(-1, 1, 256) for n in (1, 2)}
    scales = {f"absmax{n}": torch.rand(-(-codes["state1"].numel() // 256)) for n in (1, 2)}
    return {"step": 3, "__bnb_optimizer_quant_state__": {**codes, **maps, **scales}}


def test_blocks_of_bitsandbytes_are_carried_and_not_split(tmp_path, monkeypatch):
    """A reshape leaves their order; a layer that is split or transposed starts anew."""
    monkeypatch.chdir(tmp_path)
    old = {"a.weight": (16, 16), "gone.weight": (64, 96), "qkv.weight": (192, 64), "b.weight": (20, 16)}
    rows = [blockwise(shape) for shape in old.values()]
    optimizer = {"state": dict(enumerate(rows)), "param_groups": [{"lr": 0.1, "params": [0, 1, 2, 3]}]}
    torch.save({"model": {key: torch.rand(shape) for key, shape in old.items()}, "optimizer": optimizer}, "run.pth")
    model = nn.ModuleDict({"a": nn.Conv2d(16, 16, 1, bias=False)})
    model.update({name: nn.Linear(64, 64, bias=False) for name in "qkv"} | {"b": nn.Linear(16, 20, bias=False)})
    split = RenameMap((MapRule("qkv.weight", "{q,k,v}.weight", ("split 3",)),), "map.json")
    asked: dict[str, Any] = {"output": "out.pth", "unsafe_fixes": True, "rename_map": split}
    report = ckptfix.repair("run.pth", model, **asked).report
    (finding,) = (one for one in report.fixed if one.code == "OPT101")
    assert finding.keys == ("q.weight", "k.weight", "v.weight")
    made = torch.load("out.pth", weights_only=True)["optimizer"]
    assert list(made["state"]) == [0, 4]
    for row, source, shape in ((made["state"][0], rows[0], (16, 16, 1, 1)), (made["state"][4], rows[3], (20, 16))):
        found, wanted = (one["__bnb_optimizer_quant_state__"] for one in (row, source))
        assert all(torch.equal(found[name].view_as(wanted[name]), wanted[name]) for name in wanted)
        assert found["state1"].shape == shape
        assert found["qmap1"].shape == (256,)


def test_the_forward_test_does_not_need_torchao(tmp_path):
    """Its process has not imported it, and torch then allows none of its classes."""
    torch.save({"model": nn.Linear(32, 16).state_dict(), "optimizer": state(low_bit())}, tmp_path / "a.pth")
    known = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        with pytest.raises(pickle.UnpicklingError, match="OptimState8bit"):
            torch.load(tmp_path / "a.pth", weights_only=True)
        assert set(read_state_dict(str(tmp_path / "a.pth"))) == {"weight", "bias"}
    finally:
        torch.serialization.add_safe_globals(known)


def trained(make: Any) -> dict[str, Any]:
    """The checkpoint of a training."""
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


OF_TORCH = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "RMSprop", "Rprop")


@pytest.mark.parametrize("name", [*OF_TORCH, "SGD", "ASGD"])
@pytest.mark.parametrize("has_steps", [True, False])
def test_state_without_steps_is_named_if_torch_fails_on_it(tmp_path, name, has_steps):
    make = getattr(torch.optim, name)
    saved = trained(make)
    for row in () if has_steps else saved["optimizer"]["state"].values():
        row.pop("step", None)
    torch.save(saved, tmp_path / "run.pth")
    found = [each for each in ckptfix.check(tmp_path / "run.pth").findings if each.code == "OPT102"]
    if has_steps or name == "SGD":
        assert found == []
        make(nn.Linear(3, 2).parameters()).load_state_dict(saved["optimizer"])
        return
    assert [(each.level, each.evidence["parameters"]) for each in found] == [(Level.WARNING, ["0", "1"])]
    with pytest.raises(KeyError, match="step"):
        make(nn.Linear(3, 2).parameters()).load_state_dict(saved["optimizer"])
    report = ckptfix.repair(tmp_path / "run.pth", output=tmp_path / "out.pth", drop_optimizer=True).report
    assert report.exit_code == 0


@pytest.mark.parametrize(
    ("group", "row"),
    [
        ({"step": 3, "bias_correction": True}, ("exp_avg", "exp_avg_sq")),  # apex
        ({"step": 3, "foreach": None, "amsgrad": False}, ("exp_avg", "exp_avg_sq")),
        ({"k": 3, "foreach": True}, ("z", "exp_avg_sq")),  # schedulefree
        ({"foreach": None, "differentiable": False}, ("exp_avg",)),  # Lion
        ({"amsgrad": False, "differentiable": False}, ()),  # frozen
    ],
)
def test_noop_optimizers_without_steps(tmp_path, group, row):
    model = nn.Linear(3, 2)
    rows = {n: {name: torch.ones_like(p) for name in row} for n, p in enumerate(model.parameters())}
    optimizer = {"state": rows, "param_groups": [{"lr": 0.1, "params": [0, 1], **group}]}
    torch.save({"model": model.state_dict(), "optimizer": optimizer}, tmp_path / "run.pth")
    assert "OPT102" not in [each.code for each in ckptfix.check(tmp_path / "run.pth").findings]
