"""Every rule is listed, has its manual and its test, and is called like its file."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

import ckptfix.rules
from ckptfix.finding import Rule
from ckptfix.rules import RULES

FOLDER = Path(ckptfix.rules.__file__).parent
SECTIONS = ["What it finds", "Why it matters", "Fix safety", "Example", "Sources"]
FAMILIES = ("FIL", "KEY", "BUF", "FIT", "VAL", "RUN")
MODULES = {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.py") if path.stem != "__init__"}


def stem(rule: Rule) -> str:
    return rule.name.replace("-", "_")


def test_every_file_is_listed_and_every_listed_rule_has_its_file():
    # The others hold what rules share.
    files = {module for module, source in MODULES.items() if "@rule(" in source}
    assert files == {stem(rule) for rule in RULES}


def test_no_code_and_no_name_is_given_twice():
    for names in ([rule.code for rule in RULES], [rule.name for rule in RULES]):
        assert [name for name, count in Counter(names).items() if count > 1] == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_rule(rule: Rule):
    assert re.fullmatch(rf"({'|'.join(FAMILIES)})\d{{3}}", rule.code)
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", rule.name)
    first, *rest = rule.manual.splitlines()
    assert re.fullmatch(rf"{rule.code} {rule.name}: \S.*\.", first)
    assert re.findall(r"^## (.+)$", rule.manual, re.MULTILINE) == SECTIONS
    texts = re.split(r"^## .+$", "\n".join(rest), flags=re.MULTILINE)[1:]
    assert all(text.strip() for text in texts)
    # A line of a manual is a line on a terminal.
    assert all(len(line) <= 120 for line in rest)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_the_test_lies_beside(module: str):
    assert (Path(__file__).parent / f"test_{module}.py").is_file()


def test_the_readme_lists_every_rule():
    readme = (FOLDER.parent.parent / "README.md").read_text(encoding="utf-8")
    assert [rule.code for rule in RULES if rule.code not in readme] == []
