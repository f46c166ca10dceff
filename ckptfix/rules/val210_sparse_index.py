"""VAL210 sparse-index: a sparse tensor with an index outside its shape.

## What it finds
Indices of a sparse tensor (COO, CSR, CSC, BSR, BSC) that are negative or beyond its shape, and compressed indices that
do not run from zero to the number of values.

Also tensors that torch refuses for another reason: indices that are not sorted or that occur twice, in a compressed
layout or in a COO tensor that claims to be coalesced. `torch.sparse_csr_tensor` builds them without a check.

## Why it matters
torch.load with `weights_only=True` refuses both since 2.15. Older releases do not check them by default: the first
operation on an index outside the shape fails, or accesses foreign memory.

## Fix safety
There is no fix. If an index is outside the shape, the right positions are unknown, and the file is damaged or hostile.
The other tensors have to be built again by your code; `--for-torch 2.14` accepts them as they are.

## Example
A tensor of shape [3, 10] with a value at [1, 99].

## Sources
https://pytorch.org/docs/stable/generated/torch.sparse.check_sparse_tensor_invariants.html"""

import warnings
from collections.abc import Iterator

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.finding import Blocks, Finding, Level, advise, counted
from ckptfix.core.spec import TensorSpec
from ckptfix.errors import UnreadableError
from ckptfix.rules.rule import Context, Rule
from ckptfix.values.statistics import tensor_statistics
from ckptfix.values.walk import Walk

CHECKED_SINCE = "2.15"  # the first release of torch whose torch.load checks sparse tensors with weights_only=True


def sparse_index(rule: Rule, context: Context) -> Iterator[Finding]:
    """Report the sparse tensors with invalid indices; propose nothing."""
    sparse = {key: spec for key, spec in context.checkpoint.specs.items() if spec.parts}
    keys = tuple(key for key, spec in sparse.items() if not _is_sound(spec))
    refused = [key for key in sparse if key not in keys and _is_refused(context.checkpoint, key)]
    if refused and not context.settings.is_for_torch_before(CHECKED_SINCE):
        yield rule.finding(
            Level.WARNING,
            f"{counted(len(refused), 'sparse tensor')} with indices that are not sorted, or that occur twice: "
            f"torch.load refuses this file with its default weights_only=True since {CHECKED_SINCE}",
            keys=refused,
            remedies=advise(
                "if you trust the file, read it with weights_only=False, build these tensors again from sorted "
                "indices, and save them; for an older torch, add --for-torch 2.14"
            ),
            blocks=Blocks.WRITING,
        )
    if keys:
        yield rule.finding(
            Level.ERROR,
            f"{counted(len(keys), 'sparse tensor')} with indices outside the shape",
            keys=keys,
            remedies=advise("fetch the file again; do not use this one"),
            blocks=Blocks.WRITING,
        )


def _is_refused(checkpoint: Checkpoint, key: str) -> bool:
    """Return whether torch's own check refuses a sparse tensor."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # damaged bytes have a finding of their own
            checkpoint.read(key)
    except UnreadableError as error:
        return isinstance(error.__cause__, RuntimeError)
    return False


def _is_sound(spec: TensorSpec) -> bool:
    """Return whether each index is inside the shape. A block counts with all its rows and columns."""
    values = spec.parts["values"]
    if "indices" in spec.parts:
        indices = spec.parts["indices"]
        rows = indices.shape[0] if len(indices.shape) == 2 else 0
        return len(indices.shape) == 2 and all(
            _are_within(indices.at(at), 0, spec.shape[at] - 1) for at in range(min(rows, len(spec.shape)))
        )
    is_of_rows = "crow_indices" in spec.parts
    compressed, plain = (
        spec.parts[name]
        for name in (("crow_indices", "col_indices") if is_of_rows else ("ccol_indices", "row_indices"))
    )
    batches = len(compressed.shape) - 1
    block = values.shape[batches + 1 :] if spec.layout in ("sparse_bsr", "sparse_bsc") else (1, 1)
    sizes = [size // max(step, 1) for size, step in zip(spec.shape[batches : batches + 2], block[:2], strict=False)]
    if len(sizes) != 2 or not compressed.shape or not plain.shape:
        return False
    across, along = sizes if is_of_rows else sizes[::-1]
    return (
        compressed.shape[-1] == across + 1
        and _are_within(compressed, 0, plain.shape[-1])
        and _are_within(plain, 0, along - 1)
    )


def _are_within(indices: TensorSpec, least: int, most: int) -> bool:
    if indices.dtype not in ("int64", "int32") or not indices.numel:
        return not indices.numel
    if not Walk(indices).is_bounded:
        return False
    figures = tensor_statistics(indices)
    return least <= figures.minimum and figures.maximum <= most
