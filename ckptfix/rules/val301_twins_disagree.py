"""VAL301 twins-disagree: a tensor was saved twice, and one of the two is broken.

## What it finds
An error: tensors of the chosen set of weights that are broken while their twin is intact. A warning, if no set was
chosen with `--weights`: another set in the file is broken while this one is intact.

Twins are the raw weights and their moving average (EMA), in separate state_dicts or in one, and the two ends of a tie
that were both stored. The matrices of two state_dicts have to correlate: two critics have the same keys but are not
twins. Broken means unexpected NaN or infinities, a negative variance, a zero matrix while the twin is not zero, or an
RMS below a millionth of the twin's.

## Why it matters
One bad step turns an average into NaN forever, and when a run diverges, its average stays intact for a while. Both
load.

## Fix safety
Unsafe, because the twin's values differ: `--replace VAL301 --fill twin` takes the broken keys from the intact twin, and
`--weights NAME` the whole set.

## Example
`state_dict` has NaN in 62 keys, `state_dict_ema` in none: repair with `--weights state_dict_ema`.

## Sources
https://github.com/huggingface/pytorch-image-models/blob/main/timm/utils/model_ema.py,
https://huggingface.co/docs/safetensors/torch_shared_tensors (ties that are stored twice)"""

from collections.abc import Iterator, Mapping

from ckptfix.core.buffers import split_key
from ckptfix.core.finding import Finding, Level, Remedy, advise, counted
from ckptfix.core.spec import TensorStatistics
from ckptfix.rules.replacing import replaced_apart
from ckptfix.rules.rule import Context, Rule
from ckptfix.values.decode import encoding
from ckptfix.values.roles import is_matrix, is_zero_by_design, may_be_infinite
from ckptfix.values.statistics import tensor_statistics
from ckptfix.values.twins import Twin, twin_sets, twins_beside

# Share of the twin's RMS below which a matrix is broken. Even an average after one update has more.
NOTHING_LEFT = 1e-6


def twins_disagree(rule: Rule, context: Context) -> Iterator[Finding]:
    """Compare tensors that were saved twice; take the sound twin if asked to.

    Another set is read only at the keys that are broken here, or at all keys if no set was chosen."""
    if beside := twins_beside(context.checkpoint, context.target):
        yield from _findings(rule, context, beside, reads_all=True)
    for _, twins in twin_sets(context.checkpoint):
        yield from _findings(rule, context, twins, reads_all=context.settings.weights is None)


def _findings(rule: Rule, context: Context, twins: Mapping[str, Twin], *, reads_all: bool) -> Iterator[Finding]:
    broken, worse = [], []
    for key, twin in twins.items():
        own = context.statistics.get(key)
        if (
            own is None
            or not (twin.spec.has_data and not twin.spec.parts and encoding(twin.spec.dtype) is not None)
            or not (reads_all or _is_suspect(own))
        ):
            continue
        other = tensor_statistics(twin.spec)
        if _is_broken(key, own, other, context) and not _is_broken(key, other, own, context):
            broken.append(key)
        elif _is_broken(key, other, own, context) and not _is_broken(key, own, other, context):
            worse.append(key)
    place = next(iter(twins.values())).place
    if broken:
        for keys, fix in replaced_apart(rule, context, broken, _is_sound):
            yield rule.finding(
                Level.ERROR,
                f"{counted(len(keys), 'key')} broken here and intact in {place or 'the twin next to it'}",
                keys=keys,
                evidence={"twins": {key: twins[key].label for key in keys}},
                fix=fix,
                remedies=(
                    Remedy.of("takes them from there", replace=(rule.code,), fill="twin"),
                    *((Remedy.of("uses the whole set", weights=place),) if place else ()),
                ),
            )
    # In the same state_dict, a broken twin is reported under its own name.
    if worse and place:
        yield rule.finding(
            Level.WARNING,
            f"{counted(len(worse), 'key')} broken in {place} and intact here",
            keys=worse,
            evidence={"twins": {key: twins[key].label for key in worse}},
            remedies=advise("keep this set; do not use the other one"),
        )


def _is_suspect(figures: TensorStatistics) -> bool:
    """Return whether a tensor may be broken by its own statistics."""
    return bool(figures.nonfinite) or figures.all_zero or figures.rms < NOTHING_LEFT


def _is_sound(key: str, figures: TensorStatistics) -> bool:
    return not _is_suspect(figures) and not (split_key(key)[1] == "running_var" and figures.minimum < 0)


def _is_broken(key: str, figures: TensorStatistics, twin: TensorStatistics, context: Context) -> bool:
    spec = context.checkpoint.specs[key]
    if figures.nan or (figures.nonfinite and not may_be_infinite(key, spec, context.target)):
        return True
    if split_key(key)[1] == "running_var":
        return figures.minimum < 0
    if not is_matrix(key, spec, context.target) or is_zero_by_design(key):
        return False
    return figures.rms < NOTHING_LEFT * twin.rms
