import math

import pytest
import torch
from msgspec.structs import replace
from torch import nn

import ckptfix
from ckptfix.core.checkpoint import Candidate
from ckptfix.core.edits import Replace
from ckptfix.core.finding import Level
from ckptfix.reading.opening import open_file, open_state_dict
from ckptfix.report.advice import remedies_text
from ckptfix.report.style import TextFormat
from ckptfix.report.terminal import headline
from ckptfix.rules.val101_non_finite import non_finite
from tests.checks import check_repaired
from tests.rules.healthy import HEALTHY, build
from tests.rules.proposals import loud, propose

INF, NAN = math.inf, math.nan


def test_noop_healthy_models():
    for name in HEALTHY:
        assert propose(non_finite, build(name).state_dict()) == [], name


@pytest.mark.parametrize(
    ("key", "tensor"),
    [
        pytest.param("attn_mask", torch.full((4, 4), -INF).triu(1), id="mask"),
        pytest.param("h.0.attn.bias", torch.full((1, 1, 4, 4), -INF), id="bias-matrix-of-gpt2"),
        pytest.param("layers.0.causal_mask", torch.full((4, 4), -INF), id="causal"),
        pytest.param("encoder.alibi", torch.full((4, 4), -INF), id="alibi"),
        pytest.param("act.observer.min_val", torch.tensor(INF), id="observer-that-saw-no-data"),
        pytest.param("val_acc_best.value", torch.tensor(-INF), id="best-metric-so-far"),
        pytest.param("early_stop.best_score", torch.tensor(INF), id="best-score-so-far"),
        pytest.param("noise_covar.raw_noise_constraint.upper_bound", torch.tensor(INF), id="constraint-of-gpytorch"),
        pytest.param("crf.start_transitions", torch.tensor([0.3, -INF, 0.1]), id="transition-that-a-crf-forbids"),
        pytest.param("turner.score_hairpin", torch.tensor([-INF, -INF, 5.4]), id="energies-of-rna"),
        pytest.param("sqrt_recip_alphas_cumprod", torch.tensor([1.0, 2.0, INF]), id="schedule-that-ends-in-noise"),
        pytest.param("w", torch.tensor([65504.0, -0.0, 1e-45]), id="large-zero-and-subnormal"),
        pytest.param("w", torch.zeros(0, 4), id="empty"),
        pytest.param("count", torch.tensor(3), id="integer"),
    ],
)
def test_noop_non_finite_by_design(key, tensor):
    assert propose(non_finite, {key: tensor}) == []


def test_noop_a_buffer_that_the_model_makes_infinite():
    model = nn.Linear(4, 4)
    model.register_buffer("scores", torch.full((4,), -INF))
    assert propose(non_finite, model.state_dict(), model) == []


@pytest.mark.parametrize(("name", "frozen"), [("attn_mask", True), ("attn_mask", False), ("scale", True)])
def test_a_mask_may_be_a_frozen_parameter(name, frozen):
    model = nn.Linear(4, 4)
    setattr(model, name, nn.Parameter(torch.full((4, 4), -INF).triu(1), requires_grad=not frozen))
    is_quiet = propose(non_finite, model.state_dict(), model) == []
    assert is_quiet == (name == "attn_mask" and frozen)


def test_noop_a_buffer_that_was_never_set():
    model = nn.Linear(4, 4)
    model.register_buffer("history", torch.full((4,), NAN))
    assert propose(non_finite, model.state_dict(), model) == []
    state = model.state_dict() | {"history": torch.tensor([1.0, NAN, 2.0, 3.0])}
    assert [finding.keys for finding in propose(non_finite, state, model)] == [("history",)]
    assert [finding.keys for finding in propose(non_finite, model.state_dict())] == [("history",)], "no model says so"


@pytest.mark.parametrize("name", ["weight", "running_var"])
def test_learned_tensors_are_reported_though_the_model_has_nan_too(name):
    model = nn.BatchNorm1d(4)
    model.get_parameter("weight").data.fill_(NAN) if name == "weight" else model.get_buffer(name).fill_(NAN)
    assert [finding.keys for finding in propose(non_finite, model.state_dict(), model)] == [(name,)]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        pytest.param("fc.weight", NAN, id="parameter-nan"),
        pytest.param("fc.weight", -INF, id="parameter-minus-inf"),
        pytest.param("bn.running_var", INF, id="running-statistic"),
        pytest.param("attn_mask", NAN, id="nan-in-a-mask"),
        pytest.param("fc.bias", -INF, id="bias-vector"),
        pytest.param("score.weight", -INF, id="head-named-score"),
        pytest.param("crf.transitions", INF, id="transition-that-is-certain"),
    ],
)
def test_nan_in_other_tensors_is_an_error(key, value):
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
    counts = {"nan": 1, "pos_inf": 1, "neg_inf": 72, "numel": 720, "first_index": [2, 1, 0, 2]}
    assert figures == {**counts, "affected": 3, "of": 10, "channels": [2, 3, 9]}


def test_one_nan_in_ten_million_is_found():
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
    assert remedies_text(finding.remedies).startswith("--replace VAL101 --fill twin takes them from state_dict_ema")
    checkpoint = replace(checkpoint, candidates=checkpoint.candidates[:2])
    (finding,) = propose(non_finite, checkpoint)
    assert remedies_text(finding.remedies).startswith("see whether the other set of this file, worse, is finite")


def test_a_finite_twin_is_found_in_a_real_file(tmp_path):
    raw, averaged = {"fc.weight": torch.full((4, 4), NAN)}, {"fc.weight": torch.ones(4, 4)}
    torch.save({"epoch": 3, "state_dict": raw, "nested": {"ema": averaged}}, tmp_path / "model.pth")
    checkpoint = open_file(str(tmp_path / "model.pth"), "state_dict")
    (finding,) = propose(non_finite, checkpoint)
    assert remedies_text(finding.remedies).endswith("or --weights nested.ema uses that whole set")


def test_infinities_in_other_buffers_are_a_warning():
    findings = loud(propose(non_finite, {"kv_cache": torch.full((2, 2), INF)}))
    assert [finding.level for finding in findings] == [Level.WARNING]


BROKEN = {"bn.running_mean": torch.zeros(2), "bn.running_var": torch.tensor([1.0, NAN]), "fc.weight": torch.ones(2, 3)}
BROKEN["fc.weight"][1, 2] = INF


def test_nothing_is_changed_unless_asked():
    (finding,) = propose(non_finite, BROKEN)
    assert finding.fix is None
    assert "--zero-non-finite" in remedies_text(finding.remedies)


@pytest.mark.parametrize(("lost", "is_advised"), [(3, True), (200, True), (2000, False), (4096, False)])
def test_zeros_are_not_advised_for_most_of_a_layer(lost, is_advised):
    weight = torch.randn(4096)
    weight[:lost] = NAN
    state = {"fc.weight": weight.reshape(64, 64), "fc.bias": torch.ones(64)}
    (finding,) = propose(non_finite, state)
    assert ("--zero-non-finite" in remedies_text(finding.remedies)) == is_advised
    assert "--replace VAL101 --fill FILE" in remedies_text(finding.remedies)
    state["fc.weight"][-1] = 1e30  # bytes of something else, read as numbers
    assert not any("zero" in name for each in propose(non_finite, state)[0].remedies for name, _ in each.options)


def test_zeros_replace_only_the_non_finite_values():
    before = {"fc.weight": BROKEN["fc.weight"], "fc.bias": torch.ones(2)}
    after = {**before, "fc.weight": torch.tensor([[1.0, 1, 1], [1, 1, 0]])}
    report = check_repaired(before, after, "VAL101", zero_non_finite=True)
    assert [edit.kind for edit in report.edits] == ["zero"]


def test_a_variance_is_not_set_to_zero():
    repaired, report = ckptfix.repair_state_dict(BROKEN, select=("VAL101",), zero_non_finite=True)
    assert [finding.keys for finding in report.remaining] == [("bn.running_var",)]
    assert repaired["bn.running_var"].isnan().any()


def test_the_statistics_of_a_norm_are_reset():
    before = {key: value for key, value in BROKEN.items() if key.startswith("bn")}
    before = {**before, "bn.running_mean": torch.ones(2), "bn.num_batches_tracked": torch.tensor(5)}
    after = dict(nn.BatchNorm1d(2, affine=False).state_dict(prefix="bn."))
    check_repaired(before, after, "VAL101", reset_running_stats=True)


def test_the_twin_is_taken_key_by_key(tmp_path):
    raw, averaged = {"a": torch.tensor([NAN]), "b": torch.ones(1)}, {"a": torch.zeros(1), "b": torch.full((1,), 2.0)}
    torch.save({"state_dict": raw, "state_dict_ema": averaged}, tmp_path / "m.pth")
    done = ckptfix.repair(tmp_path / "m.pth", weights="state_dict", replace="VAL101", fill="twin", select="VAL")
    assert done.state_dict() == {"a": torch.zeros(1), "b": torch.ones(1)}
    assert done.report.exit_code == 0
    assert done.report.edits == (Replace("a", "float32", (1,), "twin", "a", "state_dict_ema"),)


@pytest.mark.parametrize("names", ["VAL101", "VAL", "fc.weight", "fc.*"])
def test_a_model_and_a_file_supply_what_is_named(names, tmp_path):
    model = nn.Linear(3, 2)
    before = {f"fc.{key}": value.clone() for key, value in model.state_dict().items()}
    before["fc.weight"][0, 0] = NAN
    torch.save({"fc.weight": torch.ones(2, 3), "fc.bias": torch.ones(2)}, tmp_path / "donor.pth")
    target = nn.ModuleDict({"fc": model})
    for fill, expected in (("target", model.weight), (str(tmp_path / "donor.pth"), torch.ones(2, 3))):
        after = {**before, "fc.weight": expected.detach()}
        check_repaired(before, after, "VAL101", target, replace=names, fill=fill)
    check_repaired(before, {**before, "fc.weight": torch.ones(2, 3)}, "VAL101", replace=names, fill=fill)


def test_a_broken_donor_is_not_used():
    before = {"weight": torch.full((2, 3), NAN)}
    model = nn.Linear(3, 2, bias=False)
    nn.init.constant_(model.weight, NAN)
    _, report = ckptfix.repair_state_dict(before, model, select=("VAL101",), replace="VAL101", fill="target")
    assert not report.fixed
    assert report.exit_code == 1


BAD = torch.tensor([1.0, float("nan")])
OPTIMIZER = {"state": {0: {"exp_avg": BAD.clone()}}, "param_groups": [{"params": [0]}]}
MASK = torch.tensor([0.0, float("-inf")])


@pytest.mark.parametrize(
    ("beside", "settings", "level"),
    [
        pytest.param({"D": {"weight": torch.ones(2), "mask": MASK}}, {}, None, id="a mask"),
        pytest.param({"best": torch.tensor(float("nan"))}, {}, None, id="a single number"),
        pytest.param({"losses": BAD}, {}, Level.NOTE, id="a log"),
        pytest.param({"D": {"weight": BAD}}, {}, Level.WARNING, id="another set"),
        pytest.param({"D": {"weight": BAD}}, {"weights": "model"}, Level.NOTE, id="beside the set that was named"),
        pytest.param({"ema": {"shadow": [torch.ones(2), BAD]}}, {}, Level.WARNING, id="an average without names"),
        pytest.param({"run": {"opt": OPTIMIZER}}, {}, None, id="an optimizer"),
        pytest.param({"run": {"opt": OPTIMIZER, "mean": [BAD]}}, {}, Level.NOTE, id="a part with an optimizer in it"),
    ],
)
def test_what_lies_next_to_the_weights(tmp_path, beside, settings, level):
    torch.save({"model": {"weight": torch.ones(2), "bias": torch.ones(2)}, **beside}, tmp_path / "file.pth")
    report = ckptfix.check(tmp_path / "file.pth", select=("VAL101",), **settings)
    assert [finding.level for finding in report.findings] == ([] if level is None else [level])
    assert all(next(iter(beside)) in finding.message for finding in report.findings)


def test_the_headline_names_unexamined_entries(tmp_path):
    torch.save({"model": {"fc.weight": torch.ones(2, 2)}, "ema": {"shadow": [torch.ones(2, 2)]}}, tmp_path / "f.pth")
    report = ckptfix.check(tmp_path / "f.pth", select=("VAL101",))
    assert report.to_json()["unexamined"] == ["ema"]
    line = TextFormat().write([headline(report)])
    assert "nothing wrong in the weights under model (ema not examined, except for checksums and NaN; not comp" in line


@pytest.mark.parametrize("value", [1.0, math.nan])
def test_packed_weights_are_searched_for_nan_alone(value, tmp_path):
    """As the state_dict of a quantised linear layer has them: a tuple of weight and bias."""
    packed = torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 0, torch.qint8), torch.full((4,), value)
    torch.save({"0.weight": torch.randn(2, 2), "1._packed_params._packed_params": packed}, tmp_path / "f.pth")
    report = ckptfix.check(tmp_path / "f.pth")
    assert report.to_json()["unexamined"] == ["1._packed_params._packed_params"]
    assert [finding.keys for finding in report.left] == [("1._packed_params._packed_params",)] * math.isnan(value)
