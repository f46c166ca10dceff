"""The weights of many files in little room.

A file's figures are columns of four significant digits. Names, dtypes and shapes are kept once for all files that have
them in common, as fine-tunes of one backbone do. What does not fit any more is left out, that of healthy files first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from ckptfix.report.page.embedding import Budget, data_element, digest, script_json


class Layers:
    """Turns lines of weights into elements of the page, in so many characters. A third is for flagged layers alone."""

    def __init__(self, characters: int) -> None:
        self._flagged, self._healthy = Budget(characters // 3), Budget(characters - characters // 3)
        self._layouts: dict[bytes, int] = {}
        self.left_out = 0

    def elements(self, number: int, line: Mapping[str, Any]) -> Iterator[str]:
        """The elements for the file of this number; none where it has no layer or there is no room."""
        layers = line["layers"]
        if not layers:
            return
        layout = script_json(_layout(layers))
        known = self._layouts.get(digest(layout))
        index = len(self._layouts) if known is None else known
        figures = script_json({"layout": index, **_figures(layers)})
        new = figures if known is not None else figures + layout
        is_flagged = any(layer["flagged"] for layer in layers)
        if not ((is_flagged and self._flagged.take(new)) or self._healthy.take(new)):
            self.left_out += 1
            return
        if known is None:
            self._layouts[digest(layout)] = index
            yield data_element(f"layout-{index}", layout)
        yield data_element(f"weights-{number}", figures)


def _layout(layers: list[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "key": [layer["key"] for layer in layers],
        "dtype": _shared([layer["dtype"] for layer in layers]),
        "shape": ["x".join(map(str, layer["shape"])) for layer in layers],
        "numel": [layer["numel"] for layer in layers],
    }


def _shared(texts: list[str]) -> list[str] | str:
    """One text where all are equal."""
    return texts[0] if len(set(texts)) == 1 else texts


def _figures(layers: list[Mapping[str, Any]]) -> dict[str, Any]:
    columns: dict[str, Any] = {name: [short(layer[name]) for layer in layers] for name in ("rms", "minimum", "maximum")}
    for name in ("zeros", "nonfinite", "flagged"):
        if some := {number: layer[name] for number, layer in enumerate(layers) if layer[name]}:
            columns[name] = some
    return columns


def short(number: float) -> float | None:
    """The number in four significant digits, a whole one without the point; None for NaN and infinities."""
    if not math.isfinite(number):
        return None
    rounded = float(f"{number:.4g}")
    if math.isinf(rounded):
        return number  # the largest of all would be rounded up, to infinity
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e6 else rounded
