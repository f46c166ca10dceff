"""The comparison with another checkpoint: what is compared, and what is reported if nothing can be."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import asdict
from torch import Tensor, nn

from ckptfix.core.finding import Level
from ckptfix.core.settings import Settings
from ckptfix.core.smoke_result import Comparison
from ckptfix.engine.validation import checked_settings
from ckptfix.errors import CkptfixError, UsageError
from ckptfix.reading.opening import open_source
from ckptfix.smoke import reference as agreement
from ckptfix.smoke.exam import Exam, examine
from ckptfix.smoke.forward import LoadedModel, forward
from ckptfix.smoke.inputs import Arguments
from ckptfix.smoke.outcome import ExamOutcome
from ckptfix.smoke.reference import Reference, compare_outputs, compare_with_cpu
from ckptfix.smoke.run import findings_of
from tests.smoke import models
from tests.smoke.conftest import Save
from tests.smoke.models import Net
from tests.smoke.second_tries import Mixed


class Sized(models.Net):
    """Gives as many outputs as a stored number says."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = super().forward(x)["logits"]
        return {f"logits{number}": logits for number in range(int(self.get_buffer("count")))}


class Drifts(models.Net):
    """Gives something else each time, and torch's seed changes nothing about it."""

    _runs = itertools.count()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": super().forward(x)["logits"] + next(self._runs)}


class Shows(nn.Module):
    """Gives its own weight away."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc.weight


shows = Shows()


def net(**changes: Tensor) -> dict[str, Any]:
    """The state_dict of a model that is always the same."""
    torch.manual_seed(1)
    return models.Net().state_dict() | {key.replace("__", "."): value for key, value in changes.items()}


def compare(tmp_path: Path, theirs: dict[str, Any], factory: str = "tests.smoke.models:Net") -> ExamOutcome:
    """The test of the file that was saved against these weights."""
    other = tmp_path / "other.pth"
    torch.save(theirs, other)
    reference = Reference(str(other), "other.pth")
    return examine(Exam(str(tmp_path / "weights.pth"), factory, device="cpu", reference=reference))


def compared(save: Save, tmp_path: Path, theirs: dict[str, Any], ours: dict[str, Any] | None = None) -> Comparison:
    model = models.Net()
    model.load_state_dict(ours or net())
    save(model)
    outcome = compare(tmp_path, theirs)
    assert outcome.is_good
    assert outcome.compared is not None
    return outcome.compared


def test_the_same_weights_give_the_same_bits(save: Save, tmp_path: Path) -> None:
    seen = compared(save, tmp_path, net())
    assert seen.identical
    assert str(seen) == "against other.pth: bit-equal"


def test_a_wrapper_and_a_missing_counter_are_repaired_first(save: Save, tmp_path: Path) -> None:
    theirs = {f"module.{key}": value for key, value in net().items() if "num_batches" not in key}
    assert str(compared(save, tmp_path, theirs)) == "against other.pth after safe repairs: bit-equal"


def test_noop_a_difference_between_different_weights(save: Save, tmp_path: Path) -> None:
    bias = net()["fc.bias"]
    seen = compared(save, tmp_path, net(fc__bias=bias + torch.tensor([8.0, 0])))
    assert seen.difference == pytest.approx(8, rel=1e-5)
    assert (seen.identical, seen.differing, seen.tensors) == (False, 1, 9)
    assert seen.agreement in (0, 0.5, 1)
    assert "largest difference 8 " in str(seen)
    assert str(seen).endswith("; the weights differ in 1 of 9 tensors")
    assert findings_of(ExamOutcome("cpu", compared=seen)) == []


def test_a_reference_with_other_predictions(save: Save, tmp_path: Path) -> None:
    ours, theirs = (net(fc__bias=torch.tensor([high, 0.0])) for high in (9, -9))
    assert compared(save, tmp_path, theirs, ours).agreement == 0


def test_a_cast_is_compared_value_by_value(save: Save, tmp_path: Path) -> None:
    halves = {key: value.bfloat16() if value.is_floating_point() else value for key, value in net().items()}
    seen = compared(save, tmp_path, halves)
    assert 0 < seen.difference < 0.1
    assert (seen.differing, seen.tensors) == (8, 9)  # the counter is an integer


def test_values_that_are_not_finite_are_not_a_small_difference(save: Save, tmp_path: Path) -> None:
    seen = compared(save, tmp_path, net(fc__bias=torch.tensor([torch.nan, 0])))
    assert not seen.is_close
    assert seen.agreement is None
    assert "a value is finite in one and not in the other" in str(seen)


@pytest.mark.parametrize(
    ("factory", "changes", "said"),
    [
        pytest.param(
            "tests.smoke.models:Net",
            {"fc.weight": torch.ones(5, 4), "fc.bias": torch.ones(5)},
            "the strict load found 2 size mismatches, fc.weight among them",
            id="it does not load",
        ),
        pytest.param(
            "tests.smoke.models:Guards",
            {"index": torch.ones(1)},
            "with its weights the model failed (ValueError: the index is corrupt)",
            id="it does not run",
        ),
        pytest.param(
            "tests.smoke.test_reference:Sized",
            {"count": torch.tensor(2)},
            "the outputs differ in names or shapes",
            id="it gives other outputs",
        ),
    ],
)
def test_what_cannot_be_compared_is_a_note(
    save: Save, tmp_path: Path, factory: str, changes: dict[str, Tensor], said: str
) -> None:
    model = (Sized if "Sized" in factory else getattr(models, factory.rpartition(":")[2]))()
    save(model)
    outcome = compare(tmp_path, model.state_dict() | changes, factory)
    assert outcome.is_good
    assert outcome.compared == Comparison("other.pth", unlike=said)
    [finding] = findings_of(outcome)
    assert (finding.code, finding.level) == ("RUN106", Level.NOTE)
    assert finding.message == f"the outputs were not compared with those of other.pth: {said}"


def test_a_model_that_did_not_run_is_not_compared(save: Save, tmp_path: Path) -> None:
    model = models.Refuses()
    save(model)
    outcome = compare(tmp_path, model.state_dict(), "tests.smoke.models:Refuses")
    assert outcome.compared == Comparison("other.pth", unlike="the model did not run")


def test_a_model_that_is_not_repeatable_is_a_note(save: Save, tmp_path: Path) -> None:
    model = Drifts()
    save(model)
    outcome = compare(tmp_path, model.state_dict(), "tests.smoke.test_reference:Drifts")
    [finding] = findings_of(outcome)
    assert (finding.code, finding.level) == ("RUN106", Level.NOTE)
    assert finding.message.startswith(
        "the model is not deterministic: with the same weights its outputs differ, against"
    )


def test_both_sides_have_the_same_dtype(save: Save, tmp_path: Path) -> None:
    model = Mixed()
    save(model)
    outcome = compare(tmp_path, model.state_dict(), "tests.smoke.second_tries:Mixed")
    assert any("converted to float64" in note for note in outcome.notes)
    assert outcome.compared is not None
    assert outcome.compared.identical


def test_outputs_are_kept_if_the_factory_returns_the_same_model(save: Save, tmp_path: Path) -> None:
    save(shows)
    theirs = {"fc.weight": torch.full((3, 3), 7.0), "fc.bias": torch.zeros(3)}
    seen = compare(tmp_path, theirs, "tests.smoke.test_reference:shows").compared
    assert seen is not None
    assert seen.difference > 5


def test_a_comparison_after_training_mode_is_the_same(save: Save, tmp_path: Path) -> None:
    file = save(models.Net())
    job = Exam(file, "tests.smoke.models:Net", device="cpu", backward=True, reference=Reference(file, "itself"))
    outcome = examine(job)
    assert outcome.training is not None
    assert str(outcome.compared) == "against itself: bit-equal"


def settings(compare: str, smoke: bool | None = None) -> Settings:
    return Settings(smoke=smoke, weights="ema", compare=compare)


def test_the_source_is_opened_with_the_same_settings() -> None:
    assert Reference.of(Settings(), "a.pth") is None
    assert Reference.of(settings("source"), "a.pth") == Reference("a.pth", "a.pth", "ema")
    assert Reference.of(settings("b.pth"), "a.pth") == Reference("b.pth", "b.pth")


def test_a_reference_is_opened_before_anything_runs(save: Save, tmp_path: Path) -> None:
    file = save(models.Net())
    (tmp_path / "notes.txt").write_text("no checkpoint")
    for given in (Settings(), settings("source"), settings(file)):
        checked_settings(asdict(given), "pkg:build")
    for name in ("absent.pth", "notes.txt"):
        with pytest.raises(CkptfixError, match=name):
            checked_settings(asdict(settings(str(tmp_path / name))), "pkg:build")


@pytest.mark.parametrize(
    ("given", "has_factory", "said"),
    [
        pytest.param(settings("source", smoke=False), True, "leave out smoke=False", id="no forward test"),
        pytest.param(settings("source"), False, "add model=", id="no model"),
        pytest.param(settings("source"), True, "in memory", id="no file"),
    ],
)
def test_a_comparison_without_meaning_is_refused(given: Settings, has_factory: bool, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        open_source(net(), checked_settings(asdict(given), "pkg:build" if has_factory else None))


LOGITS = torch.tensor([[1.0, 2.0, 4.0], [4.0, 2.0, 1.0]])


def agreement_of(ours: Tensor, theirs: Tensor, dtype: str = "float32") -> Comparison:
    return compare_outputs([("logits", ours)], [("logits", theirs)], "b.pth", dtype)


def test_the_same_is_bit_equal() -> None:
    same = agreement_of(LOGITS, LOGITS.clone())
    assert same.identical
    assert same.is_close
    assert str(same) == "against b.pth: bit-equal"


@pytest.mark.parametrize(
    ("change", "dtype", "is_close", "agreement"),
    [
        pytest.param(1e-4, "float32", True, 1.0, id="rounding"),
        pytest.param(1e-2, "float32", False, 1.0, id="more than rounding"),
        pytest.param(1e-2, "float16", True, 1.0, id="rounding of float16"),
        pytest.param(1e-4, "float64", False, 1.0, id="too much for float64"),
        pytest.param(5.0, "float32", False, 0.5, id="another class"),
    ],
)
def test_the_difference_counts_against_the_scale(change: float, dtype: str, is_close: bool, agreement: float) -> None:
    ours = LOGITS.clone()
    ours[0, 0] += change
    seen = agreement_of(ours, LOGITS, dtype)
    assert seen.difference == pytest.approx(change, rel=1e-2)
    assert (seen.scale, seen.identical, seen.is_close, seen.agreement) == (4.0, False, is_close, agreement)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        pytest.param([("a", LOGITS)], [("b", LOGITS)], id="names"),
        pytest.param([("a", LOGITS)], [("a", LOGITS[:1])], id="shapes"),
        pytest.param([("a", LOGITS)], [], id="number"),
    ],
)
def test_outputs_of_other_kinds_are_not_compared(ours: Any, theirs: Any) -> None:
    seen = compare_outputs(ours, theirs, "b.pth")
    assert seen.unlike
    assert not seen.is_close


@pytest.mark.parametrize(
    ("theirs", "is_close"),
    [
        pytest.param([-torch.inf, 1.0, torch.nan], True, id="the same in both"),
        pytest.param([-torch.inf, 1.0, 2.0], False, id="finite in one"),
        pytest.param([torch.inf, 1.0, torch.nan], False, id="of the other sign"),
    ],
)
def test_non_finite_values_are_compared(theirs: list[float], is_close: bool) -> None:
    seen = agreement_of(torch.tensor([[-torch.inf, 1.0, torch.nan]]), torch.tensor([theirs]))
    assert seen.is_close is is_close
    assert seen.scale >= 1


def test_integers_are_compared() -> None:
    labels = torch.tensor([1, 2])
    assert agreement_of(labels, labels.clone()).identical
    assert not agreement_of(labels, labels + 1).identical


def test_outputs_of_one_value_have_no_classes() -> None:
    assert agreement_of(torch.ones(2, 1), torch.ones(2, 1)).agreement is None


class Draws(Net):
    """Adds noise to its output."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": super().forward(x)["logits"] + torch.randn(())}


def with_cpu(model: nn.Module) -> Comparison:
    subject = LoadedModel(model.eval(), torch.device("cpu"), next(model.parameters()).dtype)
    with torch.no_grad():
        run = forward(subject, Arguments((torch.ones(1, 3, 8, 8, dtype=subject.dtype),)), ExamOutcome())
        return compare_with_cpu(subject, run, ExamOutcome())


def test_a_device_agrees_with_itself() -> None:
    assert with_cpu(Net()).identical


def test_half_is_compared_in_float32() -> None:
    seen = with_cpu(Net().half())
    assert not seen.identical
    assert seen.is_close


def test_a_model_that_draws_random_numbers_is_not_compared() -> None:
    assert "draws random numbers" in with_cpu(Draws()).unlike


def test_a_large_model_is_not_run_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "LARGEST_FOR_CPU", 10)
    assert "too large" in with_cpu(Net()).unlike
