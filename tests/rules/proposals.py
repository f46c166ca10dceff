"""One rule at work on a small state_dict of real tensors, without the engine around it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ckptfix.applying import Step
from ckptfix.finding import Context, Finding, Rule
from ckptfix.live import open_state_dict
from ckptfix.plan import Plan
from ckptfix.settings import Settings
from ckptfix.supplies import Supplies
from ckptfix.target import Target, target_from_module
from ckptfix.values import Statistics

StateDict = Mapping[str, Any]


def context(
    state_dict: StateDict,
    model: torch.nn.Module | Target | None = None,
    donor: StateDict | None = None,
    **settings: Any,
) -> Context:
    """What a rule sees of a state_dict and a model."""
    checkpoint = open_state_dict(state_dict)
    target = target_from_module(model) if isinstance(model, torch.nn.Module) else model
    given = open_state_dict(donor) if donor is not None else None
    return Context(checkpoint, target, Statistics(checkpoint), Settings(**settings), given)


def propose(
    rule: Rule, state_dict: StateDict, model: Any = None, donor: StateDict | None = None, **settings: Any
) -> list[Finding]:
    """What the rule finds."""
    return list(rule.propose(context(state_dict, model, donor, **settings)))


def repaired(
    rule: Rule, state_dict: StateDict, model: Any = None, donor: StateDict | None = None, **settings: Any
) -> dict[str, Any]:
    """The state_dict after the fixes of the rule; a second look has to propose no further fix."""
    seen = context(state_dict, model, donor, **settings)
    edits = tuple(edit for finding in rule.propose(seen) if finding.fix for edit in finding.fix.edits)
    supplies = Supplies(seen.target.initial if seen.target else None, seen.donor)
    after = Plan((Step(rule.code, edits),)).apply(seen.checkpoint, supplies)
    state = after.state_dict()
    assert not [finding for finding in propose(rule, state, model, donor, **settings) if finding.fix]
    return state
