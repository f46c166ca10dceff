from dataclasses import replace

import pytest

from ckptfix.core.edits import Rename
from ckptfix.core.finding import Applicability, Fix
from ckptfix.report.advice import advice_lines, next_command, remedy_flags
from ckptfix.report.style import Paper
from ckptfix.report.telling import Mode, Telling
from tests.report.samples import COUNTER, EXTRA, MISMATCH, MISSING, NOTE, PREFIX, repaired, report


def told(report, mode=Mode.CHECK):
    return Paper().write(advice_lines(report, Telling(mode))).splitlines()


@pytest.mark.parametrize(
    "findings", [pytest.param((), id="clean"), pytest.param((NOTE,), id="a note asks for nothing")]
)
def test_nothing_to_do_after_a_check(findings):
    assert told(report(*findings)) == []


def test_nothing_is_left_after_a_repair():
    assert told(repaired(), Mode.REPAIR) == ["left: nothing"]


@pytest.mark.parametrize(
    ("findings", "command"),
    [
        pytest.param((MISMATCH,), "", id="no fix, no command"),
        pytest.param((PREFIX,), "ckptfix repair resnet.pth", id="safe"),
        pytest.param((EXTRA, PREFIX), "ckptfix repair resnet.pth --unsafe-fixes", id="unsafe"),
        pytest.param((MISSING,), "ckptfix repair resnet.pth --fill target", id="a flag of its own is enough"),
    ],
)
def test_command_after_a_check(findings, command):
    assert next_command(report(*findings), Telling()) == command


def test_the_command_is_quoted_and_keeps_what_was_given():
    telling = Telling(command=("ckptfix", "repair", "my file.pth", "--model", "zoo:resnet"))
    assert next_command(report(EXTRA), telling) == "ckptfix repair 'my file.pth' --model zoo:resnet --unsafe-fixes"


def test_a_repair_does_not_advise_itself():
    assert next_command(report(COUNTER), Telling(Mode.REPAIR)) == ""


@pytest.mark.parametrize(
    ("remedy", "flags"),
    [
        pytest.param("", {}, id="none"),
        pytest.param("name the model with --model", {}, id="a flag inside is not the command"),
        pytest.param("--unsafe-fixes drops them", {"--unsafe-fixes": []}, id="without a value"),
        pytest.param("--fill FILE takes them", {"--fill": ["FILE"]}, id="with a value"),
        pytest.param(
            "--drop-mismatched --fill target|FILE takes others",
            {"--drop-mismatched": [], "--fill": ["target"]},
            id="two, and a choice",
        ),
    ],
)
def test_remedy_flags(remedy, flags):
    assert remedy_flags(remedy) == flags


def test_a_flag_that_was_given_is_not_given_twice():
    telling = Telling(Mode.REPAIR, command=("ckptfix", "repair", "a.pth", "--fill", "donor.pth"))
    assert next_command(report(MISSING), telling) == ""


def test_what_to_do_about_each_finding():
    assert told(report(PREFIX, EXTRA, MISSING, MISMATCH)) == [
        "left:",
        "  FIT102 unexpected-key: --unsafe-fixes applies the fix, which invents, drops or changes values",
        "  FIT101 missing-key: --fill target takes the initial values",
        "  FIT103 shape-mismatch: no automatic repair; see ckptfix rule FIT103",
        "  run: ckptfix repair resnet.pth --unsafe-fixes --fill target",
    ]


def test_a_rename_is_no_change_of_values():
    fix = Fix((Rename("a.weight", "b.weight"),), Applicability.UNSAFE)
    assert told(report(replace(PREFIX, fix=fix)))[1] == (
        f"  {PREFIX.code} {PREFIX.name}: --unsafe-fixes applies the fix, which gives keys other names, and nothing "
        "confirms that these are the right ones"
    )


def test_a_command_for_each_set_of_weights():
    """What a pick may cure is not cured by another flag before it."""
    sets = replace(MISMATCH, code="KEY104", remedy="--weights q takes this set alone, --weights k that one")
    lines = told(report(sets, EXTRA, MISSING))
    assert [line.strip() for line in lines if "ckptfix repair" in line] == [
        "run: ckptfix repair resnet.pth --weights q",
        "or: ckptfix repair resnet.pth --weights k",
    ]
