"""FIT105: a tied key that the file does not repeat."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ckptfix.finding import Applicability, Tie
from ckptfix.rules.tie import tie
from tests.rules.proposals import propose, repaired


class Language(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight


EMBED, HEAD, OTHER = torch.randn(5, 4), torch.randn(5, 4), torch.randn(6, 4)


@pytest.mark.parametrize(
    ("state", "model"),
    [
        pytest.param({"embed.weight": EMBED}, None, id="no target"),
        pytest.param({"embed.weight": EMBED}, Language(tied=False), id="the target does not tie"),
        pytest.param(Language().state_dict(), Language(), id="both are there"),
        pytest.param({"embed.weight": EMBED, "head.weight": HEAD}, Language(), id="unequal ones are never tied anew"),
        pytest.param({}, Language(), id="neither is there"),
        pytest.param({"embed.weight": OTHER}, Language(), id="the twin has another shape"),
    ],
)
def test_noop(state, model):
    assert propose(tie, state, model) == []


@pytest.mark.parametrize(("stored", "missing"), [("embed.weight", "head.weight"), ("head.weight", "embed.weight")])
def test_supplied_from_its_twin(stored, missing):
    model = Language()
    (finding,) = propose(tie, {stored: EMBED}, model)
    assert finding.keys == (missing,)
    assert finding.fix is not None
    assert finding.fix.edits == (Tie(missing, stored),)
    assert finding.fix.applicability == Applicability.SAFE
    after = repaired(tie, {stored: EMBED}, model)
    model.load_state_dict(after, strict=True)
    assert torch.equal(model.head.weight, EMBED)
    assert after[missing].untyped_storage().data_ptr() == after[stored].untyped_storage().data_ptr()
