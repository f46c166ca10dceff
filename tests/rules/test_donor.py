"""A donor supplies a tensor under the same key and in the same shape, and only where no target names what is needed."""

from __future__ import annotations

import pytest
import torch

from ckptfix.core.edits import Fill
from ckptfix.core.spec import TensorSpec
from ckptfix.rules.donor import donor_fill
from tests.rules.proposals import context

DONOR = {"weight": torch.ones(3, 4), "bias": torch.ones(3)}
SPEC = TensorSpec("float32", (3, 4))


@pytest.mark.parametrize(
    ("key", "spec", "donor", "model"),
    [
        pytest.param("weight", SPEC, None, None, id="there_is_no_donor"),
        pytest.param("other", SPEC, DONOR, None, id="the_donor_does_not_have_it"),
        pytest.param("bias", SPEC, DONOR, None, id="it_has_another_shape_there"),
        pytest.param("weight", SPEC, DONOR, torch.nn.Linear(4, 3), id="the_rule_on_missing_keys_fills_for_a_target"),
    ],
)
def test_noop(key: str, spec: TensorSpec, donor: dict[str, torch.Tensor] | None, model: torch.nn.Module | None) -> None:
    assert donor_fill(key, spec, context({}, model, donor)) is None


@pytest.mark.parametrize("spec", [SPEC, pytest.param(None, id="nobody_knows_the_shape")])
def test_the_same_key_in_the_same_shape_is_taken(spec: TensorSpec | None) -> None:
    fill = donor_fill("weight", spec, context({}, None, DONOR))
    assert fill == Fill("weight", "float32", (3, 4), "donor", donor_key="weight")
