"""The strongest evidence for a map of names: values from the same training on both sides.

A file that was renamed, and perhaps fine-tuned since, has nearly the values of its reference. Up to a thousand elements
of each tensor are compared: tensors of other layers, or of another training, do not correlate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ckptfix.core.lazy import torch
from ckptfix.core.parts import Part, Shape, full, used_in_full
from ckptfix.maps.matches import Inference, Match
from ckptfix.maps.trees import Label

if TYPE_CHECKING:
    Values = Mapping[str, torch.Tensor]

SAMPLES, FEWEST = 1024, 64
"""The elements of a tensor that are compared, and the least number: fewer correlate by chance."""

ALIKE, APART = 0.8, 0.25
"""The least correlation of a pair, and the least distance to the correlation of either with any other tensor."""

SAME_TRAINING = 0.5  # least share of the target's elements in pairs if both files are from the same training


def by_values(
    inference: Inference | None, source: Mapping[str, Shape], target: Mapping[str, Shape], ours: Values, theirs: Values
) -> Inference | None:
    """Return the map that values show, completed by the inferred one; only the latter unless both sides are of one
    training."""
    found = _pairs(source, target, ours, theirs)
    for key in [key for key in target if key not in found]:  # a bias or counter follows its layer's matrix
        front, _, end = key.rpartition(".")
        other = f"{found.get(f'{front}.weight', '').rpartition('.')[0]}.{end}"
        if source.get(other) == target[key] and other not in found.values():
            found[key] = other
    found |= _equal_ones(found, source, target, ours, theirs)
    taken = set(found.values())
    matches = {key: Match((Part.whole(other, target[key]),), Label.CERTAIN) for key, other in found.items()}
    for key, match in inference.matches.items() if inference is not None else ():
        if key not in found and not any(part.source in taken for part in match.parts):
            matches[key] = _confirmed(key, match, ours, theirs)
    shown = sum(theirs[key].numel() for key, match in matches.items() if match.label is Label.CERTAIN)
    if shown < SAME_TRAINING * sum(theirs[key].numel() for key in target):
        return inference
    whole = used_in_full({key: match.parts for key, match in matches.items()}, source)
    kept = {key: matches[key] for key in target if key in whole}
    known = inference or Inference({}, dict(source), dict(target))
    found_in_values = replace(known, matches=kept, origin="values", maps=())
    found_in_values.doubt_torn_tensors()
    return found_in_values


def _pairs(source: Mapping[str, Shape], target: Mapping[str, Shape], ours: Values, theirs: Values) -> dict[str, str]:
    """Return, for each key of the target, the only key of the source with its values."""
    groups: dict[Shape, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for side, shapes in enumerate((source, target)):
        for key, shape in shapes.items():
            groups[shape][side].append(key)
    found = {}
    for here, there in groups.values():
        if here and there and theirs[there[0]].numel() >= FEWEST:
            table = _sampled(ours, here) @ _sampled(theirs, there).T
            for column, key in enumerate(there):
                row = int(table[:, column].argmax())
                best = float(table[row, column])
                table[row, column] = -inf
                rival = float(torch.maximum(table[:, column].max(), table[row].max()))
                table[row, column] = best
                if best >= max(ALIKE, rival + APART):
                    found[key] = here[row]
    return found


def _equal_ones(
    found: Mapping[str, str], source: Mapping[str, Shape], target: Mapping[str, Shape], ours: Values, theirs: Values
) -> dict[str, str]:
    """Return the pairs of tensors that occur several times on both sides, each in the block of its neighbours."""
    taken, blocks = set(found.values()), {_block(key): _block(other) for key, other in found.items()}
    spare: dict[tuple[Shape, str | None], list[str]] = defaultdict(list)
    for other in source.keys() - taken:
        spare[source[other], _block(other)].append(other)
    equal = {}
    for key in target.keys() - found.keys():
        place = full(target[key])
        others = spare.get((target[key], blocks.get(_block(key))), ())
        fitting = [other for other in others if _agree((Part(other, place, place),), theirs[key], ours)]
        if len(fitting) == 1:
            equal[key] = fitting[0]
    return equal if len(set(equal.values())) == len(equal) else {}


def _block(key: str) -> str:
    return ".".join(key.split(".")[:-2])


def _confirmed(key: str, match: Match, ours: Values, theirs: Values) -> Match:
    """Return the inferred match as certain if the values agree, and as ambiguous if a large tensor's do not."""
    wanted = theirs[key]
    if wanted.numel() < FEWEST:
        return match
    square = len(match.parts) == 1 and wanted.ndim == 2 and wanted.shape[0] == wanted.shape[1]
    first = match.parts[0]
    view = () if first.axes or len(first.box) == wanted.ndim else tuple(wanted.shape)  # a 1x1 convolution
    turned = (replace(first, axes=() if first.axes else (1, 0), view=view),) if square else ()
    for parts in (match.parts, turned):
        if parts and _agree(parts, wanted, ours):
            return replace(match, parts=parts, label=Label.CERTAIN)
    is_flat = float(_normal(wanted.reshape(1, -1)[:, :SAMPLES]).abs().sum()) == 0
    return match if is_flat or wanted.ndim < 2 else replace(match, label=Label.AMBIGUOUS)


def _agree(parts: tuple[Part, ...], wanted: torch.Tensor, ours: Values) -> bool:
    """Return whether each part of a tensor correlates with its source."""
    for part in parts:
        box, place = (tuple(slice(*bounds) for bounds in each) for each in (part.box, part.place))
        mine, other = ours[part.source][box], wanted[place]
        if part.axes:
            mine = mine.reshape(part.view or mine.shape).permute(part.axes)
        if mine.numel() < FEWEST or float((_row(mine) * _row(other)).sum()) < ALIKE:
            return False
    return True


def _sampled(values: Values, keys: list[str]) -> torch.Tensor:
    return torch.cat([_row(values[key]) for key in keys])


def _row(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sample of a tensor's elements, with mean 0 and length 1; zeros if all are equal."""
    at = torch.arange(tensor.numel())
    if tensor.numel() > SAMPLES:  # only in 16 places, because each reads a page of the file
        at = (torch.arange(16)[:, None] * (tensor.numel() // 16) + torch.arange(SAMPLES // 16)).flatten()
    index = torch.unravel_index(at, tensor.shape)
    bits = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor  # torch 2.4 cannot index float8
    return _normal(bits[index].cpu().view(tensor.dtype).reshape(1, -1))


def _normal(rows: torch.Tensor) -> torch.Tensor:
    centred = rows.double() - rows.double().mean(1, keepdim=True)
    return torch.nan_to_num(centred / centred.norm(dim=1, keepdim=True), 0.0, 0.0, 0.0)
