"""Runs one rule on a small state_dict of real tensors, without the engine."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from msgspec.structs import replace

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.finding import Finding, Level
from ckptfix.core.plan import Plan, Step
from ckptfix.core.settings import Settings
from ckptfix.core.target import Target, target_from_module
from ckptfix.engine.applying import apply_plan
from ckptfix.engine.changes import ValueSources
from ckptfix.reading.opening import open_state_dict
from ckptfix.rules import RULES
from ckptfix.rules.rule import Context, Rule
from ckptfix.values.statistics import Statistics

StateDict = Mapping[str, Any]
Generator = Callable[..., Iterator[Finding]]


def context(
    state_dict: StateDict | Checkpoint,
    model: torch.nn.Module | Target | None = None,
    donor: StateDict | None = None,
    root: object = None,
    **settings: Any,
) -> Context:
    """Return the context of a rule for a state_dict and a model; ``root`` is the container around it."""
    checkpoint = state_dict if isinstance(state_dict, Checkpoint) else open_state_dict(state_dict)
    if root is not None:
        checkpoint = replace(checkpoint, root=root)
    target = target_from_module(model) if isinstance(model, torch.nn.Module) else model
    given = open_state_dict(donor) if donor is not None else None
    return Context(checkpoint, target, Statistics(checkpoint), Settings(**settings), given)


def rule_of(generator: Generator) -> Rule:
    """Return the rule with this generator."""
    code = generator.__module__.rpartition(".")[2].partition("_")[0]
    return next(rule for rule in RULES if rule.code == code.upper())


def propose(
    generator: Generator,
    state_dict: StateDict | Checkpoint,
    model: Any = None,
    donor: StateDict | None = None,
    **settings: Any,
) -> list[Finding]:
    """Return the findings of the rule."""
    return list(rule_of(generator).propose(context(state_dict, model, donor, **settings)))


def loud(findings: list[Finding]) -> list[Finding]:
    """Return the findings that change the exit code."""
    return [finding for finding in findings if finding.level > Level.NOTE]


def repaired(
    generator: Generator, state_dict: StateDict, model: Any = None, donor: StateDict | None = None, **settings: Any
) -> dict[str, Any]:
    """Return the state_dict after the fixes of the rule. Asserts that it then proposes no further fix."""
    seen, rule = context(state_dict, model, donor, **settings), rule_of(generator)
    edits = tuple(edit for finding in rule.propose(seen) if finding.fix for edit in finding.fix.edits)
    value_sources = ValueSources(seen.target, seen.donor)
    after = apply_plan(Plan((Step(rule.code, edits),)), seen.checkpoint, value_sources)
    state = after.state_dict()
    assert not [finding for finding in propose(generator, state, model, donor, **settings) if finding.fix]
    return state
