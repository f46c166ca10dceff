import json
import math
import sys

import numpy as np
import pytest

from ckptfix.core.edits import Cast
from ckptfix.core.finding import Applicability, Finding, Fix, Level
from ckptfix.core.report import envelope, error_to_json, plain
from ckptfix.errors import UsageError
from tests.report.samples import COUNTER, MISSING, NOTE, PREFIX, repaired, report


def strict(data):
    """Return the data after a round trip through a parser that follows the standard strictly."""

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(json.dumps(data, allow_nan=False), parse_constant=refuse)


def test_an_empty_report():
    assert strict(report().to_json()) == {
        "version": 1,
        "source": "resnet.pth",
        "format": "torch-zip",
        "container": "state_dict",
        "tensors": 9,
        "numel": 11689512,
        "target": None,
        "exit_code": 0,
        "findings": [],
        "edits": [],
        "coverage": None,
        "obstacles": [],
        "smoke": None,
        "dry_run": False,
        "refused": False,
        "output": None,
        "remarks": [],
        "likeness": None,
        "unexamined": [],
    }


def test_a_repair_in_full():
    data = strict(repaired().to_json())
    finding = data["findings"][0]
    assert finding["level"] == "error"
    assert finding["fixed"] is True
    assert finding["keys"] == list(PREFIX.keys)
    assert finding["evidence"] == {"prefix": "module", "share": 1.0}
    assert finding["fix"]["applicability"] == "safe"
    assert finding["fix"]["edits"][0] == {
        "edit": "rename",
        "key": "module.layer1.0.conv1.weight",
        "to": "layer1.0.conv1.weight",
    }
    assert len(data["edits"]) == 9
    assert data["coverage"]["share"] == 1.0
    assert data["coverage"]["buffers_from_file"] == 9597
    assert data["smoke"]["outputs"] == ["float32[2, 10]"]
    assert data["smoke"]["checks"] == []
    assert data["smoke"]["compared"] is None
    assert (data["output"], data["exit_code"]) == ("resnet.fixed.pth", 0)


def test_unfixed_findings_are_marked():
    data = strict(report(PREFIX, NOTE).to_json())
    assert [finding["fixed"] for finding in data["findings"]] == [False, False]
    assert [finding["fixable"] for finding in data["findings"]] == [True, False]
    assert data["exit_code"] == 1


def test_accepted_findings_are_marked():
    """The page and the JSON of ``--accept`` asked for a remedy that only a migration's manifest had."""
    data = strict(report(MISSING, PREFIX, NOTE, fixed=(PREFIX,), accepted=("FIT", "KEY", "FIL")).to_json())
    assert [finding["accepted"] for finding in data["findings"]] == [True, False, False]


def test_a_dry_run_has_fixed_nothing():
    data = strict(report(PREFIX, fixed=(PREFIX,), is_dry_run=True).to_json())
    assert (data["dry_run"], data["refused"], data["exit_code"]) == (True, False, 0)
    assert {(finding["fixable"], finding["fixed"]) for finding in data["findings"]} == {(True, False)}


def test_figures_that_are_not_json_numbers_are_text():
    evidence = {"nan": math.nan, "inf": [math.inf, -math.inf], "single": np.float32(1.5), "level": Level.ERROR}
    finding = Finding("VAL101", "non-finite", Level.ERROR, "m", evidence=evidence)
    assert strict(report(finding).to_json())["findings"][0]["evidence"] == {
        "nan": "NaN",
        "inf": ["Infinity", "-Infinity"],
        "single": "1.5",
        "level": 2,
    }


def test_display_only_has_a_dash():
    finding = Finding(
        "X1", "x", Level.ERROR, "m", fix=Fix((Cast("k", "float16", "float32"),), Applicability.DISPLAY_ONLY)
    )
    assert report(finding).to_json()["findings"][0]["fix"]["applicability"] == "display-only"


def test_plain_data_has_no_tuples_and_only_text_keys():
    assert plain({1: (2, {3}), "b": b"x"}) == {"1": [2, [3]], "b": "b'x'"}


def test_lone_surrogates_survive():
    assert strict(plain({"\ud800": "\udfff"})) == {"\ud800": "\udfff"}


def test_envelope_takes_errors_and_reports():
    data = strict(envelope([report().to_json(), error_to_json("bad.pth", "bad.pth: damaged")], {"ckptfix": "1"}))
    assert data["version"] == 1
    assert [entry["exit_code"] for entry in data["reports"]] == [0, 2]
    assert data["reports"][1]["error"] == "bad.pth: damaged"


def test_findings_as_a_table_of_pandas():
    pandas = pytest.importorskip("pandas")
    table = report(PREFIX, COUNTER, fixed=(PREFIX,)).to_dataframe()
    assert isinstance(table, pandas.DataFrame)
    assert list(table.columns) == ["code", "name", "level", "message", "keys", "fixable", "fixed"]
    assert table[["code", "level", "fixable", "fixed"]].values.tolist() == [
        ["KEY102", "error", True, True],
        ["BUF101", "warning", True, False],
    ]
    assert table["keys"].map(len).tolist() == [6, 3]
    assert list(report().to_dataframe().columns) == list(table.columns)


def test_a_table_without_pandas_is_refused_with_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match="pip install pandas"):
        report(PREFIX).to_dataframe()
