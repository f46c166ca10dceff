"""VAL101 non-finite: the file holds NaN or infinite values.

## What it finds
Every tensor with a NaN, and every parameter or running statistic with an infinity, with the counts, the position of the
first such value, and the affected channels (indices of the first dimension). One value is enough.

Infinities are not reported in attention masks, in quantization observers without data, as a best result so far or an
unused bound, nor is -Inf in tables of scores or transitions. With a model, that means any buffer except running
statistics; for a frozen parameter, and without a model, the name decides. A buffer that is NaN throughout in the file
and in a fresh model is fine.

Each other part of the file (another set, an average without names) with such values is a separate finding: a warning if
it may be weights and neither a model nor `--weights` is given, otherwise a note. OPT103 finds those of optimizers.

## Why it matters
The file loads, and the forward pass is NaN from such a tensor on. The cause is a run that diverged, or a cast to
float16 (values above 65504 become infinite).

## Fix safety
Unsafe, and only on request, because the right values are not in these tensors.

- `--replace VAL101 --fill twin` takes them from another set of weights in the file (an EMA twin) that is finite there,
  `--fill FILE` from another checkpoint, `--fill target` from the model's initialisation.
- For a norm, `--recalibrate data.npy` measures the statistics again, and `--reset-running-stats` makes them fresh.
- `--zero-non-finite` sets the values to zero and keeps the others. This is a last resort, because it cuts connections,
  and is not suggested if a twentieth of a tensor or more is lost.

Casting back to float32 does not restore an overflowed value.

## Example
`bn1.running_var` holds 1 NaN in 64 values: outputs are finite in training mode and NaN in eval mode.

## Sources
https://github.com/csjliang/LPTN/issues, https://github.com/ultralytics/ultralytics/pull/24731,
torch/nn/modules/batchnorm.py"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckptfix.core.checkpoint import is_inside
from ckptfix.core.edits import NON_FINITE, Edit, Zero
from ckptfix.core.finding import FILE, Finding, Level, Remedy, advise
from ckptfix.core.lazy import np
from ckptfix.core.objects import tensors_in
from ckptfix.core.spec import TensorSpec, TensorStatistics
from ckptfix.maps.optimizer_states import parts_beside
from ckptfix.reading.weights.containers import is_averaged
from ckptfix.rules.replacing import Replacements, cured_apart, for_running_statistics, reset_edits
from ckptfix.rules.rule import Context, Rule, affected
from ckptfix.values.casting import can_be_zeroed
from ckptfix.values.roles import is_buffer, is_running_statistic, may_be_infinite
from ckptfix.values.scan import channels_with

# Last segments of tables whose entries are added to a path's score, as in a CRF or for RNA energies.
_SCORES = re.compile(r"(^|_)(scores?|transitions?|log_?(probs?|priors?))(_|$)")


def non_finite(rule: Rule, context: Context) -> Iterator[Finding]:
    """Report the tensors that are not finite: errors, then warnings, each with those that a flag cures first."""
    bad: dict[str, Level] = {}
    for key, figures in context.statistics.items():
        level = _level(key, figures, context)
        if level is not None:
            bad[key] = level
    replacements = Replacements(context)
    cures = {key: _cure(rule, key, context, replacements) for key in bad}
    for level in (Level.ERROR, Level.WARNING):
        for keys, fix in cured_apart([key for key in bad if bad[key] is level], cures):
            tensors = {key: context.statistics[key] for key in keys}
            specs = context.checkpoint.specs
            yield rule.finding(
                level,
                _message(tensors),
                keys=keys,
                evidence={"tensors": {key: _evidence(specs[key], tensors[key]) for key in keys}},
                fix=fix,
                remedies=() if fix else _remedies(rule, tuple(keys), context, replacements),
            )
    for key, entry in context.checkpoint.entries.items():
        if key not in context.checkpoint.specs and (inner := _not_finite_in(list(tensors_in(entry)), context)):
            yield rule.finding(
                Level.ERROR,
                f"in the packed weights of {key}, {_message(inner)}",
                keys=(key,),
                evidence={"tensors": len(inner)},
                remedies=advise("use an earlier checkpoint, or pack the float model's weights again"),
            )
    yield from _beside(rule, context)


def _beside(rule: Rule, context: Context) -> Iterator[Finding]:
    """Report every other part of the file with NaN or +Inf, except optimizers. -Inf may be a mask.

    It is a warning for weights if the user has not said which ones are meant; any other part may be a log."""
    checkpoint = context.checkpoint
    for place, specs, is_optimizer in parts_beside(checkpoint):
        if is_optimizer:
            continue
        if bad := _not_finite_in(specs, context):
            is_set = any(is_inside(each.name, place) for each in checkpoint.candidates) or is_averaged(place)
            is_meant = context.target is None and context.settings.weights is None
            yield rule.finding(
                Level.WARNING if is_set and is_meant else Level.NOTE,
                f"outside the weights, in {place}, {_message(bad)}",
                evidence={"part": place, "tensors": len(bad)},
                remedies=advise(f"do not load {place} from this file"),
            )


def _not_finite_in(specs: Sequence[TensorSpec], context: Context) -> dict[str, TensorStatistics]:
    """Return the statistics of the tensors with NaN or +Inf, by number."""
    wanted = {str(number): spec for number, spec in enumerate(specs) if spec.numel > 1}
    found = context.statistics_of(wanted) if wanted else {}
    return {number: figures for number, figures in found.items() if figures.nan or figures.pos_inf}


def _level(key: str, figures: TensorStatistics, context: Context) -> Level | None:
    if not figures.nonfinite:
        return None
    if figures.nan:
        return None if _is_unset(key, figures, context) else Level.ERROR
    spec = context.checkpoint.specs[key]
    is_impossible = figures.neg_inf == figures.nonfinite and _SCORES.search(key.rpartition(".")[2])
    if is_impossible or may_be_infinite(key, spec, context.target):
        return None
    is_other_buffer = is_buffer(key, spec, context.target) and not is_running_statistic(key)
    return Level.WARNING if is_other_buffer else Level.ERROR


def _is_unset(key: str, figures: TensorStatistics, context: Context) -> bool:
    """Return whether a buffer is NaN throughout, as in a fresh model."""
    if figures.nan != figures.numel or is_running_statistic(key):
        return False
    start = context.start(key) if is_buffer(key, context.checkpoint.specs[key], context.target) else None
    return start is not None and start.nan == start.numel


def _cure(rule: Rule, key: str, context: Context, replacements: Replacements) -> tuple[Edit, ...]:
    """Return the edits that the user's flags ask for: other values, a fresh norm, or, last of all, zeros."""
    if replaced := replacements.of(rule.code, key):
        return replaced
    if is_running_statistic(key):
        return reset_edits(key, context)
    spec = context.checkpoint.specs[key]
    if context.settings.zero_non_finite and can_be_zeroed(spec):
        return (Zero(key, spec.dtype, NON_FINITE),)
    return ()


def _message(tensors: Mapping[str, TensorStatistics]) -> str:
    counts = {
        "NaN": sum(figures.nan for figures in tensors.values()),
        "+Inf": sum(figures.pos_inf for figures in tensors.values()),
        "-Inf": sum(figures.neg_inf for figures in tensors.values()),
    }
    listed = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    total = sum(figures.numel for figures in tensors.values())
    which = "1 tensor is" if len(tensors) == 1 else f"{len(tensors)} tensors are"
    return f"{which} not finite: {listed} among {total} values"


def _evidence(spec: TensorSpec, figures: TensorStatistics) -> dict[str, Any]:
    counts = {"nan": figures.nan, "pos_inf": figures.pos_inf, "neg_inf": figures.neg_inf, "numel": figures.numel}
    first = figures.first_nonfinite
    place = None if first is None else list(map(int, np.unravel_index(first, spec.shape)))
    evidence: dict[str, Any] = {**counts, "first_index": place}
    return evidence | affected(channels_with(spec, lambda values: ~np.isfinite(values)), spec)


def _remedies(rule: Rule, keys: tuple[str, ...], context: Context, replacements: Replacements) -> tuple[Remedy, ...]:
    twins = [replacements.sound_twin(key) for key in keys]
    places = list(dict.fromkeys(twin.place for twin in twins if twin))
    if places and all(twins):
        named = ", ".join(place or "the other end of the tie" for place in places)
        whole = (Remedy.of("uses that whole set", weights=places[0]),) if len(places) == 1 and places[0] else ()
        from_twin = (("replace", (rule.code,)), ("fill", "twin"))
        return (Remedy(from_twin, f"takes them from {named}, finite there"), *whole)
    if all(is_running_statistic(key) for key in keys):
        return for_running_statistics(rule)
    others = [
        candidate.name for candidate in context.checkpoint.candidates if candidate.path != context.checkpoint.container
    ]
    look = advise(f"see whether the other set of this file, {others[0]}, is finite") if others else ()
    return (
        *look,
        Remedy.of("takes these tensors from an earlier checkpoint", replace=(rule.code,), fill=FILE),
        *(_ZERO if all(_are_few(context.statistics[key]) for key in keys) else ()),
    )


_ZERO = (Remedy.of("sets these values to zero, as a last resort", zero_non_finite=True),)


def _are_few(figures: TensorStatistics) -> bool:
    """Return whether a tensor stays mostly intact with zeros in place of these values."""
    is_noise = figures.absmax > 1e15  # then the other values are not weights either
    return figures.nonfinite <= max(8, figures.numel // 20) and not is_noise
