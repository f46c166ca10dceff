"""The tensors inside whatever a model takes or returns, and their figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ckptfix.smoke.outcome import Figures

if TYPE_CHECKING:
    import torch

_DEPTH = 16  # outputs nest a few levels; deeper is a cycle


def tensors_in(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in nested tuples, lists, dicts, dataclasses and named tuples, with its path (``logits``,
    ``hidden[2]``).

    transformers' ModelOutput is an OrderedDict, a PackedSequence a named tuple.
    """
    import torch

    if isinstance(value, torch.Tensor):
        yield name, value
    elif depth < _DEPTH:
        for step, part in _parts(value):
            yield from tensors_in(part, f"{name}{step}" if name else step.removeprefix("."), depth + 1)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f".{key}", part) for key, part in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from ((f".{field}", getattr(value, field)) for field in value._fields)
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value))


def describe(name: str, tensor: torch.Tensor) -> str:
    """A tensor in the report: ``float32[2, 10]``, with its path where it has one: ``logits: float32[2, 10]``."""
    shown = shape_of(tensor)
    return f"{name}: {shown}" if name else shown


def shape_of(tensor: torch.Tensor) -> str:
    """Dtype and shape: ``float32[2, 10]``. The sizes of a nested tensor vary, so it has none."""
    shape = "nested" if tensor.is_nested else ", ".join(map(str, tensor.shape))
    return f"{dtype_name(tensor.dtype)}[{shape}]"


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype in the report: ``float32``."""
    return str(dtype).removeprefix("torch.")


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """The stored values as one real, dense, floating tensor; empty for integers, which are always finite, and on the
    meta device.
    """
    import torch

    values = tensor.detach()
    if values.is_meta:
        return torch.empty(0)
    if values.is_nested:
        values = values.values()
    elif values.is_sparse:
        values = values.coalesce().values()
    elif values.layout != torch.strided:
        values = values.values()  # compressed sparse: the indices are integers
    if values.is_quantized:
        values = values.dequantize()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if not values.is_floating_point():
        return torch.empty(0)
    return values.float() if values.dtype.itemsize == 1 else values  # float8 knows no isfinite


def figures_of(name: str, tensor: torch.Tensor) -> Figures:
    """The figures of one tensor; a single pass where all is finite, as it nearly always is."""
    shown, values = shape_of(tensor), values_of(tensor)
    if values.numel() == 0:
        return Figures(name, shown)
    low, high = values.aminmax()  # NaN if there is one anywhere
    if low.isfinite() and high.isfinite():
        return Figures(name, shown, low=low.item(), high=high.item())
    finite = values[values.isfinite()]
    return Figures(
        name,
        shown,
        nan=int(values.isnan().sum()),
        positive_inf=int(values.isposinf().sum()),
        negative_inf=int(values.isneginf().sum()),
        low=finite.min().item() if finite.numel() else None,
        high=finite.max().item() if finite.numel() else None,
    )
