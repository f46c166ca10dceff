from __future__ import annotations

import pytest
import torch

from ckptfix.reading.opening import open_file
from ckptfix.rules.corroboration import Corroboration
from ckptfix.rules.decayed import decayed
from tests.rules.test_decayed import trained
from tests.rules.value_findings import loud, propose


@pytest.mark.parametrize(
    ("observed", "predicted", "agrees"),
    [
        (1e-6, None, None),
        (1e-6, 1e-6, True),
        (1e-6, 1e-4, True),
        (1e-6, 0.5, False),
        (1e-9, 0.0, True),
        (0.3, 0.0, False),
    ],
)
def test_a_prediction_agrees_where_the_logarithms_do(observed, predicted, agrees):
    assert Corroboration(observed, predicted).agrees is agrees


@pytest.mark.parametrize(
    ("corroboration", "words"),
    [
        (Corroboration(1e-6), ""),
        (Corroboration(1e-6, weight_decay=0.0), ", though the optimizer in this file had no weight_decay"),
        (
            Corroboration(1e-6, terms="weight_decay 0.1", weight_decay=0.1),
            "; the optimizer in this file had weight_decay 0.1",
        ),
        (
            Corroboration(1e-6, 2e-6, True, None, "weight_decay 0.1 at lr 0.1 over 9 steps", 0.1),
            "; no gradient arrived; weight_decay 0.1 at lr 0.1 over 9 steps predicts 2e-06 of the start, which agrees",
        ),
        (
            Corroboration(1e-6, 0.9, None, 0.999, "weight_decay 0.1", 0.1),
            "; decay alone moved it, as its momentum is parallel to it; weight_decay 0.1 predicts 0.9 of the start, "
            "which does not agree",
        ),
        (
            Corroboration(1e-6, None, False, None, "weight_decay 0.1", 0.1),
            "; though gradients arrived; the optimizer in this file had weight_decay 0.1",
        ),
    ],
)
def test_what_the_message_adds(corroboration, words):
    assert corroboration.in_words == words


def test_the_file_of_a_trainer_tells_how_the_layer_got_there(tmp_path):
    net, optimizer = trained(1500)
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": 1500}, tmp_path / "t.pth")
    (finding,) = loud(propose(decayed, open_file(str(tmp_path / "t.pth"))))
    assert "weight_decay 0.01 at lr 0.1 over 1500 steps predicts" in finding.message
    assert finding.message.endswith("which agrees")
    figures = finding.evidence["tensors"]["conv3.weight"]
    assert figures["cosine_of_momentum"] == pytest.approx(1.0)
    assert figures["prediction_agrees"] is True
    assert 1 < figures["peak_to_rms"] < 6
