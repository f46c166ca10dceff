import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptfix.zoo.drafting import draft_table
from ckptfix.zoo.items import list_zoo
from ckptfix.zoo.naming import compile_patterns
from ckptfix.zoo.places import open_place
from ckptfix.zoo.survey import ItemLayout, ItemSummary, gather, layout_of, plain_names, survey

STATE = {"conv.weight": torch.zeros(2, 3), "bn.running_mean": torch.zeros(2), "bn.num_batches_tracked": torch.tensor(0)}


def seen(folder):
    place = open_place(str(folder))
    return {summary.name: summary for summary in survey(place, list_zoo(place))}


def shapes_of(layout: ItemLayout | None):
    assert layout is not None
    return layout.shapes


def test_one_file(tmp_path):
    torch.save(STATE, tmp_path / "a.pth")
    summary = seen(tmp_path)["a.pth"]
    assert shapes_of(summary.layout) == {"conv.weight": (2, 3), "bn.running_mean": (2,)}
    assert (summary.prefix, summary.dtypes, summary.weights, summary.candidates) == ("", ("float32",), ".", ())
    assert (summary.whole_model, summary.is_damaged, summary.counters) == ("", False, True)
    assert (summary.fault, summary.is_hostile) == ("", False)


@pytest.mark.parametrize(
    ("keys", "names", "prefix"),
    [
        (["a.w", "b.w"], ["a.w", "b.w"], ""),
        (["module.a.w", "module.b.w"], ["a.w", "b.w"], "module."),
        (["_orig_mod.a.w", "b.w"], ["a.w", "b.w"], "_orig_mod"),
        (["model.a.w", "model.b.w"], ["a.w", "b.w"], "model."),
        (["module.net.model.a.w", "module.net.model.b.w"], ["a.w", "b.w"], "module.net.model."),
        (["model.a.w", "loss.w"], ["model.a.w", "loss.w"], ""),
        (["encoder.a.w", "encoder.b.w"], ["a.w", "b.w"], "encoder."),
        (["layer1.a.w", "layer1.b.w"], ["layer1.a.w", "layer1.b.w"], ""),
        (["model"], ["model"], ""),
        (["a.w", "module.a.w"], ["a.w", "module.a.w"], ""),
        (
            ["x.LayerNorm.gamma", "x.LayerNorm.beta", "y.gamma"],
            ["x.LayerNorm.weight", "x.LayerNorm.bias", "y.gamma"],
            "",
        ),
        (["f.denselayer1.norm.1.weight"], ["f.denselayer1.norm1.weight"], ""),
    ],
)
def test_names_as_the_model_has_them(keys, names, prefix):
    shapes, taken = plain_names(dict.fromkeys(keys, (1,)))
    assert (list(shapes), taken) == (names, prefix)


def test_layouts_of_wrapped_and_plain_files_are_one(tmp_path):
    torch.save(STATE, tmp_path / "a.pth")
    torch.save({"epoch": 3, "state_dict": {f"module.{key}": value for key, value in STATE.items()}}, tmp_path / "b.pth")
    old = {key: value for key, value in STATE.items() if "num_batches" not in key}
    torch.save(old, tmp_path / "c.pth")
    found = seen(tmp_path)
    assert found["a.pth"].layout is found["b.pth"].layout is found["c.pth"].layout
    assert (found["b.pth"].prefix, found["b.pth"].weights) == ("module.", "state_dict")
    assert not found["c.pth"].counters


def test_another_head_is_another_layout():
    one, other = layout_of({"a": (1,), "fc": (10,)}), layout_of({"a": (1,), "fc": (7,)})
    assert one.digest != other.digest
    assert one.numel == 11


def test_several_state_dicts(tmp_path):
    torch.save({"model": STATE, "ema": dict(STATE)}, tmp_path / "a.pth")
    summary = seen(tmp_path)["a.pth"]
    assert (summary.weights, summary.candidates) == ("model", ("model", "ema"))


def test_the_class_of_a_whole_model(tmp_path):
    torch.save(torch.nn.DataParallel(torch.nn.LSTM(2, 3)), tmp_path / "a.pth")
    assert seen(tmp_path)["a.pth"].whole_model == "torch.nn.modules.rnn.LSTM"


class Payload:
    def __reduce__(self):
        import os

        return os.system, ("true",)


def test_what_cannot_be_read_says_why(tmp_path):
    torch.save(STATE, tmp_path / "whole.pth")
    whole = (tmp_path / "whole.pth").read_bytes()
    (tmp_path / "cut.pth").write_bytes(whole[: len(whole) * 4 // 5])
    torch.save({"state_dict": STATE, "x": Payload()}, tmp_path / "evil.pth")
    found = seen(tmp_path)
    cut, evil = found["cut.pth"], found["evil.pth"]
    assert cut.layout is None
    assert "is cut short" in cut.fault
    assert "salvage = true" in cut.fault  # as in zoo.toml
    assert not cut.fault.startswith("cut.pth")
    assert (cut.is_hostile, 0 < cut.whole <= 3) == (False, True)
    assert (evil.layout, evil.is_hostile, evil.whole) == (None, True, 3)
    assert "system()" in evil.fault
    assert str(tmp_path) not in cut.fault + evil.fault


def test_other_files_are_passed_by(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "plain.pkl").write_bytes(pickle.dumps([1]))
    torch.save({"last_epoch": 3, "_step_count": 4}, tmp_path / "scheduler.pt")
    torch.save([1], tmp_path / "named.pt")  # a name that no trainer gives claims to be a checkpoint
    assert seen(tmp_path).keys() == {"named.pt"}
    assert "1 checkpoint in" in (draft := draft_table(place := open_place(str(tmp_path)), list_zoo(place)))
    assert "3 other files" in draft


def test_a_place_far_away(tmp_path, memory):
    torch.save(STATE, tmp_path / "a.pth")
    place = open_place(memory)
    place.put(tmp_path / "a.pth", "x/a.pth")
    (summary,) = survey(place, list_zoo(place))
    assert shapes_of(summary.layout) == {"conv.weight": (2, 3), "bn.running_mean": (2,)}


ONE, OTHER = layout_of({"a": (1,)}), layout_of({"a": (2,)})


def summaries(names, layout=ONE, **more):
    return [ItemSummary(name, layout, **more) for name in names]


def patterns_of(names, others=(), strangers=()):
    """The patterns of one group, next to another group and files that are not checkpoints."""
    groups = gather([*summaries(names), *summaries(others, OTHER)], strangers)
    return list(next(group.patterns for group in groups if group.layout is ONE))


@pytest.mark.parametrize(
    ("names", "others", "strangers", "expected"),
    [
        pytest.param(["a.pth"], [], [], ["a.pth"], id="one file"),
        pytest.param(["a.pth"], ["x/a.pth"], [], ["/a.pth"], id="its name elsewhere too"),
        pytest.param(["x/a.pth"], ["a.pth"], [], ["x/a.pth"], id="one in a folder"),
        pytest.param(["x/a.pth", "x/y/b.pth"], [], [], ["x/"], id="a whole folder"),
        pytest.param(["x/a.pth", "x/b.pth"], ["y/x/c"], [], ["/x/"], id="a folder whose name another has"),
        pytest.param(["x/a.pth", "x/b.pth"], ["x/c.pth"], [], ["x/a.pth", "x/b.pth"], id="not with another's file"),
        pytest.param(["x/a.pth", "x/b.pth"], [], ["x/log"], ["x/a.pth", "x/b.pth"], id="not with a stranger"),
        pytest.param(["x/y/a", "x/y/b", "x/z/c"], [], [], ["x/"], id="the highest folder"),
        pytest.param(["x/y/a", "x/y/b", "x/z/c"], ["x/d"], [], ["x/y/", "x/z/c"], id="but no higher"),
        pytest.param(["1/a.pth", "2/a.pth"], ["2/b.pth"], [], ["a.pth"], id="one name in several folders"),
        pytest.param(["1/a", "2/a"], ["3/a"], [], ["1/a", "2/a"], id="not if another has it"),
        pytest.param(["e1.pth", "e2.pth", "e30.pth"], [], [], ["/e*.pth"], id="numbers"),
        pytest.param(["e1.pth", "e2.pth"], [], [], ["e1.pth", "e2.pth"], id="two are too few"),
        pytest.param(["e1.pth", "e2.pth", "e3.pth"], ["e4.pth"], [], ["e1.pth", "e2.pth", "e3.pth"], id="another's"),
        pytest.param(
            ["r-19c8e357.pth", "r-00aabbcc.pth", "r-deadbeef.pth"], ["rx"], [], ["/r-*.pth"], id="hashes in names"
        ),
        pytest.param(
            ["resnet18_ep1.pth", "resnet18_ep2.pth", "resnet18_ep10.pth"], [], [], ["/resnet18_ep*.pth"], id="18 stays"
        ),
        pytest.param(["x/e1.pth", "x/e2.pth", "x/e3.pth"], ["x/f"], [], ["x/e*.pth"], id="in a folder"),
        pytest.param(["[a].pth"], [], [], ["[[]a].pth"], id="characters of patterns"),
    ],
)
def test_the_shortest_patterns_that_mean_these_files_alone(names, others, strangers, expected):
    assert patterns_of(names, others, strangers) == expected


NAMES = st.lists(
    st.builds(
        "/".join,
        st.lists(st.sampled_from(["a", "b", "x1", "x2", "x3", "e*", "[q]", "r-19c8e357.pth"]), min_size=1, max_size=3),
    ),
    unique=True,
    min_size=1,
    max_size=12,
)


@given(NAMES, st.randoms(use_true_random=False))
def test_patterns_mean_their_group_and_nothing_else(names, random):
    # A name is a file or a folder, and not both.
    names = [name for name in names if not any(other.startswith(f"{name}/") for other in names)]
    side = {name: random.choice("12s") for name in names}
    one, two, rest = ([name for name in names if side[name] == which] for which in "12s")
    for group in gather([*summaries(one), *summaries(two, OTHER)], rest):
        expression = compile_patterns(group.patterns)
        assert [name for name in sorted(names) if expression.fullmatch(name)] == sorted(group.names)


def test_files_that_hold_several_state_dicts_are_a_group_of_their_own():
    plain, double = summaries(["a", "b"]), summaries(["c"], candidates=("model", "ema"), weights="model")
    groups = gather([*double, *plain], ())
    assert [group.names for group in groups] == [("a", "b"), ("c",)]
    assert groups[0].layout is groups[1].layout


def test_the_order_does_not_hang_on_the_listing():
    many = [*summaries(["a", "b"]), *summaries(["c", "d"], OTHER), ItemSummary("e", fault="is empty")]
    assert gather(many, ["f"])[0].names == ("a", "b")
    assert [group.patterns for group in gather(many, ["f"])] == [
        group.patterns for group in gather(many[2:] + many[:2], ["f"])
    ]
