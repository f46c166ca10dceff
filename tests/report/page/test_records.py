import json

import pytest
from msgspec.structs import replace

from ckptfix.core.coverage import Coverage
from ckptfix.core.finding import Finding, Level, Remedy
from ckptfix.core.likeness import Fit, Likeness
from ckptfix.core.option import CHECK, REPAIR
from ckptfix.core.smoke_result import SmokeResult
from ckptfix.report.advice import Presentation
from ckptfix.report.page import record_of, record_of_error
from tests.report.samples import COUNTER, EXTRA, MISSING, NOTE, PREFIX, repaired, report

TWIN = (Remedy((("replace", ("VAL101",)), ("fill", "twin")), "takes them"),)
NAN = Finding("VAL101", "non-finite", Level.ERROR, "NaN", keys=("a",), remedies=TWIN)


@pytest.mark.parametrize(
    ("made", "mode", "outcome"),
    [
        pytest.param(report(), CHECK, "already fine", id="clean"),
        pytest.param(report(NOTE), CHECK, "already fine", id="a note"),
        pytest.param(report(PREFIX, COUNTER), CHECK, "can be repaired", id="safe fixes alone"),
        pytest.param(report(PREFIX, EXTRA), CHECK, "needs a decision", id="one is unsafe"),
        pytest.param(report(PREFIX, MISSING), CHECK, "needs a decision", id="one needs a flag"),
        pytest.param(report(NAN), CHECK, "needs a decision", id="no fix"),
        pytest.param(report(PREFIX, obstacles=("x",)), CHECK, "needs a decision", id="would not load after it"),
        pytest.param(repaired(), REPAIR, "repaired", id="repaired"),
        pytest.param(
            replace(repaired(), coverage=Coverage(9, 6, 0, 0, {"target": 3})),
            REPAIR,
            "partly untrained",
            id="a part is untrained",
        ),
        pytest.param(replace(repaired(), is_dry_run=True), REPAIR, "can be repaired", id="dry run"),
        pytest.param(report(), REPAIR, "already fine", id="nothing to repair"),
        pytest.param(report(NAN), REPAIR, "needs a decision", id="left"),
        pytest.param(report(smoke=SmokeResult(False)), CHECK, "needs a decision", id="the forward test failed"),
    ],
)
def test_outcome(made, mode, outcome):
    assert record_of(made, Presentation(mode))["outcome"] == outcome


def test_the_command_carries_the_flags():
    presentation = Presentation(choices={"model": "zoo:net"})
    assert record_of(report(NAN, source="a b.pth"), presentation)["command"] == (
        "ckptfix repair 'a b.pth' --model zoo:net --fill twin --replace VAL101"
    )
    assert record_of(report(), presentation)["command"] is None


def test_a_command_that_fills_has_its_price():
    made = record_of(report(MISSING, coverage=Coverage(20_520_000, 20_007_000, 0, 0)), Presentation(REPAIR))
    (way,) = made["decisions"]
    assert (way["command"], way["price"]) == (made["command"], "`fc` becomes untrained: 2.5 % of the model")


def test_what_a_file_is_like_is_reported_with_the_command_that_continues():
    like = Likeness(("smp/Unet-resnet18",), Fit.EXACT, {"smp": "1"}, prefix="module.")
    made = record_of(replace(report(PREFIX), likeness=like), Presentation(REPAIR))["looks_like"]
    assert made["text"] == "smp Unet-resnet18, under `module.`"
    assert made["commands"][0] == "ckptfix repair resnet.pth --like known:smp/Unet-resnet18"


def test_findings_without_their_fixes(tmp_path):
    details = record_of(report(PREFIX, EXTRA), Presentation())
    assert [finding["fixable"] for finding in details["findings"]] == [True, False]
    assert all("fix" not in finding for finding in details["findings"])
    json.dumps(details, allow_nan=False)


def test_the_size_is_that_of_the_file_or_of_all_in_the_folder(tmp_path):
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c").write_bytes(b"123")
    sizes = [
        record_of(report(source=str(path)), Presentation())["size"] for path in (tmp_path / "a", tmp_path, "nowhere")
    ]
    assert sizes == [5, 8, None]


def test_an_error():
    assert record_of_error("no\x00where.pth", "m") == {
        "source": "no\x00where.pth",
        "outcome": "unreadable",
        "error": "m",
        "size": None,
    }
