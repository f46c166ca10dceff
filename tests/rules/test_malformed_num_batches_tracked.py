"""BUF103: counters in another form than a 0-d int64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ckptfix.finding import Applicability
from ckptfix.rules.malformed_num_batches_tracked import malformed_num_batches_tracked
from tests.rules.proposals import propose, repaired

KEY = "bn.num_batches_tracked"


@pytest.mark.parametrize(
    ("key", "tensor"),
    [
        pytest.param(KEY, torch.tensor(5), id="as it should be"),
        pytest.param(KEY, torch.tensor([5, 6]), id="two elements are no counter"),
        pytest.param(KEY, torch.zeros(0), id="no element"),
        pytest.param(KEY, torch.tensor(5j), id="a complex number is no counter"),
        pytest.param("bn.count", torch.tensor([5.0]), id="another name"),
    ],
)
def test_noop(key, tensor):
    assert propose(malformed_num_batches_tracked, {key: tensor}) == []


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.tensor([5]), id="one element in a list"),
        pytest.param(torch.tensor([[5]]), id="two dimensions"),
        pytest.param(torch.tensor(5.0), id="a float"),
        pytest.param(torch.tensor(5, dtype=torch.int32), id="a short integer"),
        pytest.param(torch.tensor([5.0], dtype=torch.float16), id="shape and dtype at once"),
    ],
)
def test_cured(tensor):
    (finding,) = propose(malformed_num_batches_tracked, {KEY: tensor})
    assert finding.fix is not None
    assert finding.fix.applicability == Applicability.SAFE
    counter = repaired(malformed_num_batches_tracked, {KEY: tensor})[KEY]
    assert (counter.dtype, counter.shape, counter.item()) == (torch.int64, (), 5)


def test_the_target_s_own_form_stands():
    module = nn.Module()
    module.register_buffer("num_batches_tracked", torch.zeros(1))
    assert propose(malformed_num_batches_tracked, module.state_dict(), module) == []


def test_the_same_value_as_torch_loads():
    model = nn.BatchNorm1d(2)
    state = {**model.state_dict(), "num_batches_tracked": torch.tensor([7.0])}
    model.load_state_dict(state)
    after = repaired(malformed_num_batches_tracked, state, model)
    assert torch.equal(after["num_batches_tracked"], model.num_batches_tracked)  # type: ignore[arg-type]  # a buffer
