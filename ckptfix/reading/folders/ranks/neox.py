"""GPT-NeoX's tensor-parallel ranks, some tensors of which are computed: biases that are summed, and norms.

If ``gpt_j_residual`` is set, the biases of attention and MLP outputs are summed over all ranks, as the outputs are;
otherwise each rank has a copy of them. This is only known from the configuration, which the run saves in ``configs``.
GPT-NeoX's own converter sums them in either case, and averages norms.

With fewer key-value heads than queries, each rank has all of its queries before all of its keys before all of its
values; otherwise they are in the order of the heads.

Sources: ``tools/ckpts/convert_neox_to_hf.py``, ``megatron/model/transformer.py`` of GPT-NeoX."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from ckptfix.bytes.files import small_text
from ckptfix.bytes.sources import ComputedBytes, is_torn
from ckptfix.core.facts import Fact, Kind
from ckptfix.core.lazy import torch
from ckptfix.core.spec import Storage, TensorSpec, contiguous_strides
from ckptfix.core.wording import first_names
from ckptfix.errors import UnreadableError
from ckptfix.reading.folders.chunks import gone
from ckptfix.reading.folders.ranks import megatron_layers
from ckptfix.reading.folders.ranks.files import note_copies
from ckptfix.reading.folders.ranks.partition import Joining, Split, SplitOf, rules, stacked
from ckptfix.reading.tensors import bytes_of, torch_dtype

_CONFIGS = "configs"
_RESIDUAL = re.compile(r"""(?im)^[^#\n]*?["']?gpt[-_]j[-_]residual["']?\s*:\s*["']?(true|false)""")
# A key of every layer of GPT-NeoX (in a file of its own or among all layers), and the biases that may be summed.
_LAYER = re.compile(r"(?:sequential\.\d+\.)?attention\.(?:query_key_value|qkv)\.")
_SUMMED = re.compile(r"(?:^|\.)(?:attention\.dense|mlp\.dense_4h_to_h|mlp\.linear2)\.bias$")
_QUERIES = re.compile(r"((?:.*\.)?attention\.)query_key_value\.(?:weight|bias)")

# The axis along which a tensor is split, by its name: with Megatron's names, GPT-NeoX's own, and those of its layers of
# Transformer Engine (``qkv``, ``fc1_weight``).
RULES = (
    *rules(
        "0 final_linear.weight mlp.w1.weight mlp.w3.weight attention.qkv.weight attention.qkv.bias",
        "0+ mlp.linear1.weight mlp.linear1.bias mlp.fc1_weight mlp.fc1_bias",
        "1 mlp.linear2.weight mlp.w2.weight mlp.fc2_weight attention.proj.weight",
        "- mlp.linear2.bias mlp.fc2_bias attention.proj.bias \\w*norm.scale attention.masked_bias",
    ),
    *megatron_layers.RULES,
)


def splits_of(state: Mapping[str, Any]) -> SplitOf:
    """Return the function that tells how each tensor is split, from the state_dict of the first rank."""
    return partial(_split, megatron_layers.splits_of(state, RULES), state)


def _split(by_name: SplitOf, state: Mapping[str, Any], name: str, parts: Sequence[TensorSpec]) -> Split | None:
    match = _QUERIES.fullmatch(name)
    dense = state.get(f"{match[1]}dense.weight") if match else None
    if isinstance(dense, TensorSpec) and len(dense.shape) == 2:
        queries = dense.shape[1]
        keys, odd = divmod(parts[0].shape[0] - queries, 2)
        if 0 < keys < queries and not odd:
            return stacked(0, [[size] * len(parts) for size in (queries, keys, keys)], parts[0])
    return by_name(name, parts)


class Neox:
    """A merge of ranks of GPT-NeoX, which records the computed tensors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._is_one = False
        self._computed: dict[str, str] = {}  # `sum` or `mean` by name

    @cached_property
    def is_residual(self) -> bool | None:
        """Whether ``gpt_j_residual`` is set, which is off by default; None if there is no configuration."""
        for place in (self.folder / _CONFIGS, self.folder.parent / _CONFIGS):
            texts = [text for file in sorted(place.glob("*.yml")) if (text := small_text(file))]
            found = {match[1].lower() == "true" for text in texts for match in _RESIDUAL.finditer(text)}
            if len(found) > 1:
                raise UnreadableError(f"{place}: its files differ in gpt_j_residual; keep only those of this run")
            if texts:
                return bool(found) and found.pop()
        return None

    def is_summed(self, states: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether the ranks have biases that are summed. Raises ``UnreadableError`` if that is unknown."""
        self._is_one = self._is_one or any(_LAYER.match(key) for key in states[0])
        biases = [key for key in states[0] if _SUMMED.search(key)] if self._is_one and len(states) > 1 else []
        if biases and self.is_residual is None:
            raise UnreadableError(
                f"{self.folder}: GPT-NeoX adds up {first_names(biases)} of its {len(states)} ranks if gpt_j_residual "
                f"is set, which is unknown here; put the run's .yml files into {self.folder}/{_CONFIGS}"
            )
        return bool(biases and self.is_residual)

    def join(
        self, joining: Joining, states: Sequence[Mapping[str, Any]], split_of: SplitOf, prefix: str = ""
    ) -> Iterator[tuple[str, Any]]:
        """Yield the entries of the whole; ``prefix`` is put before their names in remarks."""
        is_summed = self.is_summed(states)
        for key, entry in joining.join(states, split_of):
            is_sum = is_summed and _SUMMED.search(key) is not None
            if is_sum or (self._is_one and "norm" in key and key in joining.differing):
                joining.differing.pop(key, None)
                entry = _computed(key, [state.get(key) for state in states], is_sum, joining.path)
                if not is_torn(entry):
                    self._computed[prefix + key] = "sum" if is_sum else "mean"
            yield key, entry

    def note(self, remarks: dict[Fact, None], ranks: int, masters: Collection[str]) -> None:
        """Remark the computed tensors, and copies of which the fp32 master of the first rank was taken instead."""
        note_copies(remarks, (name for name in self._computed if name in masters))
        for name, rule in self._computed.items():
            if name not in masters:
                remarks[Fact.of(Kind.RANKS_COMPUTED, name, rule=rule, ranks=ranks)] = None


def _computed(name: str, parts: Sequence[Any], is_sum: bool, path: str) -> TensorSpec:
    """Return the sum or mean of the tensors of all ranks in their dtype, computed as in GPT-NeoX; lost if a rank is."""
    first: TensorSpec = parts[0]
    if any(map(is_torn, parts)):
        return gone(name, first, path)
    if any((part.dtype, part.shape) != (first.dtype, first.shape) or not part.is_contiguous for part in parts):
        raise UnreadableError(f"{path}: its ranks have {name} in different shapes; put the files of one save together")
    size = first.itemsize

    def compute(start: int, stop: int) -> memoryview:
        total: Any = 0
        for part in parts:
            begin = part.extent[0]
            raw = bytearray(part.storage.source.read(begin + start * size, begin + stop * size))
            total = total + torch.frombuffer(raw, dtype=torch_dtype(part.dtype))
        return bytes_of((total if is_sum else total / len(parts)).view(torch.uint8))

    storages = tuple(storage for part in parts for storage in part.storages)
    storage = Storage(name, ComputedBytes(first.nbytes, size, compute), parts=storages)
    return TensorSpec(first.dtype, first.shape, contiguous_strides(first.shape), storage)
