"""VAL202 all-zero: a weight matrix of only zeros.

## What it finds
Float matrices and kernels in which every value is exactly zero, unless the model initialises them with zeros or,
without a model, the name is that of a layer that starts at zero. Zero vectors of the same layer are listed with it. It
is an error if most matrices in the file are zero, else a warning.

These may start at zero, so they are a note unless the optimizer, the step count or the norms' batch counts show that
the file was trained:

- a last layer by name, or with a zero bias;
- a matrix that is zero in every block (`conv4.weight` or `mlp.2.weight` of all blocks), which may be most of the file;
- a matrix in a block with a scalar scale, as in Fixup;
- one of several tables in a file of only tables (word2vec).

Always a note: without a model, a matrix that is not called a weight or kernel (`latent_avg`, `confusion`), because it
may be a buffer, and one that starts at zero by its name, if the same layer of another block is not zero; norms with
zero weight (at least two if the file may be untrained); and biases, if all in the file are zero.

## Why it matters
The layer passes nothing on. Possible causes are weights that decayed and were then cast to float16 (everything below
3e-8 becomes zero), placeholders that a sharded run saved instead of its weights, or a layer that was never filled.

## Fix safety
Unsafe, and only on request: the values are not in the file. `--replace VAL202` with `--fill FILE`, `twin` or `target`
replaces them.

## Example
`layer4.0.weight` in float16: 576 of 576 values are zero, and so are the weight and bias of the norm after it.

## Sources
Layers that are zero by design: https://arxiv.org/abs/2106.09685 (LoRA), https://arxiv.org/abs/2302.05543 (ControlNet),
https://arxiv.org/abs/2212.09748 (adaLN-Zero), https://arxiv.org/abs/1706.02677 (the last gamma of a residual block)"""

import re
from collections import defaultdict
from collections.abc import Iterator

from ckptfix.core.buffers import NUM_BATCHES_TRACKED, split_key
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.finding import Finding, Level, counted
from ckptfix.rules.replacing import from_elsewhere, replaced_apart, replaces
from ckptfix.rules.rule import Context, Rule, StatisticsByKey
from ckptfix.values.optimizer import was_stepped
from ckptfix.values.roles import Norm, is_embedding, is_head, is_layers_own, is_zero_by_design, norms_after

MOST = 0.5  # share of zero matrices above which the whole file counts as empty
MOST_AT_START = 0.72  # the same in an untrained file if each is zero in every block: RWKV has 5 of 7
# Names of the last layer of a network that outputs images or numbers.
_LAST = r"(^|[._])(out|outputs?|final|last|pred|predict(or|ion)?)([._]|$)"


def all_zero(rule: Rule, context: Context) -> Iterator[Finding]:
    """Report the matrices that are zero and should not be; replace them if asked to."""
    specs, statistics = context.checkpoint.specs, context.statistics
    matrices = list(context.matrices)
    zero = [key for key in matrices if statistics[key].all_zero]
    is_trained = _is_trained(context)
    closed = frozenset() if is_trained else _closed_branches(zero, context)
    empty_file = len(zero) - len(closed) > max(MOST * len(matrices), 1) and not _is_at_start(zero, matrices, is_trained)
    suspects = _not_by_design(zero, context, use_names=not empty_file)
    excused = [] if empty_file else _excused(suspects, matrices, context, is_trained)
    excused += [key for key in suspects if key in closed and key not in excused]
    quiet = {*zero}.difference(suspects)
    excused += _unlike_others(quiet, matrices) if quiet and not context.usual else []
    excused = [key for key in excused if not replaces(context.settings, rule.code, key)]
    are_excused = set(excused)
    listed = reported = dict.fromkeys(key for key in suspects if key not in are_excused)
    if excused:
        yield rule.finding(
            Level.NOTE,
            f"{len(excused)} of {len(matrices)} weight matrices {'is' if len(excused) == 1 else 'are'} zero: initial "
            "values, untrained layers, or buffers",
            keys=excused,
            evidence={"matrices": len(matrices), "names": sorted({_role(key) for key in excused})},
        )
    if reported:
        norms = norms_after(context.checkpoint, reported)
        companions = [key for matrix in reported for key in _zero_companions(norms.get(matrix), statistics)]
        listed = dict.fromkeys((*reported, *companions))
        for keys, fix in replaced_apart(rule, context, listed, lambda key, figures: not figures.all_zero):
            some = [key for key in keys if key in reported]
            hold = "holds" if len(some) == 1 else "hold"
            if some:
                yield rule.finding(
                    Level.ERROR if empty_file else Level.WARNING,
                    f"{len(some)} of {len(matrices)} weight matrices {hold} nothing but zeros",
                    keys=keys,
                    evidence={
                        "tensors": {key: {"zeros": statistics[key].zeros, "numel": specs[key].numel} for key in some},
                        "matrices": len(matrices),
                        "zero_by_design": len(zero) - len(reported),
                    },
                    fix=fix,
                    remedies=from_elsewhere(rule),
                )
    ends = {key: split_key(key)[1] for key in statistics if len(specs[key].shape) == 1 and specs[key].numel > 1}
    gammas = [key for key, end in ends.items() if end == "weight" and statistics[key].all_zero]
    biases = [key for key, end in ends.items() if end.startswith("bias")]  # bias_ih_l0 too
    lost = [key for key in gammas if key not in listed]
    if len(lost) > (0 if is_trained else 1):
        start = "" if is_trained else ": initial values, or lost"
        yield rule.finding(Level.NOTE, f"{counted(len(lost), 'norm')} with a weight of zeros{start}", lost)
    if len(biases) > 1 and all(statistics[key].all_zero for key in biases):
        yield rule.finding(Level.NOTE, f"all {len(biases)} biases are zero: initial values, or lost", keys=biases)


def _not_by_design(zero: list[str], context: Context, *, use_names: bool) -> list[str]:
    """Return the matrices that do not start at zero, in the model or, without one, by their names."""
    if zero and context.usual:
        return [key for key in zero if (start := context.start(key)) is None or not start.all_zero]
    return [key for key in zero if not (use_names and is_zero_by_design(key))]


def _excused(suspects: list[str], matrices: list[str], context: Context, is_trained: bool) -> list[str]:
    """Return the suspects that may be buffers or untrained. With a model, that is already known."""
    if not suspects or context.usual:
        return []
    excused = {key for key in suspects if not is_layers_own(key)}
    if not is_trained:
        tables_only = all(map(is_embedding, matrices))  # word2vec: context vectors start at zero
        excused |= {key for key in suspects if is_head(key) or (is_embedding(key) and split_key(key)[1] != "weight")}
        excused |= set(suspects) if tables_only and len(suspects) < len(matrices) else set()
        last = [key for key in matrices[-1:] if key in suspects]
        biases = {key: context.statistics.get(f"{split_key(key)[0]}bias") for key in last}
        excused |= {key for key, bias in biases.items() if re.search(_LAST, key) or (bias and bias.all_zero)}
        excused |= _in_every_block(set(suspects), matrices)
    return [key for key in suspects if key in excused]


def _closed_branches(zero: list[str], context: Context) -> frozenset[str]:
    """Return the zero matrices of blocks with a scalar scale that is not zero, as in Fixup."""
    specs = context.checkpoint.specs
    scaled = {
        split_key(key)[0]
        for key, figures in context.statistics.items()
        if specs[key].numel == 1 and DTYPES[specs[key].dtype].is_float and not figures.all_zero
    }
    return frozenset(key for key in zero if split_key(split_key(key)[0][:-1])[0] in scaled - {""})


def _in_every_block(zero: set[str], matrices: list[str]) -> set[str]:
    """Return the matrices that are zero in every block, if there are at least two blocks."""
    members: dict[str, set[str]] = defaultdict(set)
    for key in matrices:
        for name in (_role(key), _role(key, 3), _place(key)):
            members[name].add(key)
    return {key for keys in members.values() if len(keys) > 1 and keys <= zero for key in keys}


def _unlike_others(designed: set[str], matrices: list[str]) -> list[str]:
    """Return the matrices that start at zero by their names, if the same layer of another block is not zero."""
    moved = {_place(key) for key in matrices if key not in designed}
    return [key for key in matrices if key in designed and _place(key) in moved]


def _role(key: str, names: int = 2) -> str:
    """Return a matrix's role in its block: its last names, without numbers."""
    return ".".join([segment for segment in key.split(".") if not segment.isdigit()][-names:])


def _place(key: str) -> str:
    """Return a matrix's path without numbers, except the number of the layer itself in a Sequential."""
    *blocks, layer, leaf = ["", *key.split(".")]
    return ".".join(("*", *(segment for segment in blocks if not segment.isdigit()), layer, leaf))


def _is_at_start(zero: list[str], matrices: list[str], is_trained: bool) -> bool:
    """Return whether most matrices may start at zero: an adapter without its base, or blocks like RWKV's."""
    if all(key.startswith("base_model.model.") for key in matrices) and all(map(is_zero_by_design, zero)):
        return True
    return (
        not is_trained and len(zero) <= MOST_AT_START * len(matrices) and _in_every_block({*zero}, matrices) >= {*zero}
    )


def _is_trained(context: Context) -> bool:
    """Return whether the file shows that steps were made, so that a last layer has left an initial zero."""
    counted = any(
        figures.maximum > 0 for key, figures in context.statistics.items() if split_key(key)[1] == NUM_BATCHES_TRACKED
    )
    return counted or was_stepped(context.checkpoint.root)


def _zero_companions(norm: Norm | None, statistics: StatisticsByKey) -> Iterator[str]:
    """Yield the weight and bias of the norm after a matrix if both are zero."""
    found = [key for key in norm.vectors if key in statistics] if norm else []
    if all(statistics[key].all_zero for key in found):
        yield from found
