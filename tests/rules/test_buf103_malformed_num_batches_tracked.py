"""BUF103: counters in another form than a 0-d int64."""

import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.core.finding import Applicability, Level
from ckptfix.rules.buf103_malformed_num_batches_tracked import malformed_num_batches_tracked
from tests.checks import assert_same
from tests.rules.proposals import propose, repaired

KEY = "bn.num_batches_tracked"


@pytest.mark.parametrize(
    ("key", "tensor"),
    [
        pytest.param(KEY, torch.tensor(5), id="as it should be"),
        pytest.param(KEY, torch.tensor([5, 6]), id="two elements are no counter"),
        pytest.param(KEY, torch.zeros(0), id="no element"),
        pytest.param(KEY, torch.tensor(5j), id="a complex number is no counter"),
        pytest.param(KEY, torch.tensor(5.0, device="meta"), id="no value"),
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
        pytest.param(torch.arange(8.0)[5], id="one element of a larger storage"),
    ],
)
def test_cured(tensor):
    (finding,) = propose(malformed_num_batches_tracked, {KEY: tensor})
    assert finding.fix is not None
    assert finding.fix.applicability == Applicability.SAFE
    counter = repaired(malformed_num_batches_tracked, {KEY: tensor})[KEY]
    assert (counter.dtype, counter.shape, counter.item()) == (torch.int64, (), 5)


def test_noop_the_form_that_the_target_has():
    module = nn.Module()
    module.register_buffer("num_batches_tracked", torch.zeros(1))
    assert propose(malformed_num_batches_tracked, module.state_dict(), module) == []


def test_the_same_value_as_torch_loads():
    model = nn.BatchNorm1d(2)
    state = {**model.state_dict(), "num_batches_tracked": torch.tensor([7.0])}
    model.load_state_dict(state)
    after = repaired(malformed_num_batches_tracked, state, model)
    assert torch.equal(after["num_batches_tracked"], model.num_batches_tracked)  # type: ignore[arg-type]  # a buffer


@pytest.mark.parametrize("values", [True, False], ids=["values are read", "no values"])
@pytest.mark.parametrize(
    ("tensor", "shown"),
    [
        pytest.param(torch.tensor(float("nan")), "nan", id="NaN"),
        pytest.param(torch.tensor(float("-inf"), dtype=torch.float16), "-inf", id="infinite"),
        pytest.param(torch.tensor([1e30]), "1e+30", id="beyond int64"),
        pytest.param(torch.tensor(2.0**63), "9.22337e+18", id="one beyond int64"),
        pytest.param(torch.tensor(2.5, dtype=torch.bfloat16), "2.5", id="a part of a batch"),
    ],
)
def test_invalid_counts_are_replaced_on_request(tensor, shown, values):
    state = {"bn.weight": torch.ones(2), KEY: tensor}
    repaired_state, report = ckptfix.repair_state_dict(state, select=("BUF103",), values=values)
    (finding,) = report.findings
    assert finding.level == Level.WARNING
    assert finding.fix is not None
    assert finding.fix.applicability == Applicability.UNSAFE
    assert f"({shown})" in finding.message
    assert_same(repaired_state, state)
    counter = repaired(malformed_num_batches_tracked, state)[KEY]
    assert (counter.dtype, counter.shape, counter.item()) == (torch.int64, (), 0)


def test_a_broken_counter_does_not_make_other_fixes_unsafe():
    state = {"a.num_batches_tracked": torch.tensor(5.0), "b.num_batches_tracked": torch.tensor(float("nan"))}
    after, report = ckptfix.repair_state_dict(state, select=("BUF103",))
    assert [finding.keys for finding in report.fixed] == [("a.num_batches_tracked",)]
    assert after["a.num_batches_tracked"].dtype == torch.int64
    assert after["b.num_batches_tracked"].isnan()


def test_no_safe_cast_of_a_count_beyond_the_dtype_of_the_target():
    module = nn.Module()
    module.register_buffer("num_batches_tracked", torch.zeros((), dtype=torch.float16))
    (finding,) = propose(malformed_num_batches_tracked, {"num_batches_tracked": torch.tensor(100_000)}, module)
    assert finding.fix is not None
    assert finding.fix.applicability == Applicability.UNSAFE
