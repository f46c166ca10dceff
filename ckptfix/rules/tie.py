"""FIT105 tie: one tensor under two names, of which the file has only one.

## What it finds

Keys that the target ties to another key, such as `lm_head.weight` to `embed_tokens.weight`, where the file has the
one and not the other.

## Why it matters

Some writers leave the twin out, as safetensors refuses to store a tensor twice. A strict load calls it a missing
key, and a load that is not strict may leave the head at its random values if the tie is broken.

## Fix safety

Safe: in the target both names are one tensor, so that the stored one holds the values of both. The two share their
storage in the result. Keys that are both in the file are left as they are, equal or not.

## Example

    ckptfix repair gpt2.safetensors --model my_models:gpt2
    # lm_head.weight = transformer.wte.weight

## Sources

- https://huggingface.co/docs/safetensors/torch_shared_tensors
- https://github.com/huggingface/safetensors/issues/202
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptfix.checkpoint import Checkpoint
from ckptfix.finding import Applicability, Context, Finding, Fix, Level, Rule, Tie, counted, rule
from ckptfix.target import Target


@rule("FIT105", "tie")
def tie(rule: Rule, context: Context) -> Iterator[Finding]:
    """Supplies a tied key from its twin."""
    if context.target is None:
        return
    if ties := list(_ties(context.checkpoint, context.target)):
        yield rule.finding(
            Level.ERROR,
            f"{counted(len(ties), 'key')} missing whose tied twin is in the file",
            keys=tuple(edit.key for edit in ties),
            evidence={"twins": {edit.key: edit.to for edit in ties}},
            fix=Fix(tuple(ties), Applicability.SAFE),
        )


def _ties(checkpoint: Checkpoint, target: Target) -> Iterator[Tie]:
    """A tie for every missing key of a group that the file has a fitting member of."""
    for group in target.ties:
        stored = [key for key in group if key in checkpoint.specs and target.accepts(key, checkpoint.specs[key].shape)]
        if stored:
            yield from (Tie(key, stored[0]) for key in group if key not in checkpoint.entries)
