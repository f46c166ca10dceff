"""The data of a page: JSON that no name in a checkpoint can break out of, with compact weights of many files.

JSON goes into ``<script type="application/json">`` elements, which browsers do not run. It is ASCII without ``<``,
``>`` or ``&``, so that nothing in it can end the element, open a comment, or mean something else in another encoding; a
lone surrogate is kept as ``\\ud800``."""

import json
import math
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

from ckptfix.core.report import Report
from ckptfix.values.statistics import histogram

_HARMLESS = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def script_json(data: Any) -> str:
    """Return plain data as JSON that is safe in a script element. Raises ``ValueError`` for NaN and infinities."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).translate(_HARMLESS)


def data_element(name: str, text: str) -> str:
    """Return the element that holds JSON from ``script_json`` under an id."""
    return f'<script type="application/json" id="{name}">{text}</script>\n'


def digest(text: str) -> bytes:
    """Return a digest of an ASCII text, to remember it in 16 bytes."""
    return blake2b(text.encode("ascii"), digest_size=16).digest()


class CharacterBudget:
    """The number of characters that a part of the page may still take."""

    def __init__(self, characters: int) -> None:
        self._left = characters

    def take(self, text: str) -> bool:
        """Return whether the text still fits, and deduct it if it does."""
        if len(text) > self._left:
            return False
        self._left -= len(text)
        return True


class Layers:
    """Turns lines of weights.jsonl into elements of the page, up to a number of characters.

    A third of them is reserved for files with flagged layers. A file's figures are columns of four significant digits.
    Names, dtypes and shapes are written once for all files that share them. What does not fit is left out."""

    def __init__(self, characters: int) -> None:
        self._flagged, self._healthy = CharacterBudget(characters // 3), CharacterBudget(characters - characters // 3)
        self._layouts: dict[bytes, int] = {}
        self.left_out = 0

    def elements(self, number: int, line: Mapping[str, Any]) -> Iterator[str]:
        """Yield the elements for the file with this number; none if it has no layers or does not fit."""
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
    dtypes = [layer["dtype"] for layer in layers]
    return {
        "key": [layer["key"] for layer in layers],
        "dtype": dtypes[0] if len(set(dtypes)) == 1 else dtypes,
        "shape": ["x".join(map(str, layer["shape"])) for layer in layers],
        "numel": [layer["numel"] for layer in layers],
    }


def _figures(layers: list[Mapping[str, Any]]) -> dict[str, Any]:
    columns: dict[str, Any] = {name: [short(layer[name]) for layer in layers] for name in ("rms", "minimum", "maximum")}
    for name in ("zeros", "nonfinite", "flagged"):
        if some := {number: layer[name] for number, layer in enumerate(layers) if layer[name]}:
            columns[name] = some
    if any(layer.get("histogram") for layer in layers):
        columns["histogram"] = [layer.get("histogram", "") for layer in layers]
    return columns


def short(number: float) -> float | None:
    """Return the number rounded to four significant digits, whole ones as int; None for NaN and infinities."""
    if not math.isfinite(number):
        return None
    rounded = float(f"{number:.4g}")
    if math.isinf(rounded):
        return number  # the largest float would be rounded up to infinity
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e6 else rounded


WEIGHTS_VERSION = 1  # raised when a field changes its meaning or goes away, not for a new field


def weights_to_json(report: Report) -> dict[str, Any]:
    """Return a line of weights.jsonl: the statistics of the tensors that the rules read, in the file's order.

    A tensor that a rule names is flagged, even if a fix has repaired it: the figures are those of the repaired file."""
    flags: dict[str, dict[str, None]] = {}
    for finding in (each for each in report.findings if each.subject.is_of_values):
        for key in finding.keys:
            flags.setdefault(key, {})[finding.code] = None
    layers = []
    for key, figures in report.figures.items():
        dtype, shape = report.layout.get(key, ("", ()))
        layers.append(
            {
                "key": key,
                "dtype": dtype,
                "shape": list(shape),
                "numel": figures.numel,
                "rms": float(figures.rms),
                "minimum": float(figures.minimum),
                "maximum": float(figures.maximum),
                "zeros": int(figures.zeros),
                "nonfinite": int(figures.nonfinite),
                "histogram": histogram(figures),
                "flagged": list(flags.get(key, ())),
            }
        )
    return {"version": WEIGHTS_VERSION, "source": report.source, "layers": layers}
