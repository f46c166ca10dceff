"""VAL202 all-zero: a weight matrix holds nothing but zeros.

## What it finds
Floating matrices and kernels in which every value is exactly zero, and of which neither the model's own
initialisation nor, without a model, the name says that they start at zero by design. Biases, norm weights and other
vectors are never reported alone; those that are zero beside a zero matrix are listed with it. It is an error where
most matrices of the file are zero. A LoRA adapter in which every B matrix is zero is a warning: it was never trained
and changes nothing.

## Why it matters
The layer passes nothing on. It is what remains of weights that decayed and were then cast to float16 (everything
below 3e-8 becomes zero), of placeholders that a sharded run saved in place of its weights, or of a layer that was
never filled.

## Fix safety
There is no fix: the values are not in the file.

## Example
`layer4.0.weight` in float16: 576 of 576 values are zero, and so are the weight and bias of the norm after it.

## Sources
Layers that are zero by design: https://arxiv.org/abs/2106.09685 (LoRA), https://arxiv.org/abs/2302.05543 (ControlNet),
https://arxiv.org/abs/2212.09748 (adaLN-Zero), https://arxiv.org/abs/1706.02677 (the last gamma of a residual block)
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ckptfix.checkpoint import Checkpoint
from ckptfix.finding import Context, Finding, Level, Rule, rule
from ckptfix.values import Statistics
from ckptfix.values.roles import is_matrix, is_zero_by_design, norm_after

MOST = 0.5
"""Share of the matrices beyond which not a layer but the file is empty."""

_LORA_B = re.compile(r"(^|\.)lora_B(\.|$)")


@rule("VAL202", "all-zero")
def all_zero(rule: Rule, context: Context) -> Iterator[Finding]:
    """Propose nothing; report the matrices that are zero and should not be."""
    if context.statistics is None:
        return
    specs, statistics = context.checkpoint.specs, context.statistics
    matrices = [key for key in statistics if is_matrix(key, specs[key], context.target)]
    zero = [key for key in matrices if statistics[key].all_zero]
    empty_file = len(zero) > max(MOST * len(matrices), 1)
    reported = _not_by_design(zero, context, use_names=not empty_file)
    if reported:
        companions = [key for matrix in reported for key in _zero_companions(context.checkpoint, matrix, statistics)]
        yield rule.finding(
            Level.ERROR if empty_file else Level.WARNING,
            f"{len(reported)} of {len(matrices)} weight matrices hold nothing but zeros",
            keys=tuple(dict.fromkeys((*reported, *companions))),
            evidence={
                "tensors": {key: {"zeros": statistics[key].zeros, "numel": statistics[key].numel} for key in reported},
                "matrices": len(matrices),
                "zero_by_design": len(zero) - len(reported),
            },
            remedy="take these layers from another checkpoint or train them; nothing of them is left here",
        )
    untrained = _untrained_adapter(statistics)
    if untrained and not set(untrained) & set(reported):
        yield rule.finding(
            Level.WARNING,
            f"all {len(untrained)} lora_B matrices are zero: this adapter was never trained and changes nothing",
            keys=untrained,
            evidence={"lora_B": len(untrained)},
            remedy="take the adapter of a later step",
        )


def _not_by_design(zero: list[str], context: Context, *, use_names: bool) -> list[str]:
    """Those that neither start at zero in the model nor, without a model, have a name that says so."""
    if not zero:
        return []
    if context.target and context.target.initial:
        initial = context.target.initial()
        return [key for key in zero if key not in initial or bool(initial[key].any())]
    return [key for key in zero if not (use_names and is_zero_by_design(key))]


def _zero_companions(checkpoint: Checkpoint, matrix: str, statistics: Statistics) -> Iterator[str]:
    """The weight and bias of the norm after the matrix where both are zero."""
    norm = norm_after(checkpoint, matrix)
    found = [key for key in norm.vectors if key in statistics] if norm else []
    if all(statistics[key].all_zero for key in found):
        yield from found


def _untrained_adapter(statistics: Statistics) -> tuple[str, ...]:
    """The B matrices of an adapter if all of them, two at least, are zero beside their A."""
    pairs = [key for key in statistics if _LORA_B.search(key) and _LORA_B.sub(r"\1lora_A\2", key) in statistics]
    return tuple(pairs) if len(pairs) > 1 and all(statistics[key].all_zero for key in pairs) else ()
