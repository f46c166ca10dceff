"""What a result shows at the prompt, when printed, and in a notebook."""

import logging
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.core.finding import Finding, Level
from ckptfix.core.plan import Plan
from ckptfix.core.spec import TensorSpec
from ckptfix.report.display import log_doubts
from tests.reading.folders.ranks.genuine import swap, unpacked
from tests.report.samples import PREFIX, repaired, report


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A result of every kind, of a checkpoint with two thousand keys."""
    folder = tmp_path_factory.mktemp("results")
    state_dict = {f"module.layers.{n}.{name}": torch.ones(2) for n in range(1000) for name in ("weight", "bias")}
    torch.save(state_dict, folder / "a.pth")
    torch.save({"w": torch.ones(2)}, folder / "b.pth")
    repair = ckptfix.repair(folder / "a.pth")
    return {
        "Report": repair.report,
        "Repair": repair,
        "Plan": repair.plan,
        "Checkpoint": repair.checkpoint,
        "Difference": ckptfix.diff(folder / "a.pth", folder / "b.pth"),
    }


@pytest.mark.parametrize("kind", ["Report", "Repair", "Plan", "Checkpoint", "Difference"])
def test_a_result_is_short(kind, results):
    result = results[kind]
    assert type(result).__name__ == kind
    assert repr(result).startswith(f"<{kind}")
    assert repr(result).endswith(">")
    assert len(repr(result)) < 250
    assert "\n" not in repr(result)
    assert 1 < len(str(result).splitlines()) < 60
    html = result._repr_html_()
    assert html.startswith('<table style="white-space: pre-line"><caption>')
    assert html.count("<tr>") == html.count("</tr>") < 40
    assert len(html) < 5000


def test_what_is_printed_is_what_the_terminal_shows():
    assert str(report(PREFIX)).startswith("resnet.pth: 1 defect: 6 keys begin with `module.`\n")
    assert str(repaired()).startswith("resnet.pth: repaired (")
    assert repr(repaired()) == "<Report of resnet.pth: 0 defects, 9 edits, written to resnet.fixed.pth>"
    assert repr(TensorSpec("float32", (2, 3), (3, 1))) == "<TensorSpec float32[2, 3]>"
    assert repr(Plan()) == "<Plan: 0 edits>"
    assert repr(Finding("KEY102", "a", Level.ERROR, "b")) == "<Finding KEY102 a error: b>"


def test_what_is_set_in_below_a_line_is_in_its_row(results):
    html = results["Checkpoint"]._repr_html_()
    assert "<td>keys</td><td>layers.{0…999}.{weight,bias} float32[2] (2000)</td>" in " ".join(html.split())


def test_names_in_a_file_are_not_markup():
    html = report(PREFIX, source="<b>.pth")._repr_html_()
    assert "<b>" not in html
    assert "&lt;b&gt;.pth" in html


def test_a_load_of_bad_values_warns(caplog):
    model = nn.Linear(2, 2)
    ckptfix.load(model, model.state_dict() | {"bias": torch.tensor([0.0, torch.nan])})
    assert caplog.messages == ["state_dict: VAL101 non-finite: 1 tensor is not finite: 1 NaN among 2 values"]


def test_the_library_logs_what_it_renames_and_fills(caplog):
    model = nn.Linear(2, 2)
    with caplog.at_level(logging.INFO, "ckptfix"):
        ckptfix.load(model, model.state_dict())
        assert caplog.messages == []
        ckptfix.load(model, {"module.weight": torch.ones(2, 2)}, fill="target", unsafe_fixes=True)
    assert caplog.messages == [
        "state_dict: rename 1 key: module.{…} → {…}",
        "state_dict: fill 1 key (2 elements) from the initial values of the target (not trained): bias  float32[2]",
    ]


@pytest.mark.parametrize(
    ("call", "added", "following"),
    [
        pytest.param("ckptfix.repair('a.pth', model)", {}, None, id="nothing left"),
        pytest.param(
            "ckptfix.check('a.pth', model)",
            {"more": torch.ones(2)},
            "ckptfix.repair('a.pth', model, beside=True, unsafe_fixes=True)",
            id="a check writes nothing",
        ),
        pytest.param(
            "ckptfix.repair('a.pth', model, output='b.pth')",
            {"more": torch.ones(2)},
            "ckptfix.repair('a.pth', model, output='b.pth', unsafe_fixes=True)",
            id="what was given stays",
        ),
        pytest.param(
            "ckptfix.repair(Path('a.pth'), ignore='VAL', values=False, dry_run=True, in_place=True)",
            {"num_batches_tracked": torch.tensor(1)},
            "ckptfix.repair('a.pth', in_place=True, ignore='VAL', values=False)",
            id="after a dry run",
        ),
        pytest.param(
            "ckptfix.repair_state_dict(state_dict, model, ignore=[])[1]",
            {"more": torch.ones(2)},
            "ckptfix.repair_state_dict(state_dict, model, unsafe_fixes=True)",
            id="in memory",
        ),
        pytest.param(
            "ckptfix.load(model, 'a.pth')",
            {"bn.running_var": torch.tensor([torch.nan, 1.0])},
            "ckptfix.load(model, 'a.pth', reset_running_stats=True)",
            id="load",
        ),
    ],
)
def test_the_call_that_is_shown_continues_from_the_one_before(call, added, following, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(OrderedDict(bn=nn.BatchNorm1d(2), fc=nn.Linear(2, 2)))
    state_dict = {f"module.{key}": value.clone() for key, value in model.state_dict().items()}
    state_dict |= {f"module.{key}": value for key, value in added.items()}
    torch.save(state_dict, "a.pth")
    names = {"ckptfix": ckptfix, "model": model, "state_dict": state_dict, "Path": Path}
    shown = str(eval(call, names))
    assert "--" not in shown
    calls = [line.partition("run: ")[2] for line in shown.splitlines() if "ckptfix." in line]
    assert calls == ([] if following is None else [following])
    if following is not None:
        done = eval(following, names)
        assert "nothing left to do" in str(done[1] if isinstance(done, tuple) else done)


@pytest.mark.parametrize("is_swapped", [False, True])
def test_ranks_that_contradict_each_other_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_swapped: bool
) -> None:
    saved, _ = unpacked("universal_zero2", tmp_path)
    if is_swapped:
        swap(*(next(saved.rglob(f"{name}/fp32.pt")) for name in ("l1.bias", "bn.bias")))
    log_doubts(ckptfix.check(saved))
    assert [record.levelname for record in caplog.records] == ["WARNING"] * is_swapped
    assert all("differ from the weights that the training used" in record.getMessage() for record in caplog.records)
