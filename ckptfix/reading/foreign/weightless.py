"""Describes a file without weights: what it contains instead, and which file to look for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from ckptfix.bytes.limits import shown
from ckptfix.core.finding import counted
from ckptfix.core.objects import Opaque, is_flat_optimizer, mappings_in, tensors_in
from ckptfix.core.spec import TensorSpec
from ckptfix.maps.optimizer_states import SLOW, STATES
from ckptfix.reading.folders.rank_shards import is_zero_state, rank_shard
from ckptfix.reading.pickles.arrays import NumpyArray, arrays_in, numpy_type
from ckptfix.reading.weights.document import Document

MOMENTS = frozenset(("exp_avg", "momentum_buffer", *SLOW))
_SCHEDULER = {"last_epoch", "_step_count"}  # keys of every `LRScheduler.state_dict`

# Shapes of the states of torch's random generators in all releases: Mersenne Twister, MTGP32 and Philox.
_RANDOM = {(5056,), (5048,), (816,), (816008,), (824048,), (16,)}


def is_optimizer(mapping: Mapping[Any, Any]) -> bool:
    """Return whether a mapping is the state of an optimizer: its state_dict, or its pickled attributes."""
    has_groups = "param_groups" in mapping or "hypers" in mapping  # the latter in fastai
    is_nested = has_groups and any(name in mapping for name in STATES)
    return is_nested or is_flat_optimizer(mapping) or is_zero_state(mapping) or _are_moments(mapping)


def _are_moments(mapping: Mapping[Any, Any]) -> bool:
    """Return whether a mapping has an optimizer's state of each parameter, as in a shard of ColossalAI."""
    return bool(mapping) and all(
        isinstance(value, dict) and not MOMENTS.isdisjoint(value) for value in mapping.values()
    )


def is_of_training(value: Any) -> bool:
    """Return whether a value is the state of an optimizer, a scheduler or a data loader, or the counters of a
    training."""
    if not isinstance(value, dict):
        return False
    return is_optimizer(value) or value.keys() >= _SCHEDULER or _counts_steps(value) or _is_of_loader(value)


def _is_of_loader(mapping: Mapping[Any, Any]) -> bool:
    """Return whether a mapping has the states of a data loader by rank, as torchtitan's ``dataloader``."""
    return "world_size" in mapping and any(str(key).startswith("dp_rank_") for key in mapping)


def _counts_steps(mapping: Mapping[Any, Any]) -> bool:
    """Return whether a mapping has an integer tensor ``step`` and no larger tensor, as torchtitan's ``train_state``."""
    step = mapping.get("step")
    is_counter = isinstance(step, TensorSpec) and step.dtype.startswith("int")
    return is_counter and all(spec.numel == 1 for spec in tensors_in(mapping))


NAME_THEM = (
    "if they are an average or the parameters in their order, load the model, copy them over model.parameters() "
    "(torch_ema: copy_to), and save model.state_dict()"
)


def why_weightless(document: Document) -> str:
    """Return the error message for a document without weights."""
    root = document.root
    shard = rank_shard(root, {})
    if shard is not None:
        return f"{document.path}: the file {shard.what}; {shard.remedy}"
    if document.path.endswith(".distcp"):
        return (
            f"{document.path}: a file of torch.distributed.checkpoint, one of several; name its folder instead, which"
            " has to hold .metadata too"
        )
    weights = tensors_in(root, lambda value: isinstance(value, dict) and is_optimizer(value))
    is_bare = isinstance(root, TensorSpec)
    unnamed = 0 if is_bare else sum(spec.numel > 1 and not is_random_state(spec) for spec in weights)
    if not unnamed and (state := _state_of(root)):
        return (
            f"{document.path}: the file holds {state} and no model weights;"
            " look for the file that the same training saved beside it"
        )
    if unnamed and not isinstance(root, Opaque):
        beside = f" under {names}" if (names := _names(root)) else ""
        return (
            f"{document.path}: no weights under names: the file holds {counted(unnamed, 'tensor')} in lists{beside};"
            f" {NAME_THEM}"
        )
    if inside := next(_files_in(root), None):
        return (
            f"{document.path}: no weights under names: entry {inside} holds a torch file as bytes; write these bytes "
            "to a file of its own and give that"
        )
    return f"{document.path}: no weights found in it: the file holds {_described(root)}; is it the right file?"


_FILES = (b"PK\x03\x04", b"\x80\x02\x8a\nl\xfc\x9cF")  # how files of torch.save begin


def _files_in(root: Any) -> Iterator[str]:
    """Yield the keys under which a container has torch files as bytes, as d3rlpy's ``.d3`` files have."""
    for name, value in root.items() if isinstance(root, dict) else ():
        if isinstance(value, Opaque) and str(value.cls).endswith("io.BytesIO"):
            value = next(iter(value.state if isinstance(value.state, tuple) else value.args), None)
        if isinstance(value, (bytes, bytearray)) and bytes(value[:8]).startswith(_FILES):
            yield shown(name)


def _state_of(root: Any) -> str | None:
    """Return which state a file contains (of an optimizer, a scheduler or random generators); None if none."""
    if any(map(is_optimizer, mappings_in(root))):
        return "an optimizer's state"
    if isinstance(root, dict) and root.keys() >= _SCHEDULER:
        return "the state of a learning-rate scheduler"
    random = [*tensors_in(root), *arrays_in(root)]
    return "the states of random generators" if random and all(map(is_random_state, random)) else None


def is_random_state(value: Any) -> bool:
    """Return whether a tensor looks like torch.get_rng_state, of a CPU or GPU, or an array like the key in
    numpy.random.get_state."""
    if isinstance(value, NumpyArray):
        return value.shape == (624,) and numpy_type(value.dtype)[0] == "u4"
    return isinstance(value, TensorSpec) and value.dtype == "uint8" and value.shape in _RANDOM


def _described(root: Any) -> str:
    if isinstance(root, TensorSpec):
        return f"a single tensor of {root.dtype} {root.shape}, which has no name"
    if root is None:
        return "None and nothing else"
    kind = str(root.cls) if isinstance(root, Opaque) else type(root).__name__
    kind = "numpy array" if isinstance(root, NumpyArray) else kind
    if isinstance(root, (dict, list, tuple)) and not root:
        return f"an empty {kind}"
    names = _names(root)
    held = f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind} without tensors under names"
    return f"{held} (it has {names})" if names else held


def _names(root: Any) -> str:
    pairs = root.pairs if isinstance(root, Opaque) else root if isinstance(root, dict) else {}
    return ", ".join(f"{shown(name):.40}" for name in islice(pairs, 4))
