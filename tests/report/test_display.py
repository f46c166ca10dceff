"""What a result shows at the prompt, when printed, and in a notebook."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.core.plan import Plan
from tests.report.samples import PREFIX, repaired, report


@pytest.fixture
def results(tmp_path):
    """A result of every kind, of a checkpoint with two thousand keys."""
    state_dict = {f"module.layers.{n}.{name}": torch.ones(2) for n in range(1000) for name in ("weight", "bias")}
    torch.save(state_dict, tmp_path / "a.pth")
    torch.save({"w": torch.ones(2)}, tmp_path / "b.pth")
    repair = ckptfix.repair(tmp_path / "a.pth")
    return {
        "Report": repair.report,
        "Repair": repair,
        "Plan": repair.plan,
        "Checkpoint": repair.checkpoint,
        "Difference": ckptfix.diff(tmp_path / "a.pth", tmp_path / "b.pth"),
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
    assert repr(Plan()) == "<Plan: 0 edits>"


def test_what_is_set_in_below_a_line_is_in_its_row(results):
    html = results["Checkpoint"]._repr_html_()
    assert "<td>keys</td><td>layers.{0…999}.{weight,bias} float32[2] (2000)</td>" in " ".join(html.split())


def test_names_in_a_file_are_no_markup():
    html = report(PREFIX, source="<b>.pth")._repr_html_()
    assert "<b>" not in html
    assert "&lt;b&gt;.pth" in html


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
