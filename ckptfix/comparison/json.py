"""The comparison as JSON, complete, for programs. Fields are added, never changed."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ckptfix.comparison.difference import Difference, Gap, Pair, Texts
from ckptfix.core.report import REPORT_VERSION, plain
from ckptfix.core.spec import TensorSpec


def difference_to_json(difference: Difference) -> dict[str, Any]:
    """The comparison as a JSON object of plain data."""
    return {
        "version": REPORT_VERSION,
        "exit_code": difference.exit_code,
        "a": asdict(difference.a),
        "b": asdict(difference.b),
        "values_compared": difference.values_compared,
        "equal": difference.equal,
        "close": difference.close,
        "cast": difference.cast,
        "only_a": {key: _spec(spec) for key, spec in difference.only_a.items()},
        "only_b": {key: _spec(spec) for key, spec in difference.only_b.items()},
        "renamed": dict(difference.renamed),
        "shapes": {pair.key: _pair(pair) for pair in difference.shapes},
        "dtypes": {pair.key: _pair(pair) for pair in difference.dtypes},
        "values": {pair.key: _gap(gap) for pair, gap in difference.values},
        "ties_a": [list(group) for group in difference.ties_a],
        "ties_b": [list(group) for group in difference.ties_b],
        "entries": _texts(difference.entries),
        "metadata": _texts(difference.metadata),
        "extras": _texts(difference.extras),
    }


def _spec(spec: TensorSpec) -> Any:
    return {"dtype": spec.dtype, "shape": list(spec.shape), "layout": spec.layout}


def _pair(pair: Pair) -> Any:
    return {"a": _spec(pair.a), "b": _spec(pair.b)}


def _gap(gap: Gap) -> Any:
    return plain({name: value for name, value in asdict(gap).items() if name != "is_close"})


def _texts(texts: Texts) -> Any:
    return {place: {"a": a, "b": b} for place, (a, b) in texts.items()}
