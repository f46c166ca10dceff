"""Codes of weights are recognised by the tensors next to them, whatever their later names."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ckptfix
from ckptfix.report.advice import recommended
from tests.checks import bytes_of
from tests.rules.test_fit107_quantised_weights import net


def chain(names: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Four layers of different widths."""
    torch.manual_seed(seed)
    widths = [16, 24, 32, 40, 48]
    layers = {f"{names.format(at)}.": nn.Linear(*pair).state_dict() for at, pair in enumerate(pairwise(widths))}
    return {f"{front}{name}": value for front, layer in layers.items() for name, value in layer.items()}


@pytest.mark.parametrize(("code", "names"), [("KEY104", "net.layers.{}.fc"), ("KEY106", "blocks.{}.linear")])
def test_scales_follow_their_codes_to_other_names(code, names, tmp_path):
    """Under their old names they would be dropped, and the codes pass for weights."""
    state, front = chain(names), names.format(1)
    state[f"{front}.weight"] = codes = torch.randn(32, 24).to(torch.float8_e4m3fn)
    save_file({**state, f"{front}.scale_weight": torch.tensor([0.5])}, tmp_path / "f.safetensors")
    save_file(chain("layers.{}.fc", seed=1), tmp_path / "like.safetensors")
    settings: dict[str, Any] = {"like": tmp_path / "like.safetensors", "unsafe_fixes": True, "rename_layers": True}
    repaired = ckptfix.repair(tmp_path / "f.safetensors", **settings)
    assert {finding.code for finding in repaired.report.fixed} >= {code, "FIT107"}
    assert bytes_of(repaired.state_dict()["layers.1.fc.weight"]) == bytes_of(codes.float() * 0.5)
    assert repaired.report.exit_code == 0


def test_codes_of_experts_without_a_suffix_are_neither_dropped_nor_filled(tmp_path):
    """compressed-tensors packs the matrix of all experts as `gate_up_proj_packed`."""
    plain = {"experts.gate_up_proj": torch.randn(4, 16, 32), "router.weight": torch.randn(64, 64)}
    beside = {
        "experts.gate_up_proj_scale": torch.rand(4, 16, 1),
        "experts.gate_up_proj_shape": torch.tensor([4, 16, 32]),
    }
    codes = {"experts.gate_up_proj_packed": torch.zeros(4, 16, 4, dtype=torch.int32), **beside}
    state = {"router.weight": plain["router.weight"], **codes}
    save_file(state, tmp_path / "f.safetensors")
    save_file(plain, tmp_path / "like.safetensors")
    (finding,) = ckptfix.check(tmp_path / "f.safetensors").findings
    assert (finding.code, set(finding.keys)) == ("FIT107", set(codes))
    report = ckptfix.check(tmp_path / "f.safetensors", like=tmp_path / "like.safetensors")
    assert [remedy.options for remedy in recommended(report)] == []


def test_codes_that_lose_their_scales_are_not_written(tmp_path):
    state = dict(net().state_dict())
    state["first.weight"] = state.pop("0.weight").to(torch.float8_e4m3fn)
    torch.save({**state, "first.scale_weight": torch.ones(1)}, tmp_path / "f.pth")
    settings: dict[str, Any] = {"rename": ("first.weight=0.weight",), "unsafe_fixes": True}
    report = ckptfix.repair(tmp_path / "f.pth", net(), output=tmp_path / "out.pth", **settings).report
    assert "FIT107" in {finding.code for finding in report.remaining}
    assert (report.exit_code, (tmp_path / "out.pth").exists()) == (1, False)
