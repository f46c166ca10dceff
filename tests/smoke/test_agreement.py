"""Comparisons, on the CPU; the true ones with a GPU are in test_gpu."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckptfix.core.smoke_result import Comparison
from ckptfix.smoke import agreement
from ckptfix.smoke.agreement import compare_outputs, compare_with_cpu
from ckptfix.smoke.arguments import Arguments
from ckptfix.smoke.forward import Subject, forward
from ckptfix.smoke.outcome import Outcome
from tests.smoke.models import Net

LOGITS = torch.tensor([[1.0, 2.0, 4.0], [4.0, 2.0, 1.0]])


def compare(ours: Tensor, theirs: Tensor, dtype: str = "float32") -> Comparison:
    return compare_outputs([("logits", ours)], [("logits", theirs)], "b.pth", dtype)


def test_the_same_is_bit_equal() -> None:
    same = compare(LOGITS, LOGITS.clone())
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
    seen = compare(ours, LOGITS, dtype)
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
def test_values_that_are_not_finite_differ_or_do_not(theirs: list[float], is_close: bool) -> None:
    seen = compare(torch.tensor([[-torch.inf, 1.0, torch.nan]]), torch.tensor([theirs]))
    assert seen.is_close is is_close
    assert seen.scale >= 1


def test_integers_differ_or_do_not() -> None:
    labels = torch.tensor([1, 2])
    assert compare(labels, labels.clone()).identical
    assert not compare(labels, labels + 1).identical


def test_the_size_of_one_value_has_no_classes() -> None:
    assert compare(torch.ones(2, 1), torch.ones(2, 1)).agreement is None


class Draws(Net):
    """Adds noise to its output."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": super().forward(x)["logits"] + torch.randn(())}


def with_cpu(model: nn.Module) -> Comparison:
    subject = Subject(model.eval(), torch.device("cpu"), next(model.parameters()).dtype)
    with torch.no_grad():
        run = forward(subject, Arguments((torch.ones(1, 3, 8, 8, dtype=subject.dtype),)), Outcome())
        return compare_with_cpu(subject, run, Outcome())


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
