"""BUF103 malformed-num-batches-tracked: a BatchNorm's counter that is no 0-d int64.

## What it finds

`num_batches_tracked` of one element but of shape `[1]`, or of another dtype than int64: what conversions through
other formats, a `.half()` applied to every tensor, or averaging over checkpoints leave behind.

## Why it matters

Torch's own load forgives both, others do not: a float counter breaks averaging and exports, and a shape of `[1]`
fails in every reader that compares shapes.

## Fix safety

Safe: the shape and the dtype become those that `load_state_dict` itself gives the value.

## Example

    ckptfix repair converted.pth
    # bn1.num_batches_tracked  float32[1] → int64[]

## Sources

- https://github.com/pytorch/pytorch/blob/main/torch/nn/modules/module.py (`_load_from_state_dict`: one element into
  0-d)
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptfix.buffers import NUM_BATCHES_TRACKED, split_key
from ckptfix.checkpoint import TensorSpec
from ckptfix.dtypes import DTYPES
from ckptfix.finding import Applicability, Cast, Context, Edit, Finding, Fix, Level, Reshape, Rule, counted, rule
from ckptfix.target import Slot

_DEFAULT = Slot("int64", (), "buffer")


@rule("BUF103", "malformed-num-batches-tracked")
def malformed_num_batches_tracked(rule: Rule, context: Context) -> Iterator[Finding]:
    """Gives counters the shape and the dtype that BatchNorm gives them, or the target, where it differs."""
    edits: list[Edit] = []
    forms: dict[str, int] = {}
    keys = []
    for key, spec in context.checkpoint.specs.items():
        slot = context.target.slots.get(key, _DEFAULT) if context.target else _DEFAULT
        if split_key(key)[1] != NUM_BATCHES_TRACKED or not (cure := _cure(key, spec, slot)):
            continue
        form = f"{spec.dtype}{list(spec.shape)}"
        forms[form] = forms.get(form, 0) + 1
        keys.append(key)
        edits.extend(cure)
    if keys:
        yield rule.finding(
            Level.WARNING,
            f"{counted(len(keys), 'counter')} of batches in another form than int64[] ({', '.join(forms)})",
            keys=tuple(keys),
            evidence={"forms": forms},
            fix=Fix(tuple(edits), Applicability.SAFE),
        )


def _cure(key: str, spec: TensorSpec, slot: Slot) -> list[Edit]:
    """The edits that give a counter the form of its slot; none for what is fine, or for what is no counter at all."""
    dtype = DTYPES[spec.dtype]
    if spec.numel != 1 or spec.layout != "strided" or dtype.is_complex or dtype.is_quantized:
        return []
    cure: list[Edit] = []
    if slot.shape is not None and len(slot.shape) <= 1 and spec.shape != slot.shape:
        cure.append(Reshape(key, spec.shape, slot.shape))
    if spec.dtype != slot.dtype:
        cure.append(Cast(key, spec.dtype, slot.dtype))
    return cure
