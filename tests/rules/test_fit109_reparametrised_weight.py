"""FIT109: a weight in parts becomes the weight that torch makes of them when it removes the parametrization."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.utils import (
    parametrizations,
    prune,
    remove_spectral_norm,
    remove_weight_norm,
    spectral_norm,
    weight_norm,
)
from torch.nn.utils.parametrize import remove_parametrizations

import ckptfix
from ckptfix.core.finding import Blocks
from tests.checks import assert_same, check_noop

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")


def plain() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), nn.ConvTranspose2d(6, 6, 3), nn.Linear(6, 1), nn.LSTM(1, 3)
    return nn.ModuleDict({str(number): layer for number, layer in enumerate(layers)})


def with_parts(apply: Apply, numbers: str = "0234", dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model in eval mode whose weights are in parts with other values than in a new model."""
    model = plain()
    for number in numbers:
        apply(model.get_submodule(number), _name(number))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5).add_(0.01 * torch.randn_like(parameter))
    return model.to(dtype).eval()


def _name(number: str) -> str:
    return "weight_hh_l0" if number == "4" else "weight"


Apply = Callable[[nn.Module, str], Any]
FORMS: dict[str, tuple[Apply, Apply, str]] = {
    "weight_norm": (weight_norm, remove_weight_norm, "0234"),
    "weight_norm over all": (partial(weight_norm, dim=cast("int", None)), remove_weight_norm, "0234"),
    "weight_norm of the last axis": (partial(weight_norm, dim=2), remove_weight_norm, "02"),
    "weight_norm of the second axis": (partial(weight_norm, dim=1), remove_weight_norm, "0234"),
    "spectral_norm": (spectral_norm, remove_spectral_norm, "0234"),
    "pruning": (partial(prune.random_unstructured, amount=0.5), prune.remove, "0234"),
    "parametrizations.weight_norm": (parametrizations.weight_norm, remove_parametrizations, "0234"),
    "parametrizations.spectral_norm": (parametrizations.spectral_norm, remove_parametrizations, "0234"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_the_weight_equals_that_of_torch(form: str, dtype: torch.dtype) -> None:
    apply, remove, numbers = FORMS[form]
    model = with_parts(apply, numbers, dtype)
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for number in numbers:
            remove(model.get_submodule(number), _name(number))
    want = dict(model.state_dict())
    kept = copy.deepcopy(before)
    state, report = ckptfix.repair_state_dict(before, plain().to(dtype), unsafe_fixes=True)
    assert [finding.code for finding in report.fixed] == ["FIT109"]
    assert report.exit_code == 0
    assert state.keys() == want.keys()
    assert_same({key: state[key] for key in want}, want)
    assert_same(before, kept)


def test_a_file_is_written_only_on_request(tmp_path) -> None:
    model = with_parts(weight_norm)
    torch.save({"state_dict": model.state_dict(), "epoch": 3}, tmp_path / "normed.pth")
    torch.save(plain().state_dict(), tmp_path / "plain.pth")
    output = tmp_path / "out.pth"
    repair = partial(ckptfix.repair, tmp_path / "normed.pth", like=tmp_path / "plain.pth", output=output)
    left = repair().report.left
    assert not output.exists()
    assert "FIT109" in {finding.code for finding in left if Blocks.FILLING in finding.blocks}
    repair(unsafe_fixes=True)
    written = torch.load(output)
    assert written["epoch"] == 3
    assert written["state_dict"].keys() == plain().state_dict().keys()
    for number in "023":
        parts = (model.state_dict()[f"{number}.weight_{part}"] for part in "vg")
        assert torch.equal(written["state_dict"][f"{number}.weight"], torch._weight_norm(*parts))


@pytest.mark.parametrize(("file", "model"), [("xtts.", ""), ("", "net."), ("a.b.", "")], ids=str)
def test_a_prefix_on_one_side_does_not_matter(file: str, model: str) -> None:
    before = {file + key: value for key, value in with_parts(weight_norm).state_dict().items()}
    target: nn.Module = plain()
    for name in reversed(model.split(".")[:-1]):
        target = nn.ModuleDict({name: target})
    state, report = ckptfix.repair_state_dict(before, target, unsafe_fixes=True)
    assert state.keys() == target.state_dict().keys()
    assert {"FIT109"} <= {finding.code for finding in report.fixed} <= {"FIT109", "KEY103", "KEY104", "BUF101"}
    own = {key.removeprefix(file): value for key, value in before.items()}
    made = torch._weight_norm(own["0.weight_v"], own["0.weight_g"])
    assert torch.equal(state[f"{model}0.weight"], made)


@pytest.mark.parametrize("form", ["weight_norm", "spectral_norm", "pruning", "parametrizations.weight_norm"])
def test_renamed_layers_are_reparametrised(form: str) -> None:
    """Each part gets the name of its layer first, as the weight itself would."""
    apply, remove, _ = FORMS[form]
    model = with_parts(apply, "03")
    before = {f"layer{key}": value for key, value in model.state_dict().items()}
    for number in "03":
        remove(model.get_submodule(number), "weight")
    state, report = ckptfix.repair_state_dict(before, plain(), rename_layers=True, unsafe_fixes=True)
    assert report.exit_code == 0
    assert state.keys() == plain().state_dict().keys()
    assert_same(state, {key: model.state_dict()[key] for key in state})
    refused = ckptfix.check(before, plain(), rename_layers=True).left
    assert {"FIT109"} == {finding.code for finding in refused if finding.needs_unsafe}


@pytest.mark.parametrize("front", ["", "layer"], ids=["the same names", "other names"])
@pytest.mark.parametrize("form", [form for form in FORMS if "weight_norm" in form])
def test_a_plain_weight_gets_the_parts_of_torch(form: str, front: str) -> None:
    apply, _, numbers = FORMS[form]
    model = plain()
    before = {front + key: value.clone() for key, value in model.state_dict().items()}
    for number in numbers:
        apply(model.get_submodule(number), _name(number))
    target = with_parts(apply, numbers)
    state, report = ckptfix.repair_state_dict(before, target, rename_layers=True)
    assert report.exit_code == 0
    assert_same({key: state[key] for key in model.state_dict()}, dict(model.state_dict()))


def test_a_plain_weight_with_a_row_of_zeros_is_refused() -> None:
    before = plain().state_dict()
    before["0.weight"][2] = 0
    with pytest.raises(ckptfix.CkptfixError, match="rows of zeros"):
        ckptfix.repair_state_dict(before, with_parts(weight_norm))


def test_parts_under_unknown_names_are_not_dropped() -> None:
    normed = weight_norm(nn.Linear(3, 3, bias=False))
    before = {**{f"c.{key}": value for key, value in normed.state_dict().items()}, "bias": torch.ones(2)}
    target = nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in "ab"})
    target.register_parameter("bias", nn.Parameter(torch.ones(2)))
    report = ckptfix.check(before, target, rename_layers=True)
    assert not any(remedy.options for finding in report.left for remedy in finding.remedies if finding.needs_unsafe)
    assert any("1 weight of the file in parts" in remedy.text for finding in report.left for remedy in finding.remedies)


def test_noop_the_model_has_the_parts() -> None:
    for apply, _, numbers in FORMS.values():
        model = with_parts(apply, numbers)
        check_noop(model.state_dict(), "FIT109", model, unsafe_fixes=True)
    check_noop(plain().state_dict(), "FIT109", plain(), unsafe_fixes=True)


@pytest.mark.parametrize(
    "parts",
    [
        {"weight_orig": torch.ones(6, 4, 3), "weight_u": torch.ones(6)},
        {"weight_orig": torch.ones(6, 4, 3), "weight_u": torch.ones(5), "weight_v": torch.ones(12)},
        {"weight_orig": torch.ones(6, 4, 3), "weight_mask": torch.ones(6, 4, 1)},
        {"weight_orig": torch.ones(6, 4, 3), "weight_mask": torch.ones(6, 4, 3), "weight_u": torch.ones(6)},
        {"weight_v": torch.ones(6, 4, 3), "weight_g": torch.ones(5, 1, 1)},
        {"weight_v": torch.ones(6, 4, 3), "weight_g": torch.ones(6, 1, 1).half()},
        {"weight_v": torch.ones(6, 4, 3)},
        {"weight_v": torch.ones(6, 5, 3), "weight_g": torch.ones(6, 1, 1)},
        {"weight_v": torch.ones(6, 4, 3), "weight_g": "a word"},
        {f"parametrizations.weight.{name}": torch.ones(6, 4, 3) for name in ("original", "0.base")},
    ],
    ids=lambda parts: " ".join(parts),
)
def test_parts_that_do_not_fit_are_left_unchanged(parts: dict[str, Any]) -> None:
    model = nn.ModuleDict({"0": nn.Conv1d(4, 6, 3)})
    state = {"0.bias": torch.ones(6), **{f"0.{name}": tensor for name, tensor in parts.items()}}
    check_noop(state, "FIT109", model, unsafe_fixes=True)


def test_the_axis_of_a_square_kernel_needs_a_model(tmp_path) -> None:
    model = spectral_norm(nn.ConvTranspose1d(6, 6, 3))
    torch.save(nn.ConvTranspose1d(6, 6, 3).state_dict(), tmp_path / "plain.pth")
    check_noop(model.state_dict(), "FIT109", None, like=tmp_path / "plain.pth", unsafe_fixes=True)


def test_a_part_is_never_renamed_to_the_weight(tmp_path) -> None:
    """Its values are similar, and its shape is the same."""
    model = with_parts(weight_norm, "023")
    torch.save(plain().state_dict(), tmp_path / "plain.pth")
    for like in ({"like": tmp_path / "plain.pth"}, {"model": plain()}):
        check_noop(model.state_dict(), "KEY106", rename_layers=True, **like)


def test_the_weight_before_its_dropout_is_taken() -> None:
    """As AWD-LSTM has it: the other is what the last batch of the training ran with."""
    model, dropped = nn.ModuleDict({"0": nn.LSTM(2, 3)}), torch.zeros(12, 3)
    weights = model.state_dict()
    raw = {("0.weight_hh_l0_raw" if key == "0.weight_hh_l0" else key): value for key, value in weights.items()}
    state, report = ckptfix.repair_state_dict({"0.weight_hh_l0": dropped, **raw}, model, unsafe_fixes=True)
    assert [finding.code for finding in report.fixed] == ["FIT109"]
    assert_same({key: state[key] for key in weights}, dict(weights))
    check_noop({"0.weight_hh_l0": dropped, **raw}, "FIT109", like=None, unsafe_fixes=True)
