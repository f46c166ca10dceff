"""Megatron-LM's own format (``ckpt_format=torch``): ``iter_0000100/mp_rank_01_002/model_optim_rng.pt``.

The numbers are the ranks of tensor, pipeline and expert parallelism. The axis along which a tensor is split follows
from its name. Layers are numbered from 0 in each stage of the pipeline and each of its chunks (``model0``, ``model1``),
and experts in each expert rank. The optimizer's state has no names, and is left out.

NeMo's files have only the state_dict (``tp_rank_01_pp_rank_002/model_weights.ckpt``), with the same names.

Sources: Megatron-LM, ``megatron/training/checkpointing.py``, ``tools/checkpoint/loader_base.py`` (3.0, core 0.16),
``megatron/core/transformer/transformer_layer.py`` (``get_transformer_layer_offset``)."""

import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import islice, product
from operator import ge, itemgetter
from pathlib import Path
from typing import Any

from ckptfix.bytes.files import small_text
from ckptfix.bytes.listing import list_folder
from ckptfix.bytes.sources import is_torn
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.facts import Fact, Kind, clauses
from ckptfix.core.finding import counted
from ckptfix.core.objects import tensors_in
from ckptfix.core.spec import TensorSpec
from ckptfix.core.wording import first_names
from ckptfix.errors import UnreadableError, damaged
from ckptfix.reading.folders.chunks import agree
from ckptfix.reading.folders.ranks.files import MOST_RANKS, RankFiles, note_copies, sums_of, tagged
from ckptfix.reading.folders.ranks.megatron_layers import (
    INTERLEAVED,
    arguments_of,
    may_drift,
    ordered_qkv,
    splits_of,
    ungrouped,
    whole_arguments,
)
from ckptfix.reading.folders.ranks.names import LATEST_MEGATRON, MEGATRON_RANK, NEMO, iteration_name
from ckptfix.reading.folders.ranks.partition import Joining, emptied
from ckptfix.reading.folders.shard_index import file_inside
from ckptfix.reading.weights.document import Document

NAME = "megatron"

# Names of the file in the folder of a rank.
FILES = ("model_optim_rng.pt", "model_rng.pt", "model_states.pt", NEMO)

_CHUNK = re.compile(r"model(\d{1,3})?")
_LAYER = re.compile(r"(^|\.)layers\.(\d{1,6})(?=\.)")
_EXPERT = re.compile(r"(\.local_experts\.|\.experts\.linear_fc[12]\.(?:weight|bias))(\d{1,6})(?=\.|$)")
_LEFT_OUT = frozenset(
    ("optimizer", "rng_state", "opt_param_scheduler", "rerun_state_machine", "num_floating_point_ops")
)
# Entries that are equal on all ranks of a run.
_SETTINGS = ("args", "opt_param_scheduler", "num_floating_point_operations_so_far")
_NEMO_CONFIG = "model_config.yaml"
_NEMO_SIZE = re.compile(r"^\s*((?:tensor|pipeline)_model_parallel_size):\s*(\d{1,7})\s*$", re.MULTILINE)
# In the pickle of a rank, sizes of parallelism above 1, among the arguments, which are at its start.
_START = 256 << 10
_DIVIDED = re.compile(rb"(?:tensor|pipeline|expert)_model_parallel_size(?:q.|r....|\x94)?(?:K[^\0\1]|M..)", re.DOTALL)
_DEPTH = 8
_REPEATED = 1000  # entries of dicts that may occur more than once; a dict that contains itself would never end

_StagePlace = tuple[str, int]  # a chunk of the model (`model1` with virtual stages), and a stage of the pipeline

# Arguments with which stages have different numbers of layers.
_UNEVEN = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
_LAST = frozenset(("final_layernorm", "final_norm"))  # modules of the last stage


def find(folder: Path) -> Path | None:
    """Return the folder of an iteration, which has a folder for each rank; None if there is none.

    Raises ``UnreadableError`` if there are several."""
    return tagged(folder, LATEST_MEGATRON, _has_ranks, iteration_name)


def document(files: RankFiles) -> Document | None:
    """Return the document of an iteration of Megatron-LM; None if a single rank has the whole model."""
    return _Joined(files).document()


def folder_of(file: Path) -> Path | None:
    """Return the folder of the iteration if the file belongs to one of several ranks; None otherwise."""
    is_one = file.name in FILES and MEGATRON_RANK.fullmatch(file.parent.name) is not None
    return file.parent.parent if is_one and _has_ranks(file.parent.parent) else None


def _has_ranks(folder: Path) -> bool:
    """Return whether a folder has the files of two ranks or more, or of one of several, by the start of its file."""
    found = [file for _, file in islice(_found_in(folder), 2)]
    return len(found) > 1 or any(map(_has_others, found))


def _has_others(file: Path) -> bool:
    if file.name == NEMO:
        return any(int(size) > 1 for _, size in _NEMO_SIZE.findall(small_text(file.parents[1] / _NEMO_CONFIG)))
    with file.open("rb") as opened:
        return _DIVIDED.search(opened.read(_START)) is not None


def _rank_files(folder: Path) -> dict[tuple[int, ...], Path]:
    """Return the file of each rank by the numbers in the name of its folder."""
    return dict(sorted(_found_in(folder)))


def _found_in(folder: Path) -> Iterator[tuple[tuple[int, ...], Path]]:
    for match in filter(None, map(MEGATRON_RANK.fullmatch, list_folder(folder).folders)):
        child = folder / match[0]
        file = next((child / name for name in FILES if (child / name).is_file()), None)
        if file is not None:
            yield tuple(int(number) for number in match.groups() if number is not None), file


def _nemo_sizes(folder: Path) -> dict[str, int]:
    """Return the sizes of tensor and pipeline parallelism in NeMo's configuration."""
    if not (text := small_text(file_inside(folder, _NEMO_CONFIG, str(folder)))):
        raise UnreadableError(f"{folder}: has no {_NEMO_CONFIG}, which gives the number of ranks; fetch it")
    return {name: int(size) for name, size in _NEMO_SIZE.findall(text)}


class _Joined:
    """A merge of the ranks of an iteration."""

    def __init__(self, files: RankFiles) -> None:
        self.files, self.path = files, str(files.folder)
        self.joining = Joining(self.path)

    def document(self) -> Document | None:
        """Return the merged document; None for a single rank of one. Tensors of missing ranks are torn.

        Raises ``UnreadableError`` if a rank is of another save."""
        found = self._of_one_form(_rank_files(self.files.folder))
        read = {numbers: self.files.root(file) for numbers, file in found.items()}
        roots = {numbers: root for numbers, root in read.items() if root is not None}
        names = {numbers: file.parent.name for numbers, file in found.items()}
        if strange := [names[numbers] for numbers, root in roots.items() if not isinstance(root, dict)]:
            raise UnreadableError(
                f"{self.path}: {first_names(strange)} hold no checkpoint of Megatron; fetch them again"
            )
        if not roots:
            raise damaged(self.path, f"{clauses(self.files.damage)}; no rank can be read")
        if is_nemo := found[min(found)].name == NEMO:
            sizes_of = _nemo_sizes(self.files.folder)
            roots = {n: {"model": root, "checkpoint_version": 3.0, "args": sizes_of} for n, root in roots.items()}
        steps = {numbers: root.get("iteration") for numbers, root in roots.items()}
        for numbers in self.files.of_another_save(steps, names, "iteration"):
            del roots[numbers], found[numbers]
        first = roots[min(roots)]
        args = arguments_of(first)
        sizes = [args.get(f"{kind}_model_parallel_size") for kind in ("tensor", "pipeline", "expert")]
        dtypes = {numbers: _dtype(root) for numbers, root in roots.items()}
        for line in dict.fromkeys(_place(numbers, sizes)[1:] for numbers in roots):  # ranks that split the same tensors
            alike = {numbers: dtype for numbers, dtype in dtypes.items() if _place(numbers, sizes)[1:] == line}
            for numbers in self.files.of_another_save(alike, names, "dtype"):
                del roots[numbers], found[numbers]
        self.files.note_foreign(
            {
                names[numbers]: {"dtype": dtypes[numbers], **{key: root.get(key) for key in _SETTINGS}}
                for numbers, root in roots.items()
            }
        )
        grid = self._grid(found, sizes)
        outside = [n for n in found if any(map(ge, _place(n, sizes), grid))]
        if outside and 0 < len(found) - len(outside) < math.prod(grid):
            beyond = tuple(names[numbers] for numbers in outside)
            self.files.damage.append(Fact.of(Kind.RANKS_STRANGE, ranks=math.prod(grid), names=beyond))
            for numbers in outside:
                del found[numbers]
                roots.pop(numbers, None)
        odd = {names[numbers] for numbers in _misplaced({_place(n, sizes): n for n in roots}, roots, grid)}
        processes = {names[numbers]: arguments_of(root).get("rank") for numbers, root in roots.items()}
        self.files.note_repeated({names[numbers]: root for numbers, root in roots.items()}, odd, processes)
        if len(read) == math.prod(grid) == 1:
            return None
        by_place = {_place(numbers, sizes): root for numbers, root in roots.items()}
        # Before ranks are called missing: with such experts, Megatron writes only some of them.
        if args.get("expert_tensor_parallel_size", grid[0]) != grid[0] and _has_experts(first):
            raise UnreadableError(f"{self.path}: experts split differently from the other layers are not merged")
        files_by_place = {_place(numbers, sizes): file for numbers, file in found.items()}
        named = partial(_folder_name, found[min(found)].parent.name, sizes)
        self._note_missing(files_by_place, grid, named)
        self._note_order(files_by_place, by_place)
        try:
            weights = self._weights(by_place, grid, first, named)
        except UnreadableError as error:
            if self.files.damage:
                raise damaged(self.path, clauses(self.files.damage)) from error
            if wrong := [fact.place for fact in self.files.remarks if fact.place in odd]:
                raise UnreadableError(f"{self.path}: a file was copied over {first_names(wrong)}") from error
            raise
        if not args.get("untie_embeddings_and_output_weights", True):
            self._tie(weights)
        self._check_vocabulary(weights, args)
        root: dict[str, Any] = {}
        for key, value in first.items():
            if not isinstance(key, str) or not (_CHUNK.fullmatch(key) or key in _LEFT_OUT):
                root[key] = whole_arguments(value) if key == "args" else value
            elif key in _LEFT_OUT:
                self.files.remarks[Fact(Kind.RANK_LEFT_OUT, key)] = None
        root = dict(_nested(weights)) if is_nemo else {**root, "model": _nested(weights)}
        note_copies(self.files.remarks, self.joining.differing, may_drift(first))
        kinds = ", ".join(f"{kind} {size}" for kind, size in zip(("TP", "PP", "EP"), grid, strict=True) if size > 1)
        return self.files.document(NAME, root, f"Megatron, {kinds}")

    def _of_one_form(self, found: Mapping[tuple[int, ...], Path]) -> dict[tuple[int, ...], Path]:
        """Return the ranks of one save, in whose folder names there are equally many numbers: those of the file that
        was named, or else most. Others are left over from a save with fewer kinds of parallelism.

        Raises ``UnreadableError`` if there are as many of them."""
        lengths = Counter(map(len, found))
        named = next((numbers for numbers, file in found.items() if file == self.files.named), None)
        (length, count), *rest = lengths.most_common()
        is_tied = any(other == count for _, other in rest)
        if named is None and is_tied:
            of_length = {len(numbers): file.parent.name for numbers, file in found.items()}
            names = first_names([*of_length.values()])
            raise UnreadableError(f"{self.path}: has ranks of {len(lengths)} saves ({names}); keep only those of one")
        if named is not None and (is_tied or len(named) != length):
            self.files.is_by_name, length = True, len(named)
        strays = [file.parent.name for numbers, file in found.items() if len(numbers) != length]
        self.files.remarks.update({Fact(Kind.STRAY_FILE, name): None for name in strays})
        return {numbers: file for numbers, file in found.items() if len(numbers) == length}

    def _note_missing(
        self,
        files: Mapping[tuple[int, int, int], Path],
        grid: tuple[int, int, int],
        named: Callable[[tuple[int, int, int]], str],
    ) -> None:
        """Record missing ranks as damage. Raises ``UnreadableError`` if there are more than there should be."""
        wanted = math.prod(grid)
        names = [*islice((named(place) for place in _places(grid) if place not in files), 4)]
        if len(files) > wanted or (not names and len(files) < wanted):
            raise UnreadableError(f"{self.path}: has {len(files)} of {counted(wanted, 'rank')}; keep those of one save")
        if names:
            fact = Fact.of(Kind.RANKS_LACKING, absent=wanted - len(files), ranks=wanted, names=tuple(names))
            self.files.damage.append(fact)
        stages = {place[1] for place in files}
        self.files.check_absent(max(grid[1] - len(stages), len(stages) * grid[0] * grid[2] - len(files)))

    def _note_order(
        self, files: Mapping[tuple[int, int, int], Path], roots: Mapping[tuple[int, int, int], Any]
    ) -> None:
        """Remark ranks whose process numbers are out of order: these increase with the tensor-parallel rank first, and
        then with the expert rank and the stage, or the other way round. A conversion in one process leaves the same
        number in all files."""
        own_ranks = {
            place: rank for place, root in roots.items() if type(rank := arguments_of(root).get("rank")) is int
        }
        if len(set(own_ranks.values())) < len(roots):
            return
        by_stage, by_expert = (sorted(own_ranks, key=itemgetter(*axes)) for axes in ((1, 2, 0), (2, 1, 0)))
        if sorted(own_ranks, key=own_ranks.__getitem__) not in (by_stage, by_expert):
            numbers = {files[place].parent.name: own_ranks[place] for place in by_stage}
            words = {name: f"process {rank}" for name, rank in numbers.items()}
            self.files.note_order({name: (rank,) for name, rank in numbers.items()}, words)

    def _grid(self, found: Mapping[tuple[int, ...], Path], sizes: Sequence[Any]) -> tuple[int, int, int]:
        """Return the sizes of tensor, pipeline and expert parallelism, from the arguments or the numbers in names."""
        places = [_place(numbers, sizes) for numbers in found]
        seen = [max(place[kind] for place in places) + 1 for kind in range(3)]
        tensor, pipeline, expert = (
            size if type(size) is int and 0 < size <= MOST_RANKS else most
            for size, most in zip(sizes, seen, strict=True)
        )
        if tensor * pipeline * expert > MOST_RANKS:
            raise UnreadableError(f"{self.path}: claims {tensor * pipeline * expert} ranks; do not use this checkpoint")
        return tensor, pipeline, expert

    def _weights(
        self,
        roots: Mapping[tuple[int, int, int], Any],
        grid: tuple[int, int, int],
        first: Any,
        named: Callable[[tuple[int, int, int]], str],
    ) -> OrderedDict[tuple[str, ...], Any]:
        """Return the entries of the whole model by their paths, with layers and experts renumbered."""
        tensor, pipeline, expert = grid
        version = first.get("checkpoint_version")
        version = version if isinstance(version, (int, float)) else 0  # as in Megatron
        heads = arguments_of(first).get("num_attention_heads")
        numbers = {
            key: int(match[1] or 0) for key in first if isinstance(key, str) and (match := _CHUNK.fullmatch(key))
        }
        chunks = sorted(numbers, key=numbers.__getitem__) or ["model"]
        flat = {
            (chunk, place): ungrouped(_flat(root.get(chunk)), arguments_of(first), self.path)
            for chunk, (place, root) in product(chunks, sorted(roots.items()))
        }
        held = {
            (chunk, stage): [state for (of, place), state in flat.items() if (of, place[1]) == (chunk, stage)]
            for chunk, stage in product(chunks, range(pipeline))
        }
        counts = {at: _layer_counts(states) for at, states in held.items()}
        offsets = stage_offsets(counts, {at for at, states in held.items() if states}, arguments_of(first))
        weights: OrderedDict[tuple[str, ...], Any] = OrderedDict()
        lacking: dict[tuple[str, ...], int] = {}
        for (chunk, stage), own in held.items():
            begin = offsets[chunk, stage]
            for place in range(expert) if own else ():
                line = [flat.get((chunk, (rank, stage, place))) for rank in range(tensor)]
                self.joining.names = [named((rank, stage, place)) for rank in range(tensor)]
                known = next((state for state in line if state is not None), own[0])
                missing = emptied(known, self.path) if None in line else {}
                states = [missing if state is None else state for state in line]
                if version < 2:
                    states = [ordered_qkv(state, version, heads, tensor, self.path) for state in states]
                for path, entry in self._joined(states, arguments_of(first)):
                    lost = self.joining.lacking.pop(".".join(path), 0)
                    if begin is None and _layer_counts([[path]]):
                        continue  # its number is unknown
                    key = _renumbered(path, begin or {}, {}, place * _experts(own[0]))
                    if key not in weights or (is_torn(weights[key]) and not is_torn(entry)):
                        weights[key], lacking[key] = entry, lost
                    elif isinstance(entry, TensorSpec) and not agree([weights[key], entry], self.path):
                        name = ".".join(key)
                        if place and ".experts." in name:
                            raise UnreadableError(
                                f"{self.path}: its ranks have their own experts in {name}, which are not merged"
                            )
                        self.joining.differing[name] = None
        self.files.lacking.update({".".join(key): lost for key, lost in lacking.items()})
        self.files.held_by.update(self.joining.held_by)
        self._check_layers(held, offsets, arguments_of(first).get("num_layers"))
        return weights

    def _check_layers(
        self,
        held: Mapping[_StagePlace, Sequence[Any]],
        offsets: Mapping[_StagePlace, Mapping[str, int] | None],
        wanted: Any,
    ) -> None:
        """Remark tensors that are lost with a stage of the pipeline, whose names are unknown.

        Raises ``UnreadableError`` if the stages have fewer layers than the arguments say."""
        if absent := sorted({stage for (_, stage), states in held.items() if not states}):
            lost = f"{'stage' if len(absent) == 1 else 'stages'} {first_names(absent)} of the pipeline"
            unplaced = {stage for (_, stage), begin in offsets.items() if begin is None and stage not in absent}
            later = (
                f", and the layers of {first_names(sorted(unplaced))}, whose numbers are unknown" if unplaced else ""
            )
            self.files.remarks[Fact.of(Kind.UNNAMED_LOSS, lost=lost + later)] = None
            return
        last = [*held][-1]
        count = max(((offsets[last] or {}).get(p, 0) + n for p, n in _layer_counts(held[last]).items()), default=0)
        count = max(count, *(offsets[last] or {"": 0}).values(), 0)
        if count and type(wanted) is int and count < wanted:
            raise UnreadableError(
                f"{self.path}: has {count} of {wanted} layers; its ranks split the model differently, or are from "
                "different saves"
            )

    def _joined(
        self, states: Sequence[Mapping[tuple[str, ...], Any]], args: Mapping[str, Any]
    ) -> Iterator[tuple[tuple[str, ...], Any]]:
        named = [{".".join(path): entry for path, entry in state.items()} for state in states]
        paths = {".".join(path): path for state in states for path in state}
        interleaved = [part for part, argument in INTERLEAVED.items() if args.get(argument)]
        for name, entry in self.joining.join(named, splits_of(named[0], interleaved=interleaved)):
            yield paths[name], entry

    def _tie(self, weights: OrderedDict[tuple[str, ...], Any]) -> None:
        """Remove the copy of the embedding in the last stage, which a model with one stage does not have."""
        named = {".".join(path): path for path, spec in weights.items() if isinstance(spec, TensorSpec)}
        source = next((path for name, path in named.items() if name.endswith("word_embeddings.weight")), None)
        for name, path in named.items():
            if source is None or not name.endswith(("output_layer.weight", "word_embeddings_for_head.weight")):
                continue
            pair = [weights[source], weights[path]]
            if is_torn(pair[0]) and not is_torn(pair[1]) and pair[0].shape == pair[1].shape:
                weights[source] = weights[path]  # the rank with the first copy is missing
            sums = [sums_of([spec]) for spec in pair]  # so that parts with the same split need not be read
            if (sums[0] and sums[0] == sums[1]) or agree(pair, self.path):
                del weights[path]
            else:
                self.joining.differing[name] = None

    def _check_vocabulary(self, weights: Mapping[tuple[str, ...], Any], args: Mapping[str, Any]) -> None:
        rows = args.get("padded_vocab_size")
        for path, spec in weights.items():
            is_embedding = isinstance(spec, TensorSpec) and ".".join(path).endswith("word_embeddings.weight")
            if is_embedding and type(rows) is int and spec.shape[0] != rows:
                name = ".".join(path)
                raise UnreadableError(
                    f"{self.path}: {name} has {spec.shape[0]} rows, but its arguments say {rows}; put the files of one"
                    " save together"
                )


def _misplaced(
    numbers_of: Mapping[tuple[int, int, int], tuple[int, ...]],
    roots: Mapping[tuple[int, ...], Any],
    grid: tuple[int, int, int],
) -> Iterator[tuple[int, ...]]:
    """Yield the ranks whose content shows that it is that of another place: of another process or, by the
    embedding and the last norm, of another stage. A conversion in one process leaves its number 0 in all files."""
    tensor, pipeline, _ = grid
    found = {n: arguments_of(root).get("rank") for n, root in roots.items()}
    processes = {n: rank for n, rank in found.items() if type(rank) is int}
    are_own = len(processes) == len(roots) and any(processes.values())
    for (rank, stage, _), numbers in numbers_of.items():
        root = roots[numbers]
        chunks = [_flat(part) for key, part in root.items() if isinstance(key, str) and _CHUNK.fullmatch(key)]
        modules = {name for chunk in chunks for path in chunk for name in ".".join(path).split(".")}
        if _is_of_another(modules, stage, pipeline) or (are_own and processes[numbers] % tensor != rank):
            yield numbers


def _is_of_another(modules: Set[str], stage: int, stages: int) -> bool:
    """Return whether the modules in a file of one of two stages show that it is that of the other: the embedding is in
    the first stage, and the last norm in the last one."""
    return stage != stages - 1 if modules & _LAST else "embedding" in modules and stage > 0


def stage_offsets(
    counts: Mapping[_StagePlace, Mapping[str, int]], present: set[_StagePlace], args: Mapping[str, Any]
) -> dict[_StagePlace, dict[str, int] | None]:
    """Return the number of the first layer in each stage, by the prefix of the layers' names; None if it is unknown,
    because an earlier stage is missing and the arguments do not tell how many layers it had.

    ``counts`` has the numbers of layers of the stages that are ``present``, in the order of the model."""
    prefixes = {prefix for found in counts.values() for prefix in found}
    gap = _layers_of_missing(counts, present, prefixes, args)
    offsets: dict[_StagePlace, dict[str, int] | None] = {}
    begin: dict[str, int] | None = {}
    for place, found in counts.items():
        offsets[place] = begin
        if begin is not None:
            own = found if place in present else None if gap is None else dict.fromkeys(prefixes, gap)
            begin = None if own is None else {p: begin.get(p, 0) + own.get(p, 0) for p in prefixes}
    return offsets


def _layers_of_missing(
    counts: Mapping[_StagePlace, Mapping[str, int]],
    present: set[_StagePlace],
    prefixes: set[str],
    args: Mapping[str, Any],
) -> int | None:
    """Return how many layers each missing stage had; None if that is not certain."""
    whole, missing = args.get("num_layers"), len(counts) - len(present)
    if type(whole) is not int or len(prefixes) != 1:
        return None  # the arguments count the layers of one stack
    (prefix,) = prefixes
    held = [counts[place].get(prefix, 0) for place in present]
    left = whole - sum(held)
    if missing == 1:
        return left if left >= 0 else None
    is_even = len(set(held)) == 1 and held[0] * len(counts) == whole and not any(args.get(name) for name in _UNEVEN)
    return held[0] if is_even else None


def _place(numbers: tuple[int, ...], sizes: Sequence[Any]) -> tuple[int, int, int]:
    """Return the tensor, pipeline and expert rank for the numbers in a name."""
    if len(numbers) == 2 and sizes[1] == 1 and type(sizes[2]) is int and sizes[2] > 1:
        return numbers[0], 0, numbers[1]
    tensor, pipeline, expert = (*numbers, 0, 0)[:3]
    return tensor, pipeline, expert


def _folder_name(like: str, sizes: Sequence[Any], place: tuple[int, int, int]) -> str:
    """Return the name of a rank's folder, in the form of another rank's name ``like``."""
    tensor, pipeline, expert = place
    words = re.split(r"(\d+)", like)  # every second word is a number
    for numbers in ((tensor,), (tensor, pipeline), (tensor, expert), place):
        if len(numbers) == len(words) // 2 and _place(numbers, sizes) == place:
            words[1::2] = (f"{number:0{len(word)}}" for number, word in zip(numbers, words[1::2], strict=True))
            return "".join(words)
    return f"tensor {tensor} pipeline {pipeline} expert {expert}"  # the names lack some of the numbers


def _places(grid: tuple[int, int, int]) -> Iterator[tuple[int, int, int]]:
    tensor, pipeline, expert = grid
    return ((t, p, e) for t in range(tensor) for p in range(pipeline) for e in range(expert))


def _flat(value: Any) -> dict[tuple[str, ...], Any]:
    """Return the entries of a state_dict by their paths; before megatron.core, it was nested by module."""
    made: dict[tuple[str, ...], Any] = {}
    seen: set[int] = set()
    repeated = 0
    pending: list[tuple[tuple[str, ...], Any]] = [((), value)]
    while pending:
        path, found = pending.pop()
        if isinstance(found, dict) and len(path) < _DEPTH:
            pending += [((*path, str(key)), child) for key, child in reversed(found.items())]
            repeated += len(found) if id(found) in seen else 0
            seen.add(id(found))
            if repeated > _REPEATED:
                raise ValueError("its dicts hold one another over and over")
        elif path:
            made[path] = found
    return made


def _nested(entries: Mapping[tuple[str, ...], Any]) -> OrderedDict[str, Any]:
    made: OrderedDict[str, Any] = OrderedDict()
    for path, entry in entries.items():
        node = made
        for part in path[:-1]:
            node = node.setdefault(part, OrderedDict())
        node[path[-1]] = entry
    return made


def _renumbered(
    path: tuple[str, ...], begin: Mapping[str, int], layers: dict[str, int], first_expert: int
) -> tuple[str, ...]:
    """Return a path with the numbers of its layer and expert in the whole model; count the layers of the stage."""
    made = []
    for depth, part in enumerate(path):
        name = part
        if match := _EXPERT.search(name):
            name = f"{name[: match.start(2)]}{first_expert + int(match[2])}{name[match.end(2) :]}"
        if match := _LAYER.search(name):
            prefix, number = ".".join((*path[:depth], name[: match.start()])), int(match[2])
            if "mtp" not in prefix:  # layers of multi-token prediction are all in the last stage
                layers[prefix] = max(layers.get(prefix, 0), number + 1)
                name = f"{name[: match.start(2)]}{begin.get(prefix, 0) + number}{name[match.end(2) :]}"
        made.append(name)
    return tuple(made)


def _layer_counts(states: Iterable[Iterable[tuple[str, ...]]]) -> dict[str, int]:
    """Return the number of layers in the states of a stage by the prefix of their names."""
    counts: dict[str, int] = {}
    for state in states:
        for path in state:
            _renumbered(path, {}, counts, 0)
    return counts


def _experts(state: Mapping[tuple[str, ...], Any]) -> int:
    return len({match[2] for path in state if (match := _EXPERT.search(path[-1]))})


def _dtype(root: Mapping[Any, Any]) -> str | None:
    """Return the dtype of most floats in the weights of a rank; None if it has none."""
    counts: Counter[str] = Counter()
    for spec in tensors_in([part for key, part in root.items() if isinstance(key, str) and _CHUNK.fullmatch(key)]):
        if DTYPES[spec.dtype].is_float:
            counts[spec.dtype] += spec.numel
    return max(counts, key=counts.__getitem__, default=None)


def _has_experts(root: Any) -> bool:
    chunks = [_flat(value) for key, value in root.items() if isinstance(key, str) and _CHUNK.fullmatch(key)]
    return any(".experts." in ".".join(path) for chunk in chunks for path in chunk)
