"""VAL206 outlier-scale: a weight matrix hundreds of times as large as the others of its kind.

## What it finds
Float matrices and kernels with at least 64 elements, named `weight`, whose RMS relative to torch's default
initialisation (`1/sqrt(3 fan_in)`) is more than 500 times the median of their kind (convolution, linear, embedding) in
the same file, and more than 100 itself. With fewer than four others of its kind, a matrix is compared with all others
and has to be above 1000. Not reported if the model initialises the layer like that.

## Why it matters
Outputs saturate or overflow. Typical causes are a run that is diverging, a scale that was applied twice, or integers
stored as floats.

## Fix safety
Unsafe: `--replace VAL206` with `--fill FILE`, `twin` or `target` replaces the values.

## Example
`layers.7.mlp.up_proj.weight`: RMS 41, while its kind has 0.02.

## Sources
torch/nn/init.py and torch/nn/modules/linear.py (the default initialisation)"""

from collections.abc import Iterator, Mapping

from ckptfix.core.buffers import split_key
from ckptfix.core.finding import Finding, Level, counted
from ckptfix.core.spec import TensorSpec, TensorStatistics
from ckptfix.rules.replacing import from_elsewhere, replaced_apart
from ckptfix.rules.rule import Context, Rule
from ckptfix.values.roles import is_scale_free, kind, median, usual_rms

SMALLEST = 64  # elements; the RMS of a smaller matrix says little

# Least ratios of the RMS to the median of its kind and to the initial RMS, and the number of others of its kind.
OF_KIND, OF_START, PEERS = 500.0, 100.0, 4
OF_START_ALONE = 1000.0  # `OF_START` for a layer with too few others of its kind


def outlier_scale(rule: Rule, context: Context) -> Iterator[Finding]:
    """Report the matrices of another order of magnitude; replace them if asked to."""
    statistics, specs = context.statistics, context.checkpoint.specs
    scales = {
        key: figures.rms / usual_rms(specs[key])
        for key, figures in context.matrices.items()
        if specs[key].numel >= SMALLEST and "weight" in split_key(key)[1] and not is_scale_free(key) and figures.rms > 0
    }
    if max(scales.values(), default=0.0) <= OF_START:
        return
    medians = _medians(scales, specs)

    def is_large(key: str, scale: float) -> bool:
        return scale > max(OF_KIND * medians[key], OF_START)

    def starts_so(key: str) -> bool:
        start = context.start(key)
        return start is not None and statistics[key].rms <= OF_START * start.rms

    def is_sound(key: str, figures: TensorStatistics) -> bool:
        return not (is_large(key, figures.rms / usual_rms(specs[key])) or figures.all_zero)

    found = [key for key in medians if is_large(key, scales[key]) and not starts_so(key)]
    for keys, fix in replaced_apart(rule, context, found, is_sound):
        worst = max(scales[key] / medians[key] for key in keys)
        verb, whose = ("is", "its") if len(keys) == 1 else ("are", "their")
        yield rule.finding(
            Level.WARNING,
            f"{counted(len(keys), 'weight matrix')} {verb} up to {worst:.2g} times as large as others of {whose} kind",
            keys=keys,
            evidence={
                "tensors": {
                    key: {
                        "rms": statistics[key].rms,
                        "median_rms_of_kind": medians[key] * usual_rms(specs[key]),
                        "absmax": statistics[key].absmax,
                    }
                    for key in keys
                },
                "thresholds": {"of_kind": OF_KIND, "of_start": OF_START},
            },
            fix=fix,
            remedies=from_elsewhere(rule),
        )


def _medians(scales: Mapping[str, float], specs: Mapping[str, TensorSpec]) -> Mapping[str, float]:
    """Return, for every matrix with enough others to compare, the median scale of its kind, or else of all others."""
    kinds: dict[str, dict[str, float]] = {}
    for key, scale in scales.items():
        kinds.setdefault(kind(key, specs[key]), {})[key] = scale
    usual: dict[str, float] = {}
    for same in kinds.values():
        if len(same) > PEERS:
            usual |= dict.fromkeys(same, median(same.values()))
            continue
        for key in same:
            others = [scale for other, scale in scales.items() if other != key]
            usual |= {key: max(median(others), OF_START_ALONE / OF_KIND)} if others else {}
    return usual
