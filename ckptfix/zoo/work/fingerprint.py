"""What a tensor is, in 32 hex digits: xxh3_128 of its dtype, shape and bytes. Equal tensors of two files have the same.

It finds duplicates and proves nothing: xxh3 is a fast hash, and anybody can make two tensors with the same one."""

from __future__ import annotations

from ckptfix.bytes.sources import stream
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.spec import TensorSpec
from ckptfix.errors import UnreadableError
from ckptfix.values.walk import Walk


def fingerprints(checkpoint: Checkpoint) -> dict[str, str]:
    """The fingerprint of every tensor by its key. One whose bytes are lost, or are none, has none."""
    found = {}
    for key, spec in checkpoint.specs.items():
        if spec.has_data and (fingerprint := fingerprint_of(spec)) is not None:
            found[key] = fingerprint
    return found


def fingerprint_of(spec: TensorSpec) -> str | None:
    """The fingerprint of a tensor; None where its bytes are lost.

    The bytes are taken in the order in which they lie, so that nothing is copied: a transposed view and the same tensor
    in row-major order differ.
    """
    from xxhash import xxh3_128

    digest = xxh3_128()
    for part in spec.strided_parts():
        is_contiguous = part.is_contiguous
        strides = () if is_contiguous else part.strides
        digest.update(f"{part.dtype} {part.shape} {strides} {part.math_bits}\n".encode())
        if not part.numel or part.storage is None:
            continue
        if is_contiguous:
            blocks = stream(part.storage.source, *part.extent)
        elif (walk := Walk(part)).is_bounded:
            blocks = walk.blocks()
        else:
            return None  # a view that repeats its storage without end: no weight
        try:
            for block in blocks:
                digest.update(block)
        except UnreadableError:
            return None
    return str(digest.hexdigest())
