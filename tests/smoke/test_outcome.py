from __future__ import annotations

import json

import pytest

from ckptfix.core.smoke_result import Comparison
from ckptfix.smoke.outcome import Failure, Figures, Gradients, Origin, Outcome

FIGURES = Figures("output", "float32[2]", nan=1, positive_inf=2, low=0.5, high=3.0)
ORIGIN = Origin("features.3", "Conv2d", FIGURES, (FIGURES,), (FIGURES,))
FAILURE = Failure("forward", "checkpoint", "ValueError: no", "head", "Linear", "m.py:1 in forward", ("a",), ORIGIN)


@pytest.mark.parametrize(
    "outcome",
    [
        pytest.param(Outcome(), id="empty"),
        pytest.param(Outcome("cpu", ("note",), ("in",), ("out",), 1.5), id="passed"),
        pytest.param(Outcome(failure=FAILURE), id="failure after NaN"),
        pytest.param(
            Outcome(non_finite=(FIGURES,), origin=ORIGIN, finite_in_float32=False, shared=True), id="not finite"
        ),
        pytest.param(
            Outcome(
                warnings=("odd",),
                training=Outcome(failure=FAILURE, gradients=Gradients(1, ("a",), ("b",), ("c",), 2, "Sqrt", "m.py:1")),
                devices=Comparison("cpu", False, 0.5, 2.0, 1e-3, None),
            ),
            id="all that may come after it",
        ),
    ],
)
def test_json_and_back(outcome: Outcome) -> None:
    assert Outcome.from_json(json.loads(json.dumps(outcome.to_json()))) == outcome


def test_figures_read_as_a_line() -> None:
    assert str(FIGURES) == "output float32[2]: 1 NaN, 2 +Inf, finite values 0.5 … 3"
    assert str(Figures("ids", "int64[2]")) == "ids int64[2]"


def test_the_place_of_a_failure() -> None:
    assert FAILURE.place == " in head (Linear), at m.py:1 in forward"
    assert Failure("forward", "model", "no", "", "Net").place == " in the model itself (Net)"
    assert Failure("build", "model", "no").place == ""


def test_the_keys_that_cannot_be_right() -> None:
    fine, bad = Figures("weight", "float32[2]", low=-1, high=1), Figures("bias", "float32[2]", nan=1)
    negative = Figures("running_var", "float32[2]", low=-1, high=1)
    assert Origin("bn", "BatchNorm2d", FIGURES, (), (fine, bad, negative)).broken == ("bn.bias", "bn.running_var")
    assert Origin("", "BatchNorm2d", FIGURES, (), (bad,)).broken == ("bias",)


def test_comparisons_and_gradients_read_as_a_line() -> None:
    assert str(Comparison("cpu", unlike="left out")) == "against cpu: not comparable, left out"
    assert str(Comparison("b", False, 0.5, 2.0, 1e-3)) == "against b: largest difference 0.5 (rounding explains 0.002)"
    assert str(Gradients(3, zero=("a",), missing=("b", "c"))) == "gradients: 3 finite, 1 all zero, 2 none"
    assert str(Gradients()) == "gradients: nothing to train"
