"""Runs the rules over a checkpoint: findings, and the plan of those fixes that are allowed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ckptfix.applying import Step, Supplies, apply_step
from ckptfix.checkpoint import Checkpoint
from ckptfix.finding import Applicability, Context, Edit, Fill, Finding, Fix
from ckptfix.plan import Plan
from ckptfix.rules import RULES
from ckptfix.settings import Settings
from ckptfix.target import Target
from ckptfix.values import Statistics


@dataclass(frozen=True)
class Diagnosis:
    """What the rules found, what will be done about it, and the checkpoint as it will be then."""

    findings: tuple[Finding, ...]
    fixed: tuple[Finding, ...]
    plan: Plan
    result: Checkpoint

    @property
    def filled(self) -> Mapping[str, Fill]:
        """The keys whose values do not come from the file."""
        return {edit.key: edit for edit in self.plan.edits if isinstance(edit, Fill)}


def diagnose(
    checkpoint: Checkpoint, target: Target | None, settings: Settings, donor: Checkpoint | None = None
) -> Diagnosis:
    """Run every selected rule; each sees the checkpoint after the fixes of those before it.

    Raises ``AssertionError`` where a second pass would still propose something: then a rule of ours is wrong (law 2 of
    the design)."""
    supplies = Supplies(target.initial if target is not None else None, donor)
    findings: list[Finding] = []
    fixed: list[Finding] = []
    plan, view = Plan(), checkpoint
    context = Context(view, target, Statistics(view) if settings.values else None, settings, donor)
    for rule in RULES:
        if not settings.selects(rule.code):
            continue
        found = tuple(rule.propose(context))
        findings += found
        cured = [finding for finding in found if finding.fix is not None and is_enabled(finding.fix, settings)]
        edits: tuple[Edit, ...] = tuple(
            edit for finding in cured if finding.fix is not None for edit in finding.fix.edits
        )
        if edits:
            step = Step(rule.code, edits)
            plan, view = plan.then(step), apply_step(view, step, supplies)
            fixed += cured
            context = replace(context, checkpoint=view, statistics=context.statistics and context.statistics.of(view))
    _assert_stable(context, settings)
    return Diagnosis(tuple(findings), tuple(fixed), plan, view)


def is_enabled(fix: Fix, settings: Settings) -> bool:
    """Whether a fix may be applied: it is safe, or asked for by its own flag, or all unsafe ones are."""
    if fix.applicability is Applicability.DISPLAY_ONLY:
        return False
    return fix.asked or fix.applicability is Applicability.SAFE or settings.unsafe_fixes


def _assert_stable(context: Context, settings: Settings) -> None:
    for rule in RULES:
        # The value rules have no fixes, and a second scan of every byte to learn that again would be dear.
        if settings.selects(rule.code) and not rule.code.startswith("VAL"):
            again = [
                finding
                for finding in rule.propose(context)
                if finding.fix is not None and is_enabled(finding.fix, settings)
            ]
            assert not again, f"{rule.code} proposes another fix on its own result: {again[0].message}"
