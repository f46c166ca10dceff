"""FIT102: keys that the target has no place for."""

import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.core.finding import Applicability, Level
from ckptfix.report.advice import recommended, remedies_text
from ckptfix.rules.fit102_unexpected_key import unexpected_key
from tests.rules.proposals import propose, repaired


class WithState(nn.Linear):
    def get_extra_state(self) -> object:
        return {"step": 1}

    def set_extra_state(self, state: object) -> None:
        pass


@pytest.mark.parametrize(
    ("state", "model"),
    [
        pytest.param({"anything": torch.zeros(1)}, None, id="no target"),
        pytest.param(nn.Linear(2, 2).state_dict(), nn.Linear(2, 2), id="the same keys"),
        pytest.param({"weight": torch.zeros(9)}, nn.Linear(2, 2), id="another shape is another rule's business"),
        pytest.param(WithState(2, 2).state_dict(), WithState(2, 2), id="an entry that is no tensor, and wanted"),
        pytest.param({}, nn.Linear(2, 2), id="an empty file"),
    ],
)
def test_noop(state, model):
    assert propose(unexpected_key, state, model) == []


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param({"aux.weight": torch.zeros(4, 4)}, id="a part that the target lacks"),
        pytest.param({"_extra_state": {"step": 1}}, id="an entry that is no tensor"),
    ],
)
def test_dropped_unsafely(extra):
    model = nn.Linear(2, 2)
    (finding,) = propose(unexpected_key, {**model.state_dict(), **extra}, model)
    assert finding.level == Level.ERROR
    assert finding.keys == tuple(extra)
    assert finding.fix is not None
    assert finding.fix.applicability == Applicability.UNSAFE
    assert not finding.fix.asked
    model.load_state_dict(repaired(unexpected_key, {**model.state_dict(), **extra}, model), strict=True)


def test_no_fix_for_the_wrong_model():
    (finding,) = propose(unexpected_key, {"a": torch.zeros(1), "b": torch.zeros(2)}, nn.Linear(2, 2))
    assert finding.fix is None
    assert finding.evidence == {"numel": 3, "of": 3}
    assert "--weights" not in remedies_text(finding.remedies)


def test_another_state_dict_is_offered_if_the_file_has_one(tmp_path):
    sets = {name: {f"{name}.weight": torch.ones(2, 3), f"{name}.bias": torch.ones(3)} for name in ("g", "d")}
    torch.save(sets, tmp_path / "gan.pth")
    report = ckptfix.check(tmp_path / "gan.pth", nn.Linear(2, 2))
    (finding,) = (finding for finding in report.findings if finding.code == "FIT102")
    assert "--weights" in remedies_text(finding.remedies)


def test_one_of_two_sets_is_to_be_chosen_first():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    state = {f"{name}.{key}": value for name in ("online", "ema") for key, value in model.state_dict().items()}
    (finding,) = propose(unexpected_key, state, model)
    assert [remedy.options for remedy in finding.remedies] == [(("weights", "online"),), (("weights", "ema"),)]


def test_an_adapter_is_to_be_merged_first():
    state = {**nn.Linear(2, 2).state_dict(), "lora_A.default.weight": torch.ones(1, 2)}
    (finding,) = propose(unexpected_key, state, nn.Linear(2, 2))
    assert remedies_text(finding.remedies).startswith("merge the adapter first")


def test_possible_sources_of_filled_keys_are_not_dropped():
    """More of the same shapes are left over than missing, under names that say nothing."""

    def built(names: str) -> nn.ModuleDict:
        layers = {name: nn.Linear(4, 4, bias=False) for name in names.split()}
        return nn.ModuleDict({**layers, "keep": nn.Linear(4, 360)})

    state, model = built("k q z p m w a r t e u i o s").state_dict(), built("alpha gamma omega theta rho tau mu nu xi")
    report = ckptfix.repair(state, model, unsafe_fixes=True, fill="target", dry_run=True).report
    (finding,) = (one for one in report.findings if one.code == "FIT102")
    assert finding.fix is not None
    assert finding.fix.applicability is Applicability.DISPLAY_ONLY
    assert report.exit_code == 1


@pytest.mark.parametrize(
    ("key", "offers"),
    [
        ("normalize_inputs.buffer_observation_state.mean", False),
        ("unnormalize_outputs.buffer_action.std", False),
        ("norm.mean", True),
        ("aux.normalized.weight", True),
    ],
)
def test_normalisation_statistics_of_a_policy_are_not_dropped(key, offers):
    model = nn.Sequential(nn.Linear(4, 4))
    report = ckptfix.check({**model.state_dict(), key: torch.ones(4)}, model)
    assert bool(recommended(report)) is offers
