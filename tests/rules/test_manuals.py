"""Every rule is listed, has its manual and its test, and is called like its file."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import ckptfix.rules
from ckptfix.core.rename_map import MapRule, RenameMap
from ckptfix.core.settings import Settings
from ckptfix.rules import RULES
from ckptfix.rules.rule import Needs, Rule
from tests.rules.proposals import context

FOLDER = Path(ckptfix.rules.__file__).parent
SECTIONS = ["What it finds", "Why it matters", "Fix safety", "Example", "Sources"]
FAMILIES = ("FIL", "KEY", "BUF", "FIT", "VAL", "OPT", "RUN")
MODULES = {
    path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.py") if path.stem not in ("__init__", "rule")
}
FOUND_LATER = {module for module, source in MODULES.items() if source.strip().endswith('"""')}
"""Rules whose findings are made when the file is run or hashed, and tested there."""


def stem(rule: Rule) -> str:
    return f"{rule.code.lower()}_{rule.name.replace('-', '_')}"


def test_every_file_is_listed_and_every_listed_rule_has_its_file():
    # The others hold what rules share.
    files = {module for module in MODULES if re.match(r"[a-z]{3}\d{3}_", module)}
    assert files == {stem(rule) for rule in RULES}


def test_no_code_and_no_name_is_given_twice():
    for names in ([rule.code for rule in RULES], [rule.name for rule in RULES]):
        assert [name for name, count in Counter(names).items() if count > 1] == []


def test_every_rule_has_a_code_a_name_and_a_manual():
    for rule in RULES:
        assert re.fullmatch(rf"({'|'.join(FAMILIES)})\d{{3}}", rule.code)
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", rule.name)
        first, *rest = rule.manual.splitlines()
        assert re.fullmatch(rf"{rule.code} {rule.name}: \S.*\.", first)
        assert re.findall(r"^## (.+)$", rule.manual, re.MULTILINE) == SECTIONS, rule.code
        texts = re.split(r"^## .+$", "\n".join(rest), flags=re.MULTILINE)[1:]
        assert all(text.strip() for text in texts), rule.code
        # A line of a manual is a line on a terminal.
        assert all(len(line) <= 120 for line in rest), rule.code


@pytest.mark.parametrize(
    "rule", [rule for rule in RULES if rule.needs not in (Needs.NAMES, Needs.OPTIMIZER)], ids=lambda rule: rule.code
)
def test_a_rule_says_nothing_without_what_it_needs(rule: Rule):
    """It is not even imported then, so it had better be right."""
    state = {"module.fc.weight": torch.full((4, 4), float("nan")), "module.fc.bias": torch.zeros(4)}
    model = torch.nn.Linear(4, 4)
    met = context(state, model, rename_map=RenameMap((MapRule("module.fc.weight", "fc.weight"),)))
    without: dict[Needs, dict[str, Any]] = {Needs.TARGET: {"target": None}, Needs.MAP: {"settings": Settings()}}
    blind = {"statistics": {}, "settings": replace(met.settings, values=False)}
    unmet = replace(met, **without.get(rule.needs, blind))
    assert not rule.needs.are_met(unmet)
    assert rule.needs.are_met(met) is (rule.needs is not Needs.FORWARD_TEST)
    assert list(rule.propose(unmet)) == []


def test_each_rule_has_its_generator_or_is_found_later():
    generators = {
        stem(rule)
        for rule in RULES
        if re.search(rf"^def {rule.name.replace('-', '_')}\(rule: ", MODULES[stem(rule)], re.M)
    }
    assert generators | FOUND_LATER == {stem(rule) for rule in RULES}
    assert {module for module in FOUND_LATER if not module.startswith("run")} == {"fil107_wrong_name_hash"}


@pytest.mark.parametrize("rule", [rule for rule in RULES if stem(rule) in FOUND_LATER], ids=lambda rule: rule.code)
def test_what_is_found_later_is_not_found_in_names_and_values(rule: Rule):
    assert list(rule.propose(context({"w": torch.full((8, 8), float("nan"))}))) == []


def test_every_module_has_its_test():
    tested = {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")}
    assert MODULES.keys() - FOUND_LATER - tested == set()


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.family == "VAL"], ids=lambda rule: rule.code)
def test_values_are_left_unchanged_where_the_user_says_so(rule: Rule):
    seen = replace(context({"w": torch.full((8, 8), float("nan"))}, values=False), statistics={})
    assert list(rule.propose(seen)) == []
