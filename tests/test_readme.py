"""The README says what the program does."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptfix.rules import RULES
from ckptfix.rules.rule import Rule

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
ROWS = {tuple(cell.strip() for cell in line.split("|")[1:3]) for line in README.splitlines() if line.startswith("|")}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_every_rule_has_its_row(rule: Rule):
    assert (rule.code, rule.name) in ROWS


def test_no_row_names_a_rule_that_is_not_there():
    codes = {code for code, _ in ROWS if code[:3] in ("FIL", "KEY", "BUF", "FIT", "VAL", "RUN")}
    assert codes == {rule.code for rule in RULES}
