from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ckptfix.errors import UnreadableError
from ckptfix.smoke.diagnosis import diagnose, holds_for_any_input, is_user_file
from ckptfix.smoke.outcome import CHECKPOINT, ENVIRONMENT, INPUT, MODEL, Failure, Figures, Origin
from ckptfix.smoke.proof import NotLoadedError

ORIGIN = Origin("bn", "BatchNorm2d", Figures("output", "float32[2]", nan=2))


def error_of(call: Callable[[], Any]) -> Exception:
    try:
        call()
    except Exception as error:  # noqa: BLE001  whatever torch raises here is what the test is about
        return error
    raise AssertionError("it ran")


def conv(*shape: int, **options: Any) -> Callable[[], Any]:
    return lambda: nn.Conv2d(3, 4, 3)(torch.ones(shape, **options))


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(conv(2, 1, 8, 8), id="channels"),
        pytest.param(conv(2, 3, 2, 2), id="smaller than the kernel"),
        pytest.param(conv(3), id="dimensions"),
        pytest.param(conv(2, 3, 8, 8, dtype=torch.float64), id="dtype, convolution"),
        pytest.param(lambda: nn.Linear(3, 2)(torch.ones(2, 4)), id="features"),
        pytest.param(lambda: nn.Linear(3, 2)(torch.ones(2, 3, dtype=torch.int64)), id="dtype, linear"),
        pytest.param(lambda: nn.Embedding(3, 2)(torch.tensor([3])), id="beyond the vocabulary"),
        pytest.param(lambda: nn.Embedding(3, 2)(torch.ones(2)), id="tokens that are floats"),
        pytest.param(lambda: torch.ones(2, 3) + torch.ones(2, 4), id="broadcast"),
        pytest.param(lambda: torch.ones(2, 3).view(4, 2), id="view"),
        pytest.param(lambda: torch.cat([torch.ones(2, 3), torch.ones(3, 4)]), id="concatenation"),
        pytest.param(lambda: nn.LayerNorm(3)(torch.ones(2, 4)), id="layer norm"),
        pytest.param(lambda: nn.LSTM(3, 2)(torch.ones(2, 2, 4)), id="lstm"),
        pytest.param(lambda: F.max_pool2d(torch.ones(1, 1, 2, 2), 5), id="pooling"),
        pytest.param(lambda: nn.BatchNorm1d(3)(torch.ones(1, 3)), id="a batch of one in training mode"),
        pytest.param(lambda: nn.BatchNorm2d(3)(torch.ones(2, 3)), id="batch norm"),
        pytest.param(lambda: nn.MultiheadAttention(4, 2)(*[torch.ones(2, 2, 6)] * 3), id="attention"),
    ],
)
def test_genuine_messages_about_the_input(call: Callable[[], Any]) -> None:
    assert diagnose("forward", error_of(call)).blame == INPUT


@pytest.mark.parametrize(
    ("stage", "error", "blame"),
    [
        pytest.param("forward", ValueError("the model's own words"), MODEL, id="model code"),
        pytest.param("forward", AttributeError("'Net' object has no attribute 'x'"), MODEL, id="attribute"),
        pytest.param("build", ValueError("no"), MODEL, id="factory"),
        pytest.param("read", UnreadableError("w.pth: cut off"), CHECKPOINT, id="reading"),
        pytest.param("load", NotLoadedError("1 missing key", ("a",)), CHECKPOINT, id="strict load"),
        pytest.param("device", RuntimeError("broken"), ENVIRONMENT, id="device"),
        pytest.param("build", MemoryError(), ENVIRONMENT, id="memory of Python"),
        pytest.param("load", torch.OutOfMemoryError("CUDA out of memory. Tried"), ENVIRONMENT, id="memory of CUDA"),
        pytest.param("forward", RuntimeError("DefaultCPUAllocator: can't allocate memory"), ENVIRONMENT, id="memory"),
        pytest.param("forward", RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), ENVIRONMENT, id="cudnn"),
        pytest.param(
            "forward", RuntimeError("\"conv\" not implemented for 'Half'"), ENVIRONMENT, id="no such operator"
        ),
    ],
)
def test_whose_fault(stage: str, error: Exception, blame: str) -> None:
    assert diagnose(stage, error).blame == blame


def test_a_genuine_lack_of_memory_is_the_environments() -> None:
    assert diagnose("forward", error_of(lambda: torch.empty(2**60))).blame == ENVIRONMENT


def test_a_wrong_call_is_the_inputs_at_the_model_and_the_codes_within() -> None:
    error = error_of(lambda: nn.Linear(2, 2)())
    assert diagnose("forward", error, ("", "Net"), depth=1).blame == INPUT
    assert diagnose("forward", error, ("head", "Linear"), depth=2).blame == MODEL


def test_an_error_after_a_nan_is_the_checkpoints() -> None:
    assert diagnose("forward", ValueError("NaN loss"), origin=ORIGIN).blame == CHECKPOINT


def test_the_message_is_one_line() -> None:
    assert diagnose("forward", RuntimeError("\nfirst\nsecond")).error == "RuntimeError: first"
    assert diagnose("forward", KeyError()).error == "KeyError"
    assert diagnose("read", UnreadableError("w.pth: cut off")).error == "w.pth: cut off"


def test_the_line_and_the_traceback_are_the_users() -> None:
    failure = diagnose("forward", error_of(conv(2, 1, 8, 8)))
    assert failure.where.startswith("test_diagnosis.py:")
    assert failure.traceback.startswith("Traceback (most recent call last):\n")
    assert "channels" in failure.traceback


@pytest.mark.parametrize(
    ("blame", "error", "holds"),
    [
        pytest.param(MODEL, "ValueError: no", False, id="another input might do"),
        pytest.param(INPUT, "RuntimeError: size", False, id="the input's fault"),
        pytest.param(MODEL, "NameError: name 'x' is not defined", True, id="a name is missing"),
        pytest.param(MODEL, "ModuleNotFoundError: No module named 'x'", True, id="a module is missing"),
        pytest.param(CHECKPOINT, "ValueError: NaN", True, id="the weights are broken"),
    ],
)
def test_what_no_input_could_have_helped(blame: str, error: str, holds: bool) -> None:
    assert holds_for_any_input(Failure("forward", blame, error)) is holds


def test_files_of_the_user() -> None:
    assert is_user_file(__file__)
    assert is_user_file("/home/me/torch/models.py")
    assert not is_user_file(nn.__file__)
    assert not is_user_file(diagnose.__code__.co_filename)
    assert not is_user_file("<frozen importlib._bootstrap>")
