"""VAL204 dead-channels: outputs of a layer that are always zero.

## What it finds
Weight matrices and kernels in which some, but not all, output channels have only zeros and numbers below 1e-20, and
norms in which some channels have a weight and bias of exactly zero. Always a note. A single zero row in a
two-dimensional matrix is padding and not reported. In embeddings, only 16 or more zero rows between others are
reported: unknown words have single ones, and a rounded-up vocabulary has them at the end.

## Why it matters
Such a channel passes nothing on. Structured pruning leaves them, and so does decay of channels that no longer get a
gradient. Good models have some: half of the filters of a face model's first layer were found near zero.

## Fix safety
There is no fix, and usually no need for one. A pruning tool can remove the channels.

## Example
`conv1.weight`: 5 of 64 output channels are zero.

## Sources
https://github.com/deepinsight/insightface/issues/277, https://arxiv.org/abs/1708.06519 (pruning by the norm's weight)
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptfix.core.finding import Finding, Level, counted
from ckptfix.core.lazy import np
from ckptfix.core.spec import FAINT
from ckptfix.rules.rule import Context, Rule, affected
from ckptfix.values.roles import kind
from ckptfix.values.scan import channels_with

MANY = 16  # least run of zero rows between others that an embedding lost or never trained
FEWEST = 4  # numbers of a channel; in a smaller one, zeros may be chance


def dead_channels(rule: Rule, context: Context) -> Iterator[Finding]:
    """Note the layers with channels of zeros; propose nothing."""
    specs = context.checkpoint.specs
    found = {key: channels for key in context.statistics if (channels := _dead(key, context))}
    tables = {key for key in found if key in context.matrices and kind(key, specs[key]) == "embedding"}
    for channel, layer in (("output channel", "layer"), ("row", "embedding")):
        dead = {key: some for key, some in found.items() if (key in tables) is (channel == "row")}
        if dead:
            yield rule.finding(
                Level.NOTE,
                f"{counted(sum(map(len, dead.values())), channel)} of {counted(len(dead), layer)} are zero",
                keys=dead,
                evidence={"tensors": {key: affected(some, specs[key], "dead") for key, some in dead.items()}},
            )


def _dead(key: str, context: Context) -> tuple[int, ...]:
    """Return the dead channels of a matrix or norm. Only tensors with zeros or faint rows are read again."""
    statistics = context.statistics
    spec, figures = context.checkpoint.specs[key], statistics[key]
    if not (figures.zeros or figures.has_faint_rows) or figures.all_zero or figures.numel != spec.numel:
        return ()
    if key in context.matrices:
        length = spec.numel // spec.shape[0]
        is_table = kind(key, spec) == "embedding"
        may_be_dead = figures.has_faint_rows or figures.zeros >= length * (MANY if is_table else 1)
        if length < FEWEST or not may_be_dead or figures.absmax < FAINT:
            return ()
        found = channels_with(spec, lambda values: abs(values) < FAINT, length)
        if is_table:
            runs = np.split(found, np.flatnonzero(np.diff(found) > 1) + 1)
            inside = (run for run in runs if len(run) >= MANY and run[0] > 0 and run[-1] < spec.shape[0] - 1)
            return tuple(int(row) for run in inside for row in run)
        # An embedding with another name. A padding row is never trained, so it is exactly zero.
        is_padding = len(found) == 1 and len(spec.shape) == 2 and not figures.has_faint_rows
        return () if is_padding else found
    bias = key.removesuffix("weight") + "bias"
    if not key.endswith(".weight") or len(spec.shape) != 1 or bias not in statistics:
        return ()
    if context.checkpoint.specs[bias].shape != spec.shape or not statistics[bias].zeros or statistics[bias].all_zero:
        return ()
    dead = [channels_with(each, lambda values: values == 0) for each in (spec, context.checkpoint.specs[bias])]
    return tuple(sorted({*dead[0]} & {*dead[1]}))
