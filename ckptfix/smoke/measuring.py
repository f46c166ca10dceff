"""Measures running statistics for ``--recalibrate FILE``, with the user's model and data and the weights of the file.

Edits with the origin ``data`` take their values from here. Runs the user's code, as ``--model`` does."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ckptfix.core.buffers import split_key
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.lazy import nn, torch
from ckptfix.errors import Opt, TargetError
from ckptfix.modules.factory import ModelArguments, build_module, user_code
from ckptfix.modules.recalibration import norms_of, recalibrate
from ckptfix.smoke.inputs import FileInput, tensors_of_file

if TYPE_CHECKING:
    from ckptfix.engine.changes import Measure

BATCH = 32  # samples per batch; statistics of much smaller batches are noisy


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
    for name, norm in norms_of(model).items():  # other broken norms are measured too, so that they do not affect these
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
