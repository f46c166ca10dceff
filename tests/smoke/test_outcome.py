from __future__ import annotations

import json

import pytest

from ckptfix.smoke.outcome import Failure, Figures, Origin, Outcome

FIGURES = Figures("output", "float32[2]", nan=1, positive_inf=2, low=0.5, high=3.0)
ORIGIN = Origin("features.3", "Conv2d", FIGURES, (FIGURES,), (FIGURES,))
FAILURE = Failure("forward", "checkpoint", "ValueError: no", "head", "Linear", "m.py:1 in forward", ("a",), ORIGIN)


@pytest.mark.parametrize(
    "outcome",
    [
        pytest.param(Outcome(), id="empty"),
        pytest.param(Outcome("cpu", ("note",), ("in",), ("out",), 1.5), id="passed"),
        pytest.param(Outcome(failure=FAILURE), id="failure after NaN"),
        pytest.param(Outcome(non_finite=(FIGURES,), origin=ORIGIN), id="not finite"),
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
