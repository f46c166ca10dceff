"""What a rule is, and the context that it sees."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.bytes.sources import is_torn
from ckptfix.core.finding import Blocks, Finding, Fix, Level, Remedy, Subject
from ckptfix.core.lazy import torch
from ckptfix.core.objects import has_optimizer
from ckptfix.core.plan import Plan
from ckptfix.core.settings import UNIVERSAL
from ckptfix.core.spec import TensorSpec, TensorStatistics
from ckptfix.errors import TargetError
from ckptfix.reading.folders.ranks.names import OF_DEEPSPEED

if TYPE_CHECKING:
    from ckptfix.core.checkpoint import Checkpoint
    from ckptfix.core.settings import Settings
    from ckptfix.core.smoke_result import Equivalence
    from ckptfix.core.target import Converter, Target


StatisticsByKey = Mapping[str, TensorStatistics]
AFFORDABLE = 4 << 30  # bytes of the largest model that is built only to judge the values of a file


class SourceModel(Struct, frozen=True):
    """The model that the file belongs to (``--source-model``): the shapes of its tensors in model order, and a function
    that runs it next to the target.

    ``prove`` takes the checkpoint and a plan for each possible map. ``converts`` and ``ties`` are those of
    ``Target``."""

    shapes: Mapping[str, tuple[int, ...]]
    prove: Callable[[Checkpoint, Sequence[Plan]], Equivalence]
    converts: Converter | None = None
    ties: tuple[tuple[str, ...], ...] = ()


class Context(Struct, frozen=True, dict=True):
    """What a rule sees: the checkpoint after the edits of earlier rules, and the target if there is one.

    ``statistics`` has the statistics of the values by key, computed in one pass on first use; it is empty under
    ``--no-values``. ``donor`` is the checkpoint of ``--fill FILE``. ``before`` is the checkpoint as opened, and
    ``plan`` has the edits since."""

    checkpoint: Checkpoint
    target: Target | None
    statistics: StatisticsByKey
    settings: Settings
    donor: Checkpoint | None = None
    before: Checkpoint | None = None
    plan: Plan = field(default_factory=Plan)
    source_model: SourceModel | None = None

    @cached_property
    def initial(self) -> Mapping[str, torch.Tensor]:
        """The model's initial values; empty without a model, or if it cannot be built with values."""
        with suppress(TargetError):
            if self.target is not None and self.target.initial is not None:
                return self.target.initial()
        return {}

    @property
    def usual(self) -> Mapping[str, torch.Tensor]:
        """The initial values by which to judge those of the file; also empty if they would cost much memory."""
        is_large = self.target is not None and self.target.is_deferred and self.target.nbytes > AFFORDABLE
        return {} if is_large else self.initial

    def start(self, key: str) -> TensorStatistics | None:
        """Return the statistics of a tensor's initial values; None if they are unknown."""
        from ckptfix.reading.tensors import spec_of_tensor
        from ckptfix.values.statistics import tensor_statistics

        return tensor_statistics(spec_of_tensor(self.usual[key])) if key in self.usual else None

    @property
    def keeps_wrappers(self) -> bool:
        """Whether the result is a universal checkpoint of a DeepSpeed run, without another target: the run resumes only
        under its own names, with those of its wrappers."""
        is_of_run = self.settings.format == UNIVERSAL and self.checkpoint.format in OF_DEEPSPEED
        return is_of_run and self.target is None

    @cached_property
    def matrices(self) -> StatisticsByKey:
        """The statistics of weight matrices and kernels."""
        from ckptfix.values.roles import is_matrix

        specs, target = self.checkpoint.specs, self.target
        return {key: each for key, each in self.statistics.items() if is_matrix(key, specs[key], target)}

    def statistics_of(self, specs: Mapping[str, TensorSpec]) -> StatisticsByKey:
        """Return the statistics of tensors outside the state_dict that are whole; each storage is read once."""
        from ckptfix.values.statistics import Statistics

        view = replace(self.checkpoint, entries={key: spec for key, spec in specs.items() if not is_torn(spec)})
        return self.statistics.of(view) if isinstance(self.statistics, Statistics) else Statistics(view)


SHOWN = 8  # channels that the evidence lists


def affected(channels: Sequence[int], spec: TensorSpec, name: str = "affected") -> dict[str, Any]:
    """Return the evidence of a defect in some channels of a tensor; empty without such channels."""
    return {name: len(channels), "of": spec.shape[0], "channels": list(channels[:SHOWN])} if channels else {}


class Needs(Enum):
    """What a rule needs in order to run."""

    NAMES = "names"
    TARGET = "target"
    VALUES = "values"
    OPTIMIZER = "optimizer"
    MAP = "map of names"
    FORWARD_TEST = "forward test"

    def are_met(self, context: Context) -> bool:
        """Return whether the context has it. The forward test runs after the rules, and makes its findings itself."""
        if self is Needs.TARGET:
            return context.target is not None
        if self is Needs.VALUES:
            return context.settings.values
        if self is Needs.OPTIMIZER:
            return has_optimizer(context.checkpoint.root) or has_optimizer(context.checkpoint.beside)
        if self is Needs.MAP:
            return context.settings.rename_map is not None
        return self is Needs.NAMES


# The subject of each family's findings.
_SUBJECTS = {
    "FIL2": Subject.VALUES,
    "FIL": Subject.FILE,
    **dict.fromkeys(("KEY", "BUF"), Subject.NAMES),
    "FIT": Subject.FIT,
    "VAL": Subject.VALUES,
    "OPT": Subject.OPTIMIZER,
    "RUN": Subject.FORWARD,
}


class Rule(Struct, frozen=True, dict=True):
    """A rule: KEY106 renamed-layers is the generator ``renamed_layers`` of the module ``key106_renamed_layers``.

    The module's docstring is the manual. The generator takes the rule and the context, and with ``Needs.TARGET`` also
    the target. A module without a generator is the manual of findings that another room makes. A module is imported
    only when the rule runs or its manual is read, because half of the rules need values, and most of the others a
    target."""

    code: str
    name: str
    needs: Needs = Needs.NAMES
    wanted_by: str | None = None  # the setting that runs this rule even if `select` omits it
    keys: str = ""  # a pattern that some key has to match for the rule to run, unless the rule is wanted

    @property
    def family(self) -> str:
        """The letters of the code, which stand for a family of defects."""
        return self.code[:3]

    @property
    def subject(self) -> Subject:
        """What its findings are about."""
        return next((of for codes, of in _SUBJECTS.items() if self.code.startswith(codes)), Subject.FILE)

    @cached_property
    def _module(self) -> ModuleType:
        return import_module(f"ckptfix.rules.{self.code.lower()}_{self._function}")

    @property
    def _function(self) -> str:
        return self.name.replace("-", "_")

    @property
    def manual(self) -> str:
        return (self._module.__doc__ or "").strip()

    def is_wanted(self, settings: Settings) -> bool:
        """Return whether the user asked for the rule's fixes, whichever rules were selected."""
        return self.wanted_by is not None and bool(getattr(settings, self.wanted_by))

    def propose(self, context: Context) -> Iterator[Finding]:
        is_heard = self.needs.are_met(context)
        if is_heard and self.keys and not self.is_wanted(context.settings):
            is_heard = any(map(re.compile(self.keys).search, context.checkpoint.entries))
        if not is_heard or (generator := getattr(self._module, self._function, None)) is None:
            return iter(())
        found: Iterator[Finding] = generator(self, context, *[context.target] * (self.needs is Needs.TARGET))
        return found

    def finding(
        self,
        level: Level,
        message: str,
        keys: Iterable[str] = (),
        evidence: Mapping[str, Any] | None = None,
        fix: Fix | None = None,
        remedies: tuple[Remedy, ...] = (),
        blocks: Blocks = Blocks.NOTHING,
        is_accepted: bool = False,
    ) -> Finding:
        """Return a finding of this rule; one that is accepted has neither a fix nor remedies."""
        if is_accepted:
            fix, remedies = None, ()
        own = self.code, self.name, level, message, tuple(keys), evidence or {}
        return Finding(*own, fix, remedies, blocks, is_accepted, self.subject)
