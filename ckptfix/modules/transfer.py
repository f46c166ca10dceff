"""Values go from a file, or from memory, straight into the tensors of a model.

torch copies by stores that read each line of memory before they overwrite it, and a mapped file that is cut off
meanwhile ends the program. The compiled library does neither, and needs no tensor to copy from; where there is none,
torch does the work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptfix.bytes.batches import batched, side_by_side
from ckptfix.bytes.compiled import MemoryGone, copy, library
from ckptfix.bytes.mapping import Mapping as FileMapping
from ckptfix.errors import UnreadableError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ckptfix.core.checkpoint import Checkpoint
    from ckptfix.core.spec import TensorSpec

PIECE = 1 << 23
"""Bytes that a thread copies in one go: some hundred microseconds, beside which handing them over is nothing."""


class _Piece(NamedTuple):
    """So many bytes at one address that are to be at another."""

    goal: int
    source: int
    nbytes: int


class Transfer:
    """The copies of the tensors of these keys into those of the model, where both are plain memory, alike, and share
    nothing. The keys are to be those that torch copies by itself.

    ``own`` has the model's tensors that will hold the values: put into the state_dict that torch loads, they leave it
    nothing to copy.
    """

    def __init__(self, model: nn.Module, checkpoint: Checkpoint, keys: Iterable[str]) -> None:
        self.own: dict[str, torch.Tensor] = {}
        self._pieces: list[_Piece] = []
        self._mapping = FileMapping()
        self._names = checkpoint.path, type(model).__name__
        if library() is not None and is_loaded_by_torch(model):
            self._plan(_tensors_of(model), {key: checkpoint.specs[key] for key in keys if key in checkpoint.specs})

    def _plan(self, tensors: Mapping[str, torch.Tensor], specs: Mapping[str, TensorSpec]) -> None:
        # Tied tensors are copied by torch: the last one counts. So is what might be a part of the model itself.
        memory = {key: tensor.untyped_storage().data_ptr() for key, tensor in tensors.items() if _is_memory(tensor)}
        homes = Counter(memory.values())
        for key, spec in specs.items():
            if key not in memory or homes[memory[key]] > 1 or not _is_alike(tensors[key], spec):
                continue
            source = self._address(spec, homes)
            if source is not None:
                self._pieces.extend(_pieces(tensors[key].data_ptr(), source, spec.nbytes))
                self.own[key] = tensors[key]

    def _address(self, spec: TensorSpec, homes: Mapping[int, int]) -> int | None:
        """Where the bytes of a contiguous tensor are in memory, or are mapped."""
        from ckptfix.reading.live import LiveBytes

        assert spec.storage is not None, "it has elements"
        source, start = spec.storage.source, spec.offset * spec.itemsize
        if not isinstance(source, LiveBytes):
            return self._mapping.address(source, start, spec.nbytes)
        is_apart = source.storage.device.type == "cpu" and source.storage.data_ptr() not in homes
        return source.storage.data_ptr() + start if is_apart else None

    def run(self) -> None:
        """Copy. Raises ``UnreadableError`` where the file was cut off meanwhile, with a part of the model changed."""
        path, model = self._names
        try:
            for _ in side_by_side(_copy_all, list(batched(self._pieces, lambda piece: piece.nbytes, PIECE))):
                pass
        except MemoryGone as error:
            raise UnreadableError(
                f"{path}: was cut off while it was copied into {model}; fetch the file again, and build the model anew "
                "before you use it, since it holds a part of the values"
            ) from error


def _tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    own: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    own.update(model.named_buffers(remove_duplicate=False))
    return own


def _pieces(goal: int, source: int, nbytes: int) -> Iterator[_Piece]:
    for start in range(0, nbytes, PIECE):
        yield _Piece(goal + start, source + start, min(PIECE, nbytes - start))


def _copy_all(pieces: Iterable[_Piece]) -> None:
    for piece in pieces:
        copy(piece.goal, piece.source, piece.nbytes)


def is_loaded_by_torch(model: nn.Module) -> bool:
    """Whether ``load_state_dict`` is that of torch, and copies into the tensors that are there."""
    import torch

    is_own = type(model).load_state_dict is torch.nn.Module.load_state_dict and "load_state_dict" not in vars(model)
    return is_own and not torch.__future__.get_swap_module_params_on_conversion()


def _is_memory(value: Any) -> bool:
    """Whether it is a tensor that lies in memory of this machine, and nothing more than that."""
    import torch

    is_tensor = type(value) in (torch.Tensor, torch.nn.Parameter)
    return is_tensor and value.device.type == "cpu" and value.layout is torch.strided


def _is_alike(goal: torch.Tensor, spec: TensorSpec) -> bool:
    """Whether the bytes of the one, one element behind the other, are what the other has to hold."""
    import torch

    if goal.dtype is not getattr(torch, spec.dtype, None) or goal.shape != spec.shape or not spec.numel:
        return False
    if spec.storage is None or not spec.is_contiguous or spec.math_bits or spec.quantizer is not None:
        return False
    if not goal.is_contiguous() or goal.is_inference():
        return False
    return not (goal.is_quantized or goal.is_conj() or goal.is_neg())
