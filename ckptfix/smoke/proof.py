"""The strict load, and the proof that every parameter came from the file.

A strict load says nothing of a parameter that the model keeps out of its own state_dict, or that an overridden
``_load_from_state_dict`` passes over. So all are filled with NaN first: whatever is NaN afterwards, and not in the
file, was never loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckptfix.errors import CkptfixError

if TYPE_CHECKING:
    import torch
    from torch import nn


class NotLoadedError(CkptfixError):
    """The file does not give the model all of its parameters; ``keys`` are those that it is about."""

    def __init__(self, message: str, keys: tuple[str, ...]) -> None:
        super().__init__(message)
        self.keys = keys


def load_strictly(model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Load with ``strict=True``; raises ``NotLoadedError`` unless every floating parameter provably came from the
    state_dict.
    """
    _fill_with_nan(model)
    # Nothing can be copied into a model on the meta device; an overridden load_state_dict may not know the argument.
    assign = {"assign": True} if any(parameter.is_meta for parameter in model.parameters()) else {}
    try:
        model.load_state_dict(state_dict, strict=True, **assign)
    except RuntimeError as error:
        raise _mismatch(model, state_dict, error) from error
    unproven = unloaded_parameters(model, state_dict)
    if unproven:
        raise NotLoadedError(
            f"the strict load passed over {_count(len(unproven), 'parameter')} that the file does not supply", unproven
        )


def unloaded_parameters(model: nn.Module, state_dict: Mapping[str, Any]) -> tuple[str, ...]:
    """The parameters that hold more NaN than the file gives them under any of their names (tied ones have several)."""
    import torch

    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if _can_be_nan(parameter):
            names.setdefault(id(parameter), []).append(name)
            parameters[id(parameter)] = parameter
    missing = []
    for identity, parameter in parameters.items():
        nan = int(parameter.isnan().sum())
        tensors = [state_dict[name] for name in names[identity] if name in state_dict]
        given = (int(tensor.isnan().sum()) for tensor in tensors if isinstance(tensor, torch.Tensor))
        if nan > max(given, default=0):
            missing.append(names[identity][0])
    return tuple(missing)


def _fill_with_nan(model: nn.Module) -> None:
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if _can_be_nan(parameter):
                parameter.fill_(torch.nan)


def _can_be_nan(parameter: torch.Tensor) -> bool:
    """Whether the element type has NaN and torch can count it; a lazy parameter has no elements yet."""
    import torch
    from torch.nn.parameter import is_lazy

    ordinary = parameter.dtype.itemsize > 1 and (parameter.is_floating_point() or parameter.is_complex())
    return ordinary and parameter.layout == torch.strided and not parameter.is_meta and not is_lazy(parameter)


def _mismatch(model: nn.Module, state_dict: Mapping[str, Any], error: RuntimeError) -> NotLoadedError:
    """What the strict load found, counted instead of listed."""
    import torch

    wanted = model.state_dict()
    missing = [key for key in wanted if key not in state_dict]
    unexpected = [key for key in state_dict if key not in wanted]
    reshaped = [
        key
        for key, value in wanted.items()
        if isinstance(value, torch.Tensor) and isinstance(state_dict.get(key), torch.Tensor)
        if not torch.nn.parameter.is_lazy(value) and value.shape != state_dict[key].shape
    ]
    counts = ((missing, "missing key"), (unexpected, "unexpected key"), (reshaped, "size mismatch"))
    said = ", ".join(_count(len(keys), noun) for keys, noun in counts if keys)
    lines = [line.strip() for line in str(error).splitlines()]
    return NotLoadedError(f"the strict load found {said or lines[-1]}", (*missing, *unexpected, *reshaped))


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{number} {noun if number == 1 else plural}"
