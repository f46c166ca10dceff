"""BUF102 unexpected-num-batches-tracked: a BatchNorm's counter where the target has none.

## What it finds
`num_batches_tracked` of modules whose target has running statistics but no counter: a frozen BatchNorm, or a model of a
torch older than 0.4.1. With `--for-torch` older than 0.4.1, every counter in the file.

## Why it matters
A strict load fails with `Unexpected key(s) in state_dict: "bn1.num_batches_tracked"`.

## Fix safety
Safe: only training a BatchNorm with `momentum=None` uses the counter, and the target has no place for it. It is
dropped; no other tensor changes.

## Example
    ckptfix repair resnet50.pth --for-torch 0.4.0
    # - bn1.num_batches_tracked

## Sources
- https://github.com/pytorch/pytorch/issues/8481
- https://github.com/pytorch/vision/blob/main/torchvision/ops/misc.py (`FrozenBatchNorm2d`)"""

from collections.abc import Iterator

from ckptfix.core.buffers import COUNTED_SINCE, NUM_BATCHES_TRACKED, split_key
from ckptfix.core.edits import Drop
from ckptfix.core.finding import Finding, Fix, Level, counted
from ckptfix.rules.rule import Context, Rule


def unexpected_num_batches_tracked(rule: Rule, context: Context) -> Iterator[Finding]:
    """Drop the counters that the target, or the torch release of ``--for-torch``, has no place for."""
    is_before_counters = context.settings.is_for_torch_before(COUNTED_SINCE)
    if not is_before_counters and context.target is None:
        return
    counters = [key for key in context.checkpoint.specs if split_key(key)[1] == NUM_BATCHES_TRACKED]
    if is_before_counters:
        reason = f"torch {context.settings.for_torch} does not know num_batches_tracked"
    elif context.target is not None:
        reason = "these modules have no num_batches_tracked in the target"
        slots = context.target.slots
        counters = [key for key in counters if key not in slots and split_key(key)[0] + "running_mean" in slots]
    if counters:
        yield rule.finding(
            Level.ERROR,
            f"{counted(len(counters), 'unexpected counter')}: {reason}",
            keys=counters,
            fix=Fix.safe(map(Drop, counters)),
        )
