"""VAL207 huge-value: a number far larger than training produces.

## What it finds
Parameters and running statistics of norms with a value above 1e6 (a `running_var`: 1e9): a warning, from 1e15 on an
error. A single number in a matrix of at least 4096 numbers is reported too if its square is nine tenths of all squares:
float16 has no huge values, and a flipped bit makes one in the thousands. The message gives the channels.

A note if data in a large unit explains it: most values of the tensor are large, or both mean and variance of the same
channels. Not reported if the model initialises it like that, for buffers, and for scalars that are neither a weight nor
a bias, which may be counters.

## Why it matters
The file loads, and the outputs saturate, overflow or become NaN. Typical causes are a flipped exponent bit (a float32
becomes 2¹²⁸ times as large) and a run that is diverging. The largest values of 10,413 tensors in 255 published files
were 296 in matrices, 2,046 in vectors, 285 in a `running_mean` and 107,080 in a `running_var`.

## Fix safety
Unsafe, and only on request: the right values are not in the file. `--replace VAL207` with `--fill FILE`, `twin` or
`target` replaces them.

## Example
`bn1.running_var`: 1 of 64 values is 1.7e+38.

## Sources
https://en.wikipedia.org/wiki/Single-precision_floating-point_format (the bits of a float)"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ckptfix.core.buffers import NUM_BATCHES_TRACKED, split_key
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.finding import Finding, Level, counted
from ckptfix.core.lazy import np
from ckptfix.core.spec import TensorSpec, TensorStatistics
from ckptfix.rules.replacing import from_elsewhere, replaced_apart
from ckptfix.rules.rule import Context, Rule, affected
from ckptfix.values.roles import is_buffer, is_running_statistic, may_be_infinite
from ckptfix.values.scan import channels_with, first_numbers

MOST, MOST_VARIANCE = 1e6, 1e9  # largest plausible absolute values, the second for a `running_var`
ABSURD = 1e15  # no unit of any data explains larger values
# Statistics by which a model scales its data, in any unit.
_OF_DATA = re.compile(r"(?!running_)(?!.*(?:weight|bias))(?:\w*_)?(?:mean|std|stddev|var|min|max)_?$|scale_$")
_PARTNER = {"running_mean": "running_var", "running_var": "running_mean"}
LARGE = 1e3  # least mean or variance of a channel with data in a large unit
FAR = 1e3  # least ratio to the median that a large unit does not explain
LOOK = 1 << 14  # values from which the median is computed
MANY, ALONE = 4096, 0.9  # least numbers of a matrix, and least share of the squares that a damaged one has


def huge_value(rule: Rule, context: Context) -> Iterator[Finding]:
    """Report the tensors with huge values; replace them if that was asked for."""
    found = {key: figures for key, figures in context.statistics.items() if _is_huge(key, figures, context)}
    levels = {key: _level(key, figures, context) for key, figures in found.items()}
    for level in (Level.ERROR, Level.WARNING, Level.NOTE):
        some = [key for key in found if levels[key] is level]
        for keys, fix in replaced_apart(rule, context, some, lambda key, figures: figures.absmax <= _bound(key)):
            yield rule.finding(
                level,
                f"{counted(len(keys), 'tensor')} with values up to {max(found[key].absmax for key in keys):.2g}",
                keys=keys,
                evidence={"tensors": {key: _evidence(key, found[key], context) for key in keys}},
                fix=fix,
                remedies=() if fix or level is Level.NOTE else from_elsewhere(rule),
            )


def _bound(key: str) -> float:
    leaf = split_key(key)[1]
    return MOST_VARIANCE if leaf == "running_var" else ABSURD if _OF_DATA.match(leaf) else MOST


def _is_huge(key: str, figures: TensorStatistics, context: Context) -> bool:
    if figures.absmax <= _bound(key) and not (key in context.matrices and _is_alone(figures)):
        return False
    spec, leaf = context.checkpoint.specs[key], split_key(key)[1]
    if not DTYPES[spec.dtype].is_float or leaf == NUM_BATCHES_TRACKED or spec.quantizer is not None:
        return False
    if not is_running_statistic(key):
        if is_buffer(key, spec, context.target) or may_be_infinite(key, spec, context.target):
            return False
        if spec.numel == 1 and not ("weight" in leaf or "bias" in leaf):
            return False
    start = context.start(key)
    return start is None or figures.absmax > 10 * start.absmax


def _is_alone(figures: TensorStatistics) -> bool:
    """Return whether one number of a dense matrix outweighs all others together."""
    squares = figures.rms**2 * figures.finite
    return figures.finite >= MANY and 2 * figures.zeros < figures.numel and figures.absmax**2 > ALONE * squares


def _level(key: str, figures: TensorStatistics, context: Context) -> Level:
    """Return how certain it is that a value is wrong rather than data in a large unit."""
    if figures.absmax >= ABSURD:
        return Level.ERROR
    specs, (module, leaf) = context.checkpoint.specs, split_key(key)
    other = specs.get(module + _PARTNER[leaf]) if leaf in _PARTNER else None
    if other is not None and {*_channels_beyond(_bound(key), specs[key])} <= {*_channels_beyond(LARGE, other)}:
        return Level.NOTE
    values = np.sort(np.abs(first_numbers(specs[key], LOOK).astype(np.float64)))
    usual = float(values[(len(values) - 1) // 2]) if len(values) else 0.0
    return Level.WARNING if figures.absmax > FAR * usual else Level.NOTE


def _evidence(key: str, figures: TensorStatistics, context: Context) -> dict[str, Any]:
    spec = context.checkpoint.specs[key]
    channels = _channels_beyond(min(_bound(key), figures.absmax / 2), spec)
    return {"absmax": figures.absmax, "rms": figures.rms, **affected(channels, spec)}


def _channels_beyond(bound: float, spec: TensorSpec) -> tuple[int, ...]:
    return channels_with(spec, lambda values: np.abs(values) > bound)
