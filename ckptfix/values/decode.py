"""Stored numbers as numpy arrays.

numpy has no bfloat16 and no 8-bit floats, and converts float16 slowly. All these values are also float32 values:
bfloat16 is shifted into the upper half of a float32, and the others are looked up in a table of all codes.

Sources: IEEE 754; "FP8 Formats for Deep Learning" (https://arxiv.org/abs/2209.05433) for e4m3fn and e5m2; "8-bit
Numerical Formats for Deep Neural Networks" (https://arxiv.org/abs/2206.02915) for the fnuz forms; the OCP Microscaling
specification for e8m0fnu."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.core.dtypes import CODES
from ckptfix.core.lazy import np
from ckptfix.core.spec import TensorSpec

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]
else:
    Array = Any  # importing numpy takes longer than reading a small file


class Encoding(Struct, frozen=True, dict=True):
    """How a dtype stores its numbers: an element has ``units`` of them (two if it is complex).

    ``code`` is the format of one number for numpy and ``struct``, and ``part`` its dtype. ``smallest_normal`` is the
    least positive number that is not subnormal, 0 for integers."""

    code: str
    units: int
    smallest_normal: float
    part: str

    @cached_property
    def itemsize(self) -> int:
        """The bytes of one stored number."""
        return struct.calcsize(self.code)

    @cached_property
    def unit(self) -> np.dtype[Any]:
        """numpy's dtype of one stored number."""
        return np.dtype(self.code)

    @cached_property
    def decode(self) -> Callable[[Array], Array]:
        """A function from a 1-d array of units to an array of float32 or float64, without a copy if possible."""
        if self.part in ("float64", "float32"):
            return lambda units: units
        if self.part == "bfloat16":
            return _upper_half
        if self.part == "bool":
            return lambda units: (units != 0).astype(np.float64)
        if self.part in _INTEGERS:
            return lambda units: units.astype(np.float64)
        if self.part == "float16":
            with np.errstate(invalid="ignore"):  # some codes are signalling NaNs
                return _table(np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32))
        return _table(np.array([_MINIFLOATS[self.part].value(code) for code in range(256)], dtype=np.float32))

    @cached_property
    def code_values(self) -> Array:
        """The value of each 8-bit code, as float64."""
        return self.decode(np.arange(256, dtype=np.uint8).view(self.unit)).astype(np.float64)

    @cached_property
    def finite_codes(self) -> Array:
        """Which of the 8-bit codes are finite numbers."""
        return np.isfinite(self.code_values)

    @cached_property
    def code_kinds(self) -> Array:
        """Which codes are NaN, infinite, negative infinite, zero and subnormal: a row of 0 and 1 for each kind."""
        values = self.code_values
        is_small = (np.abs(values) < self.smallest_normal) & (values != 0)
        kinds = (np.isnan(values), values == np.inf, values == -np.inf, values == 0, is_small)
        return np.stack(kinds).astype(np.float64)


class _Minifloat(Struct, frozen=True):
    """An 8-bit float: a sign, ``exponent`` bits, and the mantissa; ``specials`` is the encoding of NaN and Inf."""

    exponent: int
    bias: int
    specials: str

    @property
    def mantissa(self) -> int:
        return 7 - self.exponent

    def value(self, code: int) -> float:
        """Return the number that a byte encodes."""
        if self.specials == "exponents":  # nothing else: no sign, no zero
            return 2.0 ** (code - 127) if code < 255 else float("nan")
        sign = -1.0 if code & 0x80 else 1.0
        exponent, fraction = (code & 0x7F) >> self.mantissa, code & ((1 << self.mantissa) - 1)
        if self.specials == "ieee" and exponent == (1 << self.exponent) - 1:
            return sign * float("nan" if fraction else "inf")
        if (self.specials == "fn" and code & 0x7F == 0x7F) or (self.specials == "fnuz" and code == 0x80):
            return float("nan")
        if exponent == 0:
            return float(sign * fraction * 2.0 ** (1 - self.bias - self.mantissa))
        return float(sign * (1 + fraction * 2.0**-self.mantissa) * 2.0 ** (exponent - self.bias))


_MINIFLOATS = {
    "float8_e4m3fn": _Minifloat(4, 7, "fn"),
    "float8_e5m2": _Minifloat(5, 15, "ieee"),
    "float8_e4m3fnuz": _Minifloat(4, 8, "fnuz"),
    "float8_e5m2fnuz": _Minifloat(5, 16, "fnuz"),
    "float8_e8m0fnu": _Minifloat(8, 128, "exponents"),
}

_FLOATS = {
    "float64": ("<d", 2.0**-1022),
    "float32": ("<f", 2.0**-126),
    "bfloat16": ("<H", 2.0**-126),
    "float16": ("<H", 2.0**-14),
}

_INTEGERS = {name: f"<{code}" for name, code in {**CODES, "bool": "B"}.items() if name not in _FLOATS}

_COMPLEX = {"complex128": "float64", "complex64": "float32", "complex32": "float16", "bcomplex32": "bfloat16"}


def is_plain(spec: TensorSpec) -> bool:
    """Return whether each element of a tensor is a number stored as it is."""
    return spec.has_data and not spec.parts and spec.quantizer is None and encoding(spec.dtype) is not None


@cache
def encoding(dtype: str) -> Encoding | None:
    """Return how a dtype stores its numbers; None if an element is not a single number (packed bits)."""
    if dtype in _COMPLEX:
        part = encoding(_COMPLEX[dtype])
        return part and replace(part, units=2)
    if dtype in _FLOATS:
        code, smallest_normal = _FLOATS[dtype]
        return Encoding(code, 1, smallest_normal, dtype)
    if dtype in _MINIFLOATS:
        return Encoding("<B", 1, 2.0 ** (1 - _MINIFLOATS[dtype].bias), dtype)
    return Encoding(_INTEGERS[dtype], 1, 0.0, dtype) if dtype in _INTEGERS else None


def _upper_half(units: Array) -> Array:
    shifted: Array = np.left_shift(units, 16, dtype=np.uint32)
    return shifted.view(np.float32)


def _table(values: Array) -> Callable[[Array], Array]:
    def look_up(units: Array) -> Array:
        found: Array = values.take(units, mode="wrap")  # all units are in range, and "raise" would check each
        return found

    return look_up


class Narrowing(NamedTuple):
    """The values that a cast to a narrower float loses: finite magnitudes above ``largest`` become infinite (NaN in
    float8_e4m3fn), and those up to ``vanishing`` become zero.

    Casts round to the nearest number, ties to the even code (IEEE 754): a magnitude overflows from half a step above
    the largest finite number on, and vanishes at half of the smallest subnormal or less."""

    vanishing: float
    largest: float


# Half of the smallest subnormal number, and the largest float32 (float64 for a cast to float32) less than half a step
# above the largest finite number. Only float8_e4m3fn has an even largest number, to which the tie rounds.
NARROWINGS = {
    "float32": Narrowing(2.0**-150, 2.0**128 - 2.0**103 - 2.0**75),
    "float16": Narrowing(2.0**-25, 65520 - 2.0**-8),
    "bfloat16": Narrowing(2.0**-134, 2.0**128 - 2.0**119 - 2.0**104),
    "float8_e4m3fn": Narrowing(2.0**-10, 464.0),
    "float8_e5m2": Narrowing(2.0**-17, 61440 - 2.0**-8),
    "float8_e4m3fnuz": Narrowing(2.0**-11, 248 - 2.0**-16),
    "float8_e5m2fnuz": Narrowing(2.0**-18, 61440 - 2.0**-8),
}
