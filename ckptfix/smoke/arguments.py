"""The tensors that ``forward`` is called with, made of random numbers or read from the user's files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckptfix.errors import UsageError
from ckptfix.smoke.input_health import odd_channels, refuse_non_finite
from ckptfix.smoke.inputs import FileInput, Input, RandomInput
from ckptfix.smoke.outputs import dtype_name

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Arguments:
    """What ``forward`` is called with; ``notes`` is what was done to it, ``warnings`` what is odd about it."""

    args: tuple[torch.Tensor, ...] = ()
    kwargs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def batch(self) -> int:
        """The size of the first dimension; 1 where there is none."""
        return next((tensor.shape[0] for tensor in self._tensors() if tensor.ndim), 1)

    def first(self, size: int) -> Arguments:
        """The first ``size`` of the batch; tensors of another first dimension have no part in it and stay whole."""
        batch = self.batch
        return self._with(lambda tensor: tensor[:size] if tensor.ndim and tensor.shape[0] == batch else tensor)

    def doubled(self) -> Arguments:
        """The batch twice, the second time with the last dimension reversed, so that no two samples are the same."""
        import torch

        batch = self.batch
        return self._with(
            lambda tensor: torch.cat([tensor, tensor.flip(-1)]) if tensor.ndim and tensor.shape[0] == batch else tensor
        )

    def to(self, device: torch.device, dtype: torch.dtype) -> Arguments:
        """The same on another device, the floating ones in another dtype."""
        return self._with(lambda tensor: tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype))

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from self.args
        yield from self.kwargs.values()

    def _with(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Arguments:
        kwargs = {name: change(tensor) for name, tensor in self.kwargs.items()}
        return replace(self, args=tuple(map(change, self.args)), kwargs=kwargs)


def make_arguments(inputs: Iterable[Input], dtype: torch.dtype, device: torch.device, seed: int = 0) -> Arguments:
    """The tensors of the inputs, on the device; floating ones have this dtype, whatever their file says, and so have
    images of bytes, which no layer takes.

    Random numbers are drawn on the CPU, so that a seed means the same input everywhere. Raises ``UsageError`` for a
    file that holds no tensors, or values that are not finite.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    args: list[torch.Tensor] = []
    kwargs: dict[str, torch.Tensor] = {}
    notes: list[str] = []
    warnings: list[str] = []
    for given in inputs:
        for name, tensor in _tensors(given, generator):
            is_float = tensor.is_floating_point() or (tensor.dtype == torch.uint8 and tensor.ndim >= 3)
            placed = tensor.to(device, dtype if is_float else tensor.dtype)
            if isinstance(given, FileInput):
                if is_float and tensor.dtype != dtype:
                    notes.append(
                        f"{given.path}: {dtype_name(tensor.dtype)} was converted to {dtype_name(dtype)} for the model"
                    )
                warnings += odd_channels(given.path, tensor)
            if name is None:
                args.append(placed)
            elif name in kwargs:
                raise UsageError(f"--input gives {name!r} twice: give each argument of forward once")
            else:
                kwargs[name] = placed
    return Arguments(tuple(args), kwargs, tuple(notes), tuple(warnings))


def _tensors(given: Input, generator: torch.Generator) -> Iterator[tuple[str | None, torch.Tensor]]:
    if isinstance(given, FileInput):
        yield from tensors_of_file(given)
    else:
        yield given.name, _draw(given, generator)


def _draw(given: RandomInput, generator: torch.Generator) -> torch.Tensor:
    import torch

    low, high = given.bounds or (0, 2)
    dtype = torch.float32 if given.bounds is None else torch.int64
    if given.draw in ("ones", "zeros"):
        return torch.full(given.shape, high - 1 if given.draw == "ones" else low, dtype=dtype)
    if given.bounds is not None:
        return torch.randint(low, high, given.shape, generator=generator)
    make = torch.rand if given.draw == "uniform" else torch.randn
    return make(given.shape, generator=generator)


def tensors_of_file(given: FileInput) -> Iterator[tuple[str | None, torch.Tensor]]:
    """The tensors of a file, by name where there are several. Raises ``UsageError`` for one that holds anything else,
    or values that are not finite."""
    import torch

    found = list(_named_tensors(_read(given.path)))
    if not found or not all(isinstance(tensor, torch.Tensor) for _, tensor in found):
        raise UsageError(f"{given.path}: holds no tensor, or more than tensors; save the inputs alone")
    if given.name is not None and len(found) > 1:
        raise UsageError(f"{given.name}={given.path}: holds {len(found)} tensors, a name takes one; leave the name out")
    if not any(tensor.numel() for _, tensor in found):
        raise UsageError(f"{given.path}: holds no sample, its shape is {list(found[0][1].shape)}; give one at least")
    for name, tensor in found:
        refuse_non_finite(given.path, tensor)
        yield given.name or (name if len(found) > 1 else None), tensor


def _named_tensors(value: Any) -> Iterator[tuple[str | None, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(name), tensor) for name, tensor in value.items())
    elif isinstance(value, list | tuple):
        yield from ((None, tensor) for tensor in value)
    else:
        yield None, value


def _read(path: str) -> Any:
    """What the file holds; it runs no code of the file."""
    import pickle

    import numpy as np
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if path.endswith(".npy"):
            return torch.from_numpy(np.load(path, allow_pickle=False).copy())
        if path.endswith(".safetensors"):
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, ValueError, TypeError, RuntimeError, SafetensorError, pickle.UnpicklingError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(f"{path}: cannot be read ({reason}); save it again as .npy or .safetensors") from error
