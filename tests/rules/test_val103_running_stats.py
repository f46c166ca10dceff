import pytest
import torch
from torch import nn

from ckptfix.core.finding import Level
from ckptfix.rules.val103_running_stats import running_stats
from tests.checks import check_repaired
from tests.rules.healthy import HEALTHY, build
from tests.rules.proposals import loud, propose


def norm(mean: float = 0.1, variance: float = 0.9, batches: int | None = 7) -> dict[str, torch.Tensor]:
    """The state_dict of a norm of eight channels."""
    state = {"bn.running_mean": torch.full((8,), mean), "bn.running_var": torch.full((8,), variance)}
    return state if batches is None else {**state, "bn.num_batches_tracked": torch.tensor(batches)}


def test_noop_healthy_models_without_warnings():
    for name in HEALTHY:
        assert loud(propose(running_stats, build(name).state_dict())) == [], name


@pytest.mark.parametrize(
    "state",
    [
        pytest.param(norm(), id="updated"),
        pytest.param(norm(batches=None), id="updated-before-0.4.1"),
        pytest.param(norm(batches=0), id="counter-supplied-later"),
        pytest.param(norm(variance=1e-12), id="tiny-variance"),
        pytest.param({"fc.weight": -torch.ones(4, 4)}, id="no-norm"),
        pytest.param({"bn.running_var": torch.full((8,), float("nan"))}, id="nan-is-for-another-rule"),
        pytest.param({"bn.running_var": torch.zeros(0)}, id="empty"),
    ],
)
def test_noop_sound_statistics(state):
    assert propose(running_stats, state) == []


def test_a_negative_variance_is_an_error_because_eval_gives_nan():
    model = nn.Sequential(nn.BatchNorm1d(8))
    model.get_buffer("0.running_var")[3] = -0.5
    (finding,) = loud(propose(running_stats, model.state_dict(), model))
    assert (finding.level, finding.keys) == (Level.ERROR, ("0.running_var",))
    assert finding.evidence["tensors"]["0.running_var"]["minimum"] == -0.5
    assert model.eval()(torch.ones(1, 8)).isnan().any(), "what the finding says does happen"


@pytest.mark.parametrize(
    ("state", "level"),
    [
        pytest.param(norm(variance=0.0), Level.WARNING, id="zero-everywhere"),
        pytest.param({"bn.running_var": torch.tensor([0.0, 1.0])}, Level.NOTE, id="zero-in-a-dead-channel"),
        pytest.param(norm(mean=0.0, variance=1.0), Level.WARNING, id="batches-counted-but-fresh"),
        pytest.param(norm(mean=0.0, variance=1.0, batches=0), Level.NOTE, id="never-updated"),
        pytest.param(norm(mean=0.0, variance=1.0, batches=None), Level.NOTE, id="never-updated-before-0.4.1"),
    ],
)
def test_the_level_depends_on_the_harm(state, level):
    (finding,) = propose(running_stats, state)
    assert (finding.level, finding.keys, finding.fix) == (level, ("bn.running_var",), None)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        pytest.param(
            {**norm(variance=0.0), "bn.weight": torch.zeros(8)},
            "running_var and weight are zero",
            id="a-norm-that-is-off",
        ),
        pytest.param(norm(mean=0.0), "only one of mean and variance ever moved", id="variance-alone-moved"),
        pytest.param(norm(variance=1.0), "only one of mean and variance ever moved", id="mean-alone-moved"),
        pytest.param(
            {**norm(batches=0), **{f"other.{key}": value for key, value in norm().items()}},
            "statistics moved but no batch counted",
            id="uncounted-beside-counted",
        ),
    ],
)
def test_contradictory_statistics_are_a_note(state, message):
    (finding,) = propose(running_stats, state)
    assert finding.level is Level.NOTE
    assert message in finding.message


def test_exchanged_mean_and_variance():
    state = {"bn.running_mean": torch.rand(16) + 0.1, "bn.running_var": torch.randn(16)}
    (finding,) = loud(propose(running_stats, state))
    assert (finding.level, "look swapped" in finding.message) == (Level.ERROR, True)


@pytest.mark.parametrize("bad", [norm(variance=-1.0), norm(variance=0.0), norm(mean=0.0, variance=1.0)])
def test_broken_statistics_are_reset_on_request(bad):
    fresh = dict(nn.BatchNorm1d(8, affine=False).state_dict(prefix="bn."))
    check_repaired({**bad, **norm_named("other")}, {**fresh, **norm_named("other")}, "VAL103", reset_running_stats=True)


def test_mean_and_variance_are_replaced_together(tmp_path):
    torch.save(norm(mean=0.3, variance=0.4), tmp_path / "donor.pth")
    after = {**norm(mean=0.3, variance=0.4, batches=9)}
    check_repaired(norm(variance=-1.0, batches=9), after, "VAL103", replace="VAL103", fill=str(tmp_path / "donor.pth"))


def test_a_variance_without_its_mean_is_replaced(tmp_path):
    torch.save(norm(mean=0.3, variance=0.4), tmp_path / "donor.pth")
    bad, after = ({k: v for k, v in norm(variance=each).items() if "mean" not in k} for each in (-1.0, 0.4))
    check_repaired(bad, after, "VAL103", replace="VAL103", fill=str(tmp_path / "donor.pth"))


def norm_named(name: str) -> dict[str, torch.Tensor]:
    """A sound norm of another name."""
    return {key.replace("bn", name): value for key, value in norm().items()}


def test_noop_the_batch_norm_of_nflows_starts_with_a_variance_of_zero():
    names = ("unconstrained_weight", "bias", "running_mean", "running_var")
    findings = propose(running_stats, {f"flow.{name}": torch.zeros(4) for name in names})
    assert not [finding for finding in findings if finding.level > Level.NOTE]
