import json
from xml.etree.ElementTree import fromstring

import pytest

import ckptfix
from ckptfix.cli.console import Console
from ckptfix.cli.output import ReportWriter
from ckptfix.errors import UnreadableError
from ckptfix.report.advice import Presentation
from tests.report.samples import PREFIX, report


def refuse():
    raise UnreadableError("torn.pth: cut short")


def written(form, capsys, **settings):
    """Return the output for a clean file, a truncated one and one with a defect, and the exit code."""
    writer = ReportWriter(Console(**settings), {"output_format": form})
    writer.write_report("good.pth", Presentation(), lambda: report(source="good.pth"))
    writer.write_report("torn.pth", Presentation(), refuse)
    writer.write_report("resnet.pth", Presentation(), lambda: report(PREFIX))
    writer.close()
    out, err = capsys.readouterr()
    count = "ckptfix: 3 files: 1 with defects (1 defect, 1 fixable), 1 could not be read\n"
    assert err == "ckptfix: error: torn.pth: cut short\n" + (count if form == "concise" else "")
    return out, writer.exit_code


def test_full_reports_are_apart(capsys):
    out, code = written("full", capsys)
    assert "(--model or --like)\n\nresnet.pth: 1 defect" in out
    assert code == 2


def test_concise(capsys):
    out, _ = written("concise", capsys)
    assert out == "resnet.pth: KEY102 wrapper-prefix: 6 keys begin with `module.` [fixable]\n"


def test_json_is_one_document(capsys):
    out, _ = written("json", capsys)
    data = json.loads(out)
    assert [(entry["source"], entry["exit_code"]) for entry in data["reports"]] == [
        ("good.pth", 0),
        ("torn.pth", 2),
        ("resnet.pth", 1),
    ]
    assert data["reports"][1]["error"] == "torn.pth: cut short"


def test_github(capsys):
    out, _ = written("github", capsys)
    assert out.splitlines() == [
        "::error file=torn.pth,title=ckptfix::torn.pth: cut short",
        "::error file=resnet.pth,title=KEY102 wrapper-prefix::6 keys begin with `module.`",
    ]


def test_sarif_is_one_document(capsys):
    out, code = written("sarif", capsys)
    (run,) = json.loads(out)["runs"]
    assert [result["ruleId"] for result in run["results"]] == ["KEY102"]
    assert len(run["invocations"][0]["toolExecutionNotifications"]) == 1
    assert code == 2


def test_an_attack_without_weights_is_an_alert(tmp_path, capsys):
    (tmp_path / "evil.pkl").write_bytes(b"cposix\nsystem\n(S'true'\ntR.")
    writer = ReportWriter(Console(), {"output_format": "sarif"})
    writer.write_report("evil.pkl", Presentation(), lambda: ckptfix.check(tmp_path / "evil.pkl"))
    writer.close()
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert [result["ruleId"] for result in run["results"]] == ["FIL901"]


def test_junit_is_one_document(capsys):
    out, code = written("junit", capsys)
    root = fromstring(out)
    assert [(suite.get("name"), suite.get("failures"), suite.get("errors")) for suite in root] == [
        ("good.pth", "0", "0"),
        ("torn.pth", "0", "1"),
        ("resnet.pth", "1", "0"),
    ]
    assert code == 2


def test_quiet_leaves_clean_files_out(capsys):
    out, _ = written("full", capsys, quiet=True)
    assert out.startswith("resnet.pth: 1 defect")


@pytest.mark.parametrize("form", ["full", "concise", "github", "sarif", "junit"])
def test_a_clean_file_gives_zero(form, capsys):
    writer = ReportWriter(Console(), {"output_format": form})
    writer.write_report("good.pth", Presentation(), report)
    writer.close()
    assert writer.exit_code == 0
