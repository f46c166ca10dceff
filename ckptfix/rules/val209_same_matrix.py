"""VAL209 same-matrix: two weight matrices with the same values, bit for bit.

## What it finds
Matrices of at least 64 values, named like a layer's, that are stored separately with the same bytes. Always a note.
Constant matrices, tied ones, and those of two sets of weights in one state_dict (`student.`, `teacher.`), which start
equal, are not reported.

## Why it matters
Training makes any two layers different. Equal ones were copied: a block of a file was written to the wrong place, a
loop loaded one layer's weights into all, or a teacher was never updated.

## Fix safety
There is no fix, and perhaps no need for one: some models start their blocks with the same weights, and share layers
that the file stores twice.

## Example
`layers.3.fc.weight` and `layers.4.fc.weight` hold the same 1048576 values.

## Sources
https://arxiv.org/abs/1909.11942 (layers that share their weights)"""

from collections import defaultdict
from collections.abc import Iterator

from ckptfix.core.finding import Finding, Level, counted
from ckptfix.reading.boxes import have_same_bytes
from ckptfix.reading.weights.prefixed_sets import copied_under, sets_of
from ckptfix.rules.rule import Context, Rule
from ckptfix.values.roles import is_layers_own

SMALLEST = 64  # values; smaller matrices may be equal by chance or design


def same_matrix(rule: Rule, context: Context) -> Iterator[Finding]:
    """Report groups of matrices with the same bytes; propose nothing."""
    specs = context.checkpoint.specs
    alike: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for key, figures in context.matrices.items():
        spec = specs[key]
        is_distinctive = not figures.is_constant and figures.nonfinite < figures.numel
        if spec.numel >= SMALLEST and is_distinctive and is_layers_own(key):
            # Matrices with equal bytes have equal extremes, and others hardly ever do.
            alike[spec.dtype, spec.shape, figures.zeros, figures.minimum, figures.maximum].append(key)
    groups = (_same(keys, context) for keys in alike.values() if len(keys) > 1)
    same = [group for group in groups if len(group) > 1]
    if same and not sets_of(specs) and not copied_under(specs):
        yield rule.finding(
            Level.NOTE,
            f"{counted(sum(map(len, same)), 'tensor')} in {counted(len(same), 'group')} with the same bytes",
            keys=[key for group in same for key in group],
            evidence={"groups": [list(group) for group in same]},
        )


def _same(keys: list[str], context: Context) -> list[str]:
    """Return the keys that hold the same bytes as the first one, in storages of their own."""
    specs, figures, path = context.checkpoint.specs, context.statistics, context.checkpoint.path
    first = specs[keys[0]]

    def is_same(key: str) -> bool:
        other = specs[key]
        if first.storage is None or other.storage is None or other.view == first.view:
            return False
        if first.strides == other.strides and figures[keys[0]].sample != figures[key].sample:
            return False  # without reading the file again
        return have_same_bytes(first, other, path)

    return [keys[0], *filter(is_same, keys[1:])]
