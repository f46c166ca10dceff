"""Numbers, tensors and the figures behind a finding as people read them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def quantity(number: int) -> str:
    """Return a count in three figures: ``999``, ``11.7 M``, ``1.24 G``."""
    return _scaled(number, ("", " k", " M", " G", " T", " P"))


def elements(numel: int) -> str:
    """``1 element``, ``11.7 M elements``."""
    return "1 element" if numel == 1 else f"{quantity(numel)} elements"


def size(nbytes: int) -> str:
    """Return a size in bytes in three figures and powers of 1000: ``512 B``, ``46.8 MB``."""
    return _scaled(nbytes, (" B", " kB", " MB", " GB", " TB", " PB"))


def _scaled(number: int, units: Sequence[str]) -> str:
    value = float(number)
    for unit in units[:-1]:
        # 999.5 and more would print as 1e+03.
        if abs(value) < 999.5:
            return f"{number}{unit}" if unit == units[0] else f"{_three(value)}{unit}"
        value /= 1000
    return f"{_three(value)}{units[-1]}"


def _three(value: float) -> str:
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f}"


def percent(part: int, whole: int) -> str:
    """Return a share in per cent that says 100 only of the whole, and 0 only of nothing: ``99.99 %``, ``< 0.01 %``."""
    if part >= whole:
        return "100 %"
    if part == 0:
        return "0 %"
    hundredths = math.floor(10_000 * part / whole)
    return "< 0.01 %" if hundredths == 0 else f"{hundredths / 100:g} %"


def tensor_text(dtype: str, shape: Sequence[int] | None) -> str:
    """Return a tensor's dtype and shape: ``float32[64, 3, 7, 7]``, ``int64[]``; ``float32[?]`` for a shape not known
    yet."""
    return f"{dtype}[{'?' if shape is None else ', '.join(map(str, shape))}]"


def evidence_items(evidence: Mapping[str, Any], length: int | None = None) -> Iterator[str]:
    """``prefix module``, ``share 1``, … from plain data; each cut to ``length`` characters."""
    for name, value in evidence.items():
        text = f"{name} {_figure(value)}"
        yield text if length is None else cut(text, length)


def cut(text: str, length: int) -> str:
    """Return the text, its end replaced by an ellipsis where it is longer."""
    return text if len(text) <= length else text[: length - 1] + "…"


def _figure(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} {_figure(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_figure, value))}]"
    return str(value)
