"""KEY103 missing-wrapper-prefix: the target is wrapped, the file is not, or in another way.

## What it finds
Keys that name the same tensor as a key of the target once the segments of wrappers (`module`, `_orig_mod`,
`_fsdp_wrapped_module`, `_checkpoint_wrapped_module`, `_forward_module`) are left out on both sides, with the same
shape.

## Why it matters
A model that was wrapped before loading (DataParallel, torch.compile, activation checkpointing) wants the wrapped names:
`Missing key(s) in state_dict: "module.conv1.weight"`.

## Fix safety
Safe: the target confirms name and shape, and only where both sides have exactly one such key. Needs a target.

## Example
`layer1.conv.weight` becomes `_orig_mod.layer1._checkpoint_wrapped_module.conv.weight` for a compiled, checkpointed
model.

## Sources
pytorch#3805, pytorch#117399, timm PR#2003.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from ckptfix.finding import Applicability, Context, Finding, Fix, Level, Rule, rule
from ckptfix.rules.wrappers import bare, renames


@rule("KEY103", "missing-wrapper-prefix")
def missing_wrapper_prefix(rule: Rule, context: Context) -> Iterator[Finding]:
    """Give keys the wrapper segments that the target has."""
    checkpoint, target = context.checkpoint, context.target
    if target is None:
        return
    wanted = _by_bare_name(key for key in target.slots if key not in checkpoint.entries)
    present = _by_bare_name(key for key in checkpoint.specs if key not in target.slots)
    new = {}
    for name, keys in present.items():
        goals = wanted.get(name, [])
        if len(keys) == len(goals) == 1 and target.accepts(goals[0], checkpoint.specs[keys[0]].shape):
            new[keys[0]] = goals[0]
    if new:
        yield rule.finding(
            Level.ERROR,
            f"{len(new)} keys lack the wrapper segments that the target's keys have",
            keys=tuple(new),
            fix=Fix(renames(new), Applicability.SAFE),
        )


def _by_bare_name(keys: Iterable[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = defaultdict(list)
    for key in keys:
        groups[bare(key)].append(key)
    return groups
