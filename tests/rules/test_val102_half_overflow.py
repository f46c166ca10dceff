import math

import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.core.finding import Applicability, Level
from ckptfix.errors import UsageError
from ckptfix.rules.val102_half_overflow import half_overflow
from tests.checks import assert_same, check_noop, check_repaired
from tests.rules.proposals import propose

WEIGHT = {"a.weight": torch.full((8, 8), 0.1), "a.bias": torch.full((8,), 0.5)}


@pytest.mark.parametrize(
    ("state", "dtype"),
    [
        pytest.param(WEIGHT, None, id="no-cast"),
        pytest.param(WEIGHT, "float32", id="it-has-that-dtype"),
        pytest.param({"count": torch.tensor(3), "mask": torch.ones(3, dtype=torch.bool)}, "float16", id="no-floats"),
        pytest.param({"w": torch.ones(3, dtype=torch.complex64)}, "float16", id="complex"),
        pytest.param({"w": torch.ones(3).to_sparse()}, "float16", id="sparse"),
        pytest.param({"a.bias": torch.ones(64)}, "float8_e4m3fn", id="vectors-stay-above-8-bits"),
        pytest.param({"w": torch.zeros(0, 3)}, "float16", id="empty"),
        pytest.param(
            {"a.weight": torch.ones(8, 8).to(torch.float8_e4m3fn), "a.scale_weight": torch.ones(1)},
            "float16",
            id="codes-and-their-scales",
        ),
        pytest.param({"bn.num_batches_tracked": torch.tensor(5.0)}, "float16", id="a-counter-is-no-weight"),
    ],
)
def test_noop(state, dtype):
    check_noop(state, "VAL102", dtype=dtype)


@pytest.mark.parametrize(
    ("given", "dtype"), [("fp16", "float16"), ("bf16", "bfloat16"), ("float8_e5m2", "float8_e5m2")]
)
def test_values_that_fit_are_cast(given, dtype):
    state = {"a.weight": WEIGHT["a.weight"]}
    after = {"a.weight": WEIGHT["a.weight"].to(getattr(torch, dtype))}
    report = check_repaired(state, after, "VAL102", dtype=given)
    (finding,) = report.findings
    assert finding.fix is not None
    assert (finding.level, finding.fix.applicability) == (Level.NOTE, Applicability.UNSAFE)
    assert report.exit_code == 0


def test_a_wider_dtype_is_safe():
    state = {key: value.bfloat16() for key, value in WEIGHT.items()}
    report = check_repaired(state, {key: value.float() for key, value in state.items()}, "VAL102", dtype="float32")
    (fix,) = (finding.fix for finding in report.findings)
    assert fix is not None
    assert fix.applicability is Applicability.SAFE


def test_tied_tensors_stay_tied():
    shared = torch.ones(4, 4)
    repaired, _ = ckptfix.repair_state_dict({"a": shared, "b": shared}, select="VAL102", dtype="float16")
    assert repaired["a"].data_ptr() == repaired["b"].data_ptr()


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "float8_e5m2"])
def test_a_tensor_that_overflows_keeps_its_dtype_and_the_finding_stays(dtype):
    state = {**WEIGHT, "b.weight": torch.full((8, 8), 0.1)}
    state["b.weight"][3, 4], state["b.weight"][0, 0] = 7e4, -1e5
    repaired, report = ckptfix.repair_state_dict(state, select="VAL102", dtype=dtype)
    (finding,) = report.remaining
    assert (finding.level, finding.keys) == (Level.ERROR, ("b.weight",))
    assert finding.message == f"2 values of 1 tensor overflow in {dtype}"
    assert finding.evidence["tensors"]["b.weight"] == {"overflow": 2, "numel": 64, "absmax": 1e5}
    assert repaired["b.weight"].dtype is torch.float32
    assert repaired["a.weight"].dtype is getattr(torch, dtype)
    again, _ = ckptfix.repair_state_dict(repaired, select="VAL102", dtype=dtype)
    assert_same(again, repaired)


def test_a_tensor_that_would_vanish_keeps_its_dtype():
    state = {**WEIGHT, "b.weight": torch.full((8, 8), 1e-9)}
    _, report = ckptfix.repair_state_dict(state, select="VAL102", dtype="float16")
    (finding,) = report.remaining
    assert (finding.level, finding.keys) == (Level.WARNING, ("b.weight",))
    assert finding.evidence["tensors"]["b.weight"]["become_zero"] == 64


def test_few_values_that_vanish_are_counted_and_cast():
    state = {"a.weight": torch.full((8, 8), 0.1)}
    state["a.weight"][0, :3] = 1e-9
    (finding,) = ckptfix.check(state, select="VAL102", dtype="float16").findings
    assert finding.message == "1 tensor of 64 values to be cast to float16, 3 values of which become zero"
    assert finding.evidence == {"become_zero": {"a.weight": 3}}


def test_infinity_in_a_dtype_without_infinity():
    state = {"a.weight": torch.full((8, 8), 0.1)}
    state["a.weight"][0, 0] = math.inf
    assert [f.level for f in propose(half_overflow, state, dtype="float8_e4m3fn")] == [Level.ERROR]
    assert [f.level for f in propose(half_overflow, state, dtype="float16")] == [Level.NOTE], "that is for VAL101"


def test_a_model_of_another_dtype_does_not_revert_the_cast():
    model = nn.Linear(4, 4)
    repaired, report = ckptfix.repair_state_dict(model.state_dict(), model, dtype="float16", unsafe_fixes=True)
    assert {value.dtype for value in repaired.values()} == {torch.float16}
    assert report.exit_code == 0


@pytest.mark.parametrize("settings", [{"dtype": "float99"}, {"dtype": "float16", "values": False}])
def test_what_has_no_meaning_is_refused(settings):
    with pytest.raises(UsageError, match=r"^dtype="):
        ckptfix.repair_state_dict(WEIGHT, **settings)


def test_a_counter_keeps_the_dtype_of_the_target(tmp_path):
    state = {"bn.running_mean": torch.zeros(4), "bn.running_var": torch.ones(4)}
    state["bn.num_batches_tracked"] = torch.tensor(5.0)
    torch.save(state, tmp_path / "like.pth")
    repaired, _ = ckptfix.repair_state_dict(state, like=tmp_path / "like.pth", dtype="float16")
    assert {key: value.dtype for key, value in repaired.items()} == {
        "bn.running_mean": torch.float16,
        "bn.running_var": torch.float16,
        "bn.num_batches_tracked": torch.float32,
    }


@pytest.mark.parametrize(("dtype", "is_said"), [("float16", True), ("bfloat16", False), ("float32", False)])
def test_what_transformers_loads_as_float32_is_reported(dtype, is_said):
    """It has the rounded values all the same, as a load of the file as it was would not."""
    from transformers import T5Config, T5EncoderModel

    ids = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    config = T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2, vocab_size=9, **ids)
    model = T5EncoderModel(config).to(torch.bfloat16 if dtype == "float32" else torch.float32)
    repaired, report = ckptfix.repair_state_dict(dict(model.state_dict()), select="VAL102", dtype=dtype)
    (finding,) = report.findings
    assert ("transformers loads 2 of them as float32 (wo of T5)" in finding.message) is is_said
    assert {value.dtype for value in repaired.values()} == {getattr(torch, dtype)}
