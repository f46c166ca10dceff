"""Parses the values of ``--input``, and makes the tensors for ``forward``.

::

    [NAME=]SHAPE               2x3x224x224                normal random numbers of the model's dtype
    [NAME=]SHAPE:int:LOW:HIGH  input_ids=2x16:int:0:1000  int64, LOW <= value < HIGH
    [NAME=]FILE                image.npy, batch.pt, batch.safetensors

A NAME with dots is a member of a dict or list: ``added_cond_kwargs.time_ids=2x6``, ``images.0=3x64x64``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.core.lazy import nn, np, torch
from ckptfix.core.options import INPUT_SUFFIXES
from ckptfix.errors import Opt, UsageError
from ckptfix.smoke.outcome import dtype_name, values_of

_FORMS = (
    "give a shape (2x3x224x224), integers (2x16:int:0:1000) or a file (.npy, .pt, .safetensors), "
    "each with NAME= before it for a keyword"
)


# The distribution of a random input; `uniform` is from 0 to 1, like images.
Draw = Literal["normal", "uniform", "ones", "zeros"]


class RandomInput(Struct, frozen=True):
    """A tensor of random numbers: floats, or integers ``bounds[0] <= value < bounds[1]``. ``name`` None is positional.

    ``draw`` is the distribution of floats; for integers, ``ones`` is the highest value and ``zeros`` the lowest."""

    shape: tuple[int, ...]
    bounds: tuple[int, int] | None = None
    name: str | None = None
    draw: Draw = "normal"

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) + (f":int:{self.bounds[0]}:{self.bounds[1]}" if self.bounds else "")
        return f"{self.name}={shape}" if self.name else shape


class FileInput(Struct, frozen=True):
    """The tensors in a file: a single one is positional or ``name``, those in a mapping are keywords."""

    path: str
    name: str | None = None


Input = RandomInput | FileInput


def parse_inputs(texts: Iterable[str]) -> tuple[Input, ...]:
    """Parse the values of ``--input``. Raises ``UsageError`` for the first that is not valid."""
    inputs = tuple(_parse(text) for text in texts)
    names = [given.name for given in inputs if given.name]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(Opt("input"), f" names {name!r} twice: give each argument of forward once")
    return inputs


def _parse(text: str) -> Input:
    before, equals, after = text.partition("=")
    name, value = (before, after) if equals and before.replace(".", "").isidentifier() else (None, text)
    if value.endswith(INPUT_SUFFIXES):
        if not Path(value).is_file():
            raise UsageError(Opt("input", text), f": there is no file {value!r}; check the path")
        return FileInput(value, name)
    match = re.fullmatch(r"(\d+(?:x\d+)*)(?::(\w+)((?::-?\d+)*))?", value)
    if match is None:
        raise UsageError(Opt("input", text), f" is neither a shape nor a file: {_FORMS}")
    shape = tuple(int(size) for size in match[1].split("x"))
    if 0 in shape:
        raise UsageError(Opt("input", text), " has a dimension of size 0: the forward test needs at least one element")
    if match[2] is None:
        return RandomInput(shape, None, name)
    bounds = [int(bound) for bound in match[3].split(":")[1:]]
    if match[2] != "int" or len(bounds) != 2 or bounds[0] >= bounds[1]:
        raise UsageError(Opt("input", text), " has no range of integers: write SHAPE:int:LOW:HIGH with LOW < HIGH")
    return RandomInput(shape, (bounds[0], bounds[1]), name)


# The ratio to the scale in training, or its inverse, from which an input is odd. Inputs with the same scaling differ by
# less; 0 … 255 differs from 0 … 1 and from ImageNet's normalisation by more than 50.
_APART = 20.0


def refuse_non_finite(path: str, tensor: torch.Tensor) -> None:
    """Raise ``UsageError`` if the input contains NaN, or infinities other than a mask's -Inf."""
    values = values_of(tensor)
    if values.numel() == 0 or bool(values.isfinite().all()):
        return
    if bool(values.isnan().any()):
        cause = ""
        if tensor.ndim > 2:  # whole channels of images and signals
            bad = tensor.isnan().transpose(0, 1).flatten(1).all(dim=1)
            if bool(bad.any()) and not bool(bad.all()):
                cause = f" in all of {_named(bad)}, as from scaling by 0/0"
        raise UsageError(f"{path}: the input itself has NaN{cause}; give a finite one")
    is_mask = bool((values.isneginf() | (values == 0)).all())
    if not is_mask:
        raise UsageError(f"{path}: the input itself has infinite values; give a finite one")


def odd_channels(path: str, tensor: torch.Tensor) -> list[str]:
    """Return a warning if some channels of an image or signal are constant and others not, as from wrong scaling."""
    if tensor.ndim < 3 or not tensor.is_floating_point() or not tensor.numel() or tensor[0, 0].numel() < 2:
        return []
    flat = tensor.transpose(0, 1).flatten(1)
    constant = flat.amax(dim=1) == flat.amin(dim=1)
    if not bool(constant.any()) or bool(constant.all()):
        return []
    return [f"{path}: {_named(constant)} is constant, while others vary"]


def _named(chosen: torch.Tensor) -> str:
    indices = chosen.nonzero().flatten().tolist()
    return f"channel {indices[0]}" if len(indices) == 1 else f"channels {', '.join(map(str, indices))}"


@contextmanager
def scale_check(model: nn.Module, given: torch.Tensor | None) -> Iterator[list[str]]:
    """Compare the input of the first BatchNorm that runs with its running statistics, and add a warning if their scales
    differ.

    Yields the warnings, which stay empty if ``given`` is None or no such layer was ever trained."""
    from torch.nn.modules.batchnorm import _BatchNorm

    warnings: list[str] = []
    values = None if given is None else values_of(given)
    if values is None or values.numel() == 0:
        yield warnings
        return
    low, high = (float(bound) for bound in values.aminmax())

    def meeting(path: str) -> Any:
        def meet(module: Any, args: Any) -> None:
            hooks.close()  # only the first that runs is near the input
            seen = (module.running_var.double() + module.running_mean.double() ** 2).mean().sqrt()
            met = values_of(args[0]).double().square().mean().sqrt() if args else seen
            ratio = float(met / seen) if bool(seen.isfinite() and met.isfinite()) and float(seen) > 0 else 1.0
            if not 1 / _APART < ratio < _APART:
                warnings.append(_scale_text(f"{path} ({type(module).__name__})", ratio, low, high))

        return meet

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            if isinstance(module, _BatchNorm) and module.running_var is not None and _is_trained(module):
                hooks.callback(module.register_forward_pre_hook(meeting(path)).remove)
        yield warnings


def _scale_text(layer: str, ratio: float, low: float, high: float) -> str:
    times = f"{ratio:.2g} times as large as" if ratio > 1 else f"{1 / ratio:.2g} times smaller than"
    hint = ""
    if ratio > 1 and low >= 0 and 16 < high <= 255:
        hint = "; divide an image of 0 … 255 by 255, and normalise it as in training"
    elif ratio < 1 and low >= 0 and high <= 1:
        hint = "; multiply an image of 0 … 1 by 255"
    span = f"the values of the input are {low:.4g} … {high:.4g}"
    return f"{span}: the input of {layer} is {times} that in training{hint}"


def _is_trained(norm: Any) -> bool:
    """Return whether the statistics were ever updated: they start as mean 0 and variance 1."""
    return not (bool((norm.running_mean == 0).all()) and bool((norm.running_var == 1).all()))


class Arguments(Struct, frozen=True):
    """The arguments of ``forward``; ``notes`` say what was done to them, ``warnings`` what is odd about them."""

    args: tuple[torch.Tensor, ...] = ()
    kwargs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def batch(self) -> int:
        """The size of the first dimension of the first tensor that has one, otherwise 1."""
        return next((tensor.shape[0] for tensor in (*self.args, *self.kwargs.values()) if tensor.ndim), 1)

    @property
    def keywords(self) -> dict[str, Any]:
        """``kwargs`` for ``forward``, with dotted names made into members of dicts and lists."""
        made: dict[str, Any] = {}
        for name, tensor in self.kwargs.items():
            *places, last = name.split(".")
            inner = made
            for place in places:
                inner = inner.setdefault(place, {})
            inner[last] = tensor
        return {name: _with_lists(value) for name, value in made.items()}

    def first(self, size: int) -> Arguments:
        """Return the first ``size`` samples of the batch; tensors with another first dimension stay whole."""
        batch = self.batch
        return self.mapped(lambda tensor: tensor[:size] if tensor.ndim and tensor.shape[0] == batch else tensor)

    def doubled(self) -> Arguments:
        """Return the batch twice, the second time reversed along its last dimension, so that no samples are equal."""
        batch = self.batch
        return self.mapped(
            lambda tensor: torch.cat([tensor, tensor.flip(-1)]) if tensor.ndim and tensor.shape[0] == batch else tensor
        )

    def to(self, device: torch.device, dtype: torch.dtype) -> Arguments:
        """Return the arguments on another device, floating ones in another dtype."""
        return self.mapped(lambda tensor: tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype))

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Arguments:
        kwargs = {name: change(tensor) for name, tensor in self.kwargs.items()}
        return replace(self, args=tuple(map(change, self.args)), kwargs=kwargs)


def _with_lists(value: Any) -> Any:
    """Return the value with dicts whose keys are all numbers as lists, at any depth."""
    if not isinstance(value, dict):
        return value
    members = {name: _with_lists(member) for name, member in value.items()}
    return list(members.values()) if all(name.isdecimal() for name in members) else members


def make_arguments(inputs: Iterable[Input], dtype: torch.dtype, device: torch.device, seed: int = 0) -> Arguments:
    """Return the tensors of the inputs on the device. Floating ones are converted to this dtype, and so are images of
    bytes, which no layer accepts.

    Random numbers are drawn on the CPU, so that a seed gives the same input on every device. Raises ``UsageError`` for
    a file without tensors, or with values that are not finite."""
    generator = torch.Generator().manual_seed(seed)
    args: list[torch.Tensor] = []
    kwargs: dict[str, torch.Tensor] = {}
    notes: list[str] = []
    warnings: list[str] = []
    for given in inputs:
        found = tensors_of_file(given) if isinstance(given, FileInput) else [(given.name, _draw(given, generator))]
        for name, tensor in found:
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
                raise UsageError(Opt("input"), f" gives {name!r} twice: give each argument of forward once")
            else:
                kwargs[name] = placed
    return Arguments(tuple(args), kwargs, tuple(notes), tuple(warnings))


def _draw(given: RandomInput, generator: torch.Generator) -> torch.Tensor:
    low, high = given.bounds or (0, 2)
    dtype = torch.float32 if given.bounds is None else torch.int64
    if given.draw in ("ones", "zeros"):
        return torch.full(given.shape, high - 1 if given.draw == "ones" else low, dtype=dtype)
    if given.bounds is not None:
        return torch.randint(low, high, given.shape, generator=generator)
    make = torch.rand if given.draw == "uniform" else torch.randn
    return make(given.shape, generator=generator)


def tensors_of_file(given: FileInput) -> Iterator[tuple[str | None, torch.Tensor]]:
    """Yield the tensors of a file, with their names if there are several. Raises ``UsageError`` if it contains anything
    else, or values that are not finite."""
    found = list(_named_tensors(_read(given.path)))
    if not found or not all(isinstance(tensor, torch.Tensor) for _, tensor in found):
        raise UsageError(f"{given.path}: has no tensor, or other data too; save only the inputs")
    if given.name is not None and len(found) > 1:
        raise UsageError(f"{given.name}={given.path}: holds {len(found)} tensors, but a name takes one; omit the name")
    if not any(tensor.numel() for _, tensor in found):
        raise UsageError(f"{given.path}: holds no sample, its shape is {list(found[0][1].shape)}; give at least one")
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
    """Return the content of the file, without running code in it. Raises ``UsageError`` if it cannot be read."""
    import pickle

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
