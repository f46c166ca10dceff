import pytest
from msgspec.structs import replace

from ckptfix.core.coverage import Coverage
from ckptfix.core.edits import MergeAdapter
from ckptfix.core.finding import Finding, Level
from ckptfix.core.option import CHECK, REPAIR
from ckptfix.core.smoke_result import SmokeResult
from ckptfix.report.advice import Presentation
from ckptfix.report.style import TextFormat
from ckptfix.report.terminal import concise_lines, full_lines, headline
from ckptfix.rules import named
from tests.report.samples import COUNTER, EXTRA, MISMATCH, MISSING, NOTE, PREFIX, repaired, report

SOUND = "resnet.pth: nothing wrong in the file itself (not compared with a model: add --model or --like)"
NAN = named("non-finite").finding(Level.ERROR, "1 tensor is not finite", ("a.weight",))


def full(report, **presentation):
    return TextFormat().write(full_lines(report, Presentation(**presentation)))


@pytest.mark.parametrize(
    ("findings", "line"),
    [
        pytest.param((), SOUND, id="no defect"),
        pytest.param((NOTE,), f"{SOUND}, 1 note", id="a note is no defect"),
        pytest.param((MISMATCH,), "resnet.pth: 1 defect: another shape (1 key)", id="one"),
        pytest.param(
            (PREFIX, COUNTER),
            "resnet.pth: 2 defects: 6 keys begin with `module.`; BatchNorm has no counter (3 keys)",
            id="two",
        ),
        pytest.param(
            (PREFIX, COUNTER, EXTRA, MISSING, MISMATCH, NOTE),
            "resnet.pth: 5 defects: 3 need a choice (unexpected-key, missing-key, shape-mismatch),"
            " 2 fixable (wrapper-prefix, missing-num-batches-tracked)",
            id="many",
        ),
        pytest.param(
            (COUNTER, PREFIX),
            "resnet.pth: 2 defects: 6 keys begin with `module.`; BatchNorm has no counter (3 keys)",
            id="an error before a warning",
        ),
        pytest.param(
            (PREFIX, COUNTER, NAN),
            "resnet.pth: 3 defects: 1 in the values (non-finite), 2 fixable (wrapper-prefix,"
            " missing-num-batches-tracked)",
            id="values first",
        ),
    ],
)
def test_headline(findings, line):
    assert TextFormat().write([headline(report(*findings))]) == f"{line}\n"


def test_full_report_of_a_repair():
    assert full(repaired(), mode=REPAIR) == (
        """\
resnet.pth: repaired (6 keys renamed, 3 keys filled) → resnet.fixed.pth; loads strictly, forward test passed
  torch-zip, state_dict at state_dict: 9 tensors, 11.7 M elements; target zoo:resnet18

KEY102 wrapper-prefix error [fixed]
  6 keys begin with `module.`
    module.layer{1…3}.{0,1}.conv1.weight  (6)
  prefix module, share 1

BUF101 missing-num-batches-tracked warning [fixed]
  BatchNorm has no counter
    layer{1…3}.0.bn1.num_batches_tracked  (3)

done:
  rename 6 keys: module.{…} → {…}
  fill 3 keys (3 elements) with zeros: layer{1…3}.0.bn1.num_batches_tracked  int64[]
coverage: 100 % of 11.7 M parameters (by number of elements) came from the file; buffers 99.97 %
forward test: passed on cpu (no CUDA device): float32[2, 3, 8, 8] → float32[2, 10], 0.012 s
written: resnet.fixed.pth
note: built on the meta device
nothing left to do
"""
    )


def test_full_report_of_a_check():
    text = full(report(PREFIX))
    assert "KEY102 wrapper-prefix error [fixable]\n" in text
    assert "done:" not in text
    assert "written:" not in text
    assert text.count("--like") == 1  # next to the figures of the file; there is no coverage to report
    assert text.endswith("  run: ckptfix repair resnet.pth\n")


def test_a_dry_run_says_would():
    text = full(report(PREFIX, fixed=(PREFIX,), edits=repaired().edits[:6], is_dry_run=True), mode=REPAIR)
    assert "[would be fixed]" in text
    assert "would do:\n  rename 6 keys: module.{…} → {…}\n" in text
    assert "written: nothing (dry run)\n" in text
    assert text.endswith("\nrun: ckptfix repair resnet.pth\n")


def test_what_was_filled_is_reported_with_the_coverage():
    text = full(report(coverage=Coverage(1000, 999, 0, 0, {"target": 1})))
    assert (
        "coverage: 99.9 % of 1.00 k parameters (by number of elements) would come from the file; buffers none;" in text
    )
    assert "; 1 element filled from target\n" in text


@pytest.mark.parametrize(
    ("smoke", "line"),
    [
        (SmokeResult(None, note="no model was given"), "forward test: no verdict: no model was given\n"),
        (SmokeResult(False, "cuda:0", "NaN in the output"), "forward test: failed on cuda:0 (NaN in the output)\n"),
        (SmokeResult(False), "forward test: failed\n"),
        (SmokeResult(True, "cpu", checks=("a", "b")), "forward test: passed on cpu\n  a\n  b\n"),
    ],
)
def test_forward_test(smoke, line):
    assert line in full(report(smoke=smoke))


def test_the_headline_has_the_first_clause():
    finding = Finding("X1", "x", Level.ERROR, "1 matrix has decayed; the optimizer had weight_decay")
    assert full(report(finding)).startswith("resnet.pth: 1 defect: 1 matrix has decayed\n")


def test_nested_evidence_is_readable():
    finding = Finding("X1", "x", Level.ERROR, "m", evidence={"tensors": {"a.weight": {"rms": 1 / 3, "at": [0, True]}}})
    assert "  evidence: tensors {a.weight {rms 0.3333, at [0, True]}}\n" in full(report(finding), verbose=True)


def test_figures_and_shapes_stand_next_to_their_keys():
    shapes = {"fc.weight": {"file": [1200, 32], "target": [1000, 32]}, "pos": {"file": None, "target": [1, 64]}}
    finding = Finding("F", "f", Level.ERROR, "m", keys=tuple(shapes), evidence={"shapes": shapes})
    assert full(report(finding)).splitlines()[5:7] == [
        "    fc.weight  file [1200, 32]          model [1000, 32]",
        "    pos        file not a tensor        model [1, 64]",
    ]
    figures = {"a.weight": {"rms": 7.159e-10, "median_rms": 0.1, "nan": 0, "optimizer": None}}
    finding = Finding("V", "v", Level.ERROR, "m", keys=("a.weight",), evidence={"tensors": figures, "limit": 0.001})
    assert full(report(finding)).splitlines()[5:7] == ["    a.weight  rms 7.16e-10, median rms 0.1", "  limit 0.001"]


@pytest.mark.parametrize(
    ("changes", "mode", "line"),
    [
        ({"target": "zoo:net"}, CHECK, "fits zoo:net"),
        ({"target": "zoo:net", "obstacles": ("a",)}, CHECK, "a strict load would fail"),
        ({"smoke": SmokeResult(False)}, REPAIR, "the forward test failed"),
        (
            {"edits": repaired().edits, "is_dry_run": True},
            REPAIR,
            "would be repaired (6 keys renamed, 3 keys filled)",
        ),
        (
            {
                "edits": (MergeAdapter("a", "float32", (1,), ()), MergeAdapter("b", "float32", (1,), (), undo=True)),
                "is_dry_run": True,
            },
            REPAIR,
            "would be repaired (1 key merged, 1 key unmerged)",
        ),
        ({"output": "a.safetensors"}, REPAIR, "written → a.safetensors; read back and compared"),
        (
            {"output": "a.pth", "coverage": Coverage(4, 2, 0, 0, {"target": 2})},
            REPAIR,
            "written → a.pth; 50 % of the parameters are untrained",
        ),
        (
            {"coverage": Coverage(4, 2, 0, 0, {"target": 2}), "is_dry_run": True},
            REPAIR,
            "50 % of the parameters would be untrained",
        ),
    ],
)
def test_headline_of_what_has_no_defect_left(changes, mode, line):
    assert TextFormat().write([headline(report(**changes), Presentation(mode))]) == f"resnet.pth: {line}\n"


def test_headline_of_a_repair_that_leaves_something():
    left = report(PREFIX, MISMATCH, fixed=(PREFIX,), edits=repaired().edits[:6], output="b.pth")
    line = "resnet.pth: 1 fixed → b.pth; left: 1 defect: another shape (1 key)\n"
    assert TextFormat().write([headline(left, Presentation(REPAIR))]) == line
    line = "resnet.pth: 1 would be fixed; left: 1 defect: another shape (1 key)\n"
    assert TextFormat().write([headline(replace(left, output=None, is_dry_run=True), Presentation(REPAIR))]) == line
    refused = report(PREFIX, MISMATCH, fixed=(PREFIX,), edits=repaired().edits[:6])
    line = "resnet.pth: not repaired; left: 1 defect: another shape (1 key)\n"
    assert TextFormat().write([headline(refused, Presentation(REPAIR))]) == line


def test_a_defect_without_a_fix_is_not_called_nothing_to_repair():
    assert "written: nothing\n" in full(report(MISMATCH), mode=REPAIR)


def test_a_long_message_is_cut_in_the_headline_alone():
    finding = Finding("X1", "x", Level.ERROR, "y" * 500)
    first, *rest = full(report(finding)).splitlines()
    assert len(first) < 150
    assert f"  {'y' * 500}" in rest


def test_long_evidence_is_cut_unless_verbose():
    finding = Finding("X1", "x", Level.ERROR, "m", evidence={"text": "y" * 500, **{f"n{n}": n for n in range(20)}})
    assert "y" * 200 not in full(report(finding))
    assert "y" * 500 in full(report(finding), verbose=True)
    assert "n19 19" in full(report(finding), verbose=True)


def test_concise():
    text = TextFormat().write(
        concise_lines(report(PREFIX, EXTRA, MISMATCH, NOTE, fixed=(PREFIX,)), Presentation(REPAIR))
    )
    assert text == (
        """\
resnet.pth: KEY102 wrapper-prefix: 6 keys begin with `module.` [fixed]
resnet.pth: FIT102 unexpected-key: the target has no such key (1 key) [fixable with --unsafe-fixes]
resnet.pth: FIT103 shape-mismatch: another shape (1 key)
resnet.pth: FIL103 foreign-class: an object of a class is inside
"""
    )


@pytest.mark.parametrize("lines", [full_lines, concise_lines])
def test_a_hostile_name_stays_text(lines):
    hostile = Finding("KEY1", "n", Level.ERROR, "\x1b[2Jmessage", keys=("\x1b]0;title\x07",), evidence={"\x1b": "\r"})
    text = TextFormat().write(lines(report(hostile, source="\x1b[31m.pth", target="\x1b"), Presentation()))
    assert "\x1b" not in text
    assert "\r" not in text


@pytest.mark.parametrize(
    ("form", "place", "code"),
    [
        ("pth", (), "torch.load('a.out', weights_only=True)"),
        ("pth", ("model", 0), "torch.load('a.out', weights_only=True)['model'][0]"),
        ("safetensors", ("model",), "safetensors.torch.load_file('a.out')"),
        (
            "universal",
            ("module",),
            'engine.load_checkpoint(\'a.out\'), with "checkpoint": {"load_universal": true} in ds_config',
        ),
        ("shards", (), "ckptfix.open_checkpoint('a.out').state_dict()"),
    ],
)
def test_the_last_line_says_how_to_load_the_result(form: str, place: tuple[str | int, ...], code: str):
    report = replace(repaired(), output="a.out", written_as=form, place=place)
    assert full(report, mode=REPAIR).endswith(f"\nload it with: {code}\n")


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        (
            {"nan": 216, "pos_inf": 1, "neg_inf": 0, "numel": 216, "first_index": [0, 0], "affected": 12, "of": 20}
            | {"channels": [0, 1, 2, 3, 4]},
            "216 NaN, 1 +Inf of 216 values, first at [0, 0], 12 of 20 channels: 0, 1, 2, …",
        ),
        ({"dead": 2, "of": 64, "channels": [3, 9]}, "2 dead of 64 channels: 3, 9"),
        ({"minimum": -1.0, "zeros": 0, "numel": 20}, "20 values, minimum -1"),
        ({"become_zero": 7, "numel": 9, "rms": 1e-9}, "7 become zero of 9 values, rms 1e-09"),
        ({"numel": 88, "of": 100}, "88 values of 100"),
    ],
    ids=["not finite", "dead channels", "no count", "a cast", "of the file"],
)
def test_counts_are_said_in_words_and_as_they_are_with_verbose(figures, words):
    found = report(
        named("non-finite").finding(
            Level.ERROR, "something is wrong", ("a.weight",), {"tensors": {"a.weight": figures}}
        )
    )
    assert f"    a.weight  {words}\n" in full(found)
    assert ", ".join(figures) == ", ".join(name for name in figures if f"{name} " in full(found, verbose=True))
