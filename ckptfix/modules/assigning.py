"""What ``assign=True`` of a load means: the tensors of the checkpoint become those of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptfix.core.dtypes import DTYPES
from ckptfix.core.finding import counted
from ckptfix.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import nn

SHOWN = 3
"""How many names a remark gives."""


def prepare(model: nn.Module, state_dict: dict[str, Any], source: str) -> tuple[str, ...]:
    """Make a state_dict fit to be assigned; what somebody should know of the model afterwards.

    Raises ``TargetError`` where the model would get integers in the place of floats, or the like: torch refuses such
    parameters, with a part of the model already changed."""
    import torch

    # With keep_vars the parameters themselves are in it, so that those which are one can be told.
    own = {key: value for key, value in model.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)}
    pairs: dict[str, None] = {}
    for key, tensor in own.items():
        given = state_dict.get(key)
        if not isinstance(given, torch.Tensor) or given.dtype == tensor.dtype:
            continue
        if _kind(given.dtype) != _kind(tensor.dtype):
            raise TargetError(
                f"{source}: {key} is of {_name(given.dtype)} and the model of {_name(tensor.dtype)} there, which "
                "assign=True does not convert; leave it out"
            )
        pairs[f"{_name(given.dtype)} for {_name(tensor.dtype)}"] = None
    _tie(own, state_dict)
    return (f"assign=True gave the model the dtypes of the file: {', '.join(pairs)}",) if pairs else ()


def left_empty(model: nn.Module) -> tuple[str, ...]:
    """A remark on what no state_dict holds and the meta device has left without values."""
    empty = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if not empty:
        return ()
    names = ", ".join(empty[:SHOWN]) + (" …" if len(empty) > SHOWN else "")
    return (
        f"the model has {counted(len(empty), 'tensor')} on the meta device still, which no state_dict holds: fill "
        f"{names} before use",
    )


def _tie(own: Mapping[str, torch.Tensor], state_dict: dict[str, Any]) -> None:
    """Give the keys that are one tensor of the model one tensor of the state_dict: the last, as copies into it would.

    torch assigns to each place by itself. Tied parameters would become two, which share memory for the time being and
    have a gradient and a place in the optimizer each.
    """
    from torch.nn import Parameter

    keys_of: dict[int, list[str]] = {}
    for key, tensor in own.items():
        if key in state_dict:
            keys_of.setdefault(id(tensor), []).append(key)
    for keys in keys_of.values():
        if len(keys) > 1:
            tensor, given = own[keys[0]], state_dict[keys[-1]]
            shared = Parameter(given.detach(), tensor.requires_grad) if isinstance(tensor, Parameter) else given
            state_dict.update(dict.fromkeys(keys, shared))


def _kind(dtype: torch.dtype) -> tuple[bool, bool, bool]:
    known = DTYPES.get(_name(dtype))
    return (dtype.is_floating_point, dtype.is_complex, known is not None and known.is_quantized)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
