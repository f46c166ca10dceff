"""FIT104: tensors of another dtype than the target's."""

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from ckptfix.core.edits import Cast
from ckptfix.core.finding import Applicability, Level
from ckptfix.core.target import target_from_checkpoint
from ckptfix.reading.opening import open_state_dict
from ckptfix.rules.fit104_dtype_mismatch import dtype_mismatch
from tests.rules.proposals import context, propose, repaired, rule_of


def module(dtype: torch.dtype) -> nn.Module:
    made = nn.Module()
    made.register_buffer("x", torch.zeros(2, dtype=dtype))
    return made


def state(dtype: torch.dtype, *values: float) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor(values or (1.0, 2.0)).to(dtype)}


@pytest.mark.parametrize(
    ("stored", "model"),
    [
        pytest.param(state(torch.float16), None, id="no target"),
        pytest.param(state(torch.float16), module(torch.float16), id="the same dtype"),
        pytest.param(state(torch.int32), module(torch.int64), id="integers of another width"),
        pytest.param(state(torch.uint8), module(torch.bool), id="a mask from before bool"),
        pytest.param({"y": torch.zeros(1)}, module(torch.float16), id="another key"),
    ],
)
def test_noop(stored, model):
    assert propose(dtype_mismatch, stored, model) == []


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        pytest.param(state(torch.float16), torch.float32, id="a wider float"),
        pytest.param(state(torch.float32), torch.bfloat16, id="a narrower float"),
        pytest.param(state(torch.float32, 65504.0), torch.float16, id="the largest float16 still fits"),
        pytest.param(state(torch.float32, 65519.0), torch.float16, id="what rounds to the largest float16 fits"),
        pytest.param(state(torch.int64), torch.float32, id="integers into floats"),
    ],
)
def test_cast_unsafely(stored, wanted):
    (finding,) = propose(dtype_mismatch, stored, module(wanted))
    assert finding.level == Level.NOTE
    assert finding.fix is not None
    assert finding.fix.applicability == Applicability.UNSAFE
    assert finding.fix.edits == (Cast("x", str(stored["x"].dtype)[6:], str(wanted)[6:]),)


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        pytest.param(state(torch.float32), torch.int64, id="the fraction would be lost"),
        pytest.param(state(torch.complex64), torch.float32, id="the imaginary part would be lost"),
    ],
)
def test_no_fix_that_would_lose_values(stored, wanted):
    (finding,) = propose(dtype_mismatch, stored, module(wanted))
    assert (finding.level, finding.fix) == (Level.WARNING, None)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool])
def test_no_fix_for_integers_in_place_of_parameters(dtype):
    stored = nn.Linear(2, 3).state_dict() | {"weight": torch.ones(3, 2, dtype=dtype)}
    for target in (nn.Linear(2, 3), target_from_checkpoint(open_state_dict(nn.Linear(2, 3).state_dict()))):
        (finding,) = propose(dtype_mismatch, stored, target)
        assert (finding.level, finding.keys, finding.fix) == (Level.WARNING, ("weight",), None)


def test_the_cast_equals_that_of_a_load():
    model, stored = module(torch.float16), state(torch.float32, 0.1, 1e-8)
    after = repaired(dtype_mismatch, stored, model)
    model.load_state_dict(stored)
    assert torch.equal(after["x"], model.state_dict()["x"])
    assert after["x"].dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_overflow_is_found_in_the_values(dtype):
    (finding,) = propose(dtype_mismatch, state(dtype, 1.0, -70000.0), module(torch.float16))
    assert finding.level == Level.ERROR
    assert "would overflow" in finding.message
    assert finding.fix is None
    assert finding.evidence["absmax"] == {"x": 70000.0}


@pytest.mark.parametrize(
    ("before", "after", "is_cast"),
    [
        pytest.param(torch.float32, torch.float16, False, id="may overflow"),
        pytest.param(torch.float64, torch.float32, False, id="of doubles"),
        pytest.param(torch.int64, torch.float16, False, id="of integers"),
        pytest.param(torch.float32, torch.bfloat16, True, id="the same range"),
        pytest.param(torch.float16, torch.float32, True, id="a wider range"),
        pytest.param(torch.int64, torch.float32, True, id="integers that fit"),
    ],
)
def test_without_values_no_cast_that_may_overflow(before, after, is_cast):
    blind = replace(context(state(before), module(after)), statistics={})
    (finding,) = rule_of(dtype_mismatch).propose(blind)
    assert finding.level == Level.NOTE
    assert (finding.fix is not None) is is_cast


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning")
def test_a_quantised_tensor_cannot_be_copied():
    stored = {"x": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}
    model = module(torch.float32)
    with pytest.raises(RuntimeError, match="Copying from quantized"):
        model.load_state_dict(stored)
    (finding,) = propose(dtype_mismatch, stored, model)
    assert (finding.level, finding.fix) == (Level.ERROR, None)
