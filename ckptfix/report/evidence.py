"""The figures behind a finding as short texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def evidence_items(evidence: Mapping[str, Any], length: int | None = None) -> Iterator[str]:
    """``prefix module``, ``share 1``, … from plain data; each cut to ``length`` characters."""
    for name, value in evidence.items():
        text = f"{name} {_figure(value)}"
        yield text if length is None else cut(text, length)


def cut(text: str, length: int) -> str:
    """The text, its end replaced by an ellipsis where it is longer."""
    return text if len(text) <= length else text[: length - 1] + "…"


def _figure(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} {_figure(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_figure, value))}]"
    return str(value)
