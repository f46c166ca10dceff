"""How the leftover tensors of a file may hold the missing ones of a model."""

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

import ckptfix
from ckptfix.report.advice import Presentation, next_command, remedies_text
from ckptfix.rules.fit101_missing_key import missing_key
from ckptfix.rules.leftovers import other_layout
from tests.rules.proposals import context, propose

D = 4


def stack(**modules: tuple[int, int]) -> nn.ModuleDict:
    """Two layers of Linear modules of these sizes."""
    layers = [nn.ModuleDict({name: nn.Linear(*size) for name, size in modules.items()}) for _ in range(2)]
    return nn.ModuleDict({"layers": nn.ModuleList(layers), "norm": nn.LayerNorm(D)})


def said(state: dict[str, torch.Tensor], model: nn.Module) -> str:
    found = context(state, model)
    assert found.target is not None
    return other_layout(found, found.target)


FUSED = stack(qkv=(D, 3 * D), out=(D, D))


def activations(**names: nn.Module) -> nn.Sequential:
    return nn.Sequential(*(nn.ModuleDict({"conv": nn.Linear(D, D), **deepcopy(names)}) for _ in range(2)))


@pytest.mark.parametrize("size", [1, D])
def test_vectors_under_other_names_are_not_filled(size):
    """MONAI's UNet moved its PReLU from `act` to `adn.A`."""
    new, old = activations(adn=nn.ModuleDict({"A": nn.PReLU(size)})), activations(act=nn.PReLU(size))
    assert "0.adn.A.weight has the shape and the numbers of 0.act.weight; if it is the same tensor" in said(
        new.state_dict(), old
    )
    (finding,) = propose(missing_key, new.state_dict(), old)
    assert "fill" not in [name for remedy in finding.remedies for name, _ in remedy.options]


def test_missing_layers_are_not_called_renamed():
    old, state = activations(act=nn.PReLU(D)), activations().state_dict()
    assert said(state, old) == ""
    assert said({**state, "0.norm.bias": torch.ones(D), "1.norm.bias": torch.ones(D)}, old) == ""


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
def test_noop_nothing_is_rearranged(file, model):
    assert said(file.state_dict(), model) == ""


def test_layers_of_another_version():
    """As of RWKV 4 and 5, where each layer has a weight that the other version does not have."""

    def version(**own: tuple[int, int]) -> nn.ModuleDict:
        layers = [nn.ModuleDict({name: nn.Linear(*size) for name, size in own.items()}) for _ in range(4)]
        return nn.ModuleDict({"blocks": nn.ModuleList(layers)})

    state, model = version(key=(D, D), first=(D, 1)).state_dict(), version(key=(D, D), faaaa=(D, 3))
    assert "version of the model" in said(state, model)
    report = ckptfix.check(state, model)
    assert next_command(report, Presentation()) == ""


def test_other_names_in_the_same_module():
    """The annotated Transformer calls the vectors of its norms so."""
    state = stack(out=(D, D)).state_dict()
    renamed = {key.replace("norm.weight", "norm.a_2").replace("norm.bias", "norm.b_2"): state[key] for key in state}
    assert "norm.a_2 or norm.b_2 has the shape of norm.weight" in said(renamed, stack(out=(D, D)))
    assert said({**state, "norm.scale": torch.ones(D)}, stack(out=(D, D))) == ""


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
    assert "the leftover keys have the shapes of the missing ones:" in text
    assert "(embed_out.weight of lm_head.weight)" in said(
        {"norm.weight": torch.ones(D), "embed_out.weight": torch.ones(9, D)},
        nn.ModuleDict({"norm": nn.LayerNorm(D, bias=False), "lm_head": nn.Linear(D, 9, bias=False)}),
    )


@pytest.mark.parametrize("wrap", ["", "base_model.model."])
def test_an_adapter_that_was_not_merged(wrap):
    state = {f"{wrap}0.base_layer.weight": torch.ones(D, D), f"{wrap}0.lora_A.default.weight": torch.ones(2, D)}
    text = said(state, nn.Sequential(nn.Linear(D, D, bias=False)))
    assert text.startswith("1 weight of the file with an unmerged adapter")


def test_layers_that_are_counted_from_one():
    state = {f"layers.{at}.weight": torch.ones(D, D) for at in (1, 2)}
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(D, D, bias=False) for _ in range(2)])})
    text = said(state, model)
    assert text.startswith("check the numbers first: layers.2.weight is left over and layers.0.weight missing")


@pytest.mark.parametrize(
    ("norm", "name"),
    [
        (weight_norm, "weight_norm"),
        (parametrizations.weight_norm, "weight_norm"),
        (spectral_norm, "spectral_norm"),
        (partial(prune.l1_unstructured, name="weight", amount=0.5), "pruning"),
        (parametrizations.spectral_norm, "spectral_norm"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_norm_of_weights_on_one_side(norm, name):
    plain, normed = nn.Sequential(nn.Conv1d(2, 3, 3)), nn.Sequential(norm(nn.Conv1d(2, 3, 3)))
    assert said(normed.state_dict(), plain).startswith(f"the file has 1 weight as {name} splits it:")
    assert said(plain.state_dict(), normed).startswith(f"the model has {name} applied to 1 weight")


@pytest.mark.parametrize("norm", [spectral_norm, parametrizations.spectral_norm])
def test_a_stored_singular_vector_is_not_filled(norm):
    model = nn.Sequential(norm(nn.Linear(D, D)))
    state = {key: value for key, value in model.state_dict().items() if not key.endswith("_v")}
    result = ckptfix.repair(state, model, fill="target")
    assert not result.report.edits
    assert result.report.left[0].remedies[0].text.startswith("do not fill them")


@pytest.mark.parametrize("form", ["0.weight._packed", "0.weight_packed", "0.parametrizations.weight.original"])
def test_a_tensor_under_a_longer_name_is_not_filled_nor_dropped(form: str):
    """Whatever packed it: its weights are in the file."""
    state = {form: torch.zeros(D, D, dtype=torch.int8), "0.bias": torch.zeros(D), "1.weight": torch.ones(D, D)}
    model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D, bias=False))
    report = ckptfix.check(state, model)
    assert not any(remedy.options for finding in report.findings for remedy in finding.remedies)
    assert "0.weight" not in said({"0.scale": torch.ones(D, D, 2), "0.bias": torch.zeros(D)}, model)


def test_dropped_layers_are_not_compared_with_missing_ones():
    """Of --drop-mismatched and --fill target: the unexpected layer has the shape of the new one by accident."""
    old = nn.ModuleDict({"body": nn.Linear(D, D), "neck": nn.Linear(D, D), "head": nn.Linear(D, 3)})
    new = nn.ModuleDict({"body": nn.Linear(D, D), "head": nn.Linear(D, D)})
    settings: dict[str, Any] = {"fill": "target", "drop_mismatched": True, "unsafe_fixes": True}
    state_dict, report = ckptfix.repair_state_dict(old.state_dict(), new, allow_untrained=True, **settings)
    assert list(state_dict) == list(new.state_dict())
    assert [finding.code for finding in report.fixed] == ["FIT103", "FIT102", "FIT101"]


def test_tied_tensors_that_are_left_over_count_once():
    """As PyG's GATConv had `lin_src` and `lin_dst`, which are `lin` in later releases."""
    weight, scale = torch.ones(D, D), torch.ones(9)
    state = {"conv.lin_src.weight": weight, "conv.lin_dst.weight": weight, "conv.scale": scale}
    model = nn.Module()
    model.conv = nn.ParameterDict({"scale": scale.clone()})
    model.conv.lin = nn.Linear(D, D, bias=False)
    assert "(conv.lin_src.weight of conv.lin.weight)" in said(state, model)
