"""Measures the running statistics of norms on the user's data: ``ckptfix.recalibrate``, and ``--recalibrate FILE`` with
the user's model and the weights of the file, from which edits with the origin ``data`` take their values.

Measured layers normalise with the statistics of each batch, as in training; their running statistics become the average
over all batches, weighted by size. Everything else runs in eval mode: no dropout, no other statistics, no gradients.
Compare torch.optim.swa_utils.update_bn, which measures all layers, gives a short last batch the weight of a full one,
and runs dropout."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from ckptfix.core.buffers import split_key
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.lazy import nn, torch
from ckptfix.errors import Opt, TargetError, UsageError
from ckptfix.modules.factory import ModelArguments, build_module, user_code
from ckptfix.smoke.inputs import FileInput, tensors_of_file

if TYPE_CHECKING:
    from ckptfix.engine.changes import Measure

BATCH = 32  # samples per batch; statistics of much smaller batches are noisy


class Recalibration(Struct, frozen=True):
    """What was measured: the numbers of batches and samples, and the names of the layers."""

    batches: int
    samples: int
    layers: tuple[str, ...]


def recalibrate(
    model: nn.Module, loader: Iterable[Any], *, layers: str | Collection[str] | None = None
) -> Recalibration:
    """Measure the running mean and variance of batch and instance norms on data, in place.

    ``loader`` yields batches like a DataLoader: a tensor, a sequence whose first item is the input, or a mapping of
    keyword arguments; tensors are moved to the model's device, and floats cast to its dtype. ``layers`` are the names
    of the modules to measure, by default all with running statistics. ``num_batches_tracked`` becomes the number of
    batches. Weights, training mode and momentum are unchanged.

    Raises ``UsageError`` if there is nothing to measure or no data, and ``TargetError`` if the statistics become NaN or
    infinite, because the weights or the data are broken. Errors of the model itself are passed on. After any error the
    old statistics are restored."""
    norms = _chosen(model, (layers,) if isinstance(layers, str) else layers)
    batches = samples = 0
    kept = {
        (name, statistic): tensor.clone()
        for name, norm in norms.items()
        for statistic, tensor in norm.named_buffers(recurse=False)
    }
    try:
        with torch.no_grad(), _measuring(model, norms.values()):
            for batch in loader:
                arguments, keywords = _arguments(batch, model)
                tensors = [each for each in (*arguments, *keywords.values()) if isinstance(each, torch.Tensor)]
                size = max(math.prod(tensors[0].shape[:1]), 1) if tensors else 1
                batches, samples = batches + 1, samples + size
                for norm in norms.values():
                    norm.momentum = size / samples  # the batch's share gives the average over all samples so far
                model(*arguments, **keywords)
        if not batches:
            raise UsageError("the data has no batch: pass at least one to measure running statistics on")
        _refuse_broken(norms)
    except BaseException:
        for (name, statistic), tensor in kept.items():
            norms[name].get_buffer(statistic).copy_(tensor)
        raise
    return Recalibration(batches, samples, tuple(norms))


def _norms_of(model: nn.Module) -> dict[str, Any]:
    """Return the layers that keep running statistics, by name."""
    from torch.nn.modules.batchnorm import _NormBase

    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _NormBase) and module.running_mean is not None and module.running_var is not None
    }


def _chosen(model: nn.Module, layers: Collection[str] | None) -> dict[str, Any]:
    norms = _norms_of(model)
    if not norms:
        raise UsageError(f"{type(model).__name__} has no layer with running statistics: there is nothing to measure")
    for name in layers or ():
        if name not in norms:
            raise UsageError(
                f"{name!r} is not a norm of {type(model).__name__} with running statistics; see named_modules()"
            )
    return {name: norm for name, norm in norms.items() if layers is None or name in layers}


@contextmanager
def _measuring(model: nn.Module, norms: Iterable[Any]) -> Iterator[None]:
    """Set eval mode for all but these layers, and reset their statistics; at the end, restore modes and momenta."""
    modes = {module: module.training for module in model.modules()}
    momenta = {norm: norm.momentum for norm in norms}
    try:
        model.eval()
        for norm in momenta:
            norm.reset_running_stats()
            norm.train()
        yield
    finally:
        for module, training in modes.items():
            module.training = training
        for norm, momentum in momenta.items():
            norm.momentum = momentum


def _refuse_broken(norms: Mapping[str, Any]) -> None:
    for name, norm in norms.items():
        if not (norm.running_mean.isfinite().all() and norm.running_var.isfinite().all()):
            raise TargetError(
                f"the input of {name or 'the norm'} is NaN or infinite on this data, so no statistics can be measured"
                ": first repair the weights before this layer, and check the data"
            )


def _arguments(batch: Any, model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments for a batch; of a sequence, only the first item is the input."""
    if isinstance(batch, Mapping):
        return (), {name: _placed(value, model) for name, value in batch.items()}
    if not isinstance(batch, torch.Tensor):
        if not isinstance(batch, list | tuple) or not batch:
            raise UsageError(f"a batch is of type {type(batch).__name__}; give a tensor, (input, …) or a mapping")
        batch = batch[0]
    return (_placed(batch, model),), {}


def _placed(value: Any, model: nn.Module) -> Any:
    """Return a tensor on the model's device, with floats in the dtype of its parameters, or of its buffers if it has
    none; other values are unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    first = next(own for own in (*model.parameters(), *model.buffers()) if own.is_floating_point())
    return value.to(first.device, first.dtype) if value.is_floating_point() else value.to(first.device)


def measure_with(model: nn.Module | str, arguments: ModelArguments = (), seed: int = 0) -> Measure:
    """Return a function that measures running statistics with a model or a factory's; a given model is not changed.

    It takes the checkpoint with all other values in place, the wanted keys, and the path of the data: one tensor
    (``.npy``, ``.pt``, ``.safetensors``) with samples along its first dimension, or several by the names of forward's
    arguments. It raises ``TargetError`` if the checkpoint does not fit the model, if the model fails on the data, or if
    the data gives no usable statistics."""

    def measure(checkpoint: Checkpoint, keys: Collection[str], path: str) -> Mapping[str, torch.Tensor]:
        if not isinstance(model, str):
            return _measure(copy.deepcopy(model), checkpoint, keys, path)
        with user_code(model, seed):
            return _measure(build_module(model, arguments, seed), checkpoint, keys, path)

    return measure


def _measure(model: nn.Module, checkpoint: Checkpoint, keys: Collection[str], path: str) -> Mapping[str, torch.Tensor]:
    try:
        model.load_state_dict(checkpoint.state_dict(), strict=True)
    except (RuntimeError, LookupError, TypeError) as error:
        reason = (str(error).splitlines()[1:2] or [str(error)])[0].strip()
        raise TargetError(
            f"{checkpoint.path}: its statistics cannot be measured, because it does not fit {type(model).__name__} "
            f"({reason}); run ckptfix check first"
        ) from error
    layers = {split_key(key)[0].removesuffix(".") for key in keys}
    for name, norm in _norms_of(model).items():  # other broken norms are measured too, so that they do not affect these
        mean, variance = norm.running_mean, norm.running_var
        if not (mean.isfinite().all() and variance.isfinite().all() and (variance >= 0).all()):
            layers.add(name)
    try:
        recalibrate(model, _batches(path), layers=layers)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise TargetError(
            f"{path}: {type(model).__name__} fails on this data ({error}); give samples in the form that its forward "
            "takes"
        ) from error
    measured = model.state_dict()
    for key in keys:
        if key.endswith("running_var") and not measured[key].any():
            raise TargetError(
                f"{path}: gives {key} no variance: the data is constant there, or never reaches this layer; use other "
                "data, or ",
                Opt("reset_running_stats"),
            )
    return {key: measured[key] for key in keys}


def _batches(path: str) -> Iterator[Any]:
    """Yield the data of a file in batches, each a tensor or a dict by the names of arguments."""
    found = {
        name: tensor.float() if tensor.dtype == torch.uint8 and tensor.ndim >= 3 else tensor
        for name, tensor in tensors_of_file(FileInput(path))
    }
    samples = min((len(tensor) for tensor in found.values() if tensor.ndim), default=0)
    for start in range(0, samples, BATCH):
        # A single sample has no variance in a layer without positions, so it is added to the batch before.
        stop = samples if samples - start <= BATCH + 1 else start + BATCH
        parts = {name: tensor[start:stop] for name, tensor in found.items()}
        yield parts.get(None, parts)
        if stop == samples:
            return
