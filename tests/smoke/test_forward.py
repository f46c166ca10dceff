from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from ckptfix.explain import explain
from ckptfix.smoke.exam import Exam, examine
from ckptfix.smoke.forward import LoadedModel, Trace, attempt, forward, load_strictly
from ckptfix.smoke.inputs import Arguments
from ckptfix.smoke.outcome import CHECKPOINT, ENVIRONMENT, INPUT, MODEL, ExamOutcome, Failure, Figures, NotLoadedError
from ckptfix.smoke.run import findings_of
from tests.smoke import models, second_tries
from tests.smoke.conftest import Save
from tests.smoke.models import Hider, Net, Tied

CPU = torch.device("cpu")


def subject() -> LoadedModel:
    return LoadedModel(Net().eval(), CPU, torch.float32)


def images(channels: int) -> Arguments:
    return Arguments((torch.ones(2, channels, 8, 8),), {}, ("a note of the input",), ("a warning of the input",))


def test_a_pass_keeps_its_outputs_and_what_was_known_before() -> None:
    done = forward(subject(), images(3), ExamOutcome("cpu", ("a note",)))
    assert [(name, tuple(tensor.shape)) for name, tensor in done.outputs] == [("logits", (2, 2))]
    assert done.outcome.is_good
    assert done.outcome.device == "cpu"
    assert done.outcome.notes == ("a note", "a note of the input")
    assert done.outcome.warnings == ("a warning of the input",)
    assert done.noting("more").outcome.notes[-1] == "more"


def test_an_error_is_an_outcome() -> None:
    failure = forward(subject(), images(1), ExamOutcome()).outcome.failure
    assert failure is not None
    assert (failure.blame, failure.module) == (INPUT, "conv")


@pytest.mark.parametrize("channels", [3, 1])
def test_the_failure_of_an_earlier_pass_is_dropped(channels: int) -> None:
    before = ExamOutcome(
        failure=Failure("forward", CHECKPOINT, "ValueError: no"), non_finite=(Figures("x", "float32[2]"),)
    )
    outcome = forward(subject(), images(channels), before).outcome
    assert outcome.non_finite == ()
    assert outcome.failure is None or outcome.failure.blame == INPUT


def test_a_subject_in_another_dtype_is_converted_as_a_whole() -> None:
    made = subject()
    made.convert(torch.float64)
    assert {tensor.dtype for tensor in made.model.state_dict().values()} == {torch.float64, torch.int64}
    assert made.is_converted
    assert made.arguments([]).args == ()


def trace_of(model: nn.Module, value: Tensor) -> Trace:
    with Trace(model.eval()) as trace, torch.no_grad():
        model(value)
    return trace


class Log(nn.Module):
    """Makes NaN without weights, in the forward of a container."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.head = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.log(-self.body(x).abs() - 1))


class Masks(nn.Module):
    """Makes -Inf, which its softmax takes away again, and then breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = nn.Threshold(100.0, -torch.inf)
        self.broken = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        return self.broken(torch.nan_to_num(self.mask(x), neginf=0.0))


class Catches(nn.Module):
    """Catches the error of one branch and runs on."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(9, 9)
        self.second = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        try:
            return self.first(x)
        except RuntimeError:
            return self.second(x)


def _with_nan(model: nn.Module, key: str) -> nn.Module:
    with torch.no_grad():
        model.state_dict()[key].view(-1)[0] = torch.nan
    return model


def test_a_finite_pass_has_no_origin_and_leaves_no_hooks() -> None:
    model = Net()
    trace = trace_of(model, torch.ones(1, 3, 8, 8))
    assert trace.origin is None
    assert trace.running is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("model", "shape", "module"),
    [
        pytest.param(_with_nan(Net(), "bn.running_var"), (1, 3, 8, 8), "bn", id="running_var"),
        pytest.param(_with_nan(Net(), "conv.weight"), (1, 3, 8, 8), "conv", id="the first of several"),
        pytest.param(
            _with_nan(nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True)), "0.bias"),
            (1, 2),
            "0",
            id="overwritten later",
        ),
        pytest.param(Log(), (1, 2), "", id="an operator of the container"),
        pytest.param(_with_nan(Masks(), "broken.weight"), (1, 2), "broken", id="a mask of -Inf is not blamed"),
    ],
)
def test_the_origin_is_the_innermost_first(model: nn.Module, shape: tuple[int, ...], module: str) -> None:
    origin = trace_of(model, torch.ones(shape)).origin
    assert origin is not None
    assert origin.module == module
    assert origin.output.nan > 0
    assert not any(figures.non_finite for figures in origin.inputs)


def test_the_origin_shows_its_weights() -> None:
    origin = trace_of(_with_nan(Net(), "bn.running_var"), torch.ones(1, 3, 8, 8)).origin
    assert origin is not None
    assert {figures.tensor: figures.nan for figures in origin.weights} == {
        "weight": 0,
        "bias": 0,
        "running_mean": 0,
        "running_var": 1,
    }


def test_an_input_that_is_not_finite_has_no_origin() -> None:
    assert trace_of(Net(), torch.full((1, 3, 8, 8), torch.nan)).origin is None


def test_after_an_error_the_innermost_module_is_still_running() -> None:
    with Trace(Net()) as trace, pytest.raises(RuntimeError, match="channels"):
        Net.__call__(trace._model, torch.ones(1, 1, 8, 8))
    assert trace.running == ("conv", "Conv2d")
    assert trace.depth == 2


def test_an_error_that_the_model_catches_is_left_behind() -> None:
    trace = trace_of(Catches(), torch.ones(1, 2))
    assert trace.running is None


class Borrows(nn.Module):
    """Uses the weight of its child directly; the child has no part in the pass."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(2, 2)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    def forward(self, x: Tensor) -> Any:
        return x @ self.child.weight


def test_broken_weights_of_children_are_named_and_masks_are_not() -> None:
    origin = trace_of(_with_nan(Borrows(), "child.weight"), torch.ones(1, 2)).origin
    assert origin is not None
    assert [figures.tensor for figures in origin.weights] == ["child.weight", "mask"]
    assert origin.broken == ("child.weight",)


NAN = torch.full((2, 4), torch.nan)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(nn.Identity(), id="nothing to load"),
        pytest.param(Net(), id="parameters and buffers"),
        pytest.param(Tied(), id="tied"),
        pytest.param(weight_norm(nn.Linear(2, 2)), id="parametrised"),
        pytest.param(nn.ParameterList([torch.ones(2, dtype=torch.complex64)]), id="complex"),
        pytest.param(nn.Linear(2, 2).half(), id="half"),
    ],
)
def test_a_strict_load_of_the_models_own_state_dict(model: nn.Module) -> None:
    state = {key: value.clone() for key, value in model.state_dict().items()}
    load_strictly(model, state)
    loaded = model.state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in state.items())


def test_a_lazy_model_is_made_by_the_load() -> None:
    lazy = nn.LazyLinear(2)
    load_strictly(lazy, nn.Linear(3, 2).state_dict())
    assert lazy.weight.shape == (2, 3)


def test_a_model_without_memory_gets_its_tensors_from_the_load() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    state = nn.Linear(3, 2).state_dict()
    load_strictly(model, state)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in state.items())
    assert model.weight.requires_grad


def test_nan_in_the_file_does_not_mean_that_it_was_not_loaded() -> None:
    load_strictly(Net(), {**Net().state_dict(), "fc.weight": NAN})


@pytest.mark.parametrize(
    ("change", "said", "keys"),
    [
        pytest.param({"fc.bias": None}, "1 missing key", ("fc.bias",), id="missing"),
        pytest.param({"a": NAN, "b": NAN}, "2 unexpected keys", ("a", "b"), id="unexpected"),
        pytest.param({"fc.bias": NAN, "bn.bias": NAN}, "2 size mismatches", ("bn.bias", "fc.bias"), id="shapes"),
        pytest.param({"fc.bias": None, "a": NAN}, "1 missing key, 1 unexpected key", ("fc.bias", "a"), id="both"),
    ],
)
def test_a_strict_load_that_fails_is_counted(change: dict[str, Any], said: str, keys: tuple[str, ...]) -> None:
    state = {key: value for key, value in {**Net().state_dict(), **change}.items() if value is not None}
    with pytest.raises(NotLoadedError) as caught:
        load_strictly(Net(), state)
    assert str(caught.value) == f"the strict load found {said}"
    assert caught.value.keys == keys


def test_a_parameter_that_a_strict_load_skips_is_found() -> None:
    state = Hider().state_dict()
    assert "hidden" not in state
    with pytest.raises(NotLoadedError, match="skipped 1 parameter") as caught:
        load_strictly(Hider(), state)
    assert caught.value.keys == ("hidden",)


IMAGES = ("4x3x16x16",)


def run(save: Save, factory: str, inputs: tuple[str, ...] = IMAGES) -> ExamOutcome:
    model = getattr(second_tries, factory)()
    return examine(Exam(save(model), f"tests.smoke.second_tries:{factory}", inputs=inputs, device="cpu"))


def test_noop_a_pass_that_succeeds_is_not_repeated() -> None:
    calls: list[Any] = []
    model = models.Net().eval()
    model.register_forward_hook(lambda *call: calls.append(call))
    done = attempt(
        LoadedModel(model, torch.device("cpu"), torch.float32), Arguments((torch.ones(1, 3, 8, 8),)), ExamOutcome()
    )
    assert done.outcome.is_good
    assert (len(calls), done.outcome.notes) == (1, ())


def test_noop_a_model_that_converts_its_dtypes_itself(save: Save) -> None:
    outcome = run(save, "HalfInPart")
    assert outcome.is_good
    assert (outcome.inputs, outcome.notes) == (("float16[4, 3, 16, 16]",), ())


@pytest.mark.parametrize(
    ("factory", "inputs", "note"),
    [
        pytest.param(
            "Hungry", "float32[1, 3, 16, 16]", "a batch of 4 did not fit into memory, so it was cut to 1", id="memory"
        ),
        pytest.param(
            "FailsInCudnn",
            "float32[4, 3, 16, 16]",
            "cuDNN failed (RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED), so it was turned off",
            id="cudnn",
        ),
        pytest.param(
            "Mixed",
            "float64[4, 3, 16, 16]",
            "the model's float32, float64 parameters met another dtype, so all were converted to float64",
            id="two dtypes in the model",
        ),
        pytest.param(
            "LacksHalf",
            "float32[4, 3, 16, 16]",
            "the model's float16, float32 parameters met another dtype, so all were converted to float32",
            id="no half version",
        ),
    ],
)
def test_a_second_try_that_helps_is_reported(save: Save, factory: str, inputs: str, note: str) -> None:
    outcome = run(save, factory)
    assert outcome.is_good
    assert outcome.inputs == (inputs,)
    assert outcome.notes == (note,)
    assert torch.backends.cudnn.enabled


@pytest.mark.parametrize(
    ("factory", "blame", "error", "note"),
    [
        pytest.param(
            "Insatiable", ENVIRONMENT, "can't allocate memory", "a batch of 1 in bfloat16 did not fit", id="memory"
        ),
        pytest.param(
            "MakesDoubles", MODEL, "same dtype", "the other dtype comes from the model's code", id="a dtype of the code"
        ),
        pytest.param(
            "AlwaysFailsInCudnn", ENVIRONMENT, "CUDNN_STATUS", "also failed with cuDNN turned off", id="cudnn"
        ),
    ],
)
def test_the_first_failure_is_reported_if_no_retry_helps(
    save: Save, factory: str, blame: str, error: str, note: str
) -> None:
    outcome = run(save, factory)
    assert outcome.failure is not None
    assert outcome.failure.blame == blame
    assert error in outcome.failure.error
    assert outcome.inputs == ("float32[4, 3, 16, 16]",)
    assert note in outcome.notes[-1]


def test_a_derived_input_finds_less_memory_too(save: Save) -> None:
    outcome = run(save, "Hungry", ())
    assert outcome.is_good
    assert outcome.inputs == ("float32[1, 3, 64, 64]",)


def test_half_weights_are_converted_if_the_code_makes_floats() -> None:
    class Scales(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * torch.ones(2))  # a float32 of its own

    subject = LoadedModel(Scales(2, 2).half(), torch.device("cpu"), torch.float16)
    done = attempt(subject, Arguments((torch.ones(1, 2, dtype=torch.float16),)), ExamOutcome())
    assert done.outcome.is_good
    assert (subject.dtype, subject.is_converted) == (torch.float32, True)
    assert "all were converted to float32" in done.outcome.notes[0]


@pytest.mark.parametrize(
    ("factory", "inputs", "record"),
    [
        pytest.param("MakesDoubles", IMAGES, "dtype-mismatch", id="dtypes"),
        pytest.param("Insatiable", IMAGES, "machine-memory", id="memory"),
        pytest.param("AlwaysFailsInCudnn", IMAGES, "cuda-library", id="cudnn"),
        pytest.param("IllegalAccess", IMAGES, "illegal-access", id="illegal access"),
        pytest.param("Hungry", ("1x1x16x16",), "input-channels", id="input"),
    ],
)
def test_explain_knows_the_error_of_each_failure(
    save: Save, factory: str, inputs: tuple[str, ...], record: str
) -> None:
    [finding] = findings_of(run(save, factory, inputs))
    assert finding.code == "RUN101"
    explanation = explain(finding.message)
    assert explanation is not None
    assert explanation.name == record
