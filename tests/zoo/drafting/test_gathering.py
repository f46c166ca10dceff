import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfix.zoo.drafting.gathering import gather
from ckptfix.zoo.drafting.survey import Sight, layout_of
from ckptfix.zoo.patterns import compile_patterns

ONE, OTHER = layout_of({"a": (1,)}), layout_of({"a": (2,)})


def sights(names, layout=ONE, **more):
    return [Sight(name, layout, **more) for name in names]


def patterns_of(names, others=(), strangers=()):
    """The patterns of one group, beside another group and files that are no checkpoints."""
    groups = gather([*sights(names), *sights(others, OTHER)], strangers)
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
    for group in gather([*sights(one), *sights(two, OTHER)], rest):
        expression = compile_patterns(group.patterns)
        assert [name for name in sorted(names) if expression.fullmatch(name)] == sorted(group.names)


def test_files_that_hold_several_state_dicts_are_a_group_of_their_own():
    plain, double = sights(["a", "b"]), sights(["c"], candidates=("model", "ema"), weights="model")
    groups = gather([*double, *plain], ())
    assert [group.names for group in groups] == [("a", "b"), ("c",)]
    assert groups[0].layout is groups[1].layout


def test_the_order_does_not_hang_on_the_listing():
    many = [*sights(["a", "b"]), *sights(["c", "d"], OTHER), Sight("e", fault="is empty")]
    assert gather(many, ["f"])[0].names == ("a", "b")
    assert [group.patterns for group in gather(many, ["f"])] == [
        group.patterns for group in gather(many[2:] + many[:2], ["f"])
    ]
