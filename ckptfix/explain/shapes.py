"""What two shapes of one key say: another head, other input channels or resolution, a part of a divided model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckptfix.core.finding import counted
from ckptfix.explain.mismatch import Shape


def shape_causes(shapes: Mapping[str, tuple[Shape, Shape]]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """What the shapes of each key, in the file and in the model, say: a sentence and the keys that it is about."""
    if not shapes:
        return
    empty = tuple(key for key, (stored, _) in shapes.items() if stored == (0,))
    if empty:
        yield (
            f"{counted(len(empty), 'key')} with nothing in the file (shape [0]): it is one part of a model that ZeRO"
            " or FSDP had divided, and the weights are in the other files.",
            empty,
        )
    others = {key: pair for key, pair in shapes.items() if key not in empty}
    if not others:
        return
    heads = {key for key, (stored, wanted) in others.items() if stored[1:] == wanted[1:] and stored and wanted}
    inputs = {key for key, pair in others.items() if _is_input(*pair)}
    positions = {key for key in others if "pos" in key.lower()}
    if positions:
        reason = "position embeddings of another resolution or length"
    elif heads == others.keys() and len(others) <= 4:
        (stored, wanted), key = next(iter(others.values())), next(iter(others))
        what = "entries of a vocabulary" if "emb" in key.lower() else "classes or output channels"
        reason = f"the same layer for {stored[0]} {what} in the file and {wanted[0]} in the model"
    elif inputs == others.keys():
        (stored, wanted) = next(iter(others.values()))
        reason = f"a layer for {stored[1]} input channels in the file and {wanted[1]} in the model"
    else:
        reason = "a model of another size or configuration than the file's, so look for its variant first"
    lines = tuple(f"{key}  file {list(stored)}  model {list(wanted)}" for key, (stored, wanted) in others.items())
    yield f"{counted(len(others), 'key')} of another shape: {reason}. strict=False does not help here.", lines


def _is_input(stored: Shape, wanted: Shape) -> bool:
    """Whether two weights of a convolution differ in their input channels alone."""
    return (
        len(stored) == len(wanted) == 4
        and stored[1] != wanted[1]
        and stored[:1] + stored[2:] == wanted[:1] + wanted[2:]
    )
