from xml.etree.ElementTree import fromstring

from ckptfix.core.coverage import Coverage
from ckptfix.core.finding import Finding, Level
from ckptfix.report.advice import Presentation
from ckptfix.report.ci import JUnitDocument
from tests.report.samples import COUNTER, MISSING, NOTE, PREFIX, report


def suites_of(*reports, errors=()):
    document = JUnitDocument()
    for each in reports:
        document.add(each, Presentation())
    for source, message in errors:
        document.add_error(source, message)
    return fromstring("".join(document.pieces()).encode())


def outcomes(suite):
    return {test.get("name"): "".join(f"{each.tag}: {each.get('message')}" for each in test) for test in suite}


def counts(element):
    return tuple(int(element.get(name)) for name in ("tests", "failures", "errors"))


def test_a_clean_file_is_a_test_that_passes():
    root = suites_of(report())
    assert (root.tag, counts(root)) == ("testsuites", (1, 0, 0))
    assert outcomes(root[0]) == {"ckptfix": ""}


def test_defects_are_failures_and_notes_are_not():
    root = suites_of(report(PREFIX, COUNTER, NOTE, fixed=(PREFIX,)), report(MISSING, source="other.pth"))
    assert [suite.get("name") for suite in root] == ["resnet.pth", "other.pth"]
    assert outcomes(root[0]) == {
        "KEY102 wrapper-prefix": "",
        "BUF101 missing-num-batches-tracked": "failure: BatchNorm has no counter (3 keys)",
        "FIL103 foreign-class": "",
        "ckptfix": "",
    }
    assert [counts(element) for element in (root, *root)] == [(6, 2, 0), (4, 1, 0), (2, 1, 0)]
    assert root[1].findtext("*/failure") == "fc.{weight,bias}\n--fill target takes the initial values"


def test_what_no_finding_says_fails_too():
    root = suites_of(
        report(obstacles=("fc.weight",), target="zoo:tiny"), report(coverage=Coverage(4, 2, 0, 0, {"target": 2}))
    )
    assert outcomes(root[0]) == {"ckptfix": "failure: resnet.pth: a strict load would fail"}
    assert outcomes(root[1]) == {"ckptfix": "failure: resnet.pth: 50 % of the parameters are untrained"}


def test_an_unreadable_file_is_an_error():
    root = suites_of(errors=[("torn.pth", "torn.pth: cut short")])
    assert outcomes(root[0]) == {"ckptfix": "error: torn.pth: cut short"}
    assert counts(root) == (1, 0, 1)


def test_names_that_xml_cannot_hold_are_escaped():
    finding = Finding("VAL101", "non-finite", Level.ERROR, "<&> \x1b", keys=("a\x00b",))
    (suite,) = suites_of(report(finding, source="\udcff\x07.pth"))
    assert suite.get("name") == "\\udcff\\x07.pth"
    failure = suite.find("*/failure")
    assert (failure.get("message"), failure.text) == ("<&> \\x1b (1 key)", "a\\x00b")
