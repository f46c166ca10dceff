"""KEY105 on modules of this torch: old and new weight_norm and spectral_norm, DenseNet's and LayerNorm's names."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from ckptfix.core.finding import Applicability, Level
from ckptfix.rules.key105_renamed_by_release import renamed_by_release
from tests.rules.proposals import propose, repaired

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")


def with_keys(**shapes: tuple[int, ...]) -> nn.Module:
    """A module that expects these keys; `__` means a dot."""
    root = nn.Module()
    for name, shape in shapes.items():
        *path, leaf = name.split("__")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, nn.Parameter(torch.randn(shape)))
    return root


def old_weight_norm(module: nn.Module, name: str = "weight") -> nn.Module:
    return nn.utils.weight_norm(module, name)


def old_spectral_norm(module: nn.Module) -> nn.Module:
    return nn.utils.spectral_norm(module)


@pytest.mark.parametrize(
    ("state", "model"),
    [
        pytest.param({"gamma": torch.ones(4)}, None, id="no target: gamma may be a layer scale"),
        pytest.param(
            {"gamma": torch.ones(4)}, with_keys(gamma=(4,), weight=(4,)), id="ConvNeXt: the target wants gamma"
        ),
        pytest.param({"gamma": torch.ones(4)}, with_keys(weight=(5,)), id="another shape under the new name"),
        pytest.param(
            {"gamma": torch.ones(4), "weight": torch.ones(4)}, with_keys(weight=(4,)), id="the new name is taken"
        ),
        pytest.param({"my_gamma": torch.ones(4)}, with_keys(my_weight=(4,)), id="gamma is a part of the segment"),
        pytest.param({"weight_g": torch.ones(4)}, with_keys(weight=(4,)), id="the norm was removed, not rewritten"),
        pytest.param({"norm.1.weight": torch.ones(4)}, with_keys(norm1__weight=(4,)), id="not a dense layer"),
        pytest.param(
            {"moving_mean": torch.ones(4), "running_mean": torch.ones(4)}, nn.BatchNorm1d(4), id="both statistics"
        ),
        pytest.param({"mean": torch.ones(3)}, nn.BatchNorm1d(4), id="the mean of images, not of a norm"),
        pytest.param({"weight": torch.ones(4)}, nn.LayerNorm(4), id="all is well"),
    ],
)
def test_noop(state, model):
    assert propose(renamed_by_release, state, model) == []


PAIRS = [
    pytest.param(
        lambda: old_weight_norm(nn.Linear(4, 6)),
        lambda: parametrizations.weight_norm(nn.Linear(4, 6)),
        id="weight_norm",
    ),
    pytest.param(
        lambda: old_weight_norm(nn.LSTM(4, 6), "weight_hh_l0"),
        lambda: parametrizations.weight_norm(nn.LSTM(4, 6), "weight_hh_l0"),
        id="weight_norm of another tensor than weight",
    ),
    pytest.param(
        lambda: nn.Sequential(old_weight_norm(nn.ConvTranspose1d(4, 6, 3))),
        lambda: nn.Sequential(parametrizations.weight_norm(nn.ConvTranspose1d(4, 6, 3))),
        id="weight_norm of a submodule",
    ),
    pytest.param(
        lambda: old_spectral_norm(nn.Linear(4, 6)),
        lambda: parametrizations.spectral_norm(nn.Linear(4, 6)),
        id="spectral_norm",
    ),
    pytest.param(
        lambda: nn.Sequential(old_spectral_norm(nn.ConvTranspose1d(4, 4, 3))),
        lambda: nn.Sequential(parametrizations.spectral_norm(nn.ConvTranspose1d(4, 4, 3))),
        id="spectral_norm whose u and v have the shape of other tensors",
    ),
    pytest.param(
        lambda: with_keys(features__denselayer3__norm__1__weight=(4,), features__denselayer3__conv__2__weight=(4, 4)),
        lambda: with_keys(features__denselayer3__norm1__weight=(4,), features__denselayer3__conv2__weight=(4, 4)),
        id="DenseNet",
    ),
    pytest.param(
        lambda: with_keys(norm__gamma=(4,), norm__beta=(4,)),
        lambda: with_keys(norm__weight=(4,), norm__bias=(4,)),
        id="LayerNorm",
    ),
    *(
        pytest.param(
            lambda names=names: with_keys(**{f"bn__{name}": (4,) for name in names}),
            lambda: with_keys(bn__running_mean=(4,), bn__running_var=(4,)),
            id=f"BatchNorm with {' and '.join(names)}",
        )
        for names in (
            ("moving_mean", "moving_variance"),
            ("moving_mean", "moving_var"),
            ("_mean", "_variance"),
            ("mean", "variance"),
            ("mean", "var"),
        )
    ),
    pytest.param(
        lambda: with_keys(q__lora_A__weight=(2, 4), q__ia3_l=(4,)),
        lambda: with_keys(q__lora_A__default__weight=(2, 4), q__ia3_l__default=(4,)),
        id="adapters of peft",
    ),
]


@pytest.mark.parametrize("backwards", [False, True], ids=["to the new names", "to the old names"])
@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_both_directions_are_exact(old, new, backwards):
    source, model = (new(), old()) if backwards else (old(), new())
    state = repaired(renamed_by_release, source.state_dict(), model)
    model.load_state_dict(state, strict=True)
    stored = sorted(value.numpy().tobytes() for value in source.state_dict().values())
    assert sorted(value.numpy().tobytes() for value in model.state_dict().values()) == stored


@pytest.mark.parametrize(("old", "new"), PAIRS[0:1] + PAIRS[3:4])
def test_the_model_has_the_same_outputs(old, new):
    source, model, batch = old(), new(), torch.randn(2, 4)
    for _ in range(3):
        source(batch)  # spectral_norm moves its vectors in training
    model.load_state_dict(repaired(renamed_by_release, source.state_dict(), model))
    assert torch.equal(model.eval()(batch), source.eval()(batch))


@pytest.mark.parametrize("wrap", ["", "base_model__model__"])
def test_base_layer_is_added_and_never_removed(wrap):
    plain = with_keys(q__weight=(4, 4), q__bias=(4,))
    adapted = with_keys(**{f"{wrap}q__base_layer__weight": (4, 4), f"{wrap}q__base_layer__bias": (4,)})
    state = repaired(renamed_by_release, plain.state_dict(), adapted)
    adapted.load_state_dict(state, strict=True)
    assert propose(renamed_by_release, adapted.state_dict(), plain) == []


def test_the_finding_names_the_rewrite():
    source, model = old_weight_norm(nn.Linear(2, 3)), parametrizations.weight_norm(nn.Linear(2, 3))
    (finding,) = propose(renamed_by_release, source.state_dict(), model)
    assert finding.level == Level.ERROR
    assert finding.keys == ("weight_g", "weight_v")
    assert finding.evidence == {"rewrites": {"weight_norm": 2}}
    assert finding.fix is not None
    assert finding.fix.applicability == Applicability.SAFE


def test_mean_and_variance_under_other_names_are_not_exchanged():
    state = {"bn.var": torch.full((4,), 2.0), "bn.mean": torch.full((4,), 3.0)}
    found = repaired(renamed_by_release, state, nn.ModuleDict({"bn": nn.BatchNorm1d(4)}))
    assert {key: value[0].item() for key, value in found.items()} == {"bn.running_var": 2.0, "bn.running_mean": 3.0}
