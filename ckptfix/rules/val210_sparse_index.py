"""VAL210 sparse-index: a sparse tensor with an index outside its shape.

## What it finds
Indices of a sparse tensor (COO, CSR, CSC, BSR, BSC) that are negative or beyond its shape, and compressed indices that
do not run from zero to the number of values.

## Why it matters
torch.load does not check them by default. The first operation on such a tensor fails, or accesses foreign memory.

## Fix safety
There is no fix: the right positions are unknown. A file with such a tensor is damaged or hostile.

## Example
A tensor of shape [3, 10] with a value at [1, 99].

## Sources
https://pytorch.org/docs/stable/generated/torch.sparse.check_sparse_tensor_invariants.html"""

from collections.abc import Iterator

from ckptfix.core.finding import Blocks, Finding, Level, advise, counted
from ckptfix.core.spec import TensorSpec
from ckptfix.rules.rule import Context, Rule
from ckptfix.values.statistics import tensor_statistics
from ckptfix.values.walk import Walk


def sparse_index(rule: Rule, context: Context) -> Iterator[Finding]:
    """Report the sparse tensors with invalid indices; propose nothing."""
    keys = tuple(key for key, spec in context.checkpoint.specs.items() if spec.parts and not _is_sound(spec))
    if keys:
        yield rule.finding(
            Level.ERROR,
            f"{counted(len(keys), 'sparse tensor')} with indices outside the shape",
            keys=keys,
            remedies=advise("fetch the file again; do not use this one"),
            blocks=Blocks.WRITING,
        )


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
