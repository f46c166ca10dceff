"""Whether the input that the user gave is itself in order, before anything is said of the model.

NaN and infinities prove nothing about weights. The scale of the values shows where the first normalisation layer
compares them with what it saw in training.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

from ckptfix.errors import UsageError
from ckptfix.smoke.outputs import values_of

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.hooks import RemovableHandle

_APART = 20.0
"""Times as large or as small as what the layer saw: two inputs that are scaled alike differ by less, and 0 … 255
against 0 … 1 or against ImageNet's normalisation by more than 50."""


def refuse_non_finite(path: str, tensor: torch.Tensor) -> None:
    """Raises ``UsageError`` where the input holds NaN, or infinities that no mask would hold."""
    values = values_of(tensor)
    if values.numel() == 0 or bool(values.isfinite().all()):
        return
    if bool(values.isnan().any()):
        channels = _whole_channels(tensor)
        cause = f" in all of {channels}, as scaling by 0/0 makes it" if channels else ""
        raise UsageError(f"{path}: the input itself holds NaN{cause}; give one that is finite")
    is_mask = bool((values.isneginf() | (values == 0)).all())
    if not is_mask:
        raise UsageError(f"{path}: the input itself holds infinite values; give one that is finite")


def _whole_channels(tensor: torch.Tensor) -> str:
    """The channels (dimension 1) that are NaN throughout, while others are not; empty where there are none."""
    if tensor.ndim < 3:
        return ""
    bad = tensor.isnan().transpose(0, 1).flatten(1).all(dim=1)
    return _named(bad) if bool(bad.any()) and not bool(bad.all()) else ""


def odd_channels(path: str, tensor: torch.Tensor) -> list[str]:
    """What to say of an image or a signal of which a channel is constant while others vary: its scaling went wrong."""
    if tensor.ndim < 3 or not tensor.is_floating_point() or not tensor.numel() or tensor[0, 0].numel() < 2:
        return []
    flat = tensor.transpose(0, 1).flatten(1)
    constant = flat.amax(dim=1) == flat.amin(dim=1)
    if not bool(constant.any()) or bool(constant.all()):
        return []
    return [f"{path}: {_named(constant)} holds one and the same value throughout, while others vary"]


def _named(chosen: torch.Tensor) -> str:
    indices = chosen.nonzero().flatten().tolist()
    return f"channel {indices[0]}" if len(indices) == 1 else f"channels {', '.join(map(str, indices))}"


class ScaleCheck:
    """A context in which the first BatchNorm that runs compares what it gets with its running statistics.

    ``warning`` is empty where they agree, or where no such layer was ever trained.
    """

    def __init__(self, model: nn.Module, given: torch.Tensor | None) -> None:
        self.warning = ""
        self._model = model
        self._given = given
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> ScaleCheck:
        from torch.nn.modules.batchnorm import _BatchNorm

        values = None if self._given is None else values_of(self._given)
        if values is None or values.numel() == 0:
            return self
        self._low, self._high = (float(bound) for bound in values.aminmax())
        for path, module in self._model.named_modules():
            if isinstance(module, _BatchNorm) and module.running_var is not None and _is_trained(module):
                self._handles.append(module.register_forward_pre_hook(self._meet(path)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _meet(self, path: str) -> Any:
        def meet(module: Any, args: Any) -> None:
            self._leave()  # the first that runs is the one that is nearest to the input
            seen = (module.running_var.double() + module.running_mean.double() ** 2).mean().sqrt()
            met = values_of(args[0]).double().square().mean().sqrt() if args else seen
            if bool(seen.isfinite() and met.isfinite()) and float(seen) > 0:
                self.warning = self._said(path, type(module).__name__, float(met / seen))

        return meet

    def _said(self, path: str, kind: str, ratio: float) -> str:
        if 1 / _APART < ratio < _APART:
            return ""
        span = f"the values of the input are {self._low:.4g} … {self._high:.4g}"
        times = f"{ratio:.2g} times as large as" if ratio > 1 else f"{1 / ratio:.2g} times smaller than"
        hint = ""
        if ratio > 1 and self._low >= 0 and 16 < self._high <= 255:
            hint = "; an image of 0 … 255 has to be divided by 255, and normalised as in training"
        elif ratio < 1 and self._low >= 0 and self._high <= 1:
            hint = "; an image of 0 … 1 has to be multiplied by 255"
        return f"{span}: what reaches {path} ({kind}) is {times} what it saw in training{hint}"


def _is_trained(norm: Any) -> bool:
    """Whether the statistics ever moved: they start as mean 0 and variance 1."""
    return not (bool((norm.running_mean == 0).all()) and bool((norm.running_var == 1).all()))
