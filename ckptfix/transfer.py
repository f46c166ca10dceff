"""Values go from a file, or from memory, straight into the tensors of a model.

torch copies by stores that read each line of memory before they overwrite it, and a mapped file that is cut off
meanwhile ends the program. The compiled library does neither; where there is none, torch does the work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptfix.errors import UnreadableError
from ckptfix.formats.batches import batched, side_by_side
from ckptfix.formats.compiled import MemoryGone, copy, library

if TYPE_CHECKING:
    import torch
    from torch import nn

PIECE = 1 << 23
"""Bytes that a thread copies in one go: some hundred microseconds, beside which handing them over is nothing."""


class _Piece(NamedTuple):
    """So many bytes at one address that are to be at another."""

    goal: int
    source: int
    nbytes: int


def transfer(model: nn.Module, state_dict: dict[str, Any], keys: Iterable[str], path: str) -> None:
    """Copy the tensors of these keys of a state_dict into those of the model, where both are plain memory, alike, and
    share nothing; and put the model's own in their places, so that torch finds nothing left to copy.

    The keys are to be those that torch copies by itself. Raises ``UnreadableError`` where the file at ``path`` was cut
    off meanwhile, with a part of the model changed.
    """
    if library() is None or not _is_loaded_by_torch(model):
        return
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    pairs = {key: (own[key], state_dict[key]) for key in keys if key in own and key in state_dict}
    pairs = {key: pair for key, pair in pairs.items() if _is_alike(*pair)}
    # Tied tensors are copied by torch: the last one counts. So is what might be a part of the model itself.
    homes = Counter(tensor.untyped_storage().data_ptr() for tensor in own.values() if _is_memory(tensor))
    pieces: list[_Piece] = []
    for key, (goal, given) in pairs.items():
        if homes[goal.untyped_storage().data_ptr()] == 1 and given.untyped_storage().data_ptr() not in homes:
            pieces.extend(_pieces(goal.data_ptr(), given.data_ptr(), given.nbytes))
            state_dict[key] = goal
    batches = list(batched(pieces, lambda piece: piece.nbytes, PIECE))
    try:
        for _ in side_by_side(_copy_all, batches):
            pass
    except MemoryGone as error:
        raise UnreadableError(
            f"{path}: was cut off while it was copied into {type(model).__name__}; fetch the file again, and build the "
            "model anew before you use it, since it holds a part of the values"
        ) from error


def _pieces(goal: int, source: int, nbytes: int) -> Iterable[_Piece]:
    for start in range(0, nbytes, PIECE):
        yield _Piece(goal + start, source + start, min(PIECE, nbytes - start))


def _copy_all(pieces: Iterable[_Piece]) -> None:
    for piece in pieces:
        copy(piece.goal, piece.source, piece.nbytes)


def _is_loaded_by_torch(model: nn.Module) -> bool:
    """Whether ``load_state_dict`` is that of torch, and copies into the tensors that are there."""
    import torch

    is_own = type(model).load_state_dict is torch.nn.Module.load_state_dict and "load_state_dict" not in vars(model)
    return is_own and not torch.__future__.get_swap_module_params_on_conversion()


def _is_alike(goal: torch.Tensor, given: Any) -> bool:
    """Whether the bytes of the one are what the other has to hold."""
    if not (_is_memory(goal) and _is_memory(given) and _is_run(goal) and _is_run(given)) or goal.is_inference():
        return False
    return goal.dtype == given.dtype and goal.shape == given.shape and goal.numel() > 0


def _is_memory(value: Any) -> bool:
    """Whether it is a tensor that lies in memory of this machine, and nothing more than that."""
    import torch

    is_tensor = type(value) in (torch.Tensor, torch.nn.Parameter)
    return is_tensor and value.device.type == "cpu" and value.layout is torch.strided


def _is_run(tensor: torch.Tensor) -> bool:
    """Whether its memory has its elements, as they are, one behind the other."""
    return tensor.is_contiguous() and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
