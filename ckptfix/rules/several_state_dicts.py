"""FIL101 several-state-dicts: the container holds more than one set of weights.

## What it finds
Two or more state_dicts of comparable size in one file: raw weights beside their moving average (EMA), a generator
beside a discriminator, a student beside a teacher.

## Why it matters
Taking the wrong set loads without an error and gives poor results (MeanFlow#12), and which one the authors evaluated is
not in the file.

## Fix safety
There is no fix: the choice is yours. Without `--weights` the raw set under the most usual name is taken, and the
finding remains.

## Example
`{state_dict, state_dict_ema}`: repair with `--weights state_dict_ema` for the averaged weights.

## Sources
Field reports: MeanFlow#12, actionformer_release#103; mmdet writes `ema_` keys with underscores for dots.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptfix.checkpoint import path_name
from ckptfix.finding import Context, Finding, Level, Rule, rule


@rule("FIL101", "several-state-dicts")
def several_state_dicts(rule: Rule, context: Context) -> Iterator[Finding]:
    """List the sets of weights where none was picked."""
    checkpoint = context.checkpoint
    if context.settings.weights is not None or len(checkpoint.candidates) < 2:
        return
    taken = path_name(checkpoint.container)
    names = [candidate.name for candidate in checkpoint.candidates]
    yield rule.finding(
        Level.WARNING,
        f"the file holds {len(names)} sets of weights ({', '.join(names)}); {taken} was taken",
        evidence={
            candidate.name: {"tensors": candidate.tensors, "numel": candidate.numel}
            for candidate in checkpoint.candidates
        },
        remedy=f"pick one with --weights NAME (say --weights {taken} to keep this one)",
    )
