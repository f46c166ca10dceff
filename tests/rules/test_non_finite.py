import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from ckptfix.checkpoint import Candidate
from ckptfix.finding import Level
from ckptfix.formats import open_file
from ckptfix.live import open_state_dict
from ckptfix.rules.non_finite import non_finite
from tests.rules.healthy import HEALTHY, build
from tests.rules.value_findings import loud, propose, without_values

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_models_are_quiet(name):
    assert propose(non_finite, build(name).state_dict()) == []


@pytest.mark.parametrize(
    ("key", "tensor"),
    [
        pytest.param("attn_mask", torch.full((4, 4), -INF).triu(1), id="mask"),
        pytest.param("h.0.attn.bias", torch.full((1, 1, 4, 4), -INF), id="bias-matrix-of-gpt2"),
        pytest.param("layers.0.causal_mask", torch.full((4, 4), -INF), id="causal"),
        pytest.param("encoder.alibi", torch.full((4, 4), -INF), id="alibi"),
        pytest.param("act.observer.min_val", torch.tensor(INF), id="observer-that-saw-no-data"),
        pytest.param("val_acc_best.value", torch.tensor(-INF), id="best-metric-so-far"),
        pytest.param("w", torch.tensor([65504.0, -0.0, 1e-45]), id="large-zero-and-subnormal"),
        pytest.param("w", torch.zeros(0, 4), id="empty"),
        pytest.param("count", torch.tensor(3), id="integer"),
    ],
)
def test_what_belongs_there_is_quiet(key, tensor):
    assert propose(non_finite, {key: tensor}) == []


def test_a_buffer_of_the_model_may_be_infinite():
    model = nn.Linear(4, 4)
    model.register_buffer("scores", torch.full((4,), -INF))
    assert propose(non_finite, model.state_dict(), model) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        pytest.param("fc.weight", NAN, id="parameter-nan"),
        pytest.param("fc.weight", -INF, id="parameter-minus-inf"),
        pytest.param("bn.running_var", INF, id="running-statistic"),
        pytest.param("attn_mask", NAN, id="nan-in-a-mask"),
        pytest.param("fc.bias", -INF, id="bias-vector"),
    ],
)
def test_the_rest_is_an_error(key, value):
    tensor = torch.ones(8)
    tensor[5] = value
    (finding,) = propose(non_finite, {"other": torch.ones(3), key: tensor})
    assert (finding.level, finding.keys, finding.fix) == (Level.ERROR, (key,), None)
    assert finding.evidence["tensors"][key]["first_index"] == [5]


def test_the_counts_and_the_first_place_are_given():
    weight = torch.zeros(10, 8, 3, 3)
    weight[2, 1, 0, 2], weight[3, 0, 0, 0], weight[9] = NAN, INF, -INF
    (finding,) = propose(non_finite, {"conv.weight": weight, "fc.weight": torch.tensor([[1.0, NAN]])})
    assert finding.message == "2 tensors are not finite: 2 NaN, 1 +Inf, 72 -Inf among 722 values"
    figures = finding.evidence["tensors"]["conv.weight"]
    expected = {"nan": 1, "pos_inf": 1, "neg_inf": 72, "numel": 720, "first_index": [2, 1, 0, 2]}
    assert figures == expected


def test_one_in_ten_million_is_found():
    weight = torch.ones(10_000_000, dtype=torch.float16)
    weight[7_654_321] = NAN
    (finding,) = propose(non_finite, {"w": weight})
    assert finding.evidence["tensors"]["w"]["first_index"] == [7_654_321]


def test_a_finite_twin_is_named():
    checkpoint = open_state_dict({"w": torch.tensor([NAN])})
    raw, averaged = checkpoint.entries, open_state_dict({"w": torch.ones(1)}).entries
    checkpoint = replace(
        checkpoint,
        container=("state_dict",),
        root={"state_dict": raw, "worse": raw, "state_dict_ema": averaged},
        candidates=tuple(Candidate((name,), 1, 1) for name in ("state_dict", "worse", "state_dict_ema")),
    )
    (finding,) = propose(non_finite, checkpoint)
    assert finding.remedy == "take the set that is finite there: --weights state_dict_ema"
    checkpoint = replace(checkpoint, candidates=checkpoint.candidates[:2])
    (finding,) = propose(non_finite, checkpoint)
    assert finding.remedy == "see whether another set of this file is finite: --weights worse"


def test_a_finite_twin_is_found_in_a_real_file(tmp_path):
    raw, averaged = {"fc.weight": torch.full((4, 4), NAN)}, {"fc.weight": torch.ones(4, 4)}
    torch.save({"epoch": 3, "state_dict": raw, "nested": {"ema": averaged}}, tmp_path / "model.pth")
    checkpoint = open_file(str(tmp_path / "model.pth"), "state_dict")
    (finding,) = propose(non_finite, checkpoint)
    assert finding.remedy == "take the set that is finite there: --weights nested.ema"


def test_values_are_left_alone_where_the_user_says_so():
    assert without_values(non_finite) == []


def test_infinities_in_other_buffers_are_a_warning():
    findings = loud(propose(non_finite, {"kv_cache": torch.full((2, 2), INF)}))
    assert [finding.level for finding in findings] == [Level.WARNING]
