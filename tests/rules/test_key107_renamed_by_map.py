"""KEY107: the user's map; cases in which it must change nothing come first."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.core.rename_map import MapRule, RenameMap
from tests.rules.test_key106_renamed_layers import FUSED, SPLIT, transformer

QKV = MapRule("blocks.{n}.attn.qkv.{weight,bias}", "layer.{n}.attention.{query,key,value}.{weight,bias}", ("split 3",))
VIT = RenameMap((
    QKV,
    MapRule("blocks.{n}.attn.proj.{weight,bias}", "layer.{n}.attention.output.{weight,bias}"),
    MapRule("blocks.{n}.norm1.{weight,bias}", "layer.{n}.layernorm_before.{weight,bias}"),
    MapRule("blocks.{n}.norm2.{weight,bias}", "layer.{n}.layernorm_after.{weight,bias}"),
    MapRule("blocks.{n}.mlp.*", "layer.{n}.mlp.*"),
), "vit.json")  # fmt: skip


def fused() -> dict[str, torch.Tensor]:
    return dict(transformer(*FUSED).state_dict())


def with_rule(*rules: MapRule) -> RenameMap:
    return RenameMap(rules, "vit.json")


@pytest.mark.parametrize("rename_map", [None, with_rule(), VIT], ids=["no map", "an empty map", "a map"])
def test_a_file_that_fits_is_left_unchanged(rename_map):
    model = transformer(*SPLIT)
    done, report = ckptfix.repair_state_dict(model.state_dict(), model, rename_map=rename_map)
    assert (report.exit_code, report.edits) == (0, ())
    assert list(done) == list(model.state_dict())


def test_a_map_is_applied_without_another_flag():
    state, model = fused(), transformer(*SPLIT)
    done, report = ckptfix.repair_state_dict(state, model, rename_map=VIT)
    assert report.exit_code == 0
    model.load_state_dict(done)
    for number in range(3):
        rows = torch.cat([done[f"layer.{number}.attention.{name}.weight"] for name in SPLIT[2]])
        assert torch.equal(rows, state[f"blocks.{number}.attn.qkv.weight"])


def test_a_map_without_a_target_applies_in_the_direction_that_fits():
    state = fused()
    there, report = ckptfix.repair_state_dict(state, rename_map=VIT)
    assert report.exit_code == 0
    back, _ = ckptfix.repair_state_dict(there, rename_map=VIT)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[key], value) for key, value in state.items())


def test_the_gates_of_a_recurrent_layer_are_joined_and_taken_apart():
    lstm = nn.LSTM(3, 4)
    rules = [
        MapRule(f"cell.{name}_{{i,f,g,o}}.{{weight,bias}}", f"{{weight,bias}}_{of}_l0", ("concat",))
        for name, of in (("W", "ih"), ("U", "hh"))
    ]
    gates, _ = ckptfix.repair_state_dict(lstm.state_dict(), rename_map=with_rule(*rules))
    assert torch.equal(gates["cell.U_f.weight"], lstm.state_dict()["weight_hh_l0"][4:8])
    done, report = ckptfix.repair_state_dict(gates, nn.LSTM(3, 4), rename_map=with_rule(*rules))
    assert report.exit_code == 0
    assert all(torch.equal(done[key], value) for key, value in lstm.state_dict().items())


def test_wrappers_go_before_a_map():
    state = {f"module.{key}": value for key, value in fused().items()}
    assert ckptfix.repair_state_dict(state, transformer(*SPLIT), rename_map=VIT)[1].exit_code == 0


def test_patterns_by_hand():
    state = {"encoder.a.weight": torch.ones(2), "encoder.b.bias": torch.ones(2), "fc": torch.ones(1)}
    done, _ = ckptfix.repair_state_dict(state, rename=["encoder.*=backbone.*", "fc=head"])
    assert list(done) == ["backbone.a.weight", "backbone.b.bias", "head"]
    swapped, _ = ckptfix.repair_state_dict({"a": torch.zeros(1), "b": torch.ones(1)}, rename=["a=b", "b=a"])
    assert swapped["a"] == 1


def test_a_rule_with_fewer_variables_wins():
    state = {f"x.{at}": torch.full((1,), float(at)) for at in range(3)}
    done, _ = ckptfix.repair_state_dict(state, rename=["x.{n}=y.{n}", "x.1=special"])
    assert list(done) == ["y.0", "special", "y.2"]


def test_the_metadata_follow():
    state = nn.ModuleDict({"a": nn.BatchNorm1d(2)}).state_dict()
    done, _ = ckptfix.repair_state_dict(state, rename="a.*=b.*")
    assert vars(done)["_metadata"]["b"] == {"version": 2}


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        pytest.param([MapRule("blocks.{n}.atn.qkv.weight", "y.{n}")], "rule 1 .*no key of the file matches", id="key"),
        pytest.param([QKV, MapRule("blocks.0.mlp.{fc1,fc9}.weight", "y.{fc1,fc9}")], "rule 2 .*matches with fc9",
                     id="one of several"),
        pytest.param([MapRule("blocks.{n}.norm1.weight", "y")], "rule 1 .*same place in the target", id="two sources"),
        pytest.param([MapRule("blocks.0.norm1.weight", "y"), MapRule("blocks.0.norm2.weight", "y")],
                     "rule 2 .*y already gets its source from blocks.0.norm1", id="two rules for a key"),
        pytest.param([MapRule("blocks.0.norm1.weight", "y"), MapRule("blocks.0.norm1.weight", "z")],
                     "rule 2 .*is already used", id="two rules for a source"),
        pytest.param([MapRule("blocks.0.norm1.weight", "blocks.0.norm2.weight")], "would be overwritten", id="a key"),
        pytest.param([MapRule("blocks.{n}.attn.qkv.weight", "y.{n}.{a,b,c,d,e}", ("split 5",))],
                     "rule 1 .*24 rows do not split as 1:1:1:1:1", id="uneven split"),
        pytest.param([MapRule("blocks.{n}.attn.qkv.weight", "y.{n}.{a,b}", ("split 3",))], "2 names for 3", id="names"),
        pytest.param([MapRule("blocks.{n}.attn.qkv.weight", "y.{n}.{a,b}")], "split is missing", id="no step"),
        pytest.param([MapRule("blocks.0.norm1.weight", "y.{m}")], "the value of {m} is not known", id="a free number"),
        pytest.param([MapRule("blocks.{n.x", "y")], "rule 1 .*is not a pattern", id="a brace"),
        pytest.param([MapRule("blocks.{n}.attn.{proj,qkv}.weight", "y.{n}", ("concat", "stack"))],
                     "stack needs one number", id="a stack without a number"),
    ],
)  # fmt: skip
def test_a_map_that_does_not_fit_is_refused_with_its_rule(rules, says):
    with pytest.raises(ckptfix.PlanError, match=says):
        ckptfix.repair_state_dict(fused(), rename_map=with_rule(*rules))


def test_a_key_that_the_target_does_not_have_is_refused():
    rules = with_rule(MapRule(QKV.source, "layer.{n}.attention.{query,key,valeu}.{weight,bias}", QKV.steps))
    with pytest.raises(ckptfix.PlanError, match=r"target has no key .*valeu\.weight, but .*value\.weight"):
        ckptfix.repair_state_dict(fused(), transformer(*SPLIT), rename_map=rules)


@pytest.mark.parametrize(
    ("source", "target", "step", "says"),
    [
        (QKV.source, QKV.target, "split 2:1:1", r"query.*would be \[12.*wants \[8"),
        (QKV.source, "layer.{n}.attention.{query,key}.{weight,bias}", "split 2", r"query.*would be \[12.*wants \[8"),
        ("blocks.{n}.mlp.*.weight", "layer.{n}.mlp.*.weight", "transpose", r"weight would be"),
    ],
    ids=["shares", "number", "axes"],
)
def test_a_rule_that_gives_other_shapes_than_the_target_is_refused(source, target, step, says):
    with pytest.raises(ckptfix.PlanError, match=rf"rule 1 .*{says}"):
        ckptfix.repair_state_dict(fused(), transformer(*SPLIT), rename_map=with_rule(MapRule(source, target, (step,))))


def test_an_optional_rule_may_name_what_is_not_there():
    rules = with_rule(*VIT.rules, MapRule("extra.{weight,bias}", "more.{weight,bias}", optional=True))
    assert ckptfix.repair_state_dict(fused(), transformer(*SPLIT), rename_map=rules)[1].exit_code == 0


@pytest.mark.parametrize(
    ("rule", "shapes", "says"),
    [
        (MapRule("e.{e}.w", "e.w", ("stack",)), {"e.0.w": (2,), "e.1.w": (2,), "e.3.w": (2,)}, "have a gap"),
        (MapRule("e.{e}", "e", ("stack",)), {"e.0": (2,), "e.1": (3,)}, "e.0 and e.1 differ in shape"),
        (MapRule("a", "b.{n}", ("unstack",)), {"a": ()}, "a single number cannot be unstacked"),
        (MapRule("a", "b", ("swap",)), {"a": (3,)}, "swap needs an even number of rows, but a has 3"),
        (MapRule("{a,b}", "c", ("concat",)), {"a": (2, 3), "b": (2, 4)}, "a and b differ in more than one axis"),
        (MapRule("{a,b}", "c", ("a b -> b a for z", "concat")), {"a": (2, 2), "b": (2, 2)}, "z is not one of {a,b}"),
        (MapRule("{a,b}.{n}", "c.{n}", ("concat",)), {"a.0": (2,), "b.1": (2,)}, "a.0 has no sibling b"),
        (MapRule("a", "b", ("(h d) -> (d h)",)), {"a": (6,)}, "size of h is not known; add 'with h=…'"),
        (MapRule("{a,b}", "{c,d,e}"), {"a": (2,), "b": (2,)}, "two lists in braces have different lengths"),
        (MapRule("a.*", "b"), {"a.x": (2,)}, r"one side has 1 more \*"),
        (MapRule("{a,a}", "{b,c}"), {"a": (2,)}, "names a string twice"),
        (MapRule("a.{n}", "b.{1-n}"), {"a.3": (2,)}, "{n} would count down to -2"),
    ],
    ids=lambda each: str(each) if isinstance(each, MapRule) else "",
)
def test_a_rule_that_has_no_meaning_for_these_shapes_is_refused(rule, shapes, says):
    state = {key: torch.ones(shape) for key, shape in shapes.items()}
    with pytest.raises(ckptfix.PlanError, match=rf"rule 1 .*{says}.*; correct the rule"):
        ckptfix.repair_state_dict(state, rename_map=with_rule(rule))


def test_an_ambiguous_rule_is_not_applied():
    unclear = MapRule("blocks.{n}.norm1.*", "layer.{n}.layernorm_before.*", label="ambiguous")
    rules = with_rule(*(rule for rule in VIT.rules if "norm1" not in rule.source), unclear)
    _, report = ckptfix.repair_state_dict(fused(), transformer(*SPLIT), rename_map=rules)
    assert report.exit_code == 1
    assert "remove the label" in "".join(each.text for finding in report.remaining for each in finding.remedies)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[", "invalid JSON"),
        ("[]", "not a map"),
        ('{"ckptfix-map": 7, "rules": []}', "has version 7"),
        ('{"ckptfix-map": 1, "rules": [], "shapes": [1]}', "Expected `object`, got `array`.*shapes"),
        ('{"ckptfix-map": 1, "rules": [], "shapes": {"a": "x"}}', "Expected `array`, got `str`.*shapes"),
        ('{"ckptfix-map": 1, "rules": [], "rulez": []}', "unknown field `rulez`"),
        ('{"ckptfix-map": 1, "rules": [{"from": "a"}]}', r"rule 1 \{'from': 'a'\}: .*missing required field `to`"),
        ('{"ckptfix-map": 1, "rules": [{"from": "a", "to": "b", "step": "x"}]}', "rule 1 .*unknown field `step`"),
        ('{"ckptfix-map": 1, "rules": [{"from": "a", "to": "b", "steps": "x"}]}', r"rule 1 .*got `str`.*steps"),
        ('{"ckptfix-map": 1, "rules": [{"from": "a", "to": "b", "label": "sure"}]}', "the label is 'sure'"),
    ],
)
def test_a_file_that_is_not_a_map_is_refused(text, says, tmp_path: Path):
    (tmp_path / "map.json").write_text(text)
    with pytest.raises(ckptfix.UsageError, match=says):
        ckptfix.check({"a": torch.ones(1)}, rename_map=tmp_path / "map.json")


def test_a_map_is_the_same_after_it_was_written():
    assert RenameMap.from_json(json.loads(VIT.json_text()), "vit.json") == VIT


def test_a_pattern_without_an_equals_sign_is_refused():
    with pytest.raises(ckptfix.UsageError, match="OLD=NEW"):
        ckptfix.check({"a": torch.ones(1)}, rename="encoder")


def test_a_pattern_by_hand_is_applied_even_if_the_file_fits():
    model = nn.ModuleDict({"q": nn.Linear(2, 2), "k": nn.Linear(2, 2)})
    state = model.state_dict()
    done, report = ckptfix.repair_state_dict(state, model, rename=["q.*=k.*", "k.*=q.*"])
    assert report.exit_code == 0
    assert torch.equal(done["q.weight"], state["k.weight"])
    assert torch.equal(done["k.bias"], state["q.bias"])
    with pytest.raises(ckptfix.UsageError, match=r"no key of the file matches v\.\*"):
        ckptfix.repair_state_dict(state, model, rename="v.*=q.*")


def test_a_pattern_by_hand_is_applied_before_the_hooks_of_a_model():
    """They load the file as it is, so that no other rule touches its names."""
    model = nn.ModuleDict({"q": nn.Linear(2, 2), "k": nn.Linear(2, 2)})
    model.register_load_state_dict_pre_hook(lambda *_: None)
    state = model.state_dict()
    done, _ = ckptfix.repair_state_dict(state, model, rename=["q.*=k.*", "k.*=q.*"])
    assert torch.equal(done["q.weight"], state["k.weight"])


def test_a_map_that_is_not_needed_is_noted():
    model = transformer(*SPLIT)
    _, report = ckptfix.repair_state_dict(model.state_dict(), model, rename_map=VIT)
    assert "vit.json was not applied: the file already fits" in [finding.message for finding in report.remaining]


@pytest.mark.parametrize("with_map", [False, True], ids=["alone", "beside a map that goes backwards"])
def test_a_pattern_by_hand_is_never_applied_backwards(with_map):
    state = {"backbone.w": torch.ones(1), "new": torch.ones(1)}
    rename_map = with_rule(MapRule("old", "new")) if with_map else None
    with pytest.raises(ckptfix.UsageError, match=r"matches encoder\.\*; it already has backbone\.\*"):
        ckptfix.repair_state_dict(state, rename="encoder.*=backbone.*", rename_map=rename_map)
    done, _ = ckptfix.repair_state_dict(state, rename="backbone.*=encoder.*", rename_map=rename_map)
    assert list(done) == ["encoder.w", "old" if with_map else "new"]


@pytest.mark.parametrize("start", ["module.", "module.module."])
def test_a_map_applies_under_a_wrapper_prefix(start):
    state, model = fused(), transformer(*SPLIT)
    state = {key.replace("head", "fc"): value for key, value in state.items()}
    wrapped = {f"{start}{key}": value for key, value in state.items()}
    rename_map = with_rule(*VIT.rules, MapRule("fc.*", "head.*"))
    done, report = ckptfix.repair_state_dict(wrapped, model, rename_map=rename_map)
    assert report.exit_code == 0
    model.load_state_dict(done)
    assert torch.equal(done["layer.0.attention.query.weight"], state["blocks.0.attn.qkv.weight"][:8])
    done, _ = ckptfix.repair_state_dict(wrapped, model, rename_map=VIT)  # what the map does not name follows
    assert "fc.weight" in done


def test_a_leading_module_that_the_map_names_stays():
    state = {"module.a": torch.ones(1), "module.b": torch.ones(1)}
    model = nn.ParameterDict({"x": torch.ones(1), "y": torch.ones(1)})
    done, _ = ckptfix.repair_state_dict(state, model, rename=["module.a=x", "module.b=y"])
    assert set(done) == {"x", "y"}


def test_a_pattern_for_a_name_that_another_rule_changed_names_that_rule():
    state = {"module.a.weight": torch.ones(2), "module.b.weight": torch.ones(2)}
    with pytest.raises(ckptfix.UsageError, match=r"after KEY102 renamed its keys: .* no key of the file matches"):
        ckptfix.repair_state_dict(state, rename=("module.a.*=module.c.*",))
    done, _ = ckptfix.repair_state_dict(state, rename=("module.a.*=module.c.*",), ignore=("KEY102",))
    assert list(done) == ["module.c.weight", "module.b.weight"]
