"""VAL102 half-overflow: a cast to a narrower dtype would lose values.

## What it finds
With `--dtype`, and before anything is cast: tensors with values that become infinite in that dtype (in float8_e4m3fn
NaN, or the largest number), an error; and tensors that would lose at least half of their values to zero, a warning. All
other floats are cast, and a note counts the values that become zero. A cast to 8 bits applies only to weight matrices:
vectors, norms and statistics need more precision. If the weights are fp32 masters of training in half precision (a
folder of ranks), buffers and parameters that training used in float32 keep it. Quantised, complex and sparse tensors
and batch counters are not cast. For T5, transformers loads `wo` as float32 even in float16; it is cast anyway, because
other programs use the file as it is, and the note says so.

## Why it matters
The range of float16 is 3e-8 to 65504, that of float8_e4m3fn 1e-3 to 448. One infinite weight makes every output NaN,
and a matrix of zeros passes nothing on.

## Fix safety
The cast happens because `--dtype` asks for it. A wider dtype is safe, a narrower one rounds every value. Tensors that
would lose values keep their dtype, and the finding on them remains: bfloat16 has the range of float32.

## Example
    ckptfix repair model.pth --dtype float16
    # 12 values of 1 tensor overflow in float16: layers.3.mlp.down_proj.weight, up to 7.3e+04

## Sources
IEEE 754 (rounding); https://arxiv.org/abs/2209.05433 (the 8-bit floats);
https://pytorch.org/docs/stable/tensor_attributes.html"""

from collections.abc import Iterator

from ckptfix.core.buffers import NUM_BATCHES_TRACKED, split_key
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.edits import Cast
from ckptfix.core.facts import Kind
from ckptfix.core.finding import Applicability, Finding, Fix, Level, advise, counted
from ckptfix.core.spec import TensorStatistics
from ckptfix.rules.quantised_layers import wanted_layers
from ckptfix.rules.rule import Context, Rule
from ckptfix.values.roles import is_float32_in_t5, is_matrix

MOST = 0.5  # a tensor that would lose at least this share of its non-zero values keeps its dtype
SATURATES = "float8_e4m3fn"  # a dtype without infinity: one in the file becomes NaN or a number

# The dtypes that hold every value of a dtype.
_LOSSLESS = {
    "float16": {"float32"},
    "bfloat16": {"float32"},
    "float8_e4m3fn": {"float32", "float16", "bfloat16"},
    "float8_e5m2": {"float32", "float16", "bfloat16"},
}


def half_overflow(rule: Rule, context: Context) -> Iterator[Finding]:
    """Cast the tensors that the user asked for, except those that would lose values."""
    dtype = context.settings.cast_dtype
    if dtype is None:
        return
    figures = {key: context.statistics[key] for key in _castable(context, dtype)}
    overflowing: dict[str, int] = {}
    vanishing: dict[str, TensorStatistics] = {}
    for key, found in figures.items():
        if count := found.overflowing + (found.pos_inf + found.neg_inf if dtype == SATURATES else 0):
            overflowing[key] = count
        elif 0 < found.vanishing >= MOST * (found.numel - found.zeros):
            vanishing[key] = found
    wider = "scale them, or leave them as they are" if dtype in ("float32", "bfloat16") else "bfloat16 has the range"
    remedies = advise(f"they keep their dtype; {wider}")
    if overflowing:
        values = sum(overflowing.values())
        yield rule.finding(
            Level.ERROR,
            f"{counted(values, 'value')} of {counted(len(overflowing), 'tensor')} overflow in {dtype}",
            keys=overflowing,
            evidence={
                "tensors": {
                    key: {"overflow": count, "numel": figures[key].numel, "absmax": figures[key].absmax}
                    for key, count in overflowing.items()
                }
            },
            remedies=remedies,
        )
    if vanishing:
        yield rule.finding(
            Level.WARNING,
            f"{counted(len(vanishing), 'tensor')} would turn at least half of their values into zero in {dtype}",
            keys=vanishing,
            evidence={
                "tensors": {
                    key: {"become_zero": found.vanishing, "numel": found.numel, "rms": found.rms}
                    for key, found in vanishing.items()
                },
                "threshold": MOST,
            },
            remedies=remedies,
        )
    specs = context.checkpoint.specs
    casts = tuple(
        Cast(key, specs[key].dtype, dtype) for key in figures if key not in overflowing and key not in vanishing
    )
    if casts:
        lost = {cast.key: figures[cast.key].vanishing for cast in casts if figures[cast.key].vanishing}
        is_lossless = all(dtype in _LOSSLESS.get(cast.before, ()) for cast in casts)
        become = f", {counted(sum(lost.values()), 'value')} of which become zero" if lost else ""
        if number := sum(is_float32_in_t5(cast.key) for cast in casts) * (dtype == "float16"):
            become += f"; transformers loads {number} of them as float32 (wo of T5), with the values of {dtype}"
        total = sum(figures[cast.key].numel for cast in casts)
        yield rule.finding(
            Level.NOTE,
            f"{counted(len(casts), 'tensor')} of {counted(total, 'value')} to be cast to {dtype}{become}",
            keys=[cast.key for cast in casts],
            evidence={"become_zero": lost} if lost else {},
            fix=Fix(casts, Applicability.SAFE if is_lossless else Applicability.UNSAFE, asked=True),
        )


def _castable(context: Context, dtype: str) -> Iterator[str]:
    is_small = DTYPES[dtype].itemsize == 1
    kept = set(_used_in_float32(context))
    layers = wanted_layers(context.checkpoint.specs, None).values()
    codes = {key for layer in layers for key in layer.parts.values()}  # after a cast they would pass for weights
    for key in context.statistics:
        spec = context.checkpoint.specs[key]
        if key in codes or spec.view in kept:
            continue
        is_plain = spec.storage is not None and not (spec.parts or spec.math_bits)
        is_other = DTYPES[spec.dtype].is_float and spec.dtype != dtype and spec.numel > 0
        is_weight = split_key(key)[1] != NUM_BATCHES_TRACKED  # counters have a fixed dtype: BUF103
        if is_plain and is_other and is_weight and (not is_small or is_matrix(key, spec, context.target)):
            yield key


def _used_in_float32(context: Context) -> Iterator[object]:
    """Yield the views of the tensors, besides masters, that training in half precision used in float32.

    They are found by what they view, because keys may have been renamed."""
    opened = context.before or context.checkpoint
    for fact in opened.remarked(Kind.MASTERS):
        yield from (opened.specs[key].view for key in fact.data["kept"] if key in opened.specs)
