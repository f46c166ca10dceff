import pytest

from ckptfix.core.finding import Applicability, Finding, Fix, Level
from ckptfix.report.telling import Mode, Telling, mark
from tests.report.samples import EXTRA, MISMATCH, PREFIX, report


@pytest.mark.parametrize(
    ("finding", "fixed", "mode", "text"),
    [
        pytest.param(MISMATCH, False, Mode.CHECK, "", id="no fix"),
        pytest.param(
            Finding("X1", "x", Level.ERROR, "m", fix=Fix((), Applicability.DISPLAY_ONLY)),
            False,
            Mode.CHECK,
            "",
            id="shown",
        ),
        pytest.param(PREFIX, False, Mode.CHECK, "[fixable]", id="safe"),
        pytest.param(EXTRA, False, Mode.CHECK, "[fixable with --unsafe-fixes]", id="unsafe"),
        pytest.param(
            Finding("X1", "x", Level.ERROR, "m", fix=Fix((), Applicability.UNSAFE, asked=True)),
            False,
            Mode.CHECK,
            "[fixable]",
            id="unsafe but asked for",
        ),
        pytest.param(EXTRA, True, Mode.REPAIR, "[fixed]", id="fixed"),
        pytest.param(PREFIX, True, Mode.DRY_RUN, "[would be fixed]", id="dry run"),
    ],
)
def test_mark(finding, fixed, mode, text):
    assert mark(finding, report(finding, fixed=(finding,) if fixed else ()), mode) == text


def test_verbose_lifts_the_limit():
    assert (Telling().limit, Telling(verbose=True).limit) == (12, None)
