import json
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from msgspec import convert, to_builtins
from msgspec.structs import replace
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence

from ckptfix.core.smoke_result import Comparison
from ckptfix.errors import UnreadableError
from ckptfix.smoke.outcome import (
    CHECKPOINT,
    ENVIRONMENT,
    INPUT,
    MODEL,
    ExamOutcome,
    Failure,
    FaultOrigin,
    Figures,
    Gradients,
    NotLoadedError,
    blame_of_assert,
    describe,
    diagnose,
    figures_of,
    holds_for_any_input,
    is_cudnn_failure,
    is_dtype_mismatch,
    is_out_of_memory,
    is_sticky,
    is_user_file,
    tensors_in,
)
from tests.smoke.second_tries import ASSERT_PRINTED

FIGURES = Figures("output", "float32[2]", nan=1, positive_inf=2, low=0.5, high=3.0)
ORIGIN = FaultOrigin("features.3", "Conv2d", FIGURES, (FIGURES,), (FIGURES,))
FAILURE = Failure("forward", "checkpoint", "ValueError: no", "head", "Linear", "m.py:1 in forward", ("a",), ORIGIN)


@pytest.mark.parametrize(
    "outcome",
    [
        pytest.param(ExamOutcome(), id="empty"),
        pytest.param(ExamOutcome("cpu", ("note",), ("in",), ("out",), 1.5), id="passed"),
        pytest.param(ExamOutcome(failure=FAILURE), id="failure after NaN"),
        pytest.param(
            ExamOutcome(non_finite=(FIGURES,), origin=ORIGIN, finite_in_float32=False, shared=True), id="not finite"
        ),
        pytest.param(
            ExamOutcome(
                warnings=("odd",),
                training=ExamOutcome(
                    failure=FAILURE, gradients=Gradients(1, ("a",), ("b",), ("c",), 2, "Sqrt", "m.py:1")
                ),
                devices=Comparison("cpu", False, 0.5, 2.0, 1e-3, None),
            ),
            id="all that may come after it",
        ),
    ],
)
def test_json_and_back(outcome: ExamOutcome) -> None:
    assert convert(json.loads(json.dumps(to_builtins(outcome))), ExamOutcome) == outcome


def test_figures_read_as_a_line() -> None:
    assert str(FIGURES) == "output float32[2]: 1 NaN, 2 +Inf, finite values 0.5 … 3"
    assert str(Figures("ids", "int64[2]")) == "ids int64[2]"


def test_the_place_of_a_failure() -> None:
    assert FAILURE.place == " in head (Linear), at m.py:1 in forward"
    assert Failure("forward", "model", "no", "", "Net").place == " in the model itself (Net)"
    assert Failure("build", "model", "no").place == ""


def test_the_keys_of_broken_weights() -> None:
    fine, bad = Figures("weight", "float32[2]", low=-1, high=1), Figures("bias", "float32[2]", nan=1)
    negative = Figures("running_var", "float32[2]", low=-1, high=1)
    assert FaultOrigin("bn", "BatchNorm2d", FIGURES, (), (fine, bad, negative)).broken == ("bn.bias", "bn.running_var")
    assert FaultOrigin("", "BatchNorm2d", FIGURES, (), (bad,)).broken == ("bias",)


def test_comparisons_and_gradients_read_as_a_line() -> None:
    assert str(Comparison("cpu", unlike="left out")) == "against cpu: not comparable, left out"
    assert str(Comparison("b", False, 0.5, 2.0, 1e-3)) == "against b: largest difference 0.5 (rounding explains 0.002)"
    assert str(Gradients(3, zero=("a",), missing=("b", "c"))) == "gradients: 3 finite, 1 all zero, 2 none"
    assert str(Gradients()) == "gradients: nothing to train"


ONE = torch.ones(1)
Pair = namedtuple("Pair", "left right")


@dataclass
class Box:
    inner: Any
    label: str = "box"


@pytest.mark.parametrize(
    ("value", "names"),
    [
        pytest.param(None, [], id="nothing"),
        pytest.param("text", [], id="no tensors"),
        pytest.param(ONE, [""], id="a tensor"),
        pytest.param((ONE, [ONE]), ["[0]", "[1][0]"], id="nested"),
        pytest.param(OrderedDict(logits=ONE, hidden=(ONE, ONE)), ["logits", "hidden[0]", "hidden[1]"], id="a mapping"),
        pytest.param(Pair(ONE, None), ["left"], id="a named tuple"),
        pytest.param([Box({"x": ONE})], ["[0].inner.x"], id="a dataclass"),
        pytest.param(Box, [], id="a class is no instance"),
        pytest.param(pack_sequence([ONE]), ["data", "batch_sizes"], id="a packed sequence"),
    ],
)
def test_every_tensor_is_found(value: Any, names: list[str]) -> None:
    assert [name for name, _ in tensors_in(value)] == names


def test_a_cycle_ends() -> None:
    loop: list[Any] = [ONE]
    loop.append(loop)
    assert len(list(tensors_in(loop))) > 1


BAD = [1.0, torch.nan, torch.inf, -torch.inf, -2.0, torch.nan]


@pytest.mark.parametrize(
    ("make", "counts", "span"),
    [
        pytest.param(lambda: torch.ones(2, 2), (0, 0, 0), (1, 1), id="finite"),
        pytest.param(lambda: torch.empty(0, 3), (0, 0, 0), (None, None), id="empty"),
        pytest.param(lambda: torch.arange(3), (0, 0, 0), (None, None), id="integers are finite"),
        pytest.param(lambda: torch.ones(2, device="meta"), (0, 0, 0), (None, None), id="meta"),
        pytest.param(lambda: torch.tensor(BAD), (2, 1, 1), (-2, 1), id="float32"),
        pytest.param(lambda: torch.tensor(BAD).half(), (2, 1, 1), (-2, 1), id="float16"),
        pytest.param(lambda: torch.tensor(BAD).bfloat16(), (2, 1, 1), (-2, 1), id="bfloat16"),
        pytest.param(lambda: torch.tensor(BAD).to(torch.float8_e5m2), (2, 1, 1), (-2, 1), id="float8"),
        pytest.param(lambda: torch.full((), torch.nan), (1, 0, 0), (None, None), id="a NaN of no dimension"),
        pytest.param(lambda: torch.tensor([complex(torch.nan, 3)]), (1, 0, 0), (3, 3), id="complex: its parts count"),
        pytest.param(lambda: torch.tensor([0, torch.inf]).to_sparse(), (0, 1, 0), (None, None), id="sparse"),
        pytest.param(
            lambda: torch.tensor([[0, torch.inf]]).to_sparse_csr(), (0, 1, 0), (None, None), id="compressed sparse"
        ),
        pytest.param(lambda: torch.nested.nested_tensor([ONE, ONE * torch.nan]), (1, 0, 0), (1, 1), id="nested"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning", "ignore:The PyTorch API of nested:UserWarning")
def test_figures(make: Callable[[], torch.Tensor], counts: tuple[int, ...], span: tuple[float | None, ...]) -> None:
    figures = figures_of("x", make())
    assert (figures.nan, figures.positive_inf, figures.negative_inf) == counts
    assert (figures.low, figures.high) == span


def test_the_report_shows_dtype_and_shape() -> None:
    assert describe("", torch.ones(2, 3)) == "float32[2, 3]"
    assert describe("logits", torch.ones((), dtype=torch.int64)) == "logits: int64[]"


SOUND = FaultOrigin("bn", "BatchNorm2d", Figures("output", "float32[2]", nan=2))
BROKEN = replace(SOUND, weights=(Figures("weight", "float32[2]", nan=1),))


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
        pytest.param("read", ImportError("cannot import name 'x'"), ENVIRONMENT, id="reading without a library"),
        pytest.param("read", OSError(5, "Input/output error"), ENVIRONMENT, id="reading from a bad disk"),
        pytest.param("move", NotImplementedError("Cannot copy out of meta tensor; no data!"), MODEL, id="no memory"),
        pytest.param("device", RuntimeError("broken"), ENVIRONMENT, id="device"),
        pytest.param("build", MemoryError(), ENVIRONMENT, id="memory of Python"),
        pytest.param("load", torch.OutOfMemoryError("CUDA out of memory. Tried"), ENVIRONMENT, id="memory of CUDA"),
        pytest.param("forward", RuntimeError("DefaultCPUAllocator: can't allocate memory"), ENVIRONMENT, id="memory"),
        pytest.param("forward", RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), ENVIRONMENT, id="cudnn"),
        pytest.param(
            "forward", RuntimeError("\"conv\" not implemented for 'Half'"), ENVIRONMENT, id="no such operator"
        ),
        pytest.param(
            "forward",
            RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
            ),
            MODEL,
            id="a tensor that the code made on another device",
        ),
        pytest.param(
            "forward",
            AttributeError("module 'torch._C' has no attribute '_cuda_getDevice'"),
            ENVIRONMENT,
            id="a torch without CUDA",
        ),
        pytest.param("training", ValueError("no targets"), MODEL, id="backward"),
    ],
)
def test_failures_are_blamed_on_the_right_part(stage: str, error: Exception, blame: str) -> None:
    assert diagnose(stage, error).blame == blame


def test_running_out_of_memory_is_blamed_on_the_environment() -> None:
    failure = diagnose("forward", error_of(lambda: torch.empty(2**50)))
    assert failure.blame == ENVIRONMENT
    assert is_out_of_memory(failure)


def lstm_of_torch_2_4() -> None:
    raise ValueError("input must have the type torch.float32, got type torch.float64")


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lstm_of_torch_2_4, id="lstm of torch 2.4"),
        pytest.param(lambda: nn.Linear(3, 2)(torch.ones(2, 3, dtype=torch.float64)), id="linear"),
        pytest.param(lambda: nn.Linear(3, 2).half()(torch.ones(2, 3)), id="half"),
        pytest.param(lambda: nn.Conv1d(3, 2, 1)(torch.ones(2, 3, 4, dtype=torch.float64)), id="convolution"),
        pytest.param(lambda: nn.LSTM(3, 2)(torch.ones(2, 2, 3, dtype=torch.float64)), id="lstm"),
        pytest.param(lambda: torch.ones(2, 2).double() @ torch.ones(2, 2), id="matrices"),
    ],
)
def test_genuine_mismatches_of_dtypes(call: Callable[[], Any]) -> None:
    failure = diagnose("forward", error_of(call))
    assert is_dtype_mismatch(failure)
    assert failure.blame == INPUT
    assert not any((is_out_of_memory(failure), is_cudnn_failure(failure), is_sticky(failure.error)))


def test_noop_a_mismatch_of_shapes_is_not_one_of_dtypes() -> None:
    assert not is_dtype_mismatch(diagnose("forward", error_of(conv(2, 1, 8, 8))))
    assert not is_dtype_mismatch(None)


@pytest.mark.parametrize(
    ("error", "cudnn", "memory", "sticky"),
    [
        ("RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", True, False, False),
        ("RuntimeError: Unable to find a valid cuDNN algorithm to run convolution", True, False, False),
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB", False, True, False),
        ("MemoryError", False, True, False),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", False, False, True),
        ("RuntimeError: CUDA error: device-side assert triggered", False, False, True),
        ("RuntimeError: CUDA error: no kernel image is available for execution on the device", False, False, False),
    ],
)
def test_errors_after_which_a_retry_may_help(error: str, cudnn: bool, memory: bool, sticky: bool) -> None:
    failure = Failure("forward", ENVIRONMENT, error)
    assert (is_cudnn_failure(failure), is_out_of_memory(failure), is_sticky(error)) == (cudnn, memory, sticky)


@pytest.mark.parametrize(
    ("printed", "blame"),
    [
        pytest.param(ASSERT_PRINTED, INPUT, id="embedding"),
        pytest.param(
            'IndexKernel.cu:93: operator(): block [0,0,0] Assertion `i < sizes[i] && "index out of bounds"` failed.',
            INPUT,
            id="index",
        ),
        pytest.param("Assertion `x > 0` failed.", None, id="another"),
        pytest.param("index out of bounds", None, id="no assert"),
    ],
)
def test_the_failed_assertion_of_a_kernel(printed: str, blame: str | None) -> None:
    assert blame_of_assert(printed) == blame


def test_a_wrong_call_is_blamed_on_the_input_only_at_the_model_itself() -> None:
    error = error_of(lambda: nn.Linear(2, 2)())
    assert diagnose("forward", error, ("", "Net"), depth=1).blame == INPUT
    assert diagnose("forward", error, ("head", "Linear"), depth=2).blame == MODEL


def test_an_error_after_nan_from_a_broken_weight_is_blamed_on_the_checkpoint() -> None:
    assert diagnose("forward", ValueError("NaN loss"), origin=BROKEN).blame == CHECKPOINT
    assert diagnose("forward", ValueError("NaN loss"), origin=SOUND).blame == MODEL


def test_the_message_is_one_line() -> None:
    assert diagnose("forward", RuntimeError("\nfirst\nsecond")).error == "RuntimeError: first"
    assert diagnose("forward", KeyError()).error == "KeyError"
    assert diagnose("read", UnreadableError("w.pth: cut off")).error == "w.pth: cut off"


def test_a_failure_has_the_line_of_the_users_code() -> None:
    failure = diagnose("forward", error_of(conv(2, 1, 8, 8)))
    assert failure.where.startswith("test_outcome.py:")
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
def test_failures_that_hold_for_any_input(blame: str, error: str, holds: bool) -> None:
    assert holds_for_any_input(Failure("forward", blame, error)) is holds


def test_files_of_the_user() -> None:
    assert is_user_file(__file__)
    assert is_user_file("/home/me/torch/models.py")
    assert not is_user_file(nn.__file__)
    assert not is_user_file(diagnose.__code__.co_filename)
    assert not is_user_file("<frozen importlib._bootstrap>")
