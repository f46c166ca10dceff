"""The map between two files or models: ``ckptfix map A B`` and ``ckptfix.infer_map``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckptfix.core.dtypes import DTYPES
from ckptfix.core.parts import Shape
from ckptfix.core.rename_map import RenameMap
from ckptfix.core.settings import Settings
from ckptfix.core.spec import TensorSpec
from ckptfix.core.target import Slot
from ckptfix.engine.diagnosis import diagnose
from ckptfix.errors import UsageError
from ckptfix.maps.folding import fold
from ckptfix.maps.inference import COUNTER, converted, infer
from ckptfix.maps.library import look_up
from ckptfix.modules.factory import target_of
from ckptfix.modules.named import SCHEMES
from ckptfix.reading.opening import Source, open_source
from ckptfix.rules import FOR_NAMES

if TYPE_CHECKING:
    from torch import nn

    from ckptfix.core.target import Converter


def infer_map(
    source: Source | nn.Module,
    target: Source | nn.Module,
    *,
    weights: str | None = None,
    other_weights: str | None = None,
) -> RenameMap:
    """Return the map from the names and the layout of one file or model to those of another; no tensor is read.

    Each side is a file, a state_dict, a model, or a factory (``pkg.mod:name``, whose code runs); ``weights`` and
    ``other_weights`` pick a state_dict of a file. Wrappers such as ``module.`` are left out, as a repair takes them off
    first. Raises ``UsageError`` if not even a name can be matched."""
    (all_ours, given), (all_theirs, wanted) = _tensors(source, weights), _tensors(target, other_weights)
    inference = converted(_shapes(all_ours, True), _shapes(all_theirs, True), (given, wanted))
    if inference is None:
        ours, theirs = _shapes(all_ours), _shapes(all_theirs)
        known = look_up(ours, theirs)
        if known is not None and len(known.maps) == 1:
            return known.maps[0]
        inference = infer(ours, theirs)
    if not inference.matches:
        raise UsageError(f"{_name(source)} and {_name(target)} have no tensors in common; nothing can be inferred")
    return replace(fold(inference), name=f"{_name(source)} → {_name(target)}")


Specs = Mapping[str, Slot] | Mapping[str, TensorSpec]


def _tensors(side: Source | nn.Module, weights: str | None) -> tuple[Specs, Converter | None]:
    """Return the tensors of a side, and what its library makes of other files, if it is a model."""
    if isinstance(side, (os.PathLike, Mapping)) or (isinstance(side, str) and not _is_factory(side)):
        settings = Settings(select=FOR_NAMES, weights=weights, values=False)
        return diagnose(open_source(side, settings), None, settings).result.specs, None
    target = target_of(side, None)
    return target.slots, target.converts


def _shapes(specs: Specs, every: bool = False) -> Mapping[str, Shape]:
    """Return the shapes of what can be moved: floats, and counters of batches, or else every tensor."""
    return {
        key: spec.shape
        for key, spec in specs.items()
        if spec.shape is not None and (every or DTYPES[spec.dtype].is_float or key.rpartition(".")[2] == COUNTER)
    }


def _is_factory(side: str) -> bool:
    return ":" in side and ("/" not in side or side.partition(":")[0] in SCHEMES) and not Path(side).exists()


def _name(side: object) -> str:
    return os.fspath(side) if isinstance(side, (str, os.PathLike)) else type(side).__name__
