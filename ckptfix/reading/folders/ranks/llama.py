"""Llama as Meta publishes it: ``consolidated.00.pth`` to ``consolidated.NN.pth``, with ``params.json``.

Each file has the same keys. The axis along which a tensor is split follows from its name (``llama-models``,
``checkpoint.py``, Llama 1 to 4). Token embeddings are split by columns in Llama 1 and 2 and by rows since Llama 3,
which the shape shows. Keys and values are replicated if there are more ranks than key-value heads, which
``params.json`` says, and the bytes show.

Mistral published Mixtral in files with the same names (``consolidated.00.pt``), each with whole layers."""

import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from ckptfix.bytes.limits import Bounds
from ckptfix.bytes.sources import is_torn
from ckptfix.core.facts import Fact, Kind, clauses
from ckptfix.core.finding import counted
from ckptfix.core.spec import TensorSpec
from ckptfix.core.wording import first_names
from ckptfix.errors import UnreadableError, damaged
from ckptfix.reading.folders.chunks import agree
from ckptfix.reading.folders.ranks.files import RankFiles, are_varied, by_rank, note_copies, unlike_most
from ckptfix.reading.folders.ranks.names import LLAMA_PARAMS, LLAMA_SHARD
from ckptfix.reading.folders.ranks.partition import Joining, Split, emptied, find_rule, rules, stacked
from ckptfix.reading.weights.document import Document

NAME = "llama"
_NAME = "consolidated.{:02d}.pth"

_PARAMS_LIMIT = 1 << 20
_LAYER = re.compile(r"layers\.(\d{1,6})\.(.+)")
_QUERIES = re.compile(r".*attention\.wq(?:kv)?\.weight")
_OF_HEADS = re.compile(r".*attention\.(?:wq|w(o))\.weight")
_SHARED = re.compile(r"(.*)\.w[kv]\.\w+")  # keys and values, of which several ranks may have the same part
_NUMBER = re.compile(r"\d+")

# The axis along which a tensor is split, by its name.
RULES = rules(
    "0 wq.weight wk.weight wv.weight output.weight lm_head.weight",
    "0 w1.weight w3.weight mlp.c_fc.weight mlp.c_fc.bias conv1._linear.weight vision_projection.weight",
    "0 wq.bias wk.bias wv.bias w_in_shared_FD.weight w_swiglu_FD.weight",
    "0+ mlp.fc1_weight",
    "0 attention.wqkv.weight mlp.fc1.weight mlp.fc3.weight",
    "1 wo.weight w2.weight mlp.c_proj.weight w_out_shared_DF.weight mlp.fc2.weight mlp.fc2_weight",
    "-1 moe_w_in_eD_F moe_w_swiglu_eD_F",
    "-2 moe_w_out_eF_D",
    "0 tok_embeddings.weight",
    "- norm.weight attention_norm.weight ffn_norm.weight \\w+.layer_norm_weight rope.freqs router_DE",
)


def find(folder: Path) -> Path | None:
    """Return the folder itself if it has shards."""
    return folder if by_rank(folder, LLAMA_SHARD) else None


def document(files: RankFiles) -> Document | None:
    """Return the document of a folder of Meta's Llama; that of the file itself if it is the only one and complete."""
    folder = files.folder
    ranks = {rank: file for (rank,), file in by_rank(folder, LLAMA_SHARD).items()}
    states = {rank: root for rank, file in ranks.items() if (root := files.root(file)) is not None}
    params = _params(folder)
    degrees = Counter(_ranks_of(state, params) for state in states.values())
    degree = max(degrees, key=lambda degree: (degrees[degree], degree), default=1)
    # The queries tell the number of ranks; without params.json, that is a guess, which more files refute.
    is_known = degree > 1 and (len(ranks) <= degree or "n_heads" in params)
    world = degree if is_known else max(max(ranks) + 1, degree)
    if world == 1 and not params:
        return files.opened(ranks[0])
    files.note_missing(world, ranks, _NAME)
    files.check_absent(world - sum(rank < world for rank in ranks))
    if not states:
        raise damaged(folder, f"{clauses(files.damage)}; no rank can be read")
    if not all(isinstance(state, dict) for state in states.values()):
        raise UnreadableError(f"{folder}: its files hold no state_dict; fetch them again")
    files.note_repeated({ranks[rank].name: state for rank, state in states.items()})
    is_apart = sum(map(len, states.values())) == len(set().union(*states.values()))
    if len(states) > 1 and degree == 1 and is_apart:  # files of whole tensors
        weights = OrderedDict(entry for state in states.values() for entry in state.items())
        if files.damage:
            files.remarks[Fact.of(Kind.UNNAMED_LOSS, lost="the missing files")] = None
        else:
            _check_layers(folder, weights, params)
        return files.document(NAME, weights, f"Mistral, {counted(len(states), 'file')}")
    shapes = {rank: _shapes(state) for rank, state in states.items() if rank < world}
    if 2 * len(unlike_most(shapes)) < len(shapes):
        for rank in files.of_another_save(shapes, {rank: file.name for rank, file in ranks.items()}, "shapes"):
            del states[rank]
    norm = next((norm for state in states.values() if isinstance(norm := state.get("norm.weight"), TensorSpec)), None)
    if norm is not None and len(norm.shape) == 1:
        params = {**params, "dim": norm.shape[0]}  # every rank has all of it, whatever params.json says
    files.note_renamed()
    missing = emptied(next(iter(states.values())), str(folder))
    states = {rank: states.get(rank, missing) for rank in range(world)}
    sharers = _sharers(list(states.values()), str(folder))
    if not (all(sharers.values()) or any(fact.kind is Kind.RANK_REPEATED for fact in files.remarks)):
        raise UnreadableError(
            f"{folder}: some of its ranks have the same keys and values, and others should and do not: its files are"
            " from different saves; put those of one save together"
        )
    params = {**params, "queries": _queries_of(states[0]) * world}
    joining = Joining(str(folder), [ranks[rank].name if rank in ranks else _NAME.format(rank) for rank in range(world)])
    fewest = {module: min(counts, default=1) for module, counts in sharers.items()}
    weights = OrderedDict(joining.join(list(states.values()), partial(_split, params, fewest)))
    files.lacking.update(joining.lacking)
    files.held_by.update(joining.held_by)
    note_copies(files.remarks, joining.differing, may_drift=False)  # norms are equal in all of Meta's files
    files.note_odd_copies(
        {ranks[rank].name: state for rank, state in states.items() if rank in ranks}, joining.differing
    )
    return files.document(NAME, weights, f"Llama, {counted(len(states), 'rank')}")


def folder_of(file: Path) -> Path | None:
    """Return the folder of a file that is named like a shard; None otherwise."""
    return file.parent if LLAMA_SHARD.fullmatch(file.name) and file.is_file() else None


def _shapes(state: Mapping[Any, Any]) -> str:
    """Return a fingerprint of the names, dtypes and shapes of tensors, which are the same on all ranks."""
    from hashlib import blake2b  # loads OpenSSL, which a first answer does not need

    specs = {str(key): (spec.dtype, spec.shape) for key, spec in state.items() if isinstance(spec, TensorSpec)}
    return blake2b(repr(sorted(specs.items())).encode(), digest_size=16).hexdigest()


def _check_layers(folder: Path, keys: Iterable[str], params: Mapping[str, Any]) -> None:
    """Raise ``UnreadableError`` unless all layers have the same keys, and their number is that in ``params.json``."""
    found = [match for key in keys if (match := _LAYER.fullmatch(key))]
    numbers = (int(match[1]) for match in found)
    layers = params.get("n_layers", params.get("num_hidden_layers", max(numbers, default=-1) + 1))
    if lacking := [name for name, count in Counter(match[2] for match in found).items() if count != layers]:
        raise UnreadableError(
            f"{folder}: {first_names(lacking)} are not in each of {counted(layers, 'layer')}; fetch the missing files"
        )


def _ranks_of(state: Any, params: Mapping[str, Any]) -> int:
    """Return the number of ranks over which queries are split; without ``params.json``, they are taken as square."""
    for key, spec in state.items() if isinstance(state, dict) else ():
        if _QUERIES.fullmatch(str(key)) and isinstance(spec, TensorSpec) and len(spec.shape) == 2:
            heads, width = params.get("n_heads"), params.get("head_dim")
            whole = heads * width if isinstance(heads, int) and isinstance(width, int) else spec.shape[1]
            return whole // (_queries_of(state) or whole or 1)
    return 1


def _queries_of(state: Mapping[str, Any]) -> int:
    """Return how many rows of queries a rank has, which are columns of its output projection; 0 if it has neither."""
    for key, spec in state.items():
        if (match := _OF_HEADS.fullmatch(str(key))) and isinstance(spec, TensorSpec) and len(spec.shape) == 2:
            return spec.shape[1 if match[1] else 0]
    return 0


def _sharers(states: Sequence[Mapping[str, Any]], path: str) -> dict[str, list[int]]:
    """Return how many consecutive ranks may have the same keys and values, by the bytes of the first layer that tells;
    none if no number fits. The attention of vision models, which has other names, may differ from that of text."""
    ranks = len(states)
    counts = [count for count in range(1, ranks + 1) if ranks % count == 0]
    found: dict[str, list[int]] = {}
    for key in map(str, states[0]):
        if not (match := _SHARED.fullmatch(key)) or (module := _module(match)) in found:
            continue
        parts = {rank: state.get(key) for rank, state in enumerate(states)}
        intact = {rank: part for rank, part in parts.items() if isinstance(part, TensorSpec) and not is_torn(part)}
        if len(intact) > 1 and all(are_varied([part]) for part in intact.values()):
            same = {pair: agree([intact[rank] for rank in pair], path) for pair in pairwise(intact)}
            found[module] = [
                count
                for count in counts
                if all((one // count == other // count) == are_same for (one, other), are_same in same.items())
            ]
    return found


def _module(match: re.Match[str]) -> str:
    """Return the name of an attention, which is the same in all layers."""
    return _NUMBER.sub("0", match[1])


def _params(folder: Path) -> Mapping[str, Any]:
    """Return the content of ``params.json``; empty if it does not exist."""
    path = folder / LLAMA_PARAMS
    if not path.is_file():
        return {}
    if path.stat().st_size > _PARAMS_LIMIT:
        raise damaged(path, "is larger than any model's sizes need")
    try:
        raw = path.read_bytes()
        found = Bounds(str(path), len(raw)).parse_json(raw)
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, f"not valid JSON ({error})") from error
    return found if isinstance(found, dict) else {}


def _split(
    params: Mapping[str, Any], sharers: Mapping[str, int], name: str, parts: Sequence[TensorSpec]
) -> Split | None:
    """Return how a tensor is split, by its name and shape; None if that is unknown.

    ``sharers`` is how many ranks have the same keys and values, by their bytes. If there are more according to
    ``params.json``, the join finds that they differ."""
    rule = find_rule(RULES, name)
    if rule is None:
        return None
    rows, ranks = parts[0].shape[0] if parts[0].shape else 0, len(parts)
    if rule.is_gated:
        return Split(rule.axis, 2)
    if name.endswith("wqkv.weight"):
        return _of_queries(params, parts)
    if rule.axis == -2 and len(parts[0].shape) == 2:  # the experts are stacked
        experts = (params.get("moe_args") or {}).get("num_experts")
        return Split(0, experts) if type(experts) is int and 0 < experts <= rows else None
    dim, vocabulary = params.get("dim"), params.get("vocab_size")
    if name.endswith("tok_embeddings.weight") and len(parts[0].shape) == 2:
        columns = parts[0].shape[1]
        # If it is split by columns, each rank has all rows of the vocabulary.
        by_columns = columns * ranks == dim if isinstance(dim, int) and columns != dim else rows == vocabulary
        return Split(1 if by_columns else 0)
    if (match := _SHARED.fullmatch(name)) is None:
        return Split(rule.axis)
    holders = sharers.get(_module(match), 1)
    heads, groups = params.get("n_heads"), params.get("n_kv_heads")
    if type(heads) is int and type(groups) is int and heads > 0 and 0 < groups < ranks:
        has_copies = rows * ranks > (params["queries"] or dim or 0) // heads * groups
        holders = max(holders, ranks // groups) if has_copies else holders
    return Split(rule.axis, holders=holders)


def _of_queries(params: Mapping[str, Any], parts: Sequence[TensorSpec]) -> Split | None:
    """Return how queries, keys and values in one tensor are split, each separately; None if ``params.json`` does not
    have the numbers of heads, or if they do not fit the output projection."""
    heads = params.get("n_heads")
    groups = params.get("n_kv_heads") or heads
    rows, ranks = parts[0].shape[0], len(parts)
    if type(heads) is not int or type(groups) is not int or min(heads, groups) < 1 or heads % ranks or groups % ranks:
        return None
    width, rest = divmod(rows * ranks, heads + 2 * groups)
    counts = (heads, groups, groups)
    is_odd = rest or params["queries"] not in (0, width * heads)
    return None if is_odd else stacked(0, [[width * count // ranks] * ranks for count in counts], parts[0])
