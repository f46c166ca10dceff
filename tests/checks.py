"""The two assertions for every rule: it changes nothing, or exactly this."""

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import ckptfix


def check_noop(state_dict: Mapping[str, Any], code: str, model: Any = None, **settings: Any) -> None:
    """Assert that the rule, run on its own, finds nothing in the state_dict and changes nothing."""
    repaired, report = ckptfix.repair_state_dict(state_dict, model, select=(code,), **settings)
    assert [finding.message for finding in report.findings] == []
    assert_same(repaired, state_dict)


def check_repaired(
    before: Mapping[str, Any], after: Mapping[str, Any], code: str, model: Any = None, **settings: Any
) -> ckptfix.Report:
    """Assert that the rule, run on its own, turns ``before`` into ``after`` with one finding, and is stable."""
    kept = copy.deepcopy(before)
    repaired, report = ckptfix.repair_state_dict(before, model, select=(code,), **settings)
    assert [finding.code for finding in report.fixed] == [code]
    assert_same(repaired, after)
    assert_same(before, kept)
    again, _ = ckptfix.repair_state_dict(repaired, model, select=(code,), **settings)
    assert_same(again, repaired)
    return report


def assert_same(got: Mapping[str, Any], want: Mapping[str, Any]) -> None:
    """Assert equal keys in equal order, dtypes, shapes, bytes (as NaN ≠ NaN) and ``_metadata``."""
    assert list(got) == list(want)
    for key, value in want.items():
        if isinstance(value, torch.Tensor):
            assert (got[key].dtype, got[key].shape) == (value.dtype, value.shape), key
            assert bytes_of(got[key]) == bytes_of(value), key
        else:
            assert got[key] == value, key
    assert (getattr(got, "_metadata", None) or {}) == (getattr(want, "_metadata", None) or {})


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return a tensor's values as row-major bytes; a sparse one made dense, a quantised one as integers."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.itemsize == 1:
        tensor = tensor.view(torch.uint8)  # torch cannot copy some of the small dtypes
    tensor = tensor.contiguous()
    start, count = tensor.storage_offset() * tensor.itemsize, tensor.numel() * tensor.itemsize
    raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return raw[start : start + count].numpy().tobytes()


def is_mapped(tensor: torch.Tensor, path: Path) -> bool:
    """Return whether the tensor is mapped from the file: whether changing the file changes it."""
    before, whole = bytes_of(tensor), path.read_bytes()
    descriptor = os.open(path, os.O_WRONLY)
    os.pwrite(descriptor, bytes(byte ^ 1 for byte in whole), 0)
    changed = bytes_of(tensor) != before
    os.pwrite(descriptor, whole, 0)
    os.close(descriptor)
    return changed


class OnAnotherDevice(torch.Tensor):
    """A tensor that, like one on a GPU, cannot be combined with one on the CPU until it is moved there."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cpu:
            return args[0].as_subclass(torch.Tensor)
        others = [arg for arg in args if isinstance(arg, torch.Tensor) and type(arg) is not cls and arg.ndim]
        if others and func is not torch.Tensor.__getitem__:
            raise RuntimeError("Expected all tensors to be on the same device")
        return super().__torch_function__(func, types, args, kwargs or {})
