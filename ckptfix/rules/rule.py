"""What a rule is, and what it sees."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.bytes.sources import is_torn
from ckptfix.core.finding import Blocks, Finding, Fix, Level, Remedy, Subject
from ckptfix.core.lazy import torch
from ckptfix.core.plan import Plan
from ckptfix.core.spec import TensorSpec, TensorStatistics

if TYPE_CHECKING:
    from ckptfix.core.checkpoint import Checkpoint
    from ckptfix.core.settings import Settings
    from ckptfix.core.smoke_result import Equivalence
    from ckptfix.core.target import Converter, Target


Figures = Mapping[str, TensorStatistics]  # by key


class Twin(Struct, frozen=True):
    """The model that the file belongs to (``--source-model``): the shapes of its tensors in its own order, and what
    runs it beside the target. ``prove`` takes the checkpoint, and a plan for each map that is possible. ``converts``
    and ``ties`` are those of ``Target``."""

    shapes: Mapping[str, tuple[int, ...]]
    prove: Callable[[Checkpoint, Sequence[Plan]], Equivalence]
    converts: Converter | None = None
    ties: tuple[tuple[str, ...], ...] = ()


class Context(Struct, frozen=True, dict=True):
    """What a rule sees: the checkpoint after the edits of earlier rules, and what it has to fit, where that is known.

    ``statistics`` gives the figures of the values by key, computed in one pass when first asked for; none under
    ``--no-values``. ``donor`` is the checkpoint of ``--fill FILE``. ``before`` is the checkpoint as it was opened, and
    ``plan`` what was done to it since."""

    checkpoint: Checkpoint
    target: Target | None
    statistics: Figures
    settings: Settings
    donor: Checkpoint | None = None
    before: Checkpoint | None = None
    plan: Plan = field(default_factory=Plan)
    twin: Twin | None = None

    @cached_property
    def initial(self) -> Mapping[str, torch.Tensor]:
        """The values that a model begins with; none without one, or if they are not known."""
        return self.target.initial() if self.target is not None and self.target.initial is not None else {}

    def figures_of(self, specs: Mapping[str, TensorSpec]) -> Figures:
        """Return the figures of tensors that lie beside the state_dict, as far as they are whole; each storage is read
        once."""
        from ckptfix.values.statistics import Statistics

        view = replace(self.checkpoint, entries={key: spec for key, spec in specs.items() if not is_torn(spec)})
        return self.statistics.of(view) if isinstance(self.statistics, Statistics) else Statistics(view)


class Rule(Struct, frozen=True):
    """A rule: its code and name, its manual (the docstring of its module), and the generator that proposes."""

    code: str
    name: str
    manual: str
    propose: Callable[[Context], Iterator[Finding]]
    subject: Subject = Subject.NAMES

    def finding(
        self,
        level: Level,
        message: str,
        keys: tuple[str, ...] = (),
        evidence: Mapping[str, Any] | None = None,
        fix: Fix | None = None,
        remedies: tuple[Remedy, ...] = (),
        blocks: Blocks = Blocks.NOTHING,
        is_accepted: bool = False,
    ) -> Finding:
        """Return a finding of this rule; one that is accepted has neither a fix nor remedies."""
        if is_accepted:
            fix, remedies = None, ()
        figures = evidence or {}
        return Finding(
            self.code, self.name, level, message, keys, figures, fix, remedies, blocks, is_accepted, self.subject
        )


def rule(generator: Callable[[Rule, Context], Iterator[Finding]]) -> Rule:
    """Make the decorated generator ``(rule, context) -> findings`` the rule of its module."""
    made = _of_module(generator.__module__, lambda context: generator(made, context))
    return made


def rule_for_target(generator: Callable[[Rule, Context, Target], Iterator[Finding]]) -> Rule:
    """Make a generator ``(rule, context, target) -> findings`` the rule of its module, which says nothing without a
    target."""

    def propose(context: Context) -> Iterator[Finding]:
        return generator(made, context, context.target) if context.target is not None else iter(())

    made = _of_module(generator.__module__, propose)
    return made


def found_later(module: str) -> Rule:
    """Return a rule that says nothing of names and values: what it finds shows when the file is run, or hashed, and the
    room that does so makes the finding (``ckptfix.smoke``, ``ckptfix.zoo``)."""
    return _of_module(module, lambda context: iter(()))


_SUBJECTS = {"val": Subject.VALUES, "fil2": Subject.VALUES, "run": Subject.FORWARD}


def _of_module(module: str, propose: Callable[[Context], Iterator[Finding]]) -> Rule:
    """``ckptfix.rules.key106_renamed_layers`` is KEY106 renamed-layers, and its docstring is the manual."""
    code, _, name = module.rpartition(".")[2].partition("_")
    manual = (sys.modules[module].__doc__ or "").strip()
    subject = next((of for family, of in _SUBJECTS.items() if code.startswith(family)), Subject.NAMES)
    return Rule(code.upper(), name.replace("_", "-"), manual, propose, subject)
