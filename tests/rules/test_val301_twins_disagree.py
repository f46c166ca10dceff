import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.core.edits import Replace
from ckptfix.core.finding import Level
from ckptfix.rules.val301_twins_disagree import twins_disagree
from tests.checks import assert_same, check_repaired
from tests.rules.proposals import propose

NAN = float("nan")


def state(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    sound = {"conv.weight": torch.randn(8, 4), "conv.bias": torch.zeros(8), "bn.running_var": torch.ones(8)}
    return sound | {key.replace("__", "."): value for key, value in changes.items()}


BROKEN = state(conv__weight=torch.full((8, 4), NAN))


def checked(tmp_path, raw, averaged, **settings):
    torch.save({"state_dict": raw, "state_dict_ema": averaged}, tmp_path / "m.pth")
    return ckptfix.check(tmp_path / "m.pth", select="VAL301", **settings)


@pytest.mark.parametrize(
    ("raw", "averaged"),
    [
        pytest.param(state(), state(conv__weight=torch.ones(8, 4)), id="both-sound"),
        pytest.param(BROKEN, BROKEN, id="both-broken"),
        pytest.param(state(), state(lora_B__weight=torch.zeros(8, 4)), id="another-key"),
        pytest.param(
            state(proj_out__weight=torch.randn(8, 4)), state(proj_out__weight=torch.zeros(8, 4)), id="zero-by-design"
        ),
        pytest.param(state(), state(conv__weight=state()["conv.weight"] * 1e-4), id="an-average-after-one-step"),
        pytest.param(state(), {"other.weight": torch.full((8, 4), NAN)}, id="another-model"),
    ],
)
def test_noop(tmp_path, raw, averaged):
    assert checked(tmp_path, raw, averaged).findings == ()


@pytest.mark.parametrize(
    "broken",
    [
        BROKEN,
        state(conv__weight=torch.zeros(8, 4)),
        state(bn__running_var=-torch.ones(8)),
        state(conv__weight=state()["conv.weight"] * 1e-8),
    ],
    ids=["nan", "zeros", "negative-variance", "remains"],
)
def test_the_broken_one_is_reported(tmp_path, broken):
    (finding,) = checked(tmp_path, broken, state()).findings
    assert finding.level is Level.ERROR
    assert finding.message == "1 key broken here and intact in state_dict_ema"
    (finding,) = checked(tmp_path, state(), broken).findings
    assert finding.level is Level.WARNING
    assert finding.message == "1 key broken in state_dict_ema and intact here"


def test_a_chosen_set_that_is_sound_is_not_compared(tmp_path):
    assert checked(tmp_path, state(), BROKEN, weights="state_dict").findings == ()
    assert len(checked(tmp_path, BROKEN, state(), weights="state_dict").findings) == 1


def test_the_broken_end_of_a_tie_is_replaced_by_the_other():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 8, bias=False), nn.Linear(4, 8, bias=False)
            self.b.weight = self.a.weight

    before = {"a.weight": torch.ones(8, 4), "b.weight": torch.full((8, 4), NAN)}
    (finding,) = propose(twins_disagree, before, Tied())
    assert finding.keys == ("b.weight",)
    after = {"a.weight": torch.ones(8, 4), "b.weight": torch.ones(8, 4)}
    check_repaired(before, after, "VAL301", Tied(), replace="VAL301", fill="twin")


def test_only_broken_tensors_come_from_the_sound_set(tmp_path):
    torch.save({"state_dict": BROKEN, "ema": state(conv__bias=torch.ones(8))}, tmp_path / "m.pth")
    done = ckptfix.repair(tmp_path / "m.pth", output=tmp_path / "out.pth", replace="VAL301", fill="twin", select="VAL")
    assert_same(torch.load(tmp_path / "out.pth")["state_dict"], state())
    (edit,) = done.plan.edits
    assert edit == Replace("conv.weight", "float32", (8, 4), "twin", "conv.weight", "ema")
    again = ckptfix.repair(tmp_path / "m.pth", output=tmp_path / "again.pth", plan=done.plan)
    assert_same(again.state_dict(), state())


def test_tensors_that_another_rule_found_too_are_fixed(tmp_path):
    """One flag has to be enough, though VAL101 and VAL103 see the same values first."""
    raw = state(conv__weight=BROKEN["conv.weight"], bn__running_var=-torch.ones(8), bn__running_mean=torch.zeros(8))
    average = state(bn__running_mean=torch.zeros(8))
    torch.save({"state_dict": raw, "state_dict_ema": average}, tmp_path / "m.pth")
    repaired = ckptfix.repair(
        tmp_path / "m.pth",
        output=tmp_path / "out.pth",
        replace="VAL301",
        fill="twin",
        weights="state_dict",
        select="VAL",
    )
    assert [finding.code for finding in repaired.report.remaining if finding.level] == []
    assert_same(repaired.state_dict(), average)


OWN = torch.randn(32, 8)
HEADS = {
    "zeros": torch.zeros(32, 8),
    "after one step from zero": 1e-8 * OWN,
    "its own numbers and a NaN": OWN.where(OWN.max() > OWN, NAN),
    "NaN only": torch.full((32, 8), NAN),
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_noop_an_output_layer_that_only_its_name_ties(head: torch.Tensor) -> None:
    assert propose(twins_disagree, {"embed_tokens.weight": torch.randn(32, 8), "lm_head.weight": head}) == []


def test_an_output_layer_that_correlates_with_the_embedding_is_tied():
    state = {"embed_tokens.weight": OWN, "lm_head.weight": HEADS["its own numbers and a NaN"]}
    assert [finding.keys for finding in propose(twins_disagree, state)] == [("lm_head.weight",)]
