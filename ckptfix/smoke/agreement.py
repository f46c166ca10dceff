"""How far the outputs of two runs are apart, and the comparison of a GPU with the CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptfix.core.smoke_result import Comparison
from ckptfix.smoke.forward import Pass, Subject, forward
from ckptfix.smoke.outcome import Outcome
from ckptfix.smoke.outputs import dtype_name, values_of

if TYPE_CHECKING:
    import torch

Outputs = Sequence[tuple[str, "torch.Tensor"]]

_TOLERANCE = {"float64": 1e-9, "float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
"""The share of the largest value by which the outputs of a deep network may differ between two devices, by dtype: some
hundred roundings of the last digit, one after another."""

LARGEST_FOR_CPU = 500_000_000
"""Parameters. Above this the CPU takes minutes for what the GPU does in a second, and the comparison is left out."""


def compare_outputs(ours: Outputs, theirs: Outputs, against: str, dtype: str = "float32") -> Comparison:
    """The outputs of one model in two runs; ``theirs`` is the reference, ``dtype`` that in which they were computed.

    A value that is finite in one alone is infinitely far from the other.
    """
    import torch

    if [(name, tensor.shape) for name, tensor in ours] != [(name, tensor.shape) for name, tensor in theirs]:
        return Comparison(against, unlike="the outputs are not of the same names and shapes")
    difference = scale = 0.0
    agreeing = classes = 0
    identical = True
    for (_, left), (_, right) in zip(ours, theirs, strict=True):
        here, there = values_of(left).cpu(), values_of(right).cpu()
        if not here.numel():
            identical = identical and torch.equal(left.cpu(), right.cpu())
            continue
        identical = identical and here.dtype == there.dtype and torch.equal(here, there)
        here, there = here.double(), there.double()
        apart = torch.where((here == there) | (here.isnan() & there.isnan()), 0.0, (here - there).abs())
        difference = max(difference, float(apart.nan_to_num(nan=torch.inf).max()))
        finite = there[there.isfinite()].abs()
        scale = max(scale, float(finite.max()) if finite.numel() else 0.0)
        if left.ndim >= 2 and left.shape[-1] > 1:
            same = here.argmax(-1) == there.argmax(-1)
            agreeing, classes = agreeing + int(same.sum()), classes + same.numel()
    agreement = agreeing / classes if classes and math.isfinite(difference) else None
    return Comparison(against, identical, difference, scale, _TOLERANCE.get(dtype, 1e-3), agreement)


def compare_with_cpu(subject: Subject, run: Pass, base: Outcome) -> Comparison:
    """What the CPU gives on the same input, against what this device gave. The model is on the CPU afterwards."""
    import torch

    dtype = dtype_name(subject.dtype)
    if sum(parameter.numel() for parameter in subject.model.parameters()) > LARGEST_FOR_CPU:
        return Comparison("cpu", unlike="the model is too large to run there in good time")
    # The tensor cores round to 10 bits in convolutions unless told otherwise; that is a choice and no fault.
    with torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled, allow_tf32=False):
        first = forward(subject, run.arguments, base)
        again = forward(replace(subject, seed=subject.seed + 1), run.arguments, base)
    if not compare_outputs(first.outputs, again.outputs, "itself", dtype).is_close:
        return Comparison("cpu", unlike="the model draws random numbers")
    cpu = torch.device("cpu")
    # float16 lacks operators on the CPU, and to widen it changes no value
    wide = torch.float32 if subject.dtype == torch.float16 else subject.dtype
    subject.model.to(cpu)
    there = Subject(subject.model, cpu, subject.dtype, subject.seed)
    if wide != subject.dtype:
        there.convert(wide)
    reference = forward(there, run.arguments.to(cpu, wide), base)
    if reference.outcome.failure is not None:
        return Comparison("cpu", unlike=f"there it failed ({reference.outcome.failure.error})")
    return compare_outputs(first.outputs, reference.outputs, "cpu", dtype)
