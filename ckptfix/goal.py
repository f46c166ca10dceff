"""What a file has to fit: the target, and everything that runs the user's model.

Everything is built on first use, so a repair imports only what it needs."""

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
    """What the file has to fit: a model or its factory, another checkpoint (``like``), or nothing."""

    settings: Settings
    model: nn.Module | str | None = None
    like: str | os.PathLike[str] | None = None
    arguments: Any = ()

    def for_file(self, checkpoint: Checkpoint) -> Goal:
        """Return the goal with the arguments that the file saved for a Lightning module; other goals are unchanged."""
        if not (isinstance(self.model, str) and self.model.startswith("lightning:")):
            return self
        from ckptfix.modules.lightning import with_saved_arguments

        return Goal(self.settings, self.model, self.like, with_saved_arguments(self.arguments, checkpoint))

    @cached_property
    def target(self) -> Target | None:
        """What a strict load expects; None without a model or reference."""
        if self.model is None and self.like is None:
            return None
        from ckptfix.modules.factory import target_of

        return target_of(self.model, self.like, self.arguments, self.settings.seed)

    @cached_property
    def donor(self) -> Checkpoint | None:
        """The checkpoint that ``--fill FILE`` names."""
        return donor_of(self.target, self.settings)

    @property
    def measure(self) -> Measure | None:
        """The function that measures running statistics for ``--recalibrate``."""
        if self.model is None:
            return None
        from ckptfix.smoke.recalibration import measure_with

        return measure_with(self.model, self.arguments, self.settings.seed)

    @property
    def source_model(self) -> SourceModel | None:
        """The model of ``--source-model``, which is run together with the target to prove a map."""
        if self.settings.source_model is None:
            return None
        from ckptfix.smoke.equivalence import twin_of

        return twin_of(self.settings.source_model, self.model, self.arguments, self.settings)

    @property
    def forward_test(self) -> ForwardTest | None:
        """The function that runs the model on the result; None without a factory or with ``--no-smoke``."""
        if not isinstance(self.model, str) or self.settings.smoke is False:
            return None
        from ckptfix.smoke.run import forward_test

        return forward_test(self.settings, self.model, self.arguments)
