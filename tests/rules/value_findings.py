"""What a value rule says about a state_dict or a file, without the engine around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.finding import Finding, Level
from ckptfix.core.settings import Settings
from ckptfix.core.target import target_from_module
from ckptfix.reading.memory import open_state_dict
from ckptfix.rules.rule import Context, Rule
from ckptfix.values.statistics import Statistics


def propose(
    rule: Rule, source: Mapping[str, Any] | Checkpoint, model: torch.nn.Module | None = None, root: object = None
) -> list[Finding]:
    """The findings on a state_dict or a checkpoint; ``root`` is the container around it."""
    checkpoint = source if isinstance(source, Checkpoint) else open_state_dict(source)
    if root is not None:
        checkpoint = replace(checkpoint, root=root)
    target = None if model is None else target_from_module(model)
    return list(rule.propose(Context(checkpoint, target, Statistics(checkpoint), Settings())))


def loud(findings: list[Finding]) -> list[Finding]:
    """The findings that change the exit code."""
    return [finding for finding in findings if finding.level > Level.NOTE]


def without_values(rule: Rule) -> list[Finding]:
    """What the rule says where no value may be read."""
    checkpoint = open_state_dict({"w": torch.full((8, 8), float("nan"))})
    return list(rule.propose(Context(checkpoint, None, None, Settings(values=False))))
