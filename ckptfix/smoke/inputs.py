"""The texts of ``--input``, and the tensors that they stand for.

::

    [NAME=]SHAPE               2x3x224x224                normal random numbers of the model's dtype
    [NAME=]SHAPE:int:LOW:HIGH  input_ids=2x16:int:0:1000  int64, LOW <= value < HIGH
    [NAME=]FILE                image.npy, batch.pt, batch.safetensors
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptfix.errors import UsageError

if TYPE_CHECKING:
    import torch

SUFFIXES = (".npy", ".pt", ".pth", ".safetensors")
_FORMS = (
    "give a shape (2x3x224x224), integers (2x16:int:0:1000) or a file (.npy, .pt, .safetensors), "
    "each with NAME= before it for a keyword"
)


@dataclass(frozen=True)
class RandomInput:
    """A tensor of random numbers: normal floats, or integers ``bounds[0] <= value < bounds[1]``. ``name`` None is
    positional.
    """

    shape: tuple[int, ...]
    bounds: tuple[int, int] | None = None
    name: str | None = None

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) + (f":int:{self.bounds[0]}:{self.bounds[1]}" if self.bounds else "")
        return f"{self.name}={shape}" if self.name else shape


@dataclass(frozen=True)
class FileInput:
    """The tensors of a file: one is positional (or ``name``), those of a mapping are keywords."""

    path: str
    name: str | None = None


Input = RandomInput | FileInput


@dataclass(frozen=True)
class Arguments:
    """What ``forward`` is called with."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def parse_inputs(texts: Iterable[str]) -> tuple[Input, ...]:
    """The inputs that these texts mean; raises ``UsageError`` of one line for the first that means nothing."""
    inputs = tuple(_parse(text) for text in texts)
    names = [given.name for given in inputs if given.name]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--input names {name!r} twice: give each argument of forward once")
    return inputs


def _parse(text: str) -> Input:
    before, equals, after = text.partition("=")
    name, value = (before, after) if equals and before.isidentifier() else (None, text)
    if value.endswith(SUFFIXES):
        if not Path(value).is_file():
            raise UsageError(f"--input {text!r}: there is no file {value!r}; check the path")
        return FileInput(value, name)
    match = re.fullmatch(r"(\d+(?:x\d+)*)(?::(\w+)((?::-?\d+)*))?", value)
    if match is None:
        raise UsageError(f"--input {text!r} is neither a shape nor a file: {_FORMS}")
    shape = tuple(int(size) for size in match[1].split("x"))
    if 0 in shape:
        raise UsageError(f"--input {text!r} has a dimension of size 0: the forward test needs at least one element")
    if match[2] is None:
        return RandomInput(shape, None, name)
    bounds = [int(bound) for bound in match[3].split(":")[1:]]
    if match[2] != "int" or len(bounds) != 2 or bounds[0] >= bounds[1]:
        raise UsageError(f"--input {text!r} has no range of integers: write SHAPE:int:LOW:HIGH with LOW < HIGH")
    return RandomInput(shape, (bounds[0], bounds[1]), name)


def make_arguments(inputs: Iterable[Input], dtype: torch.dtype, device: torch.device, seed: int = 0) -> Arguments:
    """The tensors of the inputs, on the device; floating ones have this dtype, whatever their file says.

    Random numbers are drawn on the CPU, so that a seed means the same input everywhere. Raises ``UsageError`` for a
    file that holds no tensors or NaN.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    args: list[torch.Tensor] = []
    kwargs: dict[str, torch.Tensor] = {}
    notes: list[str] = []
    for given in inputs:
        for name, tensor in _tensors(given, generator):
            placed = tensor.to(device)
            if tensor.is_floating_point() and tensor.dtype != dtype:
                placed = placed.to(dtype)
                if isinstance(given, FileInput):
                    notes.append(f"{given.path}: {_short(tensor.dtype)} was converted to {_short(dtype)} for the model")
            if name is None:
                args.append(placed)
            elif name in kwargs:
                raise UsageError(f"--input gives {name!r} twice: give each argument of forward once")
            else:
                kwargs[name] = placed
    return Arguments(tuple(args), kwargs, tuple(notes))


def _tensors(given: Input, generator: torch.Generator) -> Iterator[tuple[str | None, torch.Tensor]]:
    import torch

    if isinstance(given, FileInput):
        yield from _tensors_of_file(given)
    elif given.bounds is None:
        yield given.name, torch.randn(given.shape, generator=generator)
    else:
        yield given.name, torch.randint(*given.bounds, given.shape, generator=generator)


def _tensors_of_file(given: FileInput) -> Iterator[tuple[str | None, torch.Tensor]]:
    import torch

    found = list(_named_tensors(_read(given.path)))
    if not found or not all(isinstance(tensor, torch.Tensor) for _, tensor in found):
        raise UsageError(f"--input {given.path}: holds no tensor, or more than tensors; save the inputs alone")
    if given.name is not None and len(found) > 1:
        raise UsageError(
            f"--input {given.name}={given.path}: holds {len(found)} tensors, a name takes one; leave the name out"
        )
    for name, tensor in found:
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise UsageError(f"--input {given.path}: the input itself holds NaN; give one that is finite")
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
        raise UsageError(f"--input {path}: cannot be read ({reason}); save it again as .npy or .safetensors") from error


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
