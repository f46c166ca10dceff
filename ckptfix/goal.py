"""What a file has to fit, and what is done with it: the target, and all that runs the user's model.

A repair that needs none of it imports none of it: everything is made when it is asked for."""

from __future__ import annotations

import os
from functools import cached_property
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from ckptfix.core.lazy import nn
from ckptfix.engine.diagnosis import donor_of

if TYPE_CHECKING:
    from ckptfix.core.checkpoint import Checkpoint
    from ckptfix.core.settings import Settings
    from ckptfix.core.target import Target
    from ckptfix.engine.changes import Measure
    from ckptfix.engine.delivery import ForwardTest
    from ckptfix.rules.rule import SourceModel


class Goal(Struct, frozen=True, dict=True):
    """A model or the factory of one, or another checkpoint that the file has to fit (``like``), or nothing."""

    settings: Settings
    model: nn.Module | str | None = None
    like: str | os.PathLike[str] | None = None
    arguments: Any = ()

    def for_file(self, checkpoint: Checkpoint) -> Goal:
        """Return the goal with the arguments of a Lightning module that the file holds; any other is the same."""
        if not (isinstance(self.model, str) and self.model.startswith("lightning:")):
            return self
        from ckptfix.modules.lightning import with_saved_arguments

        return Goal(self.settings, self.model, self.like, with_saved_arguments(self.arguments, checkpoint))

    @cached_property
    def target(self) -> Target | None:
        """What a strict load wants; None if nothing was given to fit."""
        if self.model is None and self.like is None:
            return None
        from ckptfix.modules.factory import target_of

        return target_of(self.model, self.like, self.arguments, self.settings.seed)

    @cached_property
    def donor(self) -> Checkpoint | None:
        """The checkpoint of ``--fill FILE``."""
        return donor_of(self.target, self.settings)

    @property
    def measure(self) -> Measure | None:
        """What measures running statistics for ``--recalibrate``."""
        if self.model is None:
            return None
        from ckptfix.smoke.measuring import measure_with

        return measure_with(self.model, self.arguments, self.settings.seed)

    @property
    def source_model(self) -> SourceModel | None:
        """The model of ``--source-model``, which proves a map by running beside the target."""
        if self.settings.source_model is None:
            return None
        from ckptfix.smoke.equivalence import twin_of

        return twin_of(self.settings.source_model, self.model, self.arguments, self.settings)

    @property
    def forward_test(self) -> ForwardTest | None:
        """What runs the model on the result; None without a factory, and with ``--no-smoke``."""
        if not isinstance(self.model, str) or self.settings.smoke is False:
            return None
        from ckptfix.smoke.run import forward_test

        return forward_test(self.settings, self.model, self.arguments)
