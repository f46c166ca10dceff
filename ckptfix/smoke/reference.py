"""Compares the outputs of a model with those on the CPU, and with those for the weights of ``--compare``.

Safe repairs are applied to the names of that checkpoint first, so that a file can be compared with its repaired copy. A
reference that does not load or run is reported, and fails nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.lazy import nn, torch
from ckptfix.core.settings import SOURCE, Settings
from ckptfix.core.smoke_result import Comparison
from ckptfix.core.target import target_from_module
from ckptfix.errors import CkptfixError
from ckptfix.reading.folders.chunks import is_same
from ckptfix.reading.opening import open_file
from ckptfix.rules import FOR_LOADING
from ckptfix.smoke.forward import LoadedModel, Pass, forward, load_strictly
from ckptfix.smoke.outcome import ExamOutcome, NotLoadedError, dtype_name, values_of

Outputs = Sequence[tuple[str, "torch.Tensor"]]

# The difference, relative to the largest value, that the outputs of a deep network may have between two devices, by
# dtype: the effect of some hundred consecutive roundings.
_TOLERANCE = {"float64": 1e-9, "float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}

# Parameters above which the comparison is skipped: the CPU takes minutes for what the GPU does in a second.
LARGEST_FOR_CPU = 500_000_000


def compare_outputs(ours: Outputs, theirs: Outputs, against: str, dtype: str = "float32") -> Comparison:
    """Compare the outputs of two runs of a model. ``theirs`` is the reference, ``dtype`` the one they were computed in.

    If a value is finite in only one of them, the difference is infinite."""
    if [(name, tensor.shape) for name, tensor in ours] != [(name, tensor.shape) for name, tensor in theirs]:
        return Comparison(against, unlike="the outputs differ in names or shapes")
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


def compare_with_cpu(subject: LoadedModel, run: Pass, base: ExamOutcome) -> Comparison:
    """Compare the outputs on this device with those on the CPU. Leaves the model on the CPU."""
    dtype = dtype_name(subject.dtype)
    if sum(parameter.numel() for parameter in subject.model.parameters()) > LARGEST_FOR_CPU:
        return Comparison("cpu", unlike="the model is too large to run there in time")
    # Tensor cores round to 10 bits in convolutions by default, which is a choice and not a fault.
    with torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled, allow_tf32=False):
        first = forward(subject, run.arguments, base)
        again = forward(replace(subject, seed=subject.seed + 1), run.arguments, base)
    if not compare_outputs(first.outputs, again.outputs, "itself", dtype).is_close:
        return Comparison("cpu", unlike="the model draws random numbers")
    cpu = torch.device("cpu")
    # float16 lacks operators on the CPU, and widening changes no value
    wide = torch.float32 if subject.dtype == torch.float16 else subject.dtype
    subject.model.to(cpu)
    there = LoadedModel(subject.model, cpu, subject.dtype, subject.seed)
    if wide != subject.dtype:
        there.convert(wide)
    reference = forward(there, run.arguments.to(cpu, wide), base)
    if reference.outcome.failure is not None:
        return Comparison("cpu", unlike=f"it failed there ({reference.outcome.failure.error})")
    return compare_outputs(first.outputs, reference.outputs, "cpu", dtype)


_NAMES = Settings(select=FOR_LOADING, values=False)


class Reference(Struct, frozen=True):
    """A checkpoint file, its name in the report, and how to open it."""

    file: str
    label: str
    weights: str | None = None
    member: str | None = None
    salvage: bool = False

    @classmethod
    def of(cls, settings: Settings, source: str) -> Reference | None:
        """Return the reference of the settings, None without one. ``source`` is the file that is repaired."""
        asked = settings.compare
        if asked == SOURCE:
            return cls(source, source, settings.weights, settings.member, settings.salvage)
        return None if asked is None else cls(asked, asked)


def compare_with_reference(
    reference: Reference, tested: Checkpoint, build: Callable[[], nn.Module], run: Pass, base: ExamOutcome
) -> Comparison:
    """Compare the outputs of ``run``, with the weights of ``tested``, with those for the reference's weights in a new
    model from ``build``."""
    label = reference.label
    try:
        model = build()
        stored = open_file(reference.file, reference.weights, salvage=reference.salvage, member=reference.member)
        from ckptfix.engine.diagnosis import diagnose  # imports all rules, which few forward tests need

        theirs = diagnose(stored, target_from_module(model), _NAMES).result
        load_strictly(model, theirs.state_dict())
    except NotLoadedError as error:
        among = f", {error.keys[0]} among them" if error.keys else ""
        return Comparison(label, unlike=f"{error}{among}")
    except CkptfixError as error:
        return Comparison(label, unlike=f"{error}")
    if theirs.keys() != stored.keys():
        label += " after safe repairs"
    subject, _ = run.setting.prepare(model)
    other = forward(subject, run.arguments, base)
    if other.outcome.failure is not None:
        failure = other.outcome.failure
        return Comparison(label, unlike=f"with its weights the model failed ({failure.error})")
    seen = compare_outputs(run.outputs, other.outputs, label, dtype_name(subject.dtype))
    if seen.identical or seen.unlike:
        return seen
    differing = sum(not is_same(spec, theirs.specs.get(key), theirs.path) for key, spec in tested.specs.items())
    return replace(seen, differing=differing, tensors=len(tested.specs))
