"""How short the values of a tensor can be described: fewer bits than its bytes have, where they are numbers of a kind.

Of a float only the sign and the exponent count; the mantissa looks random in any reading. They are described by a code
that learns how often each occurs (Krichevsky and Trofimov, The performance of universal encoding, 1981), and that
begins with what weights are like. Of an integer the number of its digits counts, and a bool is 0 or 1."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import lgamma, log, log2
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FLOATS = {
    "float64": (8, 11),
    "float32": (4, 8),
    "float16": (2, 5),
    "bfloat16": (2, 8),
    "complex128": (8, 11),
    "complex64": (4, 8),
    "complex32": (2, 5),
}
"""Bytes of a number, and bits of its exponent."""

_INTEGERS = {"int64": 8, "int32": 4, "int16": 2, "uint64": 8, "uint32": 4, "uint16": 2}

_COMMON, _POSSIBLE = (-16, 3), (-40, 16)
"""Exponents that most weights have, and those that few have but hardly any number lies outside of."""

_OF_ZERO, _OF_POSSIBLE, _OF_ANY = 0.02, 0.05, 0.001
"""How likely a zero, a number outside of the common ones and one of any exponent are thought to be at first."""

_WEIGHT = 2.0
"""How many elements these beginnings count as."""

_EVEN = (1 / 256,) * 256


def saved_bits(data: bytes, dtype: str, *, is_known: bool = False) -> float:
    """The bits by which a description of the elements is shorter than they are; none where they are garbage.

    ``dtype`` is ``bytes`` for those of which nothing is known. Elements of a byte neither save nor cost: quantised ones
    look random. Where ``is_known``, nothing has to be learnt, which is more than any code can save."""
    if not data:
        return 0.0
    if dtype == "bytes":
        import numpy as np

        return max(0.0, _learned(np.frombuffer(data, dtype=np.uint8), None if is_known else _EVEN, 8))
    saved = 0.0
    if dtype in _FLOATS:
        saved = _of_floats(data, *_FLOATS[dtype], is_known)
    elif dtype in _INTEGERS:
        saved = _of_integers(data, _INTEGERS[dtype], dtype.startswith("int"))
    elif dtype == "bool":
        saved = 7.0 * len(data) if data.count(0) + data.count(1) == len(data) else 0.0
    return max(0.0, saved)


def _of_floats(data: bytes, width: int, bits: int, is_known: bool) -> float:
    import numpy as np

    signs = np.frombuffer(data, dtype=f"<u{width}") >> (8 * width - 1 - bits)
    # Of whole numbers and of constants the mantissa says little new either, which shows in the bytes.
    prior = None if is_known else _prior(bits) * 2
    return max(_learned(signs, prior, bits + 1), saved_bits(data, "bytes", is_known=is_known))


def _learned(signs: NDArray[Any], prior: Sequence[float] | None, bits: int) -> float:
    """The bits that signs of so many bits save, once it is learnt how often each occurs, or without that."""
    import numpy as np

    counts = np.bincount(signs.astype(np.int64), minlength=1 << bits)
    held = np.flatnonzero(counts).tolist()
    if prior is None:
        return bits * len(signs) + sum(int(counts[at]) * log2(counts[at] / len(signs)) for at in held)
    nats = lgamma(_WEIGHT) - lgamma(_WEIGHT + len(signs))
    nats += sum(lgamma(_WEIGHT * prior[at] + int(counts[at])) - lgamma(_WEIGHT * prior[at]) for at in held)
    return bits * len(signs) + nats / log(2)


@cache
def _prior(bits: int) -> tuple[float, ...]:
    """How likely each exponent with one sign is at first."""
    bias = (1 << (bits - 1)) - 1
    shares = [_OF_ANY / (1 << bits)] * (1 << bits)
    for (low, high), share in ((_COMMON, 1 - _OF_ZERO - _OF_POSSIBLE - _OF_ANY), (_POSSIBLE, _OF_POSSIBLE)):
        held = range(max(low, 1 - bias), min(high, bias) + 1)
        for exponent in held:
            shares[exponent + bias] += share / len(held)
    shares[0] += _OF_ZERO
    return tuple(share / 2 for share in shares)


def _of_integers(data: bytes, width: int, is_signed: bool) -> float:
    import numpy as np

    numbers = np.frombuffer(data, dtype=f"<{'i' if is_signed else 'u'}{width}")
    digits = np.ceil(np.log2(np.abs(numbers.astype(np.float64)) + 1))
    costs = digits + 2 * np.log2(digits + 1) + 1 + is_signed
    return float(8 * width * len(numbers) - costs.sum())
