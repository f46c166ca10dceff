"""One forward pass, followed through the modules, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckptfix.smoke.arguments import Arguments, make_arguments
from ckptfix.smoke.device import place
from ckptfix.smoke.diagnosis import diagnose
from ckptfix.smoke.inputs import Input
from ckptfix.smoke.outcome import Outcome
from ckptfix.smoke.outputs import describe, figures_of, tensors_in
from ckptfix.smoke.trace import Trace

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass
class Subject:
    """The model under test, and where it runs. ``dtype`` is that of its floating inputs; a second try may change it,
    and the whole model with it: then it ``is_converted``.
    """

    model: nn.Module
    device: torch.device
    dtype: torch.dtype
    seed: int = 0
    is_converted: bool = False

    @property
    def setting(self) -> Setting:
        """How another model is to run that is compared with this one."""
        return Setting(self.device, self.seed, self.dtype if self.is_converted else None)

    def arguments(self, given: Iterable[Input]) -> Arguments:
        """The tensors for this model."""
        return make_arguments(given, self.dtype, self.device, self.seed)

    def convert(self, dtype: torch.dtype) -> None:
        """Bring the whole model into one floating dtype."""
        self.model.to(dtype=dtype)
        self.dtype = dtype
        self.is_converted = True

    def release(self) -> None:
        """Let go of the model, so that another finds room; the subject has none from then on."""
        vars(self).pop("model", None)


@dataclass(frozen=True)
class Setting:
    """How a model runs: where, with which seed, and the dtype that it was ``converted`` to as a whole, None for its
    own.
    """

    device: torch.device
    seed: int = 0
    converted: torch.dtype | None = None

    def prepare(self, model: nn.Module) -> tuple[Subject, tuple[str, ...]]:
        """The model in eval mode, on the device, and what to say about its way there."""
        dtype, notes = place(model.eval(), self.device)
        subject = Subject(model, self.device, dtype, self.seed)
        if self.converted is not None:
            subject.convert(self.converted)
        return subject, notes


@dataclass(frozen=True)
class Pass:
    """A forward pass: what came of it, on what and how it ran, and its outputs with their names."""

    outcome: Outcome
    arguments: Arguments
    setting: Setting
    outputs: tuple[tuple[str, torch.Tensor], ...] = ()

    def detached(self) -> Pass:
        """The same with outputs that share no memory with the model, whose values may change."""
        return replace(self, outputs=tuple((name, tensor.detach().cpu().clone()) for name, tensor in self.outputs))

    def noting(self, *notes: str) -> Pass:
        """The same with more to say."""
        return replace(self, outcome=replace(self.outcome, notes=(*self.outcome.notes, *notes)))


def forward(subject: Subject, arguments: Arguments, base: Outcome) -> Pass:
    """Call the model once; an error of its code is part of the outcome and never raised.

    ``base`` is what is known before; what it says of another pass is not taken over.
    """
    import torch

    given = {**{f"[{index}]": value for index, value in enumerate(arguments.args)}, **arguments.kwargs}
    # a single positional input needs no name in the report
    names = {name: "" if len(given) == 1 and not arguments.kwargs else name for name in given}
    base = replace(
        base,
        inputs=tuple(describe(names[name], tensor) for name, tensor in given.items()),
        notes=base.notes + arguments.notes,
        warnings=base.warnings + arguments.warnings,
        failure=None,
        non_finite=(),
        origin=None,
    )
    torch.manual_seed(subject.seed)
    started = time.perf_counter()
    with Trace(subject.model) as trace:
        try:
            output = subject.model(*arguments.args, **arguments.kwargs)
            synchronize(subject.device)
        except (Exception, SystemExit) as error:  # noqa: BLE001  the user's code may raise anything, and that is the finding
            failure = diagnose("forward", error, trace.running, trace.depth, trace.origin)
            return Pass(replace(base, failure=failure), arguments, subject.setting)
    seconds = time.perf_counter() - started
    tensors = tuple(tensors_in(output))
    bad = [
        figures for figures in (figures_of(name or "output", tensor) for name, tensor in tensors) if figures.non_finite
    ]
    outcome = replace(
        base,
        outputs=tuple(describe(name, tensor) for name, tensor in tensors),
        seconds=seconds,
        notes=base.notes if tensors else (*base.notes, "the output holds no tensor to look at"),
        non_finite=tuple(bad),
        origin=trace.origin if bad else None,
    )
    return Pass(outcome, arguments, subject.setting, tensors)


def synchronize(device: torch.device) -> None:
    """Wait for the GPU, whose errors would otherwise surface at some later and innocent line."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
