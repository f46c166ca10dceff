import pytest

from ckptfix.cli.showing import _rendered
from ckptfix.report.style import TextFormat
from ckptfix.rules import RULES
from tests.cli.programs import run_here


@pytest.mark.parametrize("word", ["KEY102", "key102", "wrapper-prefix"])
def test_the_manual_of_a_rule(tmp_path, word):
    done = run_here("rule", word, cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("KEY102 wrapper-prefix: ")
    assert "\n## Fix safety\n" in done.stdout


def test_all_rules_have_a_line(tmp_path):
    lines = run_here("rule", "--all", cwd=tmp_path).stdout.splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"{rule.code} {rule.name}" for rule in RULES]


def test_a_family_has_a_line_for_each_rule(tmp_path):
    lines = run_here("rule", "buf", cwd=tmp_path).stdout.splitlines()
    assert [line.partition(" ")[0] for line in lines] == [rule.code for rule in RULES if rule.code.startswith("BUF")]


def test_a_terminal_gets_headings_and_paragraphs():
    manual = "KEY1 a: first.\n\n## Why\nOne `two`\nthree.\n\n    x = 1\n\n- a\n  b\n- c"
    assert TextFormat(color=True).write(_rendered(manual)) == (
        "  KEY1 a: first.\n\n\x1b[36mWhy\x1b[0m\n  One \x1b[1mtwo\x1b[0m three.\n\n      x = 1\n\n  - a b\n  - c\n\n"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["KEY999"], "there is no rule KEY999"),
        (["wrapper-prefx"], "did you mean KEY102 wrapper-prefix?"),
        (["KEYX"], "there is no rule KEYX; see the rules of its family: ckptfix rule KEY"),
        (["running-stat"], "did you mean VAL103 running-stats?"),
        ([], "name one rule"),
        (["KEY102", "--all"], "name one rule"),
    ],
)
def test_usage(tmp_path, words, said):
    done = run_here("rule", *words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
