"""The tensors of a checkpoint, built by torch, which is not imported before the first of them is wanted."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from ckptfix.core.checkpoint import Checkpoint

if TYPE_CHECKING:
    import torch


class LazyTensors:
    """The ``TensorReader`` of every checkpoint that is opened."""

    def tensor(self, checkpoint: Checkpoint, key: str) -> torch.Tensor:
        """Read one tensor; a ``DamageWarning`` says if its storage fails its checksum."""
        from ckptfix.reading.tensors import read_tensor

        return read_tensor(checkpoint, key)

    def state_dict(self, checkpoint: Checkpoint, mapped: Collection[str]) -> dict[str, Any]:
        """Build the whole state_dict. Raises ``UnreadableError`` if bytes fail their checksum."""
        from ckptfix.reading.tensors import build_state_dict

        return build_state_dict(checkpoint, mapped)
