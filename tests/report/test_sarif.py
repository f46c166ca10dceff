"""The models of ``sarif-pydantic`` stand for the schema, which nobody publishes as a package."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from pydantic import BaseModel, ValidationError
from sarif_pydantic import Sarif

from ckptfix.core.finding import Blocks, Finding, Level
from ckptfix.report.ci import SarifLog
from ckptfix.report.telling import Telling
from ckptfix.rules import RULES
from tests.report.samples import COUNTER, EXTRA, MISSING, PREFIX, report

KNOWN = {"toolExecutionNotifications"}
"""Properties of the standard that the models let pass and do not know (section 3.20.21)."""


def unknown(part: object) -> Iterator[str]:
    """The properties that the models do not know: the schema forbids others than its own."""
    if isinstance(part, BaseModel):
        yield from part.model_extra or {}
        part = list(part.__dict__.values())
    if isinstance(part, (list, tuple, dict)):
        for each in part.values() if isinstance(part, dict) else part:
            yield from unknown(each)


def run_of(*reports, errors=()):
    """The only run of the log of these reports, which is valid."""
    log = SarifLog("1.2.3")
    for each in reports:
        log.add(each, Telling())
    for source, message in errors:
        log.add_error(source, message)
    data = json.loads(log.text())
    assert set(unknown(Sarif.model_validate(data))) <= KNOWN
    (run,) = data["runs"]
    return run


def test_no_defect():
    run = run_of(report())
    assert (run["results"], run["tool"]["driver"]["rules"]) == ([], [])
    assert run["invocations"] == [{"executionSuccessful": True, "toolExecutionNotifications": []}]


def test_findings_are_results():
    run = run_of(report(PREFIX, COUNTER, EXTRA, MISSING, fixed=(PREFIX,)))
    assert [(each["ruleId"], each["level"], each["message"]["text"]) for each in run["results"]] == [
        ("KEY102", "note", "6 keys begin with `module.` [fixed]"),
        ("BUF101", "warning", "BatchNorm has no counter (3 keys)"),
        ("FIT102", "error", "the target has no such key (1 key)"),
        ("FIT101", "error", "the file lacks keys of the target (2 keys)\n--fill target takes the initial values"),
    ]
    (location,) = run["results"][2]["locations"]
    assert location == {
        "physicalLocation": {"artifactLocation": {"uri": "resnet.pth"}, "region": {"startLine": 1}},
        "logicalLocations": [{"fullyQualifiedName": "head.weight", "kind": "member"}],
    }


@pytest.mark.parametrize("entry", RULES, ids=lambda entry: entry.code)
def test_every_rule_describes_itself(entry):
    finding = Finding(entry.code, entry.name, Level.WARNING, "a")
    (rule,) = run_of(report(finding))["tool"]["driver"]["rules"]
    assert (rule["id"], rule["name"]) == (entry.code, entry.name)
    assert rule["shortDescription"]["text"]
    assert rule["help"]["markdown"].startswith("## What it finds")
    assert "helpUri" not in rule or not rule["helpUri"].endswith((".", ")", ",", "`"))


def test_a_rule_is_as_bad_as_the_worst_of_its_findings():
    notes = [Finding("VAL101", "non-finite", level, "a") for level in (Level.NOTE, Level.ERROR, Level.WARNING)]
    run = run_of(report(*notes))
    assert [rule["defaultConfiguration"] for rule in run["tool"]["driver"]["rules"]] == [{"level": "error"}]


def test_a_file_that_would_run_code_is_a_vulnerability():
    payload = Finding("FIL901", "executable-payload", Level.ERROR, "runs os.system", blocks=Blocks.LOADING)
    hostile, harmless = run_of(report(payload, PREFIX))["tool"]["driver"]["rules"]
    assert hostile["properties"] == {"tags": ["security"], "security-severity": "9.8"}
    assert "properties" not in harmless


def test_an_unreadable_file_is_a_failure_of_the_run():
    (invocation,) = run_of(errors=[("torn.pth", "torn.pth: cut short")])["invocations"]
    assert not invocation["executionSuccessful"]
    (told,) = invocation["toolExecutionNotifications"]
    assert (told["level"], told["message"]["text"]) == ("error", "torn.pth: cut short")


def test_an_alert_stays_the_same_from_run_to_run_and_differs_from_others():
    def prints(*findings, source="a.pth"):
        results = run_of(report(*findings, source=source))["results"]
        return [each["partialFingerprints"]["primaryLocationLineHash"] for each in results]

    assert prints(PREFIX, COUNTER) == [*prints(PREFIX), *prints(COUNTER)]
    assert len({*prints(PREFIX, COUNTER), *prints(PREFIX, source="b.pth")}) == 3


@pytest.mark.parametrize(
    ("source", "uri"),
    [
        pytest.param("./runs/a.pth", "runs/a.pth", id="relative"),
        pytest.param("a b%#é.pth", "a%20b%25%23%C3%A9.pth", id="escaped"),
        pytest.param("a\udcff.pth", "a%FF.pth", id="not text"),
        pytest.param("/elsewhere/a b.pth", "file:///elsewhere/a%20b.pth", id="absolute"),
        pytest.param("https://host/a.pth", "https://host/a.pth", id="a URL"),
    ],
)
def test_a_path_is_a_uri(source, uri):
    (result,) = run_of(report(PREFIX, source=source))["results"]
    assert result["locations"][0]["physicalLocation"]["artifactLocation"] == {"uri": uri}


def test_a_path_below_the_working_directory_is_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (result,) = run_of(report(PREFIX, source=str(tmp_path / "a.pth")))["results"]
    assert result["locations"][0]["physicalLocation"]["artifactLocation"] == {"uri": "a.pth"}


def test_the_models_refuse_what_is_not_sarif():
    with pytest.raises(ValidationError):
        Sarif.model_validate({"version": "2.1.0", "runs": [{"results": []}]})
