"""VAL101 non-finite: the file holds NaN or infinite values.

## What it finds
Every tensor with a NaN, and every parameter or running statistic with +Inf or -Inf, with the counts and the place of
the first such value. -Inf alone is left in peace where it belongs: in attention masks, and in quantization observers
that have seen no data. With a model, that is any buffer but the running statistics; without one, the name decides.

## Why it matters
The file loads without a word, and the first forward pass through such a tensor is NaN from there on. It comes from a
run that diverged, or from a cast to float16 (values above 65504 become infinite).

## Fix safety
There is no fix: the right values are not in these tensors. Where the file holds another state_dict (an EMA twin) that
is finite there, the remedy names it. A cast back to float32 does not bring an overflowed value back.

## Example
`bn1.running_var` holds 1 NaN in 64 values: outputs are finite in training mode and NaN in eval mode.

## Sources
https://github.com/csjliang/LPTN/issues, https://github.com/ultralytics/ultralytics/pull/24731,
torch/nn/modules/batchnorm.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckptfix.checkpoint import Candidate, Checkpoint, TensorSpec, path_name
from ckptfix.finding import Context, Finding, Level, Rule, rule
from ckptfix.values import Statistics, TensorStatistics
from ckptfix.values.roles import is_buffer, is_running_statistic, may_be_infinite


@rule("VAL101", "non-finite")
def non_finite(rule: Rule, context: Context) -> Iterator[Finding]:
    """Propose nothing; report the tensors that are not finite, errors apart from warnings."""
    if context.statistics is None:
        return
    bad: dict[Level, dict[str, TensorStatistics]] = {Level.ERROR: {}, Level.WARNING: {}}
    for key, figures in context.statistics.items():
        level = _level(key, figures, context)
        if level is not None:
            bad[level][key] = figures
    for level, tensors in bad.items():
        if tensors:
            yield rule.finding(
                level,
                _message(tensors),
                keys=tuple(tensors),
                evidence={"tensors": {key: _evidence(context.checkpoint.specs[key], tensors[key]) for key in tensors}},
                remedy=_remedy(context.checkpoint, tuple(tensors)),
            )


def _level(key: str, figures: TensorStatistics, context: Context) -> Level | None:
    if not figures.nonfinite:
        return None
    if figures.nan:
        return Level.ERROR
    spec = context.checkpoint.specs[key]
    if may_be_infinite(key, spec, context.target):
        return None
    is_other_buffer = is_buffer(key, spec, context.target) and not is_running_statistic(key)
    return Level.WARNING if is_other_buffer else Level.ERROR


def _message(tensors: Mapping[str, TensorStatistics]) -> str:
    counts = {
        "NaN": sum(figures.nan for figures in tensors.values()),
        "+Inf": sum(figures.pos_inf for figures in tensors.values()),
        "-Inf": sum(figures.neg_inf for figures in tensors.values()),
    }
    listed = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    total = sum(figures.numel for figures in tensors.values())
    which = "1 tensor is" if len(tensors) == 1 else f"{len(tensors)} tensors are"
    return f"{which} not finite: {listed} among {total} values"


def _evidence(spec: TensorSpec, figures: TensorStatistics) -> dict[str, Any]:
    counts = {"nan": figures.nan, "pos_inf": figures.pos_inf, "neg_inf": figures.neg_inf, "numel": figures.numel}
    return {**counts, "first_index": _coordinates(spec.shape, figures.first_nonfinite)}


def _coordinates(shape: tuple[int, ...], index: int | None) -> list[int] | None:
    if index is None:
        return None
    place = []
    for size in reversed(shape):
        index, at = divmod(index, size)
        place.append(at)
    return place[::-1]


def _remedy(checkpoint: Checkpoint, keys: tuple[str, ...]) -> str:
    others = [candidate for candidate in checkpoint.candidates if candidate.path != checkpoint.container]
    finite = [candidate.name for candidate in others if _is_finite_twin(checkpoint, candidate, keys)]
    if finite:
        return f"take the set that is finite there: --weights {finite[0]}"
    if others:
        return f"see whether another set of this file is finite: --weights {others[0].name}"
    return "take these tensors from an earlier checkpoint or another copy, or train again from before the divergence"


def _is_finite_twin(checkpoint: Checkpoint, candidate: Candidate, keys: tuple[str, ...]) -> bool:
    """Whether the other state_dict has all these keys, finite."""
    twin = checkpoint.root
    for part in candidate.path:
        inside = twin if isinstance(twin, Mapping) else dict(enumerate(twin)) if isinstance(twin, list) else {}
        twin = inside.get(part)
    if not isinstance(twin, Mapping):
        return False
    entries = {key: twin.get(key) for key in keys}
    statistics = Statistics(replace(checkpoint, path=f"{checkpoint.path}:{path_name(candidate.path)}", entries=entries))
    return all(key in statistics and not statistics[key].nonfinite for key in keys)
