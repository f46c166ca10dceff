"""Megatron-FSDP's ``fsdp_dtensor``: a folder of torch.distributed.checkpoint without common data beside it.

The halves of a gated layer are saved separately (``linear_fc1.weight_w`` and ``linear_fc1.weight_v``), and so are their
moments. Names begin with ``module.`` once or several times, for the wrappers of the model, and in the optimizer more
often than in the weights. The optimizer has the settings of each parameter instead of groups. Megatron's converter from
``torch_dist`` writes the same names without nesting.

Sources: Megatron-LM (core 0.19), ``megatron/core/transformer/fsdp_dtensor_checkpoint.py``,
``megatron/core/optimizer/distrib_optimizer.py``, ``tools/checkpoint/checkpoint_inspector.py``."""

from collections.abc import Mapping
from typing import Any

from ckptfix.core.spec import TensorSpec
from ckptfix.core.wrappers import leading_modules, shared_modules, without_first
from ckptfix.reading.folders.ranks.mixers import rejoined, rejoined_state

# Which container is Megatron's. The DCP folders of other programs do not have it.
_MARK = "checkpoint_version"

_SETTINGS = "param_to_group_meta"


def whole_layers(root: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a container of Megatron-FSDP with the names and shapes of Megatron's other formats: without ``module.``,
    with one tensor for each gated layer, and with the optimizer under the names of the weights.

    Any other container is returned as it is."""
    made = _nested(root) if _MARK in root else dict(root)
    model, optimizer = made.get("model"), made.get("optimizer")
    if _MARK not in root or not isinstance(model, dict):
        return made
    wrappers = shared_modules([name for name in model if isinstance(name, str)])
    made["model"] = {_without(name, wrappers): spec for name, spec in rejoined(model).items()}
    optimizer = optimizer if isinstance(optimizer, dict) else {}
    state = optimizer.get("state")
    if isinstance(state, dict) and all(isinstance(row, dict) for row in state.values()):
        made["optimizer"] = _by_weight({**optimizer, "state": rejoined_state(state)}, made["model"])
    return made


def _nested(root: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a container with the weights under ``model``, and the moments under ``optimizer``, if their names begin
    with these words, as the converter writes them."""
    names = [name for name in root if isinstance(name, str) and isinstance(root[name], TensorSpec)]
    weights = {name: name.removeprefix("model.") for name in names if name.startswith("model.")}
    moments = {name: name.removeprefix("optimizer.state.") for name in names if name.startswith("optimizer.state.")}
    if not weights or "model" in root or (moments and "optimizer" in root):
        return dict(root)
    made = {name: value for name, value in root.items() if name not in weights and name not in moments}
    made["model"] = {short: root[name] for name, short in weights.items()}
    state: dict[str, dict[str, Any]] = {}
    for name, short in moments.items():
        weight, _, field = short.rpartition(".")
        state.setdefault(weight, {})[field] = root[name]
    return made | ({"optimizer": {"state": state}} if state else {})


def _by_weight(optimizer: dict[Any, Any], model: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return an optimizer under the names of the weights, with groups of the parameters that have the same settings.

    It is returned as it is if its names are not those of weights."""
    state, settings = optimizer["state"], optimizer.get(_SETTINGS)
    own = {_bare(name): name for name in model}
    names = {name: own.get(_bare(name)) for name in state}
    if None in names.values() or len({*names.values()}) < len(names):
        return optimizer
    made = {**optimizer, "state": {names[name]: row for name, row in state.items()}}
    if not isinstance(settings, dict):
        return made
    groups: dict[str, dict[str, Any]] = {}
    known = {own.get(_bare(name)): found for name, found in settings.items()}
    if not made["state"].keys() <= known.keys() or not all(isinstance(found, dict) for found in known.values()):
        return made
    for name in model:
        if name in known:
            group = groups.setdefault(repr(known[name]), {**known[name], "params": []})
            group["params"].append(name)
    del made[_SETTINGS]
    return {**made, "param_groups": [*groups.values()]}


def _bare(name: Any) -> Any:
    return _without(name, leading_modules(name)) if isinstance(name, str) else name


def _without(name: Any, wrappers: int) -> Any:
    return without_first(name, wrappers) if isinstance(name, str) else name
