"""FIT103 shape-mismatch: a key of the right name and another shape.

## What it finds

Keys that the file and the target both have, with different shapes, and keys under which the file holds no tensor at
all.

## Why it matters

`size mismatch for fc.weight: copying a param with shape …`; `strict=False` does not help. The model is another one:
another number of classes, vocabulary, resolution or number of input channels.

## Fix safety

None by itself: a head of another size, an expanded input convolution or a resized embedding is never invented.
`--drop-mismatched` takes these keys out, and `--fill target` or `--fill FILE` puts others in their place, which the
report lists with their numel. Only one element stored as `[1]` in place of `[]`, or the reverse, is reshaped
safely.

## Example

    ckptfix repair imagenet.pth --model my_models:resnet18_10_classes --drop-mismatched --fill target
    # fc.weight  file [1000, 512]  target [10, 512]

## Sources

- https://github.com/pytorch/pytorch/blob/main/torch/nn/modules/module.py (`_load_from_state_dict`)
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptfix.checkpoint import TensorSpec
from ckptfix.finding import Applicability, Context, Drop, Finding, Fix, Level, Reshape, Rule, counted, rule


@rule("FIT103", "shape-mismatch")
def shape_mismatch(rule: Rule, context: Context) -> Iterator[Finding]:
    """Shows both shapes; drops the keys where that was asked for."""
    if context.target is None:
        return
    evidence = {}
    reshapes = []
    for key, slot in context.target.slots.items():
        entry = context.checkpoint.entries.get(key)
        if key not in context.checkpoint.entries or slot.shape is None:
            continue
        if not isinstance(entry, TensorSpec):
            evidence[key] = {"file": None, "target": list(slot.shape)}
        elif {entry.shape, slot.shape} == {(), (1,)}:
            reshapes.append(Reshape(key, entry.shape, slot.shape))
        elif entry.shape != slot.shape:
            evidence[key] = {"file": list(entry.shape), "target": list(slot.shape)}
    if reshapes:
        yield rule.finding(
            Level.WARNING,
            f"{counted(len(reshapes), 'key')} of one element stored as [1] in place of [], or the reverse",
            keys=tuple(reshape.key for reshape in reshapes),
            fix=Fix(tuple(reshapes), Applicability.SAFE),
        )
    if evidence:
        drops = tuple(Drop(key) for key in evidence)
        yield rule.finding(
            Level.ERROR,
            f"{counted(len(evidence), 'key')} of another shape than the target's",
            keys=tuple(evidence),
            evidence={"shapes": evidence},
            fix=Fix(drops, Applicability.UNSAFE, asked=True) if context.settings.drop_mismatched else None,
            remedy="--drop-mismatched --fill target|FILE takes other values; or name the model that the file is of",
        )
