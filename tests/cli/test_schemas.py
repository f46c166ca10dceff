"""The JSON output matches the JSON Schemas under ``docs/schemas``."""

import argparse
import hashlib
import json
import shlex

import pytest
import torch
from jsonschema import Draft202012Validator, ValidationError, validate

from tests.cli.programs import ROOT, parse, run_here
from tests.reading.folders.ranks.genuine import unpacked

SCHEMAS = {path.name: json.loads(path.read_text()) for path in (ROOT / "docs" / "schemas").glob("*.json")}


def assert_valid(data, name):
    validate(data, SCHEMAS[f"{name}.schema.json"])


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_schemas_are_valid(name):
    Draft202012Validator.check_schema(SCHEMAS[name])
    assert SCHEMAS[name]["$id"] == name


def test_shared_definitions_are_equal_in_all_schemas():
    first: dict[str, object] = {}
    for schema in SCHEMAS.values():
        for name, described in schema.get("$defs", {}).items():
            assert first.setdefault(name, described) == described, name


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["check", "good.pth"], id="no defect"),
        pytest.param(["check", "wrapped.pth", "torn.pth", "good.pth"], id="a defect and an unreadable file"),
        pytest.param(["check", "good.pth", "--no-values"], id="values unread"),
        pytest.param(["check", "nan.pth", "--model", "zoo:tiny"], id="values and a target"),
        pytest.param(["check", "good.pth", "--model", "zoo:tiny", "--model-args", '{"width": 5}'], id="shapes"),
        pytest.param(["repair", "wrapped.pth", "--model", "zoo:tiny", "--device", "cpu"], id="a forward test"),
        pytest.param(["repair", "wrapped.pth", "--dry-run"], id="a dry run"),
    ],
)
def test_a_report_conforms_to_its_schema(words, folder):
    torch.save({"weight": torch.full((2, 3), float("nan")), "bias": torch.zeros(2)}, folder / "nan.pth")
    data = json.loads(run_here(*words, "--output-format", "json", cwd=folder).stdout)
    assert_valid(data, "report")
    for report in data["reports"]:
        for command in report.get("commands", ()):
            assert shlex.split(command["text"]) == command["words"]
            parse(command["text"])


def test_what_a_missing_rank_held_is_data(tmp_path):
    folder, _ = unpacked("fsdp2tp_w4", tmp_path)
    (folder / "rank_1.pt").unlink()
    data = json.loads(run_here("check", folder, "--output-format", "json", cwd=tmp_path).stdout)
    assert_valid(data, "report")
    (report,) = data["reports"]
    assert [(fact["kind"], fact["data"]) for fact in report["damage"]] == [
        ("ranks-lacking", {"absent": 1, "ranks": 4, "names": ["rank_1.pt"]}),
        ("bytes-lacking", {"nbytes": 96, "keys": ["model.head.weight"]}),
    ]
    assert report["lost"] == {"head.weight": ["float32", [13, 8]]}


def test_a_report_names_the_file_by_its_digest(folder):
    (report,) = json.loads(run_here("check", "wrapped.pth", "--output-format", "json", cwd=folder).stdout)["reports"]
    assert report["sha256"] == hashlib.sha256((folder / "wrapped.pth").read_bytes()).hexdigest()
    assert report["commands"] == [{"words": ["ckptfix", "repair", "wrapped.pth"], "text": "ckptfix repair wrapped.pth"}]


def test_an_inspection_conforms_to_its_schema(folder):
    tied = torch.zeros(4, 4)
    odd = {"a": tied, "b": tied, "t": torch.zeros(3, 5).T, "s": torch.eye(3).to_sparse(), "n": 3}
    torch.save({"model": odd, "ema": {"a": tied}, "args": argparse.Namespace(lr=1.0)}, folder / "odd.pth")
    samples = [path for path in (ROOT / "sample_checkpoints").iterdir() if path.suffix in (".pth", ".safetensors")]
    for path in (*samples, "odd.pth", "good.pth", "torn.pth"):
        assert_valid(
            json.loads(run_here("inspect", str(path), "--output-format", "json", cwd=folder).stdout), "inspection"
        )


def test_a_plan_conforms_to_its_schema(folder):
    run_here("repair", "wrapped.pth", "-n", "--plan", "plan.json", cwd=folder)
    assert_valid(json.loads((folder / "plan.json").read_text()), "plan")


def test_a_manifest_conforms_to_its_schema(folder):
    (folder / "old").mkdir()
    for name in ("good.pth", "wrapped.pth", "torn.pth", "zoo.py"):
        (folder / name).rename(folder / "old" / name)
    torch.save({"weight": torch.full((2, 3), float("nan"))}, folder / "old" / "nan.pth")
    run_here("migrate", "old", "new", "--jobs", "1", cwd=folder)
    lines = (folder / "new" / "manifest.jsonl").read_text().splitlines()
    assert len(lines) == 5
    for line in lines:
        assert_valid(json.loads(line), "manifest")


def test_a_schema_refuses_what_it_does_not_describe():
    with pytest.raises(ValidationError):
        assert_valid({"version": 1, "versions": {}, "reports": [{}]}, "report")
    with pytest.raises(ValidationError):
        assert_valid({"ckptfix-plan": 2, "steps": []}, "plan")
