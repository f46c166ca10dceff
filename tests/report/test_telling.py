import pytest

from ckptfix.core.finding import Applicability, Finding, Fix, Level
from ckptfix.report.advice import Presentation, mark
from tests.report.samples import EXTRA, MISMATCH, PREFIX, report


@pytest.mark.parametrize(
    ("finding", "fixed", "text"),
    [
        pytest.param(MISMATCH, False, "", id="no fix"),
        pytest.param(
            Finding("X1", "x", Level.ERROR, "m", fix=Fix((), Applicability.DISPLAY_ONLY)),
            False,
            "",
            id="shown",
        ),
        pytest.param(PREFIX, False, "[fixable]", id="safe"),
        pytest.param(EXTRA, False, "[fixable with --unsafe-fixes]", id="unsafe"),
        pytest.param(
            Finding("X1", "x", Level.ERROR, "m", fix=Fix((), Applicability.UNSAFE, asked=True)),
            False,
            "[fixable]",
            id="unsafe but asked for",
        ),
        pytest.param(EXTRA, True, "[fixed]", id="fixed"),
    ],
)
def test_mark(finding, fixed, text):
    assert mark(finding, report(finding, fixed=(finding,) if fixed else ()), Presentation()) == text


def test_what_is_not_written_only_would_be_fixed():
    for held in ({"is_dry_run": True}, {"is_refused": True}):
        assert mark(PREFIX, report(PREFIX, fixed=(PREFIX,), **held), Presentation()) == "[would be fixed]"


def test_verbose_lifts_the_limit():
    assert (Presentation().limit, Presentation(verbose=True).limit) == (12, None)
