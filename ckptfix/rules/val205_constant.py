"""VAL205 constant: a weight matrix in which every value is the same.

## What it finds
Float matrices and kernels of 64 elements or more, named `weight` (of an LSTM or GRU too), in which every value is
the same non-zero number. Not reported if the model initialises the layer like that, and without a model for 1 (norms
over several dimensions), for the mean over the inputs (`1/fan_in`, `1/kernel size`: fixed blur and average kernels),
and for norms by name.

## Why it matters
All outputs of such a layer are the same, and so are their gradients: it never learns to tell them apart. Typical causes
are a placeholder (`torch.full`), a broken conversion or a failed initialisation.

## Fix safety
Unsafe: `--replace VAL205` with `--fill FILE` or `--fill target` replaces the values.

## Example
`fc.weight`: 512000 of 512000 values are 0.01.

## Sources
torch/nn/init.py; https://www.deeplearningbook.org/contents/optimization.html (section 8.4, on breaking symmetry)"""

import math
import re
from collections.abc import Iterator

from ckptfix.core.finding import Finding, Level, counted
from ckptfix.core.spec import TensorStatistics
from ckptfix.rules.replacing import from_elsewhere, replaced_apart
from ckptfix.rules.rule import Context, Rule

SMALLEST = 64  # elements; a smaller matrix of one value may be intended
_WEIGHT = r"weight(_[ih]h_l\d+(_reverse)?)?$"
_SCALE = r"(?i)(norm|ln|bn|scale|gamma|blur|pool|mean|avg|filter|upsample)[^.]*\.weight$"


def constant(rule: Rule, context: Context) -> Iterator[Finding]:
    """Report the matrices of one value; replace them if asked to."""
    statistics = context.matrices
    found = [key for key, figures in statistics.items() if _is_constant(key, figures, context)]
    for keys, fix in replaced_apart(rule, context, found, lambda key, figures: not figures.is_constant):
        yield rule.finding(
            Level.WARNING,
            f"{counted(len(keys), 'weight matrix')} {'has' if len(keys) == 1 else 'have'} only one value",
            keys=keys,
            evidence={
                "tensors": {key: {"value": statistics[key].maximum, "numel": statistics[key].numel} for key in keys}
            },
            fix=fix,
            remedies=from_elsewhere(rule),
        )


def _is_constant(key: str, figures: TensorStatistics, context: Context) -> bool:
    spec = context.checkpoint.specs[key]
    is_large = spec.numel >= SMALLEST and bool(re.search(_WEIGHT, key))
    if not figures.is_constant or figures.maximum == 0 or not is_large:
        return False
    if (start := context.start(key)) is not None:
        return not start.is_constant
    # 1 or a mean is by design, to the precision of the dtype.
    usual = (1.0, 1 / math.prod(spec.shape[1:]), 1 / math.prod(spec.shape[2:]), 1 / spec.shape[0])
    is_usual = any(math.isclose(abs(figures.maximum), value, rel_tol=1e-2) for value in usual)
    return not is_usual and not re.search(_SCALE, key)
