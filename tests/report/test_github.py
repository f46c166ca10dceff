import pytest

from ckptfix.core.finding import Finding, Level
from ckptfix.report.advice import Presentation
from ckptfix.report.ci import WorkflowCommands
from tests.report.samples import COUNTER, MISSING, NOTE, PREFIX, report


def commands(made):
    return list(WorkflowCommands().add(made, Presentation()))


def test_a_clean_file_says_nothing():
    assert commands(report()) == []


def test_levels_become_commands():
    assert commands(report(PREFIX, COUNTER, NOTE, fixed=(PREFIX,))) == [
        "::notice file=resnet.pth,title=KEY102 wrapper-prefix::6 keys begin with `module.` [fixed]",
        "::warning file=resnet.pth,title=BUF101 missing-num-batches-tracked::BatchNorm has no counter (3 keys)",
        "::notice file=resnet.pth,title=FIL103 foreign-class::an object of a class is inside",
    ]


def test_a_remedy_is_a_line_of_its_own():
    (line,) = commands(report(MISSING))
    assert line.endswith("(2 keys)%0A--fill target takes the initial values")


@pytest.mark.parametrize(
    ("text", "in_message", "in_file"),
    [
        ("50%", "50%25", "50%25"),
        ("a\r\nb", "a%0D%0Ab", "a%0D%0Ab"),
        ("a:b,c", "a:b,c", "a%3Ab%2Cc"),
        ("%0A", "%250A", "%250A"),
    ],
)
def test_escapes(text, in_message, in_file):
    (line,) = commands(report(Finding("X1", "x", Level.ERROR, text), source=text))
    assert line == f"::error file={in_file},title=X1 x::{in_message}"


def test_an_error():
    (line,) = WorkflowCommands().add_error("a.pth", "a.pth: cut short")
    assert line == "::error file=a.pth,title=ckptfix::a.pth: cut short"
