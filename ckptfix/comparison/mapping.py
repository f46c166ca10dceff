"""Infers the map between two files or models: ``ckptfix map A B`` and ``ckptfix.infer_map``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ckptfix.core.checkpoint import IN_MEMORY, Checkpoint
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.lazy import nn
from ckptfix.core.parts import Shape
from ckptfix.core.rename_map import LABELS, RenameMap
from ckptfix.core.settings import Settings
from ckptfix.core.smoke_result import Equivalence
from ckptfix.core.spec import TensorSpec
from ckptfix.core.target import Slot
from ckptfix.engine.diagnosis import diagnose
from ckptfix.engine.validation import parsed_settings
from ckptfix.errors import Opt, UsageError
from ckptfix.maps.folding import fold
from ckptfix.maps.inference import COUNTER, converted, infer_tied
from ckptfix.maps.library import look_up
from ckptfix.maps.matches import Inference
from ckptfix.maps.trees import Label
from ckptfix.modules.factory import target_of
from ckptfix.modules.named import SCHEMES
from ckptfix.reading.configs import head_sizes
from ckptfix.reading.opening import Source, open_source
from ckptfix.rules import FOR_NAMES
from ckptfix.rules.layer_moves import proved
from ckptfix.smoke.equivalence import twin_of

if TYPE_CHECKING:
    from ckptfix.core.target import Converter


def infer_map(
    source: Source | nn.Module,
    target: Source | nn.Module,
    *,
    weights: str | None = None,
    other_weights: str | None = None,
    prove: bool = False,
    input: str | Sequence[str] = (),
    timeout: float = 300.0,
) -> RenameMap:
    """Return the map from the names and layout of one file or model to those of another, without reading a tensor.

    Each side is a file, a state_dict, a model, or a factory (``pkg.mod:name``, whose code runs); ``weights`` and
    ``other_weights`` select a state_dict in a file. Wrappers such as ``module.`` are ignored, because a repair removes
    them first. ``prove`` runs both models, like ``source_model`` of a repair: with random weights and the ``input``,
    for at most ``timeout`` seconds. Raises ``UsageError`` if nothing matches."""
    (all_ours, given, heads, _), (all_theirs, wanted, others, tied) = (
        _tensors(*side) for side in ((source, weights), (target, other_weights))
    )
    inference = converted(_shapes(all_ours, True), _shapes(all_theirs, True), (given, wanted))
    if inference is None:
        ours, theirs = _shapes(all_ours), _shapes(all_theirs)
        heads |= others
        known = look_up(ours, theirs, tied, heads) if heads else None
        inference = known or look_up(ours, theirs, tied) or infer_tied(ours, theirs, tied)
    if not inference.matches:
        raise UsageError(f"{_name(source)} and {_name(target)} have no tensors in common, so no map can be inferred")
    proof = None
    if prove:
        inference, proof = _proved(inference, source, target, parsed_settings({"input": input, "timeout": timeout}))
    if len(inference.maps) == 1 and all(match.label > Label.AMBIGUOUS for match in inference.matches.values()):
        found = inference.maps[0]
        if proof is not None and proof.is_proved and not proof.open:
            found = replace(found, rules=tuple(replace(rule, label=LABELS[-1]) for rule in found.rules))
    else:
        found = replace(fold(inference), name=f"{_name(source)} → {_name(target)}")
    supplied = {name for key in inference.matches for name in tied.get(key, ())}
    return replace(found, missing=tuple(key for key in found.missing if key not in supplied), proof=proof)


def _proved(inference: Inference, source: Any, target: Any, settings: Settings) -> tuple[Inference, Equivalence]:
    """Return the map with which both models give equal outputs, and the result of running them. Raises ``UsageError``
    if a side is not a model."""
    if not all(_is_model(side) for side in (source, target)):
        raise UsageError(
            Opt("prove", True), " runs both sides: give two models, for example timm:NAME or pkg.mod:factory"
        )
    slots = target_of(source, None).slots
    specs = {key: TensorSpec(slot.dtype, slot.shape) for key, slot in slots.items() if slot.shape is not None}
    stored = Checkpoint(_name(source), IN_MEMORY, specs)
    twin = twin_of(source, target, (), settings)
    chosen, moves, proof = proved(inference, twin, target_of(target, None).tie_of, stored)
    return replace(chosen, matches=chosen.matches | moves), proof


Specs = Mapping[str, Slot] | Mapping[str, TensorSpec]


def _tensors(
    side: Any, weights: str | None
) -> tuple[Specs, Converter | None, frozenset[int], Mapping[str, tuple[str, ...]]]:
    """Return the tensors of a side, ``converts`` of its ``Target`` if it is a model, the sizes of its attention heads,
    and the target's ``tie_of``."""
    if not _is_model(side):
        settings = Settings(select=FOR_NAMES, weights=weights, values=False)
        result = diagnose(open_source(side, settings), None, settings).result
        return result.specs, None, head_sizes(result), {}
    target = target_of(side, None)
    return target.slots, target.converts, target.heads, target.tie_of


def _shapes(specs: Specs, every: bool = False) -> Mapping[str, Shape]:
    """Return the shapes of the tensors to map: floats and ``num_batches_tracked``, or with ``every`` all tensors."""
    return {
        key: spec.shape
        for key, spec in specs.items()
        if spec.shape is not None and (every or DTYPES[spec.dtype].is_float or key.rpartition(".")[2] == COUNTER)
    }


def _is_model(side: object) -> bool:
    if not isinstance(side, str):
        return not isinstance(side, (os.PathLike, Mapping))
    return ":" in side and ("/" not in side or side.partition(":")[0] in SCHEMES) and not Path(side).exists()


def _name(side: object) -> str:
    return os.fspath(side) if isinstance(side, (str, os.PathLike)) else type(side).__name__
