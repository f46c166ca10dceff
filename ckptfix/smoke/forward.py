"""One forward pass, followed through the modules, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ckptfix.smoke.device import place
from ckptfix.smoke.diagnosis import diagnose
from ckptfix.smoke.inputs import Arguments, Input, make_arguments
from ckptfix.smoke.outcome import Figures, Origin, Outcome
from ckptfix.smoke.outputs import describe, figures_of, tensors_in

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True)
class _Call:
    path: str
    module: nn.Module
    inputs: tuple[Figures, ...]


class Trace:
    """A context in which every module of the model is followed.

    A module is an origin if its inputs were finite when it was entered (it may overwrite them) and its output is not.
    Inner modules return before outer ones, so the first origin is the innermost.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[RemovableHandle] = []
        self._calls: list[_Call] = []
        self._origins: list[Origin] = []

    def __enter__(self) -> Trace:
        import torch

        for path, module in self._model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # compiled code does not call Python hooks
            self._handles.append(module.register_forward_pre_hook(self._entering(path), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leaving))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def running(self) -> tuple[str, str] | None:
        """Path and class of the innermost module that was entered and not left: after an error, the one that raised."""
        if not self._calls:
            return None
        return self._calls[-1].path, type(self._calls[-1].module).__name__

    @property
    def depth(self) -> int:
        """How many modules are running; 1 is the model itself."""
        return len(self._calls)

    @property
    def origin(self) -> Origin | None:
        """The first module that made NaN or +Inf out of finite values; one that made only -Inf, which masks hold by
        design, comes last.
        """
        made = [origin for origin in self._origins if origin.output.nan or origin.output.positive_inf]
        return next(iter(made + self._origins), None)

    def _entering(self, path: str) -> Any:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            given = {**{f"input[{index}]": value for index, value in enumerate(args)}, **kwargs}
            self._calls.append(_Call(path, module, _figures(given)))

        return enter

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        while self._calls:
            call = self._calls.pop()
            if call.module is module:
                break  # what lay above it raised, and the model caught that
        else:
            return
        if any(figures.non_finite for figures in call.inputs):
            return
        bad = next((figures for figures in _figures({"output": output}) if figures.non_finite), None)
        if bad is not None:
            self._origins.append(Origin(call.path, type(module).__name__, bad, call.inputs, _weights(module)))


def _weights(module: nn.Module) -> tuple[Figures, ...]:
    """The module's own tensors, and those of its children that cannot be right: its code may use them directly."""
    own, below = (
        [*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)] for recurse in (False, True)
    )
    names = {name for name, _ in own}
    figures = _figures({name: tensor for name, tensor in below if tensor.is_floating_point()})
    return tuple(one for one in figures if one.tensor in names or one.is_broken)


def _figures(values: dict[str, Any]) -> tuple[Figures, ...]:
    return tuple(figures_of(name, tensor) for name, tensor in tensors_in(values))


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
            output = subject.model(*arguments.args, **arguments.keywords)
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
