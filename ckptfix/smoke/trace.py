"""Follows a forward pass through the modules: which one is running, and which one first made a value that is not
finite.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ckptfix.smoke.outcome import Figures, Origin
from ckptfix.smoke.outputs import figures_of, tensors_in

if TYPE_CHECKING:
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
