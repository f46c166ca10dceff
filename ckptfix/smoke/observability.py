"""Finds tensors of a model that could be exchanged, or transposed, without changing any output.

Trying each exchange would take one pass each, and in twin towers only shows if all their layers are exchanged at once.
One forward and backward pass is enough: if all tensors of one shape have the same values, and square ones are
symmetric, then exchangeable tensors have the same gradient, and so do a matrix and its transpose. So tensors whose
gradients differ cannot be exchanged unnoticed, neither alone nor together with others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from msgspec import Struct

from ckptfix.core.lazy import nn, torch
from ckptfix.core.parts import Box, Shape, extent

DEAD = 1e-11  # relative to the largest gradient, below which one may be rounding

# The least difference of two gradients, relative to the larger one: rounding makes about 1e-12.
DIFFERENT = 1e-6

_SAMPLES = 256


class Unit(Struct, frozen=True, eq=False):
    """A box of a tensor in the target, and the box in the source that its values come from."""

    source: str
    shape: Shape
    box: Box
    key: str
    place: Box
    tensor: torch.Tensor

    @property
    def view(self) -> torch.Tensor:
        """The values, as a view of the tensor."""
        return self.of(self.tensor.detach())

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same box of another tensor of this shape."""
        return tensor[tuple(slice(*bounds) for bounds in self.place)]

    @property
    def _way(self) -> tuple[object, ...]:
        """Source module and target module of the values, with the relative first row in each."""
        sides = (self.box, self.shape), (self.place, tuple(self.tensor.shape))
        rows = [box[0][0] / size[0] if box and size[0] else 0 for box, size in sides]
        return self.source.rpartition(".")[0], self.key.rpartition(".")[0], *rows

    def follows(self, units: Sequence[Unit], hidden: Sequence[Unit]) -> bool:
        """Return whether another tensor moves between the same modules and rows, and is observable."""
        return any(other._way == self._way for other in units if other not in hidden)


def unobservable(
    model: nn.Module, units: Sequence[Unit], outputs: Callable[[], Sequence[torch.Tensor]], seed: int
) -> list[Unit]:
    """Return the units that no output depends on, and those that may be exchanged with others of the same shape, or
    transposed, without changing the outputs. Restores the values of the model."""
    like: dict[Shape, list[Unit]] = defaultdict(list)
    for unit in units:
        like[extent(unit.place)].append(unit)
    generator = torch.Generator().manual_seed(seed + 1)
    kept = [unit.view.clone() for unit in units]
    dead = _dead(_gradients(model, units, outputs, generator))  # at the values for which the outputs were compared
    for shape, members in like.items():
        values = random_values(shape, generator)
        if _is_square(shape):
            values = (values + values.T) / 2**0.5
        for unit in members:
            unit.view.copy_(values)
    gradients = _gradients(model, units, outputs, generator)
    dead |= _dead(gradients)
    for unit, values in zip(units, kept, strict=True):
        unit.view.copy_(values)
    hidden: dict[Unit, None] = {}
    for shape, members in like.items():
        hidden |= dict.fromkeys(unit for unit in members if unit in dead)
        hidden |= dict.fromkeys(_alike([unit for unit in members if unit not in dead], gradients, _is_square(shape)))
    return list(hidden)


def _is_square(shape: Shape) -> bool:
    return len(shape) == 2 and shape[0] == shape[1] > 1


def _dead(gradients: Mapping[Unit, torch.Tensor]) -> set[Unit]:
    """Return the units whose gradient is zero up to rounding: no output depends on them."""
    sizes = {unit: float(each.abs().max()) if each.numel() else 0.0 for unit, each in gradients.items()}
    largest = max(sizes.values(), default=0.0)
    return {unit for unit, size in sizes.items() if size <= DEAD * largest}


def random_values(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return a vector between 0.5 and 1.5, which may be a variance, or a matrix that keeps the scale of its input."""
    sizes = [size for size in shape if size != 1]
    if len(sizes) < 2:
        return torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5
    return torch.randn(shape, generator=generator, dtype=torch.float64).mul_(prod(sizes[1:]) ** -0.5)


def _gradients(
    model: nn.Module, units: Sequence[Unit], outputs: Callable[[], Sequence[torch.Tensor]], generator: torch.Generator
) -> dict[Unit, torch.Tensor]:
    """Return the gradient of a random projection of the outputs for each unit; zero if there is none."""
    tensors = list({id(unit.tensor): unit.tensor for unit in units}.values())
    asked = {tensor: tensor.requires_grad for tensor in (*model.parameters(), *tensors)}
    got: Sequence[torch.Tensor | None] = (None,) * len(tensors)
    try:
        for tensor in asked:
            tensor.requires_grad_(False)
        for tensor in tensors:
            tensor.requires_grad_()
        with torch.enable_grad(), _differentiable():
            found = [(one * torch.randn(one.shape, generator=generator)).sum() for one in outputs()]
            got = torch.autograd.grad(torch.stack(found).sum(), tensors, allow_unused=True)
    except RuntimeError:  # a part of the model is not differentiable: nothing is proved
        pass
    finally:
        for tensor, is_asked in asked.items():
            tensor.requires_grad_(is_asked)
    by_tensor = {id(t): torch.zeros_like(t) if g is None else g for t, g in zip(tensors, got, strict=True)}
    return {unit: unit.of(by_tensor[id(unit.tensor)]).detach() for unit in units}


def _differentiable() -> Any:
    """Return a context in which the running statistics of a BatchNorm get gradients too."""
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = {**dict(zip(_BATCH_NORM, args, strict=False)), **(kwargs or {})}
            if func is not torch.nn.functional.batch_norm or given.get("training") or given["running_var"] is None:
                return func(*args, **(kwargs or {}))
            along = (1, -1, *(1,) * (given["input"].ndim - 2))
            scale = (given["running_var"] + given.get("eps", 1e-5)).rsqrt()
            result = (given["input"] - given["running_mean"].view(along)) * scale.view(along)
            if given.get("weight") is not None:
                result = result * given["weight"].view(along)
            return result if given.get("bias") is None else result + given["bias"].view(along)

    return Mode()


_BATCH_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


def _alike(units: Sequence[Unit], gradients: Mapping[Unit, torch.Tensor], is_square: bool) -> list[Unit]:
    """Return the units whose gradient equals that of another one or, if they are square, a transposed one. Compares
    only the elements that are largest over all units."""
    found = [gradients[unit] for unit in units] + [gradients[unit].T for unit in units if is_square]
    if len(found) < 2:
        return []
    total = torch.stack([gradient.abs() for gradient in found]).sum(0).flatten()
    places = total.topk(min(_SAMPLES, total.numel())).indices
    samples = torch.stack([gradient.flatten()[places] for gradient in found])
    sizes = samples.abs().amax(1)
    apart = torch.cdist(samples, samples, p=float("inf"))
    equal = apart <= DIFFERENT * torch.maximum(sizes[:, None], sizes[None, :])
    equal.fill_diagonal_(False)
    return [unit for at, unit in enumerate(units) if bool(equal[at].any())]
