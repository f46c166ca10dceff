"""The figures of a file's weights as plain data: a line of ``weights.jsonl``, and what the page draws."""

from __future__ import annotations

from typing import Any

from ckptfix.core.report import Report

WEIGHTS_VERSION = 1
"""Grows when a field changes its meaning or goes away; new fields do not count."""

_ABOUT_VALUES = ("VAL", "FIL2", "RUN")
"""The rules that convict the values of a tensor, and not its name or its shape."""


def weights_to_json(report: Report) -> dict[str, Any]:
    """Return the statistics of the tensors that the rules read, in the file's order.

    A rule that names a tensor flags it, also where a fix has cured it: the figures are those of the repaired file,
    the flag says that there was something.
    """
    flags = _flags(report)
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
                "flagged": flags.get(key, []),
            }
        )
    return {"version": WEIGHTS_VERSION, "source": report.source, "layers": layers}


def _flags(report: Report) -> dict[str, list[str]]:
    flags: dict[str, list[str]] = {}
    for finding in report.findings:
        if finding.code.startswith(_ABOUT_VALUES):
            for key in finding.keys:
                codes = flags.setdefault(key, [])
                if finding.code not in codes:
                    codes.append(finding.code)
    return flags
