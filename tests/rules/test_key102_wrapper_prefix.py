"""KEY102: a leading ``module.``."""

import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.core.finding import Level
from ckptfix.report.advice import remedies_text
from ckptfix.rules.key102_wrapper_prefix import wrapper_prefix
from tests.checks import assert_same, check_noop, check_repaired
from tests.rules.proposals import propose, repaired

ONE = torch.ones(2)
COUNT = torch.tensor(3)


class Named(nn.Module):
    """A model with a submodule that is really named ``module``, and perhaps the same weights without that prefix."""

    def __init__(self, twin: bool = False) -> None:
        super().__init__()
        self.module = nn.Linear(2, 3)
        self.head = nn.Linear(3, 4)
        if twin:
            self.weight = nn.Parameter(torch.ones(3, 2))


def prefixed(state, prefix="module."):
    return {prefix + key: value for key, value in state.items()}


@pytest.mark.parametrize(
    ("state", "model"),
    [
        pytest.param({}, None, id="empty"),
        pytest.param({"weight": ONE}, None, id="no prefix"),
        pytest.param(Named().state_dict(), None, id="a submodule named module, beside others"),
        pytest.param(Named().state_dict(), Named(), id="a submodule named module, in the target too"),
        pytest.param(prefixed(Named().state_dict()), nn.DataParallel(Named()), id="the target is wrapped"),
        pytest.param({"modules.weight": ONE, "module_list.weight": ONE}, None, id="a segment is compared whole"),
        pytest.param({"module": ONE}, None, id="a parameter named module"),
        pytest.param({"module.0.module.w": ONE, "module.1.module.w": ONE}, None, id="modules of tensordict"),
        pytest.param({"n_averaged": COUNT, "weight": ONE}, None, id="n_averaged without module beside it"),
        pytest.param({"module.w": ONE, "n_averaged": torch.ones(3)}, None, id="an n_averaged that is no counter"),
        pytest.param(
            torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2)).state_dict(),
            torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2)),
            id="the target is an AveragedModel",
        ),
        pytest.param({"module.x": ONE, "y": ONE}, nn.Linear(2, 2), id="nothing that the target wants"),
    ],
)
def test_noop(state, model):
    check_noop(state, "KEY102", model)


@pytest.mark.parametrize(
    ("before", "after", "model"),
    [
        pytest.param({"module.a.w": ONE}, {"a.w": ONE}, None, id="once"),
        pytest.param({"module.module.a.w": ONE}, {"a.w": ONE}, None, id="twice"),
        pytest.param(
            {"module.module.a.w": ONE, "module.b.w": ONE},
            {"module.a.w": ONE, "b.w": ONE},
            None,
            id="what all keys share",
        ),
        pytest.param({"module.module": ONE}, {"module": ONE}, None, id="the parameter itself is named module"),
        pytest.param(
            {"module.backbone_module.blocks.w": ONE, "module.module_x.w": ONE},
            {"backbone_module.blocks.w": ONE, "module_x.w": ONE},
            None,
            id="names that contain the word",
        ),
        pytest.param({"n_averaged": COUNT, "module.w": ONE}, {"w": ONE}, None, id="AveragedModel"),
        pytest.param(
            {"n_averaged": COUNT, "module.module.w": ONE}, {"w": ONE}, None, id="AveragedModel of DataParallel"
        ),
        pytest.param({"module.n_averaged": COUNT, "module.module.w": ONE}, {"w": ONE}, None, id="the other way round"),
        pytest.param(
            {"n_averaged": COUNT, "module.n_averaged": COUNT, "module.module.w": ONE},
            {"w": ONE},
            None,
            id="two averages",
        ),
        pytest.param(prefixed(Named().state_dict()), dict(Named().state_dict()), Named(), id="a module within"),
        pytest.param(
            prefixed(Named(twin=True).state_dict()),
            dict(Named(twin=True).state_dict()),
            Named(twin=True),
            id="a module within, and a key that the cut of another would hit",
        ),
        pytest.param(
            {"n_averaged": COUNT, **prefixed(nn.Linear(2, 2).state_dict())},
            prefixed(nn.Linear(2, 2).state_dict()),
            nn.DataParallel(nn.Linear(2, 2)),
            id="the prefix is wanted and the counter is not",
        ),
    ],
)
def test_repaired(before, after, model):
    torch.manual_seed(0)
    values = {key: torch.full_like(value, number) for number, (key, value) in enumerate(before.items())}
    names = dict(zip([key for key in before if not key.endswith("n_averaged")], after, strict=True))
    check_repaired(values, {name: values[key] for key, name in names.items()}, "KEY102", model)


def test_half_prefixed_without_a_target_is_only_reported():
    state = {"module.bn1.weight": ONE, "bn1.bias": ONE, "module.fc.weight": ONE}
    (finding,) = propose(wrapper_prefix, state)
    assert (finding.level, finding.keys, finding.fix) == (Level.WARNING, ("module.bn1.weight",), None)
    assert "--model" in remedies_text(finding.remedies)


def test_numbering_that_continues_without_the_prefix():
    state = {
        f"{'module.' if at < 2 else ''}net.blocks.{at}.{leaf}": torch.ones(2) for at in range(4) for leaf in ("w", "b")
    }
    (finding,) = propose(wrapper_prefix, state)
    assert (finding.keys, finding.fix) == (tuple(state)[:4], None)


def test_noop_the_same_numbers_with_and_without_the_prefix():
    parts = [(prefix, at) for prefix in ("module.enc.{}.attn", "enc.{}.mlp") for at in range(2)]
    assert propose(wrapper_prefix, {f"{prefix.format(at)}.w": ONE for prefix, at in parts}) == []


def test_half_prefixed_with_a_target():
    model = nn.BatchNorm1d(4)
    state = {("module." if "running" in key else "") + key: value for key, value in model.state_dict().items()}
    check_repaired(state, dict(model.state_dict()), "KEY102", model)


def test_keys_of_other_shapes_or_names_follow():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    state = {"module.0.weight": torch.ones(3, 2), "module.1.weight": torch.ones(9, 3), "module.aux": ONE}
    assert list(repaired(wrapper_prefix, state, model)) == ["0.weight", "1.weight", "aux"]
    half = {**state, "0.bias": torch.ones(3)}
    assert list(repaired(wrapper_prefix, half, model)) == ["0.weight", "1.weight", "module.aux", "0.bias"]


def test_a_stray_key_does_not_prevent_the_fix_with_a_target():
    model = nn.Linear(2, 2)
    state = {**prefixed(model.state_dict()), "epoch_loss": torch.zeros(())}
    assert list(repaired(wrapper_prefix, state, model)) == ["weight", "bias", "epoch_loss"]


def test_two_sets_of_weights_are_not_merged():
    model = nn.Linear(2, 2)
    state = {**prefixed(model.state_dict()), **prefixed(model.state_dict(), "module.module.")}
    (finding,) = propose(wrapper_prefix, state, model)
    assert finding.fix is None
    assert "both be weight" in finding.message
    same, _ = ckptfix.repair_state_dict(state, model, select=("KEY102",))
    assert_same(same, state)


def test_metadata_follows_the_keys():
    model = nn.DataParallel(nn.Sequential(nn.BatchNorm1d(3), nn.ReLU()))
    check_repaired(model.state_dict(), model.module.state_dict(), "KEY102")


def test_the_counter_of_mmengine_is_dropped_only_for_a_target_without_it():
    model = nn.Linear(2, 2)
    averaged = {"steps": torch.tensor(7), **{f"module.{key}": value for key, value in model.state_dict().items()}}
    check_repaired(averaged, dict(model.state_dict()), "KEY102", model)
    check_noop(averaged, "KEY102")
    holder = nn.Module()
    holder.module = model
    holder.register_buffer("steps", torch.tensor(0))
    check_noop(averaged, "KEY102", holder)
