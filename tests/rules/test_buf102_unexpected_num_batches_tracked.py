"""BUF102: counters that the target, or an old torch, has no place for."""

import pytest
import torch
from torch import nn

from ckptfix.core.finding import Applicability
from ckptfix.rules.buf102_unexpected_num_batches_tracked import unexpected_num_batches_tracked
from tests.rules.proposals import propose, repaired


class FrozenBatchNorm(nn.Module):
    """Statistics without a counter, as in detection models."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.zeros(3))


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        pytest.param(None, {}, id="no target and no release to aim at"),
        pytest.param(None, {"for_torch": "0.4.1"}, id="the first release with counters"),
        pytest.param(None, {"for_torch": "0.10.0"}, id="releases compare as versions, not as text"),
        pytest.param(nn.BatchNorm1d(3), {}, id="the target wants it"),
        pytest.param(nn.BatchNorm1d(3, track_running_stats=False), {}, id="the statistics have no place either"),
        pytest.param(nn.Linear(3, 3), {}, id="the module is not there"),
    ],
)
def test_noop(model, settings):
    assert propose(unexpected_num_batches_tracked, nn.BatchNorm1d(3).state_dict(), model, **settings) == []


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        pytest.param(FrozenBatchNorm(), {}, id="a frozen BatchNorm"),
        pytest.param(None, {"for_torch": "0.4.0"}, id="an old torch"),
        pytest.param(nn.BatchNorm1d(3), {"for_torch": "0.4.0"}, id="an old torch, whatever the target wants"),
    ],
)
def test_dropped(model, settings):
    state = nn.BatchNorm1d(3).state_dict()
    (finding,) = propose(unexpected_num_batches_tracked, state, model, **settings)
    assert finding.keys == ("num_batches_tracked",)
    assert finding.fix is not None
    assert finding.fix.applicability == Applicability.SAFE
    after = repaired(unexpected_num_batches_tracked, state, model, **settings)
    FrozenBatchNorm().load_state_dict(after, strict=True)
