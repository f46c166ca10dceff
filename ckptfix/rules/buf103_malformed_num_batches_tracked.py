"""BUF103 malformed-num-batches-tracked: a BatchNorm's counter that is not a 0-d int64.

## What it finds
`num_batches_tracked` with shape `[1]`, or with a dtype other than int64, left by conversions through other formats, a
`.half()` on every tensor, or averaging checkpoints.

## Why it matters
Torch's own load forgives both, others do not: a float counter breaks averaging and exports, and a shape of `[1]`
fails in every reader that compares shapes.

## Fix safety
Safe if the counter is an integer that fits the new dtype: it gets the shape and dtype that `load_state_dict` itself
would give it. This reads the one element, even with `--no-values`. A counter that is NaN, infinite, fractional or too
large is replaced by zero, which is unsafe. No other stored count is ever overwritten.

## Example
    ckptfix repair converted.pth
    # bn1.num_batches_tracked  float32[1] → int64[]

## Sources
- https://github.com/pytorch/pytorch/blob/main/torch/nn/modules/module.py (`_load_from_state_dict`: one element into
  0-d)"""

from collections.abc import Iterator

from ckptfix.core.buffers import NUM_BATCHES_TRACKED, split_key
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.edits import Assemble, Cast, Drop, Edit, Fill
from ckptfix.core.finding import Finding, Fix, Level, counted
from ckptfix.core.spec import TensorSpec
from ckptfix.rules.rule import Context, Rule

_DEFAULT: tuple[str, tuple[int, ...]] = ("int64", ())  # what BatchNorm gives a counter

# Bits up to which a dtype represents every integer.
_DIGITS = {
    **{"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8},
    **{f"int{bits}": bits - 1 for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": bits for bits in (8, 16, 32, 64)},
}


def malformed_num_batches_tracked(rule: Rule, context: Context) -> Iterator[Finding]:
    """Give counters the shape and dtype of the target, or else of BatchNorm."""
    edits: list[Edit] = []
    forms: dict[str, int] = {}
    keys = []
    broken: dict[str, str] = {}
    zeros: list[Edit] = []
    for key, spec in context.checkpoint.specs.items():
        if not key.endswith(NUM_BATCHES_TRACKED) or split_key(key)[1] != NUM_BATCHES_TRACKED:
            continue  # endswith rules out most keys at low cost
        slot = context.target.slots.get(key) if context.target else None
        dtype, shape = (slot.dtype, slot.shape) if slot is not None else _DEFAULT
        if not (cure := _cure(key, spec, dtype, shape)):
            continue
        if spec.dtype != dtype:
            from ckptfix.values.scan import first_numbers

            value = float(first_numbers(spec, 1)[0])  # one element, which is read even if values are not scanned
            if not _holds(dtype, value):
                broken[key] = f"{value:g}"
                zeros += (Drop(key), Fill(key, dtype, shape or (), "zeros"))
                continue
        form = f"{spec.dtype}{list(spec.shape)}"
        forms[form] = forms.get(form, 0) + 1
        keys.append(key)
        edits.extend(cure)
    if keys:
        yield rule.finding(
            Level.WARNING,
            f"{counted(len(keys), 'batch counter')} stored as {', '.join(forms)} instead of int64[]",
            keys=keys,
            evidence={"forms": forms},
            fix=Fix.safe(edits),
        )
    if broken:
        shown = ", ".join(dict.fromkeys(broken.values()))
        yield rule.finding(
            Level.WARNING,
            f"{counted(len(broken), 'batch counter')} with an invalid value ({shown})",
            keys=broken,
            evidence={"values": broken},
            fix=Fix.unsafe(zeros),
        )


def _cure(key: str, spec: TensorSpec, dtype: str, shape: tuple[int, ...] | None) -> list[Edit]:
    """Return the edits that give a counter this dtype and shape; none if it has them, or is not a counter."""
    cure: list[Edit] = []
    if spec.numel == 1 and shape is not None and len(shape) <= 1 and spec.shape != shape:
        cure.append(Assemble.reshape(key, spec.dtype, spec.shape, shape))
    if spec.numel == 1 and spec.dtype != dtype:
        cure.append(Cast(key, spec.dtype, dtype))
    if not cure:
        return cure
    from ckptfix.values.decode import is_plain  # imported late: most counters are well formed

    return cure if is_plain(spec) and not DTYPES[spec.dtype].is_complex else []


def _holds(dtype: str, value: float) -> bool:
    """Return whether a value is an integer that a dtype can represent."""
    is_signed = not dtype.startswith("uint")
    return value.is_integer() and abs(value) < 2 ** _DIGITS.get(dtype, 0) and (is_signed or value >= 0)
