import pytest

from ckptfix.core.edits import (
    EDITS,
    Assemble,
    Cast,
    Drop,
    Fill,
    Moments,
    Omit,
    Plain,
    Regroup,
    Rename,
    RenameModule,
    Replace,
    Retag,
    Tie,
    Zero,
)
from ckptfix.core.parts import Part, box_at, full
from ckptfix.report.edits import LINES, edit_lines, rename_pattern


@pytest.mark.parametrize(
    ("key", "to", "pattern"),
    [
        pytest.param("module.a.b", "a.b", ("module.{…}", "{…}"), id="a prefix goes"),
        pytest.param("a.b", "module.a.b", ("{…}", "module.{…}"), id="a prefix comes"),
        pytest.param("module.module.a", "module.a", ("module.{…}", "{…}"), id="one of two equal prefixes goes"),
        pytest.param("a._orig_mod.b", "a.b", ("{…}._orig_mod.{…}", "{…}.{…}"), id="a segment inside goes"),
        pytest.param(
            "a._orig_mod.b._orig_mod.c", "a.b.c", ("{…}._orig_mod.{…}._orig_mod.{…}", "{…}.{…}.{…}"), id="twice inside"
        ),
        pytest.param("ema_a_0_b_c", "a.0.b_c", ("ema_{…}_{…}", "{…}.{…}"), id="underscores become dots"),
        pytest.param("a/b/c", "a.b.c", ("{…}/{…}", "{…}.{…}"), id="slashes become dots"),
        pytest.param("ln.gamma", "ln.weight", ("{…}.gamma", "{…}.weight"), id="a leaf changes"),
        pytest.param("norm.1.weight", "norm1.weight", ("norm.1.{…}", "norm1.{…}"), id="two segments become one"),
        pytest.param("a", "b", ("a", "b"), id="nothing in common"),
        pytest.param(
            "a.weight_g",
            "a.parametrizations.weight.original0",
            ("{…}.weight_g", "{…}.parametrizations.weight.original0"),
            id="a leaf becomes a path",
        ),
    ],
)
def test_rename_pattern(key, to, pattern):
    assert rename_pattern(key, to) == pattern


def test_no_edits_give_no_lines():
    assert edit_lines(()) == []


def test_each_kind_in_its_words():
    edits = (
        Rename("module.a", "a"),
        Rename("module.b", "b"),
        Drop("head.0"),
        Drop("head.1"),
        Fill("n", "int64", (), "zeros"),
        Fill("fc.weight", "float32", (10, 512), "target"),
        Replace("bn.running_mean", "float32", (8,), "zeros"),
        Replace("bn.running_var", "float32", (8,), "ones"),
        Replace("a.weight", "float32", (2, 2), "twin", "module.a.weight", "state_dict_ema"),
        Replace("b.weight", "float32", (2, 2), "twin", "c.weight"),
        Replace("c.weight", "float32", (2, 2), "donor", "c.weight"),
        Zero("d.weight", "float32", "non-finite"),
        Zero("e.weight", "float32", "subnormal"),
        Tie("dec.weight", "emb.weight"),
        Cast("x.w", "float16", "float32"),
        Assemble.reshape("n2", "float32", (1,), ()),
        RenameModule("module.norm", "norm"),
        Assemble("0.fc.weight", "float32", (3, 2), (Part("0.fc.weight", full((2, 3)), full((3, 2)), axes=(1, 0)),)),
        Assemble("1.fc.weight", "float32", (3, 2), (Part("1.fc.weight", full((2, 3)), full((3, 2)), axes=(1, 0)),)),
        Assemble(
            "qk.bias",
            "float32",
            (2, 4),
            tuple(Part(name, full((4,)), box_at((at, 0), (1, 4))) for at, name in enumerate(("q.b", "k.b"))),
        ),
        Plain("args", "argparse.Namespace", "dict"),
        Retag("cuda:3"),
    )
    assert edit_lines(edits) == [
        "rename 2 keys: module.{…} → {…}",
        "rename 1 row of _metadata: module.{…} → {…}",
        "reshape 1 key from [1] to []: n2",
        "assemble 2 keys (transposed): {0,1}.fc.weight",
        "assemble 1 key: q.b → qk.bias (of 2 tensors, reshaped)",
        "drop 2 keys: head.{0,1}",
        "fill 1 key (1 element) with zeros: n  int64[]",
        "fill 1 key (5.12 k elements) from the initial values of the target (not trained): fc.weight  float32[10, 512]",
        "reset 2 keys of running statistics: bn.{running_mean,running_var}",
        "replace 1 key (4 elements) from state_dict_ema: a.weight  float32[2, 2]",
        "replace 1 key (4 elements) from its twin in the same state_dict: b.weight  float32[2, 2]",
        "replace 1 key (4 elements) from the donor file: c.weight  float32[2, 2]",
        "set the non-finite values of 1 key to zero: d.weight",
        "set the subnormal values of 1 key to zero: e.weight",
        "tie dec.weight to emb.weight",
        "cast 1 key from float16 to float32: x.w",
        "turn argparse.Namespace into dict at args",
        "retag tensors from cuda:3 to cpu",
    ]


def test_a_list_of_many_lines_is_indented_and_cut():
    lines = edit_lines([Drop(f"k{'.x' * n}") for n in range(20)], limit=3)
    assert lines == ["drop 20 keys:", "  k", "  k.x", "  … and 18 more"]


def test_without_a_limit_every_rename_is_shown():
    assert edit_lines([Rename("m.a", "a")], limit=None) == ["rename 1 key: m.{…} → {…}", "  m.a → a"]


def test_every_kind_of_edit_has_its_line():
    assert set(LINES) | {Regroup, Moments, Omit} == set(EDITS.values())


def test_an_optimizer_that_two_rules_edit_has_the_parameters_of_each_apart():
    """OPT101 updates it to match, and OPT103 then leaves out the state that is NaN."""
    two = [Moments("optimizer", 0, key, number) for number, key in (("0", "a"), ("1", "b"))]
    edits = [Regroup("optimizer", (0,)), *two, Regroup("optimizer", (0,)), two[0], Moments("optimizer", 0, "1", None)]
    assert edit_lines(edits) == [
        "match the optimizer to the weights: 2 parameters in 1 group",
        "match the optimizer to the weights: 2 parameters in 1 group",
        "  start the state of 1 key anew: 1",
    ]


def test_a_log_of_a_thousand_epochs_is_one_line():
    edits = [Plain(f"log.{name}[{n}]", "numpy.float64", "float") for name in "ab" for n in range(1000)]
    assert edit_lines([*edits, Plain("best", "numpy.float64", "float")]) == [
        "turn numpy.float64 into float at log.a[…] (1000)",
        "turn numpy.float64 into float at log.b[…] (1000)",
        "turn numpy.float64 into float at best",
    ]
    assert len(edit_lines(edits, limit=None)) == 2000
    others = [Plain(f"args.{chr(97 + n)}", "numpy.float64", "float") for n in range(26)]
    assert edit_lines(others)[-1] == "… and 15 more places"


def test_ties_of_a_shared_module_are_one_line():
    shared = [Tie(f"wrapped.h.{n}.{leaf}", f"h.{n}.{leaf}") for n in range(4) for leaf in ("weight", "bias")]
    assert edit_lines(shared) == ["tie 8 keys: wrapped.{…} to {…}"]
    assert len(edit_lines(shared, limit=None)) == 8
