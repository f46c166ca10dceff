"""Missing weights that are in the file after all, under other names or in another layout: said, and never guessed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

import ckptfix
from ckptfix.core.target import target_from_module
from ckptfix.reading.memory import open_state_dict
from ckptfix.report.commands import remedies_text
from ckptfix.rules.other_layout import other_layout

D = 4


def stack(**modules: tuple[int, int]) -> nn.ModuleDict:
    """Two layers of Linear modules of these sizes."""
    layers = [nn.ModuleDict({name: nn.Linear(*size) for name, size in modules.items()}) for _ in range(2)]
    return nn.ModuleDict({"layers": nn.ModuleList(layers), "norm": nn.LayerNorm(D)})


def said(state: dict[str, torch.Tensor], model: nn.Module) -> str:
    return other_layout(open_state_dict(state), target_from_module(model))


FUSED = stack(qkv=(D, 3 * D), out=(D, D))
SPLIT = stack(q=(D, D), k=(D, D), v=(D, D), out=(D, D))


@pytest.mark.parametrize(
    ("file", "model"),
    [
        pytest.param(FUSED, FUSED, id="all in place"),
        pytest.param(stack(out=(D, D), head=(D, 7)), stack(out=(D, D), head=(D, 9)), id="another number of classes"),
        pytest.param(stack(out=(D, D), aux=(D, 7)), stack(out=(D, D)), id="nothing is missing"),
        pytest.param(stack(out=(D, D)), stack(out=(D, D), head=(D, 7)), id="nothing is left over"),
        pytest.param(stack(a=(D, 7)), stack(a=(D, 7), b=(D, D)), id="more layers"),
        pytest.param(stack(out=(D, D), aux=(D, 7)), stack(out=(D, D), head=(D, 9)), id="an auxiliary head"),
    ],
)
def test_silence(file, model):
    assert said(file.state_dict(), model) == ""


@pytest.mark.parametrize(("file", "model"), [(FUSED, SPLIT), (SPLIT, FUSED)], ids=["fused", "split"])
def test_fused_and_split_projections(file, model):
    text = said(file.state_dict(), model)
    assert text.startswith("2 modules may have the missing weights in another layout")
    assert "layers.0.{" in text
    assert "qkv.weight" in text
    report = ckptfix.check(file.state_dict(), model, values=False)
    assert report.exit_code == 1
    flags = [text for finding in report.findings if (text := remedies_text(finding.remedies)).startswith("--")]
    assert all(text.startswith("--rename-layers") for text in flags)


def test_matrices_of_one_shape_under_other_names():
    text = said(stack(query=(D, D), key=(D, D), value=(D, D)).state_dict(), stack(q=(D, D), k=(D, D), v=(D, D)))
    assert "those left over have the shapes of the missing keys:" in text
    assert "(embed_out.weight of lm_head.weight)" in said(
        {"norm.weight": torch.ones(D), "embed_out.weight": torch.ones(9, D)},
        nn.ModuleDict({"norm": nn.LayerNorm(D, bias=False), "lm_head": nn.Linear(D, 9, bias=False)}),
    )


@pytest.mark.parametrize("wrap", ["", "base_model.model."])
def test_an_adapter_that_was_not_merged(wrap):
    state = {f"{wrap}0.base_layer.weight": torch.ones(D, D), f"{wrap}0.lora_A.default.weight": torch.ones(2, D)}
    text = said(state, nn.Sequential(nn.Linear(D, D, bias=False)))
    assert text.startswith("1 weight of the file with an adapter beside")


def test_layers_that_are_counted_from_one():
    state = {f"layers.{at}.weight": torch.ones(D, D) for at in (1, 2)}
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(D, D, bias=False) for _ in range(2)])})
    text = said(state, model)
    assert text.startswith("look at the numbers first: layers.2.weight is left over and layers.0.weight missing")


@pytest.mark.parametrize(
    ("norm", "name"),
    [
        (weight_norm, "weight_norm"),
        (parametrizations.weight_norm, "weight_norm"),
        (spectral_norm, "spectral_norm"),
        (parametrizations.spectral_norm, "spectral_norm"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_norm_of_weights_on_one_side(norm, name):
    plain, normed = nn.Sequential(nn.Conv1d(2, 3, 3)), nn.Sequential(norm(nn.Conv1d(2, 3, 3)))
    assert said(normed.state_dict(), plain).startswith(f"the file has 1 weight as {name} splits it up")
    assert said(plain.state_dict(), normed).startswith(f"the model has {name} applied to 1 weight")
