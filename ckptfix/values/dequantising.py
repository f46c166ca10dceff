"""Quantised weights as floats: the tensors that formats store next to the codes, and the arithmetic.

bitsandbytes packs two 4-bit codes into each byte, the high half first. A code is an index into a table of numbers
between -1 and 1, which are multiplied by the largest magnitude of their block (``absmax``), itself possibly an 8-bit
code."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ckptfix.bytes.sources import CachedBytes, ComputedBytes, is_torn
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.edits import BLOCKS, FOUR_BITS, INT8, MXFP4, MXFP4_TURNED, NVFP4, Dequantise
from ckptfix.core.lazy import torch
from ckptfix.core.spec import TensorSpec, computed
from ckptfix.reading.boxes import row_major, row_major_bytes
from ckptfix.reading.tensors import bytes_of, torch_dtype
from ckptfix.values.casting import computing, whole_tensor

# The factor of each scheme's scales: bitsandbytes stores 127 times the step of a row.
FACTORS = {INT8: 7.874015718698502e-3, BLOCKS: 1.0}
PACK = 16  # bytes of MXFP4 codes per scale
_ROWS = 256  # unpacked at a time
SQUARE = 128  # rows and columns per scale, if scales are for squares
# fmt: off
_TABLES = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4": tuple(sign * size / 12 for sign in (1, -1) for size in (0, 0.0625, 8, 12, 4, 6, 2, 3)),
}
# fmt: on
_E2M1 = tuple(sign * size for sign in (1.0, -1.0) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
_LONGEST = 4096  # most bytes of a quant_state

BlockSize = Literal[32, 64, 128, 256, 512, 1024, 2048, 4096]


class QuantState(Struct, frozen=True):
    """The fields of a ``quant_state``, as bitsandbytes names them."""

    quant_type: Literal["nf4", "fp4"]
    blocksize: BlockSize
    dtype: Literal["float32", "float16", "bfloat16"]
    shape: tuple[int, ...]
    nested_blocksize: BlockSize | None = None
    nested_offset: float | None = None

    @property
    def numel(self) -> int:
        """The number of weights."""
        return math.prod(self.shape)


def are_codes(key: str, specs: Mapping[str, TensorSpec]) -> bool:
    """Return whether a tensor holds 4-bit codes, which may be stored as any dtype (``bnb_4bit_quant_storage``)."""
    return specs[key].shape[1:] == (1,) and f"{key}.absmax" in specs


def quant_state(key: str, specs: Mapping[str, TensorSpec], path: str) -> QuantState | str:
    """Return the ``quant_state`` of a weight, or the reason why it cannot be dequantised."""
    names = [f"{key}.quant_state.bitsandbytes__{kind}" for kind in _TABLES]
    stored = [specs[name] for name in names if name in specs]
    if len(stored) != 1 or stored[0].nbytes > _LONGEST:
        return "some lack a `quant_state` of NF4 or FP4"
    needed = {part: specs.get(f"{key}.{part}") for part in ("absmax", "quant_map")}
    is_nested = needed["absmax"] is not None and needed["absmax"].dtype == "uint8"
    if is_nested:
        needed |= {part: specs.get(f"{key}.{part}") for part in ("nested_absmax", "nested_quant_map")}
    for part, spec in needed.items():
        if spec is None:
            return f"`{part}` is missing"
    plain = [spec for spec in (specs[key], stored[0], *needed.values()) if spec is not None]
    if any(spec.storage is None or spec.parts or spec.math_bits or spec.quantizer or is_torn(spec) for spec in plain):
        return "some of their bytes are missing"
    try:
        state = msgspec.json.decode(row_major_bytes(stored[0], path), type=QuantState)
    except msgspec.DecodeError as error:
        return f"their `quant_state` is damaged ({error})"
    if min(state.shape, default=0) < 1 or plain[0].nbytes != -(-state.numel // 2):
        return "the shape in their `quant_state` does not fit the codes"
    blocks = -(-state.numel // state.blocksize)
    sizes = {"absmax": blocks, "quant_map": 16, "nested_quant_map": 256}
    if is_nested:
        if state.nested_blocksize is None or state.nested_offset is None:
            return "their `quant_state` lacks `nested_blocksize` or `nested_offset`"
        sizes["nested_absmax"] = -(-blocks // state.nested_blocksize)
    for part, spec in needed.items():
        assert spec is not None
        if spec.numel != sizes[part] or not (DTYPES[spec.dtype].is_float or (is_nested and part == "absmax")):
            return f"`{part}` does not have the length or dtype that their `quant_state` says"
    table = whole_tensor(specs[f"{key}.quant_map"], path).flatten()
    if not torch.equal(table, torch.tensor(_TABLES[state.quant_type]).to(table.dtype)):
        return f"`quant_map` lacks the numbers of {state.quant_type}"
    return state


def scale_steps(codes: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, int] | None:
    """Return how many rows and columns of a matrix of codes share a scale; None if the scales do not fit it."""
    if len(codes) != 2 or 0 in codes:
        return None
    rows, columns = codes
    if math.prod(scales) == 1:
        return rows, columns
    if scales in ((rows,), (rows, 1)):
        return 1, columns
    return (SQUARE, SQUARE) if scales == (-(-rows // SQUARE), -(-columns // SQUARE)) else None


def dequantised_spec(
    spec: TensorSpec, specs: Mapping[str, TensorSpec], edit: Dequantise, path: str
) -> TensorSpec | None:
    """Return the tensor of codes times their scales, multiplied when it is read; None if the scales do not fit."""
    if not DTYPES[edit.dtype].is_float:
        return None
    if edit.scheme == FOUR_BITS:
        return _four_bit_spec(edit.key, specs, edit.dtype, path)
    scales = specs.get(edit.source)
    if scales is None or any(each.storage is None or each.parts or each.quantizer for each in (spec, scales)):
        return None
    size = DTYPES[edit.dtype].itemsize
    storages = (*spec.storages, *scales.storages)
    content: ComputedBytes
    if edit.scheme in (MXFP4, MXFP4_TURNED) and (shape := unpacked_shape(spec, scales)):
        experts, rows, columns = shape
        shape = (experts, columns, rows) if edit.scheme == MXFP4_TURNED else shape
        unit = rows * columns * size
        content = CachedBytes(experts * unit, unit, lambda at, _: _unpacked(spec.at(at), scales.at(at), edit, path))
    elif edit.scheme in FACTORS and scale_steps(spec.shape, scales.shape) is not None:
        shape = spec.shape
        content = ComputedBytes(spec.numel * size, shape[1] * size, partial(_scaled, spec, scales, edit, path))
    elif edit.scheme == NVFP4 and (shape := paired_shape(edit.key, edit.source, {**specs, edit.key: spec})):
        content = ComputedBytes(spec.numel * 2 * size, shape[1] * size, partial(_paired, spec, specs, edit, path))
        storages = (*storages, *specs[scale_of_whole(edit.source, specs)].storages)
    else:
        return None
    return computed(spec, f"dequantised {edit.dtype}", content, storages, dtype=edit.dtype, shape=shape)


def unpacked_shape(codes: TensorSpec, scales: TensorSpec) -> tuple[int, ...]:
    """Return the experts, rows and columns of codes of MXFP4; empty for any other codes."""
    if (codes.dtype, scales.dtype, codes.shape) != ("uint8", "uint8", (*scales.shape, PACK)) or len(scales.shape) != 3:
        return ()
    return (*scales.shape[:2], scales.shape[2] * 2 * PACK)


def scale_of_whole(source: str, specs: Mapping[str, TensorSpec]) -> str:
    """Return the key of NVFP4's scale for the whole matrix, next to those of its blocks (``source``); empty if there is
    none. modelopt multiplies by it, compressed-tensors divides."""
    names = (f"{source}_2", source.removesuffix("scale") + "global_scale")
    return next((name for name in names if name in specs and specs[name].numel == 1), "")


def paired_shape(key: str, source: str, specs: Mapping[str, TensorSpec]) -> tuple[int, ...]:
    """Return the rows and columns of codes of NVFP4; empty for any other codes."""
    codes, scales = specs.get(key), specs.get(source)
    if codes is None or scales is None or (codes.dtype, scales.dtype) != ("uint8", "float8_e4m3fn"):
        return ()
    fits = len(codes.shape) == 2 and codes.shape == (*scales.shape[:1], *(8 * size for size in scales.shape[1:]))
    return (codes.shape[0], 2 * codes.shape[1]) if fits and scale_of_whole(source, specs) else ()


def _paired(
    spec: TensorSpec, specs: Mapping[str, TensorSpec], edit: Dequantise, path: str, first: int, last: int
) -> memoryview:
    """Return the bytes of rows of NVFP4, equal to what modelopt and compressed-tensors compute."""
    rows = (
        replace(each, shape=(last - first, each.shape[1]), offset=each.offset + each.strides[0] * first)
        for each in (spec, specs[edit.source])
    )
    codes, steps = (whole_tensor(each, path) for each in rows)
    whole = whole_tensor(specs[key := scale_of_whole(edit.source, specs)], path).float().flatten()
    scales = steps.float() * whole if key.endswith("_2") else steps.float() / whole
    with computing(path, f"{edit.key} cannot become {edit.dtype}"):
        numbers = _of_bytes(_E2M1, torch.float32).flip(-1)[codes.int()].flatten(1)
        made = (numbers * scales.repeat_interleave(PACK, 1)).to(torch_dtype(edit.dtype)).flatten()
    return bytes_of(made.view(torch.uint8))


def _scaled(spec: TensorSpec, scales: TensorSpec, edit: Dequantise, path: str, first: int, last: int) -> memoryview:
    """Return the bytes of rows of the product, computed in float32 as the formats' own readers do."""
    rows, columns = spec.shape
    across, along = scale_steps(spec.shape, scales.shape) or (1, 1)
    part = replace(spec, shape=(last - first, columns), offset=spec.offset + spec.strides[0] * first)
    codes, factors = (whole_tensor(each, path).float() for each in (part, scales))
    steps = factors.reshape(-(-rows // across), -(-columns // along))
    steps = steps[torch.arange(first, last) // across][:, torch.arange(columns) // along]
    with computing(path, f"{edit.key} cannot become {edit.dtype}"):
        product = (codes * steps * FACTORS[edit.scheme]).to(torch_dtype(edit.dtype)).flatten()
    return bytes_of(product.view(torch.uint8))


def _unpacked(spec: TensorSpec, scales: TensorSpec, edit: Dequantise, path: str) -> memoryview:
    """Return the bytes of one expert's MXFP4 matrix, equal to transformers' ``convert_moe_packed_tensors``."""
    with computing(path, f"{edit.key} cannot become {edit.dtype}"):
        codes, powers = (whole_tensor(each, path) for each in (spec, scales))
        dtype = torch_dtype(edit.dtype)
        numbers = _of_bytes(_E2M1, dtype).flip(-1)
        made = torch.empty(codes.shape[0], codes.shape[1] * 2 * PACK, dtype=dtype)
        for first in range(0, len(made), _ROWS):
            pairs = numbers[codes[first : first + _ROWS].int()].flatten(-2)
            shifts = powers[first : first + _ROWS].int().sub(127).unsqueeze(-1)
            made[first : first + _ROWS] = torch.ldexp(pairs, shifts).flatten(1)
        made = made.T.contiguous() if edit.scheme == MXFP4_TURNED else made
    return bytes_of(made.view(torch.uint8)).cast("B")


def _four_bit_spec(key: str, specs: Mapping[str, TensorSpec], dtype: str, path: str) -> TensorSpec | None:
    state = quant_state(key, specs, path)
    if isinstance(state, str):
        return None
    size, step = DTYPES[dtype].itemsize, state.blocksize
    content = ComputedBytes(state.numel * size, step * size, partial(_floats, key, specs, state, dtype, path))
    parts = ("absmax", "nested_absmax", "nested_quant_map")
    beside = [specs[name] for name in (f"{key}.{part}" for part in parts) if name in specs]
    storages = [storage for spec in (specs[key], *beside) for storage in spec.storages]
    return computed(specs[key], f"dequantised {dtype}", content, storages, dtype=dtype, shape=state.shape)


def _floats(
    key: str, specs: Mapping[str, TensorSpec], state: QuantState, dtype: str, path: str, first: int, last: int
) -> memoryview:
    """Return the bytes of blocks of weights, equal to ``dequantize_4bit`` followed by a cast."""
    start, stop = first * state.blocksize, min(last * state.blocksize, state.numel)
    codes = torch.frombuffer(bytearray(row_major(specs[key], path).read(start // 2, -(-stop // 2))), dtype=torch.uint8)
    numbers = _of_bytes(_TABLES[state.quant_type], torch.float32)[codes.int()].flatten()[: stop - start]
    steps = _largest(key, specs, state, path, first, last).repeat_interleave(state.blocksize)[: stop - start]
    with computing(path, f"{key} cannot become {dtype}"):
        made = (numbers * steps).to(torch_dtype(state.dtype)).to(torch_dtype(dtype))
    return bytes_of(made.view(torch.uint8))


def _of_bytes(table: tuple[float, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a table of the two numbers in each byte, that of the high half first."""
    numbers = torch.tensor(table, dtype=dtype)
    return torch.stack((numbers.repeat_interleave(16), numbers.repeat(16)), -1)


def _largest(
    key: str, specs: Mapping[str, TensorSpec], state: QuantState, path: str, first: int, last: int
) -> torch.Tensor:
    """Return the largest magnitude of each block from ``first`` to ``last``."""
    stored = specs[f"{key}.absmax"]
    raw = bytearray(row_major(stored, path).read(first * stored.itemsize, last * stored.itemsize))
    absmax = torch.frombuffer(raw, dtype=torch_dtype(stored.dtype))
    if state.nested_blocksize is None or state.nested_offset is None or stored.dtype != "uint8":
        return absmax.float()
    scales, table = (
        whole_tensor(specs[f"{key}.{part}"], path).flatten().float() for part in ("nested_absmax", "nested_quant_map")
    )
    blocks = torch.arange(first, last) // state.nested_blocksize
    return table[absmax.int()] * scales[blocks] + torch.tensor(state.nested_offset)
