"""KEY101 wrapper-segment: keys with a segment that a wrapper put in.

## What it finds
Path segments that only wrappers make: `_orig_mod` (torch.compile), `_fsdp_wrapped_module` (FSDP),
`_checkpoint_wrapped_module` (activation checkpointing) and `_forward_module` (Lightning, DeepSpeed), at any depth, in
any order, any number of times.

## Why it matters
`load_state_dict` compares whole keys. A model that is not wrapped in the same way reports every key as missing and
every key as unexpected; with `strict=False` it loads nothing at all and says nothing.

## Fix safety
Safe: the names are reserved by torch, whole segments are taken out, and no value changes. Where two keys would become
one, nothing is renamed. Where the target itself has such segments, KEY103 matches the two namings instead.

## Example
`module._orig_mod.layer1.0.weight` becomes `module.layer1.0.weight`, and KEY102 takes the rest.

## Sources
timm PR#2003, pytorch#117399, ray#43594; `torch/_dynamo/eval_frame.py`, `torch/distributed/fsdp/_common_utils.py`,
`torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptfix.finding import Applicability, Context, Finding, Fix, Level, Rule, rule
from ckptfix.rules.wrappers import WRAPPER_SEGMENTS, colliding, has_wrapper_segment, renames, strip_segments


@rule("KEY101", "wrapper-segment")
def wrapper_segment(rule: Rule, context: Context) -> Iterator[Finding]:
    """Take the segments of wrappers out of every key."""
    target = context.target
    if target is not None and any(has_wrapper_segment(key) for key in target.slots):
        return
    keys = tuple(key for key in context.checkpoint.entries if has_wrapper_segment(key))
    if not keys:
        return
    found = sorted({part for key in keys for part in key.split(".") if part in WRAPPER_SEGMENTS})
    new = {key: strip_segments(key) for key in keys}
    clash = colliding(context.checkpoint.entries, new)
    message = f"{len(keys)} keys carry the wrapper segment {', '.join(found)}"
    if clash:
        yield rule.finding(
            Level.ERROR,
            f"{message}, and without it two keys would both be {clash}",
            keys=keys,
            remedy="remove one of the two sets of weights",
        )
    else:
        yield rule.finding(
            Level.ERROR, message, keys=keys, evidence={"segments": found}, fix=Fix(renames(new), Applicability.SAFE)
        )
