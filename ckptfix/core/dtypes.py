"""The element types of torch, and their names in other formats.

The table does not import torch, so that work on names need not either. Sources: ``torch/csrc/Dtype.cpp`` and
``c10/core/ScalarType.h`` for the names and sizes, ``torch/storage.py`` for the typed storage classes, the safetensors
format for its tags (https://github.com/huggingface/safetensors#format)."""

import struct
from functools import cached_property

from msgspec import Struct


class DType(Struct, frozen=True, dict=True):
    """An element type: its torch name, bytes per element, and, if any, storage class in pickles and safetensors tag."""

    name: str
    itemsize: int
    storage: str | None = None
    safetensors: str | None = None

    @cached_property
    def packed(self) -> int:
        """Numbers per element: 2 for ``float4_e2m1fn_x2``, whose pairs torch counts as elements."""
        return 2 if self.name.endswith("_x2") else 1

    @cached_property
    def per_byte(self) -> int:
        """Elements per byte: torch counts the single numbers of ``quint4x2`` and ``quint2x4`` as elements."""
        return {"quint4x2": 2, "quint2x4": 4}.get(self.name, 1)

    @cached_property
    def is_float(self) -> bool:
        """Whether the elements are real floating-point numbers (from fp64 down to fp4)."""
        return self.name.startswith(("float", "bfloat"))

    @cached_property
    def is_complex(self) -> bool:
        return "complex" in self.name

    def few(self, units: bytes) -> tuple[float, ...] | None:
        """Decode a few numbers without importing numpy; return None for a dtype that needs numpy."""
        if self.name == "bfloat16":
            wide = bytearray(2 * len(units))
            wide[2::4], wide[3::4] = units[::2], units[1::2]
            return struct.unpack(f"<{len(units) // 2}f", wide)
        code = CODES.get(self.name)
        return struct.unpack(f"<{len(units) // self.itemsize}{code}", units) if code else None

    @cached_property
    def is_quantized(self) -> bool:
        """Whether the elements are integers that a quantizer maps to reals."""
        return self.name in {"quint8", "qint8", "qint32", "quint4x2", "quint2x4"}


# The format character of each dtype in `struct`.
CODES = {
    **dict(zip("float64 float32 float16 qint8 qint32 quint8".split(), "dfebiB", strict=True)),
    **dict(zip("int8 int16 int32 int64 uint8 uint16 uint32 uint64".split(), "bhiqBHIQ", strict=True)),
}

_TABLE = (
    DType("float64", 8, "DoubleStorage", "F64"),
    DType("float32", 4, "FloatStorage", "F32"),
    DType("float16", 2, "HalfStorage", "F16"),
    DType("bfloat16", 2, "BFloat16Storage", "BF16"),
    DType("float8_e4m3fn", 1, None, "F8_E4M3"),
    DType("float8_e5m2", 1, None, "F8_E5M2"),
    DType("float8_e4m3fnuz", 1, None, "F8_E4M3FNUZ"),
    DType("float8_e5m2fnuz", 1, None, "F8_E5M2FNUZ"),
    DType("float8_e8m0fnu", 1, None, "F8_E8M0"),
    DType("float4_e2m1fn_x2", 1, None, "F4"),
    DType("complex128", 16, "ComplexDoubleStorage"),
    DType("complex64", 8, "ComplexFloatStorage", "C64"),
    DType("complex32", 4),
    DType("bcomplex32", 4),  # since torch 2.14: a pair of bfloat16
    DType("int64", 8, "LongStorage", "I64"),
    DType("int32", 4, "IntStorage", "I32"),
    DType("int16", 2, "ShortStorage", "I16"),
    DType("int8", 1, "CharStorage", "I8"),
    DType("uint8", 1, "ByteStorage", "U8"),
    DType("uint16", 2, None, "U16"),
    DType("uint32", 4, None, "U32"),
    DType("uint64", 8, None, "U64"),
    DType("bool", 1, "BoolStorage", "BOOL"),
    DType("quint8", 1, "QUInt8Storage"),
    DType("qint8", 1, "QInt8Storage"),
    DType("qint32", 4, "QInt32Storage"),
    DType("quint4x2", 1, "QUInt4x2Storage"),
    DType("quint2x4", 1, "QUInt2x4Storage"),
    *(DType(f"bits{n}", 2 if n == "16" else 1) for n in ("1x8", "2x4", "4x2", "8", "16")),
    *(DType(f"int{n}", 1) for n in range(1, 8)),
    *(DType(f"uint{n}", 1) for n in range(1, 8)),
)

# Every element type by its torch name (`float32` for `torch.float32`).
DTYPES: dict[str, DType] = {dtype.name: dtype for dtype in _TABLE}

# Every element type by its class in a pickle (`FloatStorage`).
BY_STORAGE: dict[str, DType] = {dtype.storage: dtype for dtype in _TABLE if dtype.storage}

# Every element type by its tag in a safetensors header (`F32`).
BY_SAFETENSORS: dict[str, DType] = {dtype.safetensors: dtype for dtype in _TABLE if dtype.safetensors}

# Every element type by numpy's type string without the byte order (`f4`).
BY_NUMPY: dict[str, DType] = {
    "f8": DTYPES["float64"],
    "f4": DTYPES["float32"],
    "f2": DTYPES["float16"],
    "c16": DTYPES["complex128"],
    "c8": DTYPES["complex64"],
    "b1": DTYPES["bool"],
    **{f"i{size}": DTYPES[f"int{8 * size}"] for size in (1, 2, 4, 8)},
    **{f"u{size}": DTYPES[f"uint{8 * size}"] for size in (1, 2, 4, 8)},
}
