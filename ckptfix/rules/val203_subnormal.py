"""VAL203 subnormal: weights so small that processors compute with them slowly.

## What it finds
float32 and float64 tensors with subnormal values (in float32 below 1.2e-38): a warning if they are at least 1 % of a
weight matrix, else a note. float16 is not reported: its subnormals begin at 6e-5 and cost nothing on a GPU.

## Why it matters
Processors may handle each subnormal number in microcode, which slows a forward pass on a CPU: by a factor of 1.0 to
1.24 measured on recent machines, several times on old ones. Such values are what decay leaves of weights; their effect
on an output cannot be measured.

## Fix safety
Unsafe, because it changes values: `--flush-subnormals` sets them to zero and leaves all others unchanged, like
`torch.set_flush_denormal(True)` at run time.

## Example
    ckptfix repair efficientnet.pth --flush-subnormals
    # 11520 subnormal values in 3 tensors

## Sources
https://github.com/lukemelas/EfficientNet-PyTorch/issues/39, https://github.com/pytorch/pytorch/issues/19651"""

from collections.abc import Iterator

from ckptfix.core.edits import SUBNORMAL, Zero
from ckptfix.core.finding import Finding, Fix, Level, Remedy, counted
from ckptfix.rules.rule import Context, Rule
from ckptfix.values.casting import can_be_zeroed

MANY = 0.01  # least share of subnormal values in a weight matrix for a warning
HUGE = 1e15  # with a value above this, subnormal ones are not from decay: the bytes are damaged
SLOW = ("float32", "float64")  # the dtypes in which CPUs compute


def subnormal(rule: Rule, context: Context) -> Iterator[Finding]:
    """Report the tensors with subnormal values, those with many first; flush them if asked to."""
    specs, found = context.checkpoint.specs, context.statistics
    slow = [
        key
        for key, figures in found.items()
        if specs[key].dtype in SLOW and figures.subnormals and not (figures.nonfinite or figures.absmax > HUGE)
    ]
    many = {key for key in slow if found[key].subnormals >= MANY * found[key].numel and key in context.matrices}
    for level in (Level.WARNING, Level.NOTE):
        keys = [key for key in slow if (key in many) is (level is Level.WARNING)]
        if keys:
            total = sum(found[key].subnormals for key in keys)
            edits = tuple(Zero(key, specs[key].dtype, SUBNORMAL) for key in keys if can_be_zeroed(specs[key]))
            is_asked = context.settings.flush_subnormals and len(edits) == len(keys)
            yield rule.finding(
                level,
                f"{counted(total, 'subnormal value')} in {counted(len(keys), 'tensor')}",
                keys=keys,
                evidence={
                    "tensors": {key: {"subnormals": found[key].subnormals, "numel": found[key].numel} for key in keys},
                    "threshold": MANY,
                },
                fix=Fix.requested(edits) if is_asked else None,
                remedies=(Remedy.of("sets them to zero", flush_subnormals=True),),
            )
