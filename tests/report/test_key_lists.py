from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfix.report.key_lists import KeyGroup, fold_keys, folded_lines


def unfold(fold: KeyGroup) -> Iterator[str]:
    """The keys that a fold stands for, the last alternatives running fastest."""
    return map(".".join, product(*fold.slots))


BATCH_NORM = ("weight", "bias", "running_mean", "running_var")


def texts(keys):
    return [str(fold) for fold in fold_keys(keys)]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        pytest.param([], [], id="no keys"),
        pytest.param(["conv1.weight"], ["conv1.weight"], id="one key stays"),
        pytest.param(["a.weight", "b.c.weight"], ["a.weight", "b.c.weight"], id="different depth"),
        pytest.param(["0.w", "1.b"], ["0.w", "1.b"], id="an incomplete product stays apart"),
        pytest.param(["v01.w", "v1.w"], ["{v1,v01}.w"], id="a leading zero is no number"),
        pytest.param([f"{name}.w" for name in "abcdefgh"], [f"{name}.w" for name in "abcdefgh"], id="too many names"),
        pytest.param(["a.w", "a.w"], ["a.w"], id="a key twice counts once"),
    ],
)
def test_what_does_not_fold(keys, expected):
    assert texts(keys) == expected


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        pytest.param([f"layers.{n}.w" for n in range(12)], ["layers.{0…11}.w"], id="numbers become a range"),
        pytest.param(["layers.10.w", "layers.9.w", "layers.11.w"], ["layers.{9…11}.w"], id="in any order"),
        pytest.param(["0.w", "1.w", "4.w", "5.w", "6.w"], ["{0,1,4…6}.w"], id="a gap is shown"),
        pytest.param([f"layer{n}.w" for n in range(1, 5)], ["layer{1…4}.w"], id="numbered names"),
        pytest.param(["q.w", "k.w", "v.w"], ["{q,k,v}.w"], id="names in their order"),
        pytest.param(
            [f"layers.{n}.{name}.weight" for n in range(3) for name in "qkv"],
            ["layers.{0…2}.{q,k,v}.weight"],
            id="a full product is one line",
        ),
        pytest.param(
            [f"layers.{n}.{name}.weight" for n in range(3) for name in "qk"] + ["layers.0.v.weight"],
            ["layers.{0…2}.{q,k}.weight", "layers.0.v.weight"],
            id="what is beyond the product stays apart",
        ),
        pytest.param(
            [f"bn1.{leaf}" for leaf in BATCH_NORM]
            + [f"layer{s}.{b}.bn{n}.{leaf}" for s in (1, 2) for b in (0, 1) for n in (1, 2) for leaf in BATCH_NORM],
            [
                "bn1.{weight,bias,running_mean,running_var}",
                "layer{1,2}.{0,1}.bn{1,2}.{weight,bias,running_mean,running_var}",
            ],
            id="a residual network",
        ),
    ],
)
def test_folds(keys, expected):
    assert texts(keys) == expected


def test_keys_of_different_spec_stay_apart():
    shapes = {"layers.0.w": "[2]", "layers.1.w": "[3]", "layers.2.w": "[2]"}
    assert fold_keys(shapes, shapes.__getitem__) == [
        KeyGroup((("layers",), ("0", "2"), ("w",)), "[2]"),
        KeyGroup((("layers",), ("1",), ("w",)), "[3]"),
    ]


def test_lines_are_cut_and_the_rest_is_counted():
    keys = [f"{chr(97 + n)}{'.x' * n}" for n in range(20)]
    lines = folded_lines(keys, 12)
    assert lines == [*keys[:11], "… and 9 more"]
    assert folded_lines(keys, None) == keys


def test_the_rest_counts_keys_and_not_lines():
    assert folded_lines(["a", "x.0.w", "x.1.w", "y.z.0.w"], 2) == ["a", "… and 3 more"]


def test_a_line_of_many_keys_says_how_many():
    assert folded_lines(["a.0", "a.1"]) == ["a.{0,1}  (2)"]


SEGMENT = st.sampled_from(
    ["", "0", "1", "2", "10", "01", "layer1", "layer2", "layer10", "weight", "bias", "{0…3}", "a,b"]
)


@given(st.lists(st.lists(SEGMENT, min_size=1, max_size=4).map(".".join), unique=True))
def test_unfolding_gives_the_keys_back(keys):
    unfolded = [key for fold in fold_keys(keys) for key in unfold(fold)]
    assert sorted(unfolded) == sorted(keys)


@given(st.lists(st.text(max_size=6), unique=True, max_size=30), st.integers(1, 5))
def test_any_text_is_a_key_and_all_are_counted(keys, limit):
    assert sorted(key for fold in fold_keys(keys) for key in unfold(fold)) == sorted(keys)
    assert len(folded_lines(keys, limit)) <= limit


def test_a_key_of_very_many_segments_folds_too():
    deep = ".".join(["a"] * 100_000)
    folds = fold_keys([f"{deep}.0", f"{deep}.1"])
    assert [key for fold in folds for key in unfold(fold)] == [f"{deep}.0", f"{deep}.1"]
