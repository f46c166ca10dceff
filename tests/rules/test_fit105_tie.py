"""FIT105: a tied key that the file does not repeat."""

import pytest
import safetensors.torch
import torch
from torch import nn

import ckptfix
from ckptfix.bytes.sources import BLOCK
from ckptfix.core.edits import Tie
from ckptfix.core.finding import Applicability, Level
from ckptfix.report.advice import remedies_text
from ckptfix.report.terminal import loading_code
from ckptfix.rules.fit105_tie import tie
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
        pytest.param({"embed.weight": EMBED, "head.weight": EMBED.clone()}, Language(), id="two equal copies"),
        pytest.param({"embed.weight": EMBED, "head.weight": EMBED.t().clone().t()}, Language(), id="equal, transposed"),
        pytest.param(
            {"embed.weight": EMBED, "head.weight": EMBED.half()}, Language(), id="a rounded copy is a matter of dtypes"
        ),
        pytest.param(
            {"embed.weight": EMBED, "head.weight": HEAD}, Language(tied=False), id="different, and not tied there"
        ),
        pytest.param({}, Language(), id="neither is there"),
        pytest.param({"embed.weight": OTHER}, Language(), id="the twin has another shape"),
    ],
)
def test_noop(state, model):
    assert propose(tie, state, model) == []


@pytest.mark.parametrize(("stored", "missing"), [("embed.weight", "head.weight"), ("head.weight", "embed.weight")])
def test_filled_from_its_twin(stored, missing):
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


@pytest.mark.parametrize("order", [["embed.weight", "head.weight"], ["head.weight", "embed.weight"]])
def test_tied_keys_with_different_values(order):
    model = Language()
    state = {key: {"embed.weight": EMBED, "head.weight": HEAD}[key] for key in order}
    (finding,) = propose(tie, state, model)
    assert (finding.level, finding.fix) == (Level.ERROR, None)
    assert finding.keys == ("embed.weight", "head.weight")
    model.load_state_dict(state, strict=True)
    assert torch.equal(model.embed.weight, HEAD)
    assert finding.evidence == {"overwritten_by": {"head.weight": ["embed.weight"]}}
    assert "a load keeps only head.weight" in remedies_text(finding.remedies)


def test_one_different_element_in_a_later_block():
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = self.b = nn.Parameter(torch.zeros(BLOCK // 4 + 1))

    state = {"a": torch.zeros(BLOCK // 4 + 1), "b": torch.zeros(BLOCK // 4 + 1)}
    assert propose(tie, state, Large()) == []
    state["b"][-1] = 1
    assert [finding.keys for finding in propose(tie, state, Large())] == [("a", "b")]


def test_noop_values_are_not_read_with_no_values():
    _, report = ckptfix.repair_state_dict(
        {"embed.weight": EMBED, "head.weight": HEAD}, Language(), select=("FIT105",), values=False
    )
    assert report.findings == ()


@pytest.mark.parametrize("untie", [False, True])
@pytest.mark.parametrize("is_tied_before", [False, True], ids=["tied by the repair", "tied in the file"])
def test_the_printed_code_loads_a_tie_from_safetensors(tmp_path, untie, is_tied_before):
    """A plain read lacks the key that is tied, as the file stores the tensor once."""
    model, embed = Language(), torch.ones(5, 4)
    state = {"embed.weight": embed} | ({"head.weight": embed} if is_tied_before else {})
    torch.save(state, tmp_path / "a.pth")
    report = ckptfix.repair(tmp_path / "a.pth", model, output=tmp_path / "b.safetensors", untie=untie).report
    loaded = eval(loading_code(report, {}), {"safetensors": safetensors, "model": model})
    if untie:
        model.load_state_dict(loaded)
    assert torch.equal(model.state_dict()["head.weight"], torch.ones(5, 4))
