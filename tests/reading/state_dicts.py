"""State_dicts with every kind of tensor that torch has, and a comparison of two of them."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ckptfix.core.dtypes import DTYPES
from tests.checks import bytes_of

TORCH_DTYPES = {name: getattr(torch, name) for name in DTYPES if isinstance(getattr(torch, name, None), torch.dtype)}
QUANTIZED = {name: dtype for name, dtype in TORCH_DTYPES.items() if DTYPES[name].is_quantized}
STRIDED = {name: dtype for name, dtype in TORCH_DTYPES.items() if name not in QUANTIZED}


def pattern(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return a tensor of any strided dtype with varying bytes, including NaN and other odd values."""
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = (torch.arange(count, dtype=torch.int64) * 37 + 11).to(torch.uint8)
    if dtype == torch.bool:
        raw &= 1
    if not count:
        return torch.empty(shape, dtype=dtype)
    return (
        raw.view(dtype).reshape(shape)
        if dtype.itemsize > 1
        else torch.empty(0, dtype=dtype).set_(
            raw.untyped_storage(), 0, shape, torch.empty(shape, device="meta").stride()
        )
    )


def _views(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return tensors with every kind of layout in a storage."""
    base = pattern(dtype, 4, 6)
    flat = pattern(dtype, 24)
    return {
        "plain": pattern(dtype, 3, 5),
        "scalar": pattern(dtype, 1).reshape(()),
        "empty": torch.empty(0, 3, dtype=dtype),
        "transposed": pattern(dtype, 3, 5).t(),
        "every_second": base[:, ::2],
        "column": pattern(dtype, 4, 6)[:, 2],
        "tail_of_large": pattern(dtype, 1000)[990:],
        "zero_stride": pattern(dtype, 1, 3).expand(4, 3),
        "head_of_flat": flat[:10],
        "middle_of_flat": flat[6:16],
        "rest_of_flat": flat[16:],
        "whole_flat": flat,
    }


def _tied() -> dict[str, Any]:
    weight = torch.randn(4, 3)
    return {"a.weight": weight, "b.bias": torch.zeros(2), "c.weight": weight, "d.weight": weight.t(), "e": weight[1]}


def _two_dtypes_of_one_storage() -> dict[str, Any]:
    storage = torch.arange(32, dtype=torch.uint8)
    return {"bytes": storage[1:13], "floats": storage.view(torch.float32)[1:3], "doubles": storage.view(torch.float64)}


def _parameters() -> dict[str, Any]:
    return {
        "trained": torch.nn.Parameter(torch.randn(3)),
        "frozen": torch.nn.Parameter(torch.randn(3), requires_grad=False),
        "buffer": torch.zeros(1),
        "leaf": torch.ones(2, requires_grad=True),
    }


def _module() -> Mapping[str, Any]:
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Sequential(torch.nn.ReLU()))
    return net.state_dict()


def _extras() -> dict[str, Any]:
    return {
        "w": torch.ones(2),
        "as_tensor._extra_state": torch.arange(4),
        "as_bytes._extra_state": b"\x00\xff extra",
        "as_dict._extra_state": {"scale": torch.ones(1), "window": (1, 2), "name": None},
        "packed": (torch.zeros(2), (torch.ones(3), None)),
        "dtype": torch.float16,
        "shape": torch.Size([1, 2]),
        "x": torch.zeros(3),
    }


def _per_tensor(dtype: torch.dtype) -> torch.Tensor:
    return torch.quantize_per_tensor(
        torch.linspace(-2, 3, 12).reshape(3, 4), 0.5, 1 if dtype == torch.quint8 else 0, dtype
    )


def _quantised(dtype: torch.dtype) -> dict[str, Any]:
    return {"q": _per_tensor(dtype)}


def _per_channel() -> dict[str, Any]:
    values = torch.linspace(-2, 3, 12).reshape(3, 4)
    scales, zeros = torch.tensor([0.1, 0.25, 0.5], dtype=torch.float64), torch.tensor([0, 1, 2])
    per_row = torch.quantize_per_channel(values, scales, zeros, 0, torch.qint8)
    floats = torch.quantize_per_channel(values, scales.float(), zeros.float(), 0, torch.quint8)
    return {"rows": per_row, "float_qparams": floats, "per_tensor": _per_tensor(torch.qint8)}


def _sparse() -> dict[str, Any]:
    dense = torch.tensor([[0.0, 1, 0, 2], [3, 0, 0, 0], [0, 0, 4, 0], [0, 5, 0, 6]])
    twice = torch.sparse_coo_tensor(
        torch.tensor([[0, 0], [1, 1]]), torch.tensor([1.0, 2.0]), (2, 2), check_invariants=True
    )
    return {
        "coo": dense.to_sparse(),
        "uncoalesced": twice,
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((2, 2)),
        "bsc": dense.to_sparse_bsc((2, 2)),
        "none_at_all": torch.zeros(3, 3).to_sparse(),
    }


def _lazy_bits() -> dict[str, Any]:
    values = torch.view_as_complex(torch.arange(12.0).reshape(6, 2))
    return {"plain": values, "conj": values.conj(), "negative": values.conj().imag, "real": values.real}


KINDS: dict[str, Callable[[], Mapping[str, Any]]] = {
    "nothing but one scalar": lambda: {"count": torch.tensor(7)},
    "a module's, with _metadata": _module,
    "ties and views of a tie": _tied,
    "two dtypes of one storage": _two_dtypes_of_one_storage,
    "parameters and requires_grad": _parameters,
    "entries that are not tensors": _extras,
    "names of all kinds": lambda: {
        key: torch.ones(1) for key in ("", ".", "a b", "ä.ß", "\u4f60", "x\ny", "a/b", "q" * 300)
    },
    "quantised per channel": _per_channel,
    "sparse of every layout": _sparse,
    "pairs of half bytes": lambda: {
        "a": pattern(torch.float4_e2m1fn_x2, 3, 5),
        "b": pattern(torch.float4_e2m1fn_x2, 2, 2).t(),
    },
    "conjugated and negated views": _lazy_bits,
    **{f"views of {name}": partial(_views, dtype) for name, dtype in STRIDED.items()},
    **{f"{name} per tensor": partial(_quantised, QUANTIZED[name]) for name in ("qint8", "quint8", "qint32")},
}


def ordered(state_dict: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return the state_dict as an OrderedDict with ``_metadata``, as torch makes it."""
    made = OrderedDict(state_dict)
    if hasattr(state_dict, "_metadata"):
        made._metadata = state_dict._metadata  # type: ignore[attr-defined]  # torch hangs it there
    return made


def same(got: Any, want: Any, where: str = "", strides: bool = True) -> None:
    """Assert equal bytes, strides and flags of tensors, and equal types and values of plain data."""
    if not isinstance(want, torch.Tensor):
        assert type(got) is type(want), where
        if isinstance(want, Mapping):
            assert list(got) == list(want), where
            for key in want:
                same(got[key], want[key], f"{where}.{key}", strides)
        elif isinstance(want, (tuple, list)):
            assert len(got) == len(want), where
            for index, part in enumerate(want):
                same(got[index], part, f"{where}[{index}]", strides)
        else:
            assert got == want, where
        return
    assert (got.dtype, got.shape, got.layout) == (want.dtype, want.shape, want.layout), where
    assert got.requires_grad == want.requires_grad or not strides, where
    assert bytes_of(got) == bytes_of(want), where
    if want.layout == torch.strided:
        assert not strides or got.stride() == want.stride() or not want.numel(), where
        assert not strides or (got.is_conj(), got.is_neg()) == (want.is_conj(), want.is_neg()), where
    elif want.layout == torch.sparse_coo:
        assert got.is_coalesced() == want.is_coalesced(), where
    if want.is_quantized:
        assert got.qscheme() == want.qscheme(), where
        if want.qscheme() == torch.per_tensor_affine:
            assert (got.q_scale(), got.q_zero_point()) == (want.q_scale(), want.q_zero_point()), where
        else:
            same(got.q_per_channel_scales(), want.q_per_channel_scales(), where)
            same(got.q_per_channel_zero_points(), want.q_per_channel_zero_points(), where)
            assert got.q_per_channel_axis() == want.q_per_channel_axis(), where


def overlaps(state_dict: Mapping[str, Any]) -> dict[tuple[str, str], int]:
    """Return the pairs of keys whose tensors share bytes, with the distance of their first bytes."""
    places = {}
    for key, tensor in state_dict.items():
        if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and tensor.numel():
            reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            places[key] = (tensor.untyped_storage()._cdata, start, start + (reach + 1) * tensor.dtype.itemsize)
    return {
        (one, other): places[other][1] - places[one][1]
        for one in places
        for other in places
        if one < other
        and places[one][0] == places[other][0]
        and places[one][1] < places[other][2]
        and places[other][1] < places[one][2]
    }
