"""What the child does, here in-process: everything but crashes and time-outs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ckptfix.smoke.exam import CONTRAST, NO_FIT, NO_GUESS, Exam, examine, recheck_in_float32, train
from ckptfix.smoke.forward import LoadedModel, attempt, compute_dtype
from ckptfix.smoke.inputs import Arguments
from ckptfix.smoke.outcome import CHECKPOINT, INPUT, MODEL, ExamOutcome
from tests.smoke import models
from tests.smoke.conftest import Save


def run(file: str, factory: str, *inputs: str, **rest: Any) -> ExamOutcome:
    return examine(Exam(file, f"tests.smoke.models:{factory}", inputs=inputs, device="cpu", **rest))


def test_a_sound_file_passes(save: Save) -> None:
    outcome = run(save(models.Net()), "Net")
    assert outcome.failure is None
    assert outcome.non_finite == ()
    assert outcome.device == "cpu"
    assert outcome.inputs == ("float32[2, 3, 64, 64]",)
    assert outcome.outputs == ("logits: float32[2, 2]",)


def test_the_stages_are_reported_in_order(save: Save) -> None:
    told: list[str] = []
    examine(Exam(save(models.Net()), "tests.smoke.models:Net"), lambda stage, so_far: told.append(stage))
    assert told == ["device", "build", "read", "load", "move", "input", "input", "forward"]


def test_safetensors_and_ties(tmp_path: Path) -> None:
    model = models.Tied()
    save_file({key: value.clone() for key, value in model.state_dict().items()}, tmp_path / "w.safetensors")
    outcome = run(str(tmp_path / "w.safetensors"), "Tied")
    assert outcome.failure is None
    assert outcome.inputs == ("int64[2, 8]",)


def test_a_container_and_the_weights_that_were_picked(tmp_path: Path) -> None:
    sound, broken = models.Net().state_dict(), models.Net().state_dict()
    broken["fc.bias"].fill_(torch.nan)
    torch.save({"state_dict": broken, "ema": sound, "epoch": 3}, tmp_path / "w.pth")
    assert run(str(tmp_path / "w.pth"), "Net", weights="ema").non_finite == ()
    assert run(str(tmp_path / "w.pth"), "Net", weights="state_dict").non_finite != ()


def test_two_inputs_by_name(save: Save) -> None:
    outcome = run(save(models.Tower()), "Tower", "tokens=2x5:int:0:10", "scale=2x5")
    assert outcome.failure is None
    assert outcome.inputs == ("tokens: int64[2, 5]", "scale: float32[2, 5]")


def test_half_weights_run_in_float32_on_the_cpu(save: Save) -> None:
    outcome = run(save(models.half()), "half")
    assert outcome.failure is None
    assert outcome.inputs == ("float32[2, 3, 64, 64]",)
    assert any("converted to float32" in note for note in outcome.notes)


def test_nan_in_the_weights_is_traced_to_its_module(save: Save) -> None:
    var = torch.tensor([1.0, torch.nan, 1.0, 1.0])
    outcome = run(save(models.Net(), {"bn.running_var": var}), "Net")
    assert outcome.failure is None
    assert [(figures.tensor, figures.nan) for figures in outcome.non_finite] == [("logits", 4)]
    assert outcome.origin is not None
    assert outcome.origin.name == "bn (BatchNorm2d)"


def test_an_error_after_nan_in_the_weights_is_blamed_on_the_file(save: Save) -> None:
    outcome = run(save(models.Checks(), {"fc.bias": torch.full((2,), torch.nan)}), "Checks")
    assert outcome.failure is not None
    assert outcome.failure.blame == CHECKPOINT
    assert outcome.failure.origin is not None
    assert outcome.failure.origin.module == "fc"


@pytest.mark.parametrize(
    ("factory", "inputs", "blame", "said"),
    [
        pytest.param("Net", ("2x1x8x8",), INPUT, "3 channels", id="the given input does not fit"),
        pytest.param("Tower", ("tokens=2x5:int:0:11", "scale=2x5"), INPUT, "index out of range", id="beyond the range"),
        pytest.param("Tower", ("2x5:int:0:10",), INPUT, "missing 1 required", id="an argument is missing"),
        pytest.param("Refuses", ("2x3x8x8",), MODEL, "ValueError: I never run", id="the model raises, input given"),
        pytest.param("Unfinished", (), MODEL, "NameError", id="the model lacks a name, whatever the input"),
        pytest.param("Leaves", (), MODEL, "SystemExit: 0", id="the model leaves"),
        pytest.param("quits", (), MODEL, "no licence", id="the factory leaves"),
        pytest.param("broken", (), MODEL, "no layer of width 3", id="the factory raises"),
        pytest.param("absent", (), MODEL, "has no absent", id="no such factory"),
    ],
)
def test_a_failure_is_classified(save: Save, factory: str, inputs: tuple[str, ...], blame: str, said: str) -> None:
    source = getattr(models, factory, models.Net)
    file = save(source() if isinstance(source, type) else models.Net())
    failure = run(file, factory, *inputs).failure
    assert failure is not None
    assert failure.blame == blame
    assert said in failure.error
    assert "\n" not in failure.error


def test_the_innermost_module_and_line_are_named(save: Save) -> None:
    failure = run(save(models.Net()), "Net", "2x1x8x8").failure
    assert failure is not None
    assert (failure.module, failure.kind) == ("conv", "Conv2d")
    assert failure.where.startswith("models.py:")
    assert "models.py" in failure.traceback


def test_no_verdict_if_the_derived_input_also_fails_with_initial_weights(save: Save) -> None:
    outcome = run(save(models.Refuses()), "Refuses")
    assert outcome.failure is None
    assert outcome.undecided.startswith(f"{NO_FIT} (float32[2, 3, 64, 64] gave ValueError: I never run")


def test_no_verdict_without_an_input(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(3)}, tmp_path / "w.pth")
    outcome = examine(Exam(str(tmp_path / "w.pth"), "torch.nn:PReLU", {"num_parameters": 3}, device="cpu"))
    assert (outcome.failure, outcome.undecided) == (None, NO_GUESS)


CORRUPT = {"index": torch.full((1,), 3.0)}


def test_no_verdict_if_the_model_only_runs_with_initial_weights(save: Save) -> None:
    outcome = run(save(models.Guards(), CORRUPT), "Guards")
    assert outcome.failure is None
    assert outcome.undecided.startswith(f"{NO_FIT} (float32[2, 3, 64, 64] gave ValueError: the index is corrupt")
    assert outcome.undecided.endswith(CONTRAST)


def test_a_model_that_runs_is_built_once(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUILT", "")
    sound = save(models.Guards())
    told: list[str] = []
    outcome = examine(Exam(sound, "tests.smoke.models:GuardsOnce", device="cpu"), lambda stage, _: told.append(stage))
    assert (outcome.failure, outcome.undecided) == (None, "")
    assert "control" not in told


@pytest.mark.parametrize(
    "factory",
    [
        pytest.param("guards", id="the factory gives the same model again"),
        pytest.param("GuardsLazily", id="the control has lazy layers and takes any input"),
        pytest.param("GuardsOnce", id="the factory does not run twice"),
    ],
)
def test_without_a_control_there_is_no_verdict(save: Save, factory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUILT", "")
    outcome = run(save(models.Guards(), CORRUPT), factory)
    assert outcome.failure is None
    assert "the index is corrupt" in outcome.undecided
    assert CONTRAST not in outcome.undecided


def test_the_arguments_of_the_factory_arrive(save: Save) -> None:
    failure = run(save(models.Net()), "broken", factory_args={"width": 7}).failure
    assert failure is not None
    assert "no layer of width 7" in failure.error


def test_a_missing_key_fails_the_load(save: Save) -> None:
    failure = run(save(models.Net(), {"fc.bias": None}), "Net").failure
    assert failure is not None
    assert (failure.stage, failure.blame, failure.keys) == ("load", CHECKPOINT, ("fc.bias",))


def test_a_file_that_torch_itself_refuses_fails(tmp_path: Path) -> None:
    torch.save({"state_dict": models.Net().state_dict(), "args": Exam("x", "y")}, tmp_path / "w.pth")
    failure = run(str(tmp_path / "w.pth"), "Net").failure
    assert failure is not None
    assert (failure.stage, failure.blame) == ("read", CHECKPOINT)
    assert failure.error == (
        "torch.load(weights_only=True) refuses the file: Unsupported global: GLOBAL ckptfix.smoke.exam.Exam"
    )


def test_an_array_as_input(save: Save, tmp_path: Path) -> None:
    import numpy as np

    np.save(tmp_path / "x.npy", np.ones((1, 3, 16, 16)))
    outcome = run(save(models.Net()), "Net", str(tmp_path / "x.npy"))
    assert outcome.failure is None
    assert outcome.inputs == ("float32[1, 3, 16, 16]",)


class Overflows(nn.Module):
    """Its product does not fit into float16, and does into float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.first(x))


@pytest.mark.parametrize(
    ("value", "is_finite"),
    [pytest.param(200.0, True, id="a limit of float16"), pytest.param(torch.nan, False, id="a broken weight")],
)
def test_an_overflow_of_half_precision_is_run_again_in_float32(value: float, is_finite: bool) -> None:
    model = Overflows().half().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
        subject = LoadedModel(model, torch.device("cpu"), torch.float16)
        run = attempt(subject, Arguments((torch.full((1, 4), 100.0, dtype=torch.float16),)), ExamOutcome())
        assert run.outcome.non_finite
        assert recheck_in_float32(run, subject).finite_in_float32 is is_finite


def test_noop_a_finite_output_is_not_run_in_float32() -> None:
    subject = LoadedModel(models.Net().half().eval(), torch.device("cpu"), torch.float16)
    run = attempt(subject, Arguments((torch.ones((1, 3, 8, 8), dtype=torch.float16),)), ExamOutcome())
    assert recheck_in_float32(run, subject).finite_in_float32 is None
    assert subject.dtype == torch.float16


IMAGES = torch.linspace(-1, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8)


def outcome_of(model: nn.Module, given: Tensor = IMAGES, backward: bool = False) -> ExamOutcome:
    with torch.no_grad():
        subject = LoadedModel(model.eval(), torch.device("cpu"), compute_dtype(model))
        return train(subject, Arguments((given,)), backward, ExamOutcome("cpu"))


class Roots(models.Net):
    """Its output holds the root of zero, whose derivative is infinite, times zero."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = super().forward(x)["logits"]
        return {"logits": torch.sqrt(logits * 0) * 0}


class Parts(nn.Module):
    """A part that is used, one that is multiplied by zero, one that is not used, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.silent, self.unused, self.frozen = (nn.Linear(2, 2, bias=False) for _ in range(4))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        return self.used(self.frozen(x)) + self.silent(x) * 0


class Leaks(models.Net):
    """Breaks only in training mode."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if self.training:
            raise ValueError("targets must be given in training mode")
        return super().forward(x)


class Masked(nn.Linear):
    """Puts -Inf in the place of its last value."""

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        return output.masked_fill(torch.arange(output.shape[-1]) == output.shape[-1] - 1, -torch.inf)


def test_training_mode_leaves_the_model_as_it_was() -> None:
    model = models.Net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    outcome = outcome_of(model, backward=True)
    assert outcome.is_good
    assert outcome.notes == ()
    assert not model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_batch_of_one_is_doubled() -> None:
    flat = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    outcome = outcome_of(flat, torch.ones(1, 4), backward=True)
    assert outcome.is_good
    assert outcome.inputs == ("float32[2, 4]",)
    assert "doubled" in outcome.notes[0]


def test_the_input_follows_a_model_that_was_converted_since() -> None:
    subject = LoadedModel(nn.Linear(4, 4).bfloat16().eval(), torch.device("cpu"), torch.bfloat16)
    arguments = Arguments((torch.ones(2, 4, dtype=torch.bfloat16),))
    subject.convert(torch.float32)
    assert train(subject, arguments, False, ExamOutcome("cpu")).inputs == ("float32[2, 4]",)


def test_training_mode_with_a_batch_of_one() -> None:
    class Single(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 1:
                raise ValueError("one at a time")
            return super().forward(x)

    outcome = outcome_of(Single(4, 4), torch.ones(1, 4))
    assert outcome.is_good
    assert outcome.inputs == ("float32[1, 4]",)
    assert outcome.notes == ()


def test_an_error_of_training_mode_is_its_outcome() -> None:
    failure = outcome_of(Leaks()).failure
    assert failure is not None
    assert "targets must be given" in failure.error


@pytest.mark.parametrize(
    ("model", "shape", "seen"),
    [
        pytest.param(models.Net(), (2, 3, 8, 8), (6, 0, (), ()), id="all are finite"),
        pytest.param(nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1)), (2, 2), (2, 0, (), ()), id="a softmax hides none"),
        pytest.param(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), (2, 2), (4, 0, (), ()), id="a norm hides none"),
        pytest.param(
            Parts(), (2, 2), (1, 1, ("silent.weight",), ("unused.weight",)), id="zeros, none and frozen are told apart"
        ),
        pytest.param(nn.Embedding(4, 2, sparse=True), None, (1, 0, (), ()), id="sparse"),
        pytest.param(nn.Linear(2, 2, dtype=torch.complex64), (2, 2), (2, 0, (), ()), id="complex"),
        pytest.param(Masked(2, 2), (2, 2), (2, 0, (), ()), id="behind a mask of -Inf"),
        pytest.param(nn.Linear(2, 2).half().double().requires_grad_(False), (2, 2), (0, 2, (), ()), id="all frozen"),
    ],
)
def test_gradients_are_counted(model: nn.Module, shape: tuple[int, ...] | None, seen: tuple[Any, ...]) -> None:
    dtype = next(model.parameters()).dtype
    given = torch.tensor([[1, 2]]) if shape is None else torch.linspace(-1, 1, 384)[: torch.Size(shape).numel()]
    gradients = outcome_of(model, given if shape is None else given.view(shape).to(dtype), backward=True).gradients
    assert gradients is not None
    assert (gradients.finite, gradients.frozen, gradients.zero, gradients.missing) == seen
    assert gradients.non_finite == ()


def test_a_gradient_that_is_not_finite_is_traced_to_its_line() -> None:
    gradients = outcome_of(Roots(), backward=True).gradients
    assert gradients is not None
    assert gradients.operator == "SqrtBackward0"
    assert gradients.where.startswith("test_exam.py:")
    assert gradients.where.endswith("in forward")
    assert set(gradients.non_finite) == {name for name, _ in Roots().named_parameters()}
    assert not torch.is_anomaly_enabled()


def test_an_output_without_a_gradient_trains_nothing() -> None:
    class Picks(models.Tied):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens).argmax(-1)

    gradients = outcome_of(Picks(), torch.tensor([[1, 2]]), backward=True).gradients
    assert gradients is not None
    assert gradients.missing == ("embed.weight",)


VAR = torch.tensor([1.0, torch.nan, 1.0, 1.0])


@pytest.mark.parametrize(
    ("changes", "is_good"),
    [
        pytest.param({}, True, id="sound"),
        pytest.param({"bn.running_var": VAR}, False, id="fine in training mode alone"),
    ],
)
def test_broken_statistics_show_only_in_eval_mode(save: Save, changes: dict[str, Tensor], is_good: bool) -> None:
    job = Exam(save(models.Net(), changes), "tests.smoke.models:Net", device="cpu", train_mode=True)
    outcome = examine(job)
    assert outcome.is_good is is_good
    assert outcome.training is not None
    assert outcome.training.is_good
    assert outcome.training.gradients is None


def test_training_mode_is_not_run_unless_asked(save: Save) -> None:
    assert examine(Exam(save(models.Net()), "tests.smoke.models:Net", device="cpu")).training is None
