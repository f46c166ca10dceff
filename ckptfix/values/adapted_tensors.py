"""Tensors of another shape, computed from the file's by a library's own formula.

Each formula gives the same bits as the function that it cites, in float32, float16 and bfloat16; the one for patch
embeddings, which takes a pseudoinverse, agrees to a relative tolerance of 1e-4."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby, product
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ckptfix.bytes.sources import CachedBytes, JoinedBytes
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.edits import PAD_TARGET, PRUNING, WEIGHT_NORM, Adapt, Fold
from ckptfix.core.lazy import torch
from ckptfix.core.spec import TensorSpec, computed, contiguous_strides
from ckptfix.errors import PlanError
from ckptfix.reading.boxes import row_major
from ckptfix.reading.tensors import bytes_of, one_thread, torch_dtype
from ckptfix.values.casting import computing, whole_tensor

if TYPE_CHECKING:
    Tensor = torch.Tensor


def adapted_spec(spec: TensorSpec, edit: Adapt, path: str, fresh: TensorSpec | None = None) -> TensorSpec:
    """Return the tensor that the edit makes of ``spec``; its values are computed when they are read.

    ``fresh`` is the model's own initial tensor. Raises ``PlanError`` if the recipe cannot make the shape."""
    refusal = PlanError(
        f"{path}: {edit.source} of {spec.dtype} {list(spec.shape)} cannot become {list(edit.shape)} by {edit.recipe}; "
        "the plan belongs to another file"
    )
    if (spec.dtype, spec.shape) != (edit.dtype, edit.before):
        raise refusal
    if edit.recipe == COPY and edit.shape == edit.before and spec.storage is not None:
        return _made(spec, edit, row_major(spec, path))
    if not is_adaptable(spec):
        raise refusal
    if edit.recipe == HEAD_ROWS or edit.recipe in _NEW_ROWS | _KEPT_ROWS:
        return _of_rows(spec, edit, path, fresh, refusal)
    if edit.recipe not in FORMULAS:
        raise refusal
    return _made(spec, edit, _whole(spec, edit.shape, lambda: _adapted(spec, edit, path)))


def _adapted(spec: TensorSpec, edit: Adapt, path: str) -> Tensor:
    with computing(path, f"{edit.source} cannot be adapted by {edit.recipe}"):
        made = FORMULAS[edit.recipe](whole_tensor(spec, path), edit)
    if tuple(made.shape) != edit.shape:
        raise PlanError(f"{path}: {edit.recipe} makes {list(made.shape)} of {edit.source}; create the plan again")
    return made


NORM = "norm"  # the recipe that computes a weight's `weight_g`


def folded_spec(spec: TensorSpec, beside: Sequence[TensorSpec], edit: Fold, path: str) -> TensorSpec:
    """Return the weight computed from its parts, with the same bits as torch when it removes the parametrization."""

    def compute() -> Tensor:
        with computing(path, f"{edit.key} is not of the form {edit.form}"):
            weight, *others = (whole_tensor(each, path) for each in (spec, *beside))
            if edit.form == WEIGHT_NORM:
                norms = [size if axis == edit.dim else 1 for axis, size in enumerate(edit.shape)]
                # torch reads the right number of norms, whatever their shape.
                return torch._weight_norm(weight, others[0].reshape(norms if edit.dim >= 0 else ()), edit.dim)
            if edit.form == PRUNING:
                return others[0].reshape(edit.shape).to(weight.dtype) * weight
            left, right = others
            return weight / torch.dot(left, torch.mv(weight.movedim(edit.dim, 0).reshape(len(left), -1), right))

    storages = (storage for each in (spec, *beside) for storage in each.storages)
    return computed(spec, edit.form, _whole(spec, edit.shape, compute), storages)


def is_adaptable(spec: TensorSpec) -> bool:
    """Return whether a tensor is a plain, non-empty tensor of floats."""
    is_plain = spec.storage is not None and spec.numel > 0 and not (spec.parts or spec.quantizer or spec.math_bits)
    return is_plain and DTYPES[spec.dtype].is_float and DTYPES[spec.dtype].packed == 1


def _made(spec: TensorSpec, edit: Adapt, source: Any) -> TensorSpec:
    return computed(spec, edit.recipe, source, spec.storages, shape=edit.shape)


def _whole(spec: TensorSpec, shape: tuple[int, ...], compute: Callable[[], Tensor]) -> CachedBytes:
    """Return the bytes of a tensor of this shape, computed when they are first read."""

    def made(first: int, last: int) -> memoryview:
        # A copy, because a row expanded to one row counts as contiguous with a stride of 0.
        whole = compute().clone(memory_format=torch.contiguous_format)
        return bytes_of(whole.flatten().view(torch.uint8))

    nbytes = replace(spec, shape=shape).nbytes
    return CachedBytes(nbytes, max(nbytes, 1), made)


# ---- rows that stay unchanged

_NEW_ROWS = frozenset({"vocab=pad:mean", "vocab=pad:zeros", PAD_TARGET})
_KEPT_ROWS = frozenset({"vocab=cut", "pos_embed=cut"})
HEAD_ROWS, COPY = "head", "depth"  # the recipes for classes by a map, and for repeated layers

# Rows averaged at a time: in float64 they fit into the processor's cache, which takes an eighth of the time.
_BLOCK = 64


def _of_rows(spec: TensorSpec, edit: Adapt, path: str, fresh: TensorSpec | None, refusal: PlanError) -> TensorSpec:
    """Return a tensor of rows of ``spec``, which keep every bit, and of rows that the recipe makes."""
    if spec.shape[:1] == edit.shape[:1] == (1,) and len(spec.shape) == len(edit.shape) == 2 and not edit.rows:
        words = None if fresh is None else fresh.at(0)
        made = _of_rows(spec.at(0), replace(edit, shape=edit.shape[1:]), path, words, refusal)
        return replace(made, shape=edit.shape, strides=contiguous_strides(edit.shape))
    if not spec.shape or spec.shape[1:] != edit.shape[1:]:
        raise refusal
    old, new = spec.shape[0], edit.shape[0]
    rows = edit.rows or tuple(range(new))  # an index past the last row: a row that the recipe makes
    has_new = any(row >= old for row in rows)
    if len(rows) != new or (has_new and edit.recipe in _KEPT_ROWS) or (edit.rows and max(rows) > old):
        raise refusal
    chunks: list[Any] = []
    # Consecutive rows are one chunk, and so are all new ones.
    for (is_new, _), run in groupby(
        enumerate(rows), key=lambda at: (at[1] >= old, 0 if at[1] >= old else at[0] - at[1])
    ):
        (place, row), *others = run
        shape = (1 + len(others), *spec.shape[1:])
        if is_new:
            chunks.append(_whole(spec, shape, partial(_new_rows, spec, edit, path, fresh, place, shape)))
        else:
            piece = replace(spec, shape=shape, offset=spec.offset + row * spec.strides[0])
            chunks.append(row_major(piece, path))
    return _made(spec, edit, JoinedBytes(tuple(chunks)))


def _new_rows(
    spec: TensorSpec, edit: Adapt, path: str, fresh: TensorSpec | None, place: int, shape: tuple[int, ...]
) -> Tensor:
    """Return the rows from ``place`` on that the file does not have."""
    if edit.recipe == PAD_TARGET:
        assert fresh is not None, "checked when the edit was applied"
        rows = whole_tensor(fresh, path)[place : place + shape[0]]
    elif edit.recipe == "vocab=pad:zeros":
        rows = torch.zeros(shape)
    else:  # the mean of all rows of the file, in float64
        total = torch.zeros(spec.shape[1:], dtype=torch.float64)
        with one_thread():
            for first in range(0, spec.shape[0], _BLOCK):
                some = (min(_BLOCK, spec.shape[0] - first), *spec.shape[1:])
                block = replace(spec, shape=some, offset=spec.offset + first * spec.strides[0])
                total += whole_tensor(block, path).double().sum(0)
        rows = (total / spec.shape[0]).expand(shape)
    return rows.to(torch_dtype(spec.dtype))


# ---- formulas


def _interpolated(
    mode: str, *, align_corners: bool | None = False, in_float32: bool = False, antialias: bool = False
) -> Callable[[Tensor, tuple[int, ...]], Tensor]:
    def resize(grid: Tensor, size: tuple[int, ...]) -> Tensor:
        from torch.nn.functional import interpolate

        values = grid.float() if in_float32 or antialias else grid
        return interpolate(values, size, mode=mode, align_corners=align_corners, antialias=antialias).to(grid.dtype)

    return resize


# https://github.com/huggingface/pytorch-image-models/blob/main/timm/layers/pos_embed.py (open_clip: the same)
_antialiased = _interpolated("bicubic", antialias=True)
_bicubic = _interpolated("bicubic")


def _geometric(grid: Tensor, size: tuple[int, ...]) -> Tensor:
    """https://github.com/huggingface/pytorch-image-models/blob/main/timm/layers/pos_embed_rel.py

    The points of the file's grid move apart with their distance from the centre, and the values between them are
    linear. BEiT's own code interpolates cubically, by a function that SciPy removed in 1.14."""
    places, weights = [], []
    for old, new in zip(grid.shape[2:], size, strict=True):
        points = torch.tensor(_progression(old // 2, new // 2))
        wanted = torch.arange(-(new // 2.0), new // 2.0 + 0.1, 1.0)
        right = torch.bucketize(wanted, points).clamp(max=old - 1)
        left = (right - 1).clamp(min=0)
        to_left, to_right = (wanted - points[left]).clamp(min=0), (points[right] - wanted).clamp(min=0)
        is_point = (to_left == 0) & (to_right == 0)
        to_left[is_point] = to_right[is_point] = 1.0
        places.append((left, right))
        weights.append((to_right, to_left))
    values = grid[0].float()
    total: Any = 0.0
    for row, column in product((0, 1), repeat=2):
        total = total + values[:, places[0][row][:, None], places[1][column]] * (
            weights[0][row][:, None] * weights[1][column]
        )
    spans = [one + other for one, other in weights]
    made: Tensor = total / (spans[0][:, None] * spans[1])
    return made.to(grid.dtype)


def _progression(old: int, new: int) -> list[float]:
    """Return ``2 * old + 1`` points in geometric progression from the centre to about ``new`` on both sides."""
    low, high = 1.01, 1.5
    while high - low > 1e-6:
        ratio = (low + high) / 2.0
        low, high = (low, ratio) if (1.0 - ratio**old) / (1.0 - ratio) > new else (ratio, high)
    distance, points = 1.0, []
    for step in range(old):
        points.append(distance)
        distance += ratio ** (step + 1)
    return [*(-point for point in reversed(points)), 0.0, *points]


def _resized(resize: Callable[[Tensor, tuple[int, ...]], Tensor], *, tokens_first: bool) -> Formula:
    """Return the formula for a table whose rows are the points of a grid and some tokens, which stay unchanged.

    A new grid with a leading extra axis also has time. ``resize`` gets ``[1, channels, *sizes]`` and the new sizes."""

    def formula(table: Tensor, edit: Adapt) -> Tensor:
        axes = len(edit.grids) // 2
        old, new = edit.grids[:axes], edit.grids[axes:]
        if is_of_blocks(edit.before, edit.shape):
            # https://github.com/huggingface/pytorch-image-models/blob/main/timm/models/nest.py (`resize_pos_embed`)
            blocks, points = (math.isqrt(size) for size in table.shape[1:3])
            grid = table.reshape(blocks, blocks, points, points, -1).permute(4, 0, 2, 1, 3).reshape(1, -1, *old)
            made = resize(grid, new).reshape(-1, *(blocks, new[0] // blocks) * 2)
            return made.permute(1, 3, 2, 4, 0).reshape(edit.shape)
        if table.dim() == 4 and table.shape[1] == edit.shape[1]:  # [1, channels, rows, columns]
            return resize(table, new)
        if table.dim() == 3 and not tokens_first:  # [heads, rows, columns]
            return resize(table.unsqueeze(0), new).reshape(edit.shape)
        channels, points = table.shape[-1], math.prod(old)
        rows = table.reshape(-1, channels)
        tokens = len(rows) - points
        kept, grid = (rows[:tokens], rows[tokens:]) if tokens_first else (rows[points:], rows[:points])
        made = resize(grid.T.reshape(1, channels, *old), new[-axes:]).reshape(channels, -1).T
        # The same table for each distance in time: https://github.com/SwinTransformer/Video-Swin-Transformer
        made = made.repeat(math.prod(new[:-axes]), 1)
        return torch.cat((kept, made) if tokens_first else (made, kept)).reshape(edit.shape)

    return formula


def _before_last(table: Tensor, edit: Adapt) -> Tensor:
    """https://github.com/huggingface/transformers/blob/main/src/transformers/models/yolos/modeling_yolos.py"""
    old, new = edit.grids[:2], edit.grids[2:]
    tables, end = table.reshape(-1, *table.shape[-2:]), 1 + math.prod(old)
    grid = tables[:, 1:end].transpose(1, 2).reshape(len(tables), -1, *old)
    made = _bicubic(grid, new).flatten(2).transpose(1, 2)
    return torch.cat((tables[:, :1], made, tables[:, end:]), 1).reshape(edit.shape)


def is_of_blocks(old: tuple[int, ...], new: tuple[int, ...]) -> bool:
    """Return whether the shapes are positions in blocks of an image, as in NesT: [1, blocks, points, channels]."""
    is_like = len(old) == len(new) == 4 and old[0] == 1 and (*old[:2], old[3]) == (*new[:2], new[3]) and old != new
    return is_like and all(math.isqrt(size) ** 2 == size for size in (old[1], old[2], new[2]))


def _heads_first(table: Tensor, edit: Adapt) -> Tensor:
    """https://github.com/huggingface/pytorch-image-models/blob/main/timm/models/tiny_vit.py"""
    old, new = edit.grids[:2], edit.grids[2:]
    return _antialiased(table.reshape(1, -1, *old), new).reshape(edit.shape)


def patch(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sides of the patch of a patch embedding; empty if they are unknown.

    A linear layer has the three colours of each pixel together, as in timm and transformers."""
    if len(shape) > 2:
        return shape[-2:]
    side = math.isqrt(shape[1] // 3)
    return (side, side) if side * side * 3 == shape[1] else ()


def _patch_embed(weight: Tensor, edit: Adapt) -> Tensor:
    """https://github.com/huggingface/pytorch-image-models/blob/main/timm/layers/patch_embed.py

    The new kernel gives for a resized patch what the old one gives for the patch (FlexiViT, arXiv 2212.08013)."""
    old, new = patch(tuple(weight.shape)), patch(edit.shape)
    basis = torch.eye(math.prod(old)).reshape(-1, 1, *old)
    resize = _antialiased(basis, new).reshape(math.prod(old), -1).T
    inverse: Tensor = torch.linalg.pinv(resize)
    if weight.dim() == 2:
        made = (weight.view(len(weight), -1, 3).mT.float() @ inverse).mT
    else:
        made = weight.flatten(-2).float() @ inverse
    return made.reshape(edit.shape).to(weight.dtype)


def _in_chans(weight: Tensor, edit: Adapt) -> Tensor:
    """https://github.com/huggingface/pytorch-image-models/blob/main/timm/models/_manipulate.py (`adapt_input_conv`)

    A single channel gets the sum of all. More channels repeat the file's, scaled to keep the sum over channels; timm
    does so for three channels in the file, and this for any number."""
    old, new = weight.shape[1], edit.shape[1]
    values = weight.float()
    if new * 3 == old > 3:  # a stem that merges neighbouring pixels has a group of three per pixel
        return values.reshape(len(weight), new, 3, *weight.shape[2:]).sum(2).to(weight.dtype)
    if new == 1:
        return values.sum(1, keepdim=True).to(weight.dtype)
    made = values.repeat(1, -(-new // old), *(1,) * (weight.dim() - 2))[:, :new] * (old / float(new))
    return made.to(weight.dtype)


def _mean_of_channels(weight: Tensor, edit: Adapt) -> Tensor:
    """https://github.com/ultralytics/ultralytics/pull/21067: each channel gets the mean of all, scaled as in timm's."""
    mean = weight.float().mean(1, keepdim=True) * (weight.shape[1] / float(edit.shape[1]))
    return mean.expand(edit.shape).to(weight.dtype)


def _repeated_in_time(weight: Tensor, edit: Adapt) -> Tensor:
    """https://arxiv.org/abs/1705.07750 (I3D): the kernel at each moment, divided by their number."""
    return (weight.float().unsqueeze(2) / edit.shape[2]).expand(edit.shape).to(weight.dtype)


def _in_the_centre(weight: Tensor, edit: Adapt) -> Tensor:
    """https://arxiv.org/abs/2103.15691 (ViViT): the kernel at the middle moment, zeros at the others."""
    made = weight.new_zeros(edit.shape)
    made[:, :, edit.shape[2] // 2] = weight
    return made


Formula = Callable[["Tensor", Adapt], "Tensor"]


def _norm(tensor: Tensor, edit: Adapt) -> Tensor:
    """Return the `weight_g` that `weight_norm` computes when it is applied. A row of zeros has no direction."""
    axes = [at for at, size in enumerate(edit.shape) if size > 1]
    norm = torch.norm_except_dim(tensor, 2, (axes or [0])[0] if edit.shape else -1)
    if not bool(norm.all()):
        raise PlanError(
            f"{edit.source} has rows of zeros, which weight_norm turns into NaN: load it into a model without"
        )
    return norm


# The formula of each recipe.
FORMULAS: Mapping[str, Formula] = {
    NORM: _norm,
    "pos_embed=timm": _resized(_antialiased, tokens_first=True),
    # https://github.com/huggingface/transformers/blob/main/src/transformers/models/vit/modeling_vit.py
    "pos_embed=plain": _resized(_bicubic, tokens_first=True),
    "pos_embed=yolos": _before_last,
    # https://github.com/huggingface/transformers/blob/main/src/transformers/models/dinov2/modeling_dinov2.py
    "pos_embed=dinov2": _resized(_interpolated("bicubic", in_float32=True), tokens_first=True),
    # https://github.com/huggingface/transformers/blob/main/src/transformers/models/siglip2/modeling_siglip2.py
    "pos_embed=siglip2": _resized(_interpolated("bilinear", antialias=True), tokens_first=True),
    # https://github.com/huggingface/transformers/blob/main/src/transformers/models/dpt/modeling_dpt.py
    "pos_embed=dpt": _resized(_interpolated("bilinear"), tokens_first=True),
    # https://github.com/huggingface/transformers/blob/main/src/transformers/models/radio/modeling_radio.py
    "pos_embed=radio": _resized(_interpolated("bilinear", in_float32=True), tokens_first=True),
    # https://github.com/huggingface/transformers/blob/main/src/transformers/models/vilt/modeling_vilt.py
    "pos_embed=vilt": _resized(_interpolated("bilinear", align_corners=True), tokens_first=True),
    # https://github.com/huggingface/transformers/blob/main/src/transformers/models/timesformer/modeling_timesformer.py
    "pos_embed=nearest": _resized(_interpolated("nearest", align_corners=None), tokens_first=True),
    # https://github.com/pytorch/vision/blob/main/torchvision/models/vision_transformer.py
    "pos_embed=torchvision": _resized(_interpolated("bicubic", align_corners=True), tokens_first=True),
    # https://github.com/mlfoundations/open_clip/blob/main/src/open_clip/model.py (`resize_text_pos_embed`)
    "pos_embed=linear": _resized(_interpolated("linear"), tokens_first=True),
    # https://github.com/microsoft/Swin-Transformer/blob/main/utils.py
    "window_bias=swin": _resized(_bicubic, tokens_first=False),
    "window_bias=beit": _resized(_geometric, tokens_first=False),
    # https://github.com/huggingface/transformers/blob/main/src/transformers/models/beit/modeling_beit.py
    "window_bias=bilinear": _resized(_interpolated("bilinear"), tokens_first=False),
    "window_bias=levit": _heads_first,
    "patch_embed=timm": _patch_embed,
    "in_chans=timm": _in_chans,
    "in_chans=mean": _mean_of_channels,
    "inflate=mean": _repeated_in_time,
    "inflate=centre": _in_the_centre,
}
