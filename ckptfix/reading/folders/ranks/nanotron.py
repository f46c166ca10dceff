"""nanotron: a file for each parameter and tensor-parallel rank, in folders named after modules.

``model/model/decoder/0/pp_block/attn/qkv_proj/model_weight_pp-rank-0-of-1_tp-rank-0-of-2.safetensors`` has a part as
``data``. Its ``__metadata__`` has the shape of the whole, and pairs of slices of the part and of the whole. The names
are those of the whole model, whatever the pipeline. A tied parameter is saved once.

Sources: ``nanotron/serialize/weights.py``, ``serialize/metadata.py``, ``parallel/parameters.py`` (0.4)."""

import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ckptfix.bytes.files import small_text
from ckptfix.bytes.listing import list_folder
from ckptfix.bytes.sources import is_torn
from ckptfix.core.facts import Fact, Kind, clauses
from ckptfix.core.finding import counted
from ckptfix.core.parts import Box, numel
from ckptfix.core.spec import TensorSpec, contiguous_strides
from ckptfix.errors import damaged
from ckptfix.reading.boxes import boxed
from ckptfix.reading.folders.chunks import agree, gone, merge_parts
from ckptfix.reading.folders.rank_shards import NANOTRON
from ckptfix.reading.folders.ranks.files import LISTED, RankFiles, add_rank, tagged
from ckptfix.reading.folders.ranks.names import LATEST_NANOTRON, NANOTRON_METADATA, NANOTRON_MODEL, NANOTRON_PART
from ckptfix.reading.weights.document import Document

NAME = NANOTRON

_NUMBER = re.compile(r"(\d+)")
_SIZE = re.compile(r"(?:np\.int\d+\()?(\d+)")
_OF_TENSORS, _OF_GROUPS = re.compile(r"(?<=tp-rank-)\d+"), re.compile(r"(?<=exp-rank-)\d+")
_OF_EXPERTS = re.compile(r"tp-rank-\d+-of-\d+_exp-rank-\d+-of-\d+")
_CONFIG, _LAYERS = "model_config.json", re.compile(r'"num_hidden_layers"\s*:\s*(\d{1,7})\b')
_OF_LAYER = re.compile(r"model\.decoder\.(\d{1,9})\.(.+)")
_MOST_SEARCHED = 32  # folders in which the first parameter is looked for
_SLICES, _SHAPE = "local_global_slices_pairs", "unsharded_shape"


def find(folder: Path) -> Path | None:
    """Return the folder of a save: this one, that of the step in ``latest.txt``, or the one of which this is the folder
    of a parameter; None if there is none."""
    for name in list_folder(folder).files:
        if NANOTRON_PART.fullmatch(name) and (save := folder_of(folder / name)) is not None:
            return save
    return tagged(folder, LATEST_NANOTRON, _is_save)


def _is_save(place: Path) -> bool:
    """Return whether a folder is a save, also if its metadata is missing, which no weight needs."""
    model = place / NANOTRON_MODEL
    if not model.is_dir() or (place / NANOTRON_METADATA).is_file():
        return model.is_dir()
    inside = (name for _, folder in islice(_folders(model), _MOST_SEARCHED) for name in list_folder(folder).files)
    return any((match := NANOTRON_PART.fullmatch(name)) and match["rank"] for name in inside)


def folder_of(file: Path) -> Path | None:
    """Return the folder of the save if the file is that of a parameter and rank; None otherwise."""
    if (match := NANOTRON_PART.fullmatch(file.name)) is None or match["rank"] is None:
        return None
    above = [place for place in file.parents if place.name == NANOTRON_MODEL]
    with_metadata = (place.parent for place in above if (place.parent / NANOTRON_METADATA).is_file())
    nested = (place.parent.parent for place in above if place.parent.name == NANOTRON_MODEL)
    return next(with_metadata, next(nested, None))


def document(files: RankFiles) -> Document:
    """Return the document of a save: a flat state_dict with the names of the modules."""
    found: dict[str, dict[int, Path]] = {}
    counts: dict[str, int] = {}
    stages: set[int] = set()
    last = 0
    for names, folder in _folders(files.folder / NANOTRON_MODEL):
        for match in filter(None, map(NANOTRON_PART.fullmatch, list_folder(folder).files)):
            name, ranks = ".".join((*names, match["leaf"])), int(match["ranks"] or 1)
            rank = int(match["group"] or 0) * ranks + int(match["rank"] or 0)
            add_rank(found.setdefault(name, {}), rank, folder / match[0])
            counts[name] = ranks * int(match["groups"] or 1)
            if match["stage"]:
                stages.add(int(match["stage"]))
                last = max(last, int(match["stages"]) - 1)
    found = {name: dict(sorted(found[name].items())) for name in sorted(found, key=_natural)}
    lacking = {name: counts[name] - len(held) for name, held in found.items() if len(held) < counts[name]}
    if lacking:
        name = max(lacking, key=lambda name: lacking[name])
        path = next(iter(found[name].values()))
        divided = [name for name, count in counts.items() if count > 1]
        if set(lacking) == set(divided):  # a rank is missing, or more
            files.note_missing(counts[name], found[name], _OF_TENSORS.sub("{}", _OF_EXPERTS.sub("part-{}", path.name)))
        else:
            absent = (islice(_absent(files, found[name], counts[name]), LISTED) for name in lacking)
            names = tuple(chain.from_iterable(absent))
            files.damage.append(Fact.of(Kind.SHARDS_MISSING, names=names, keys=len(lacking), nbytes=0, total=0))
    if len(stages) <= last and not _has_all_layers(files.folder, found):
        absent_stages = (stage for stage in range(last + 1) if stage not in stages)
        named = tuple(f"model_*_pp-rank-{stage}-of-{last + 1}_*.safetensors" for stage in islice(absent_stages, LISTED))
        files.damage.append(Fact.of(Kind.SHARDS_MISSING, names=named, keys=0, nbytes=0, total=0))
        files.remarks[Fact.of(Kind.UNNAMED_LOSS, lost="the layers of missing stages")] = None
    files.remarks.update({Fact.of(Kind.LAYER_LACKING, name, number=layer): None for name, layer in _lacking(found)})
    wholes = {name: _whole(files, name, held, name in lacking) for name, held in found.items()}
    weights = OrderedDict((name, spec) for name, spec in wholes.items() if spec is not None)
    if not weights:
        raise damaged(files.folder, clauses(files.damage) or "has no weights")
    optimizer = files.folder / "optimizer"
    if optimizer.is_dir() and any(optimizer.iterdir()):
        files.remarks[Fact(Kind.RANK_LEFT_OUT, "optimizer")] = None
    made = files.document(NAME, weights, f"nanotron, {counted(max(counts.values()), 'tensor-parallel rank')}")
    return replace(made, lost={name: None for name, spec in wholes.items() if spec is None})


def _has_all_layers(folder: Path, names: Iterable[str]) -> bool:
    """Return whether a save has as many layers as its configuration says. A stage may have only tied parameters, which
    another one saves."""
    stated = _LAYERS.search(small_text(folder / _CONFIG))
    layers = {match[1] for match in map(_OF_LAYER.fullmatch, names) if match}
    return stated is not None and int(stated[1]) == len(layers)


def _lacking(names: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield the parameters that only one layer lacks, and its number, unless it has others that no other layer has, as
    a dense layer among those with experts."""
    layers: dict[int, set[str]] = {}
    for match in filter(None, map(_OF_LAYER.fullmatch, names)):
        layers.setdefault(int(match[1]), set()).add(match[2])
    holders = Counter(name for held in layers.values() for name in held)
    for number, held in layers.items():
        if len(layers) > 1 and all(holders[name] > 1 for name in held):
            missing = (name for name, count in holders.items() if count == len(layers) - 1 and name not in held)
            yield from ((f"model.decoder.{number}.{name}", number) for name in missing)


def _absent(files: RankFiles, held: Mapping[int, Path], count: int) -> Iterator[str]:
    """Yield the paths of the missing files of a parameter."""
    path = next(iter(held.values()))
    match = NANOTRON_PART.fullmatch(path.name)
    ranks = int((match and match["ranks"]) or 1)
    for number in range(count):
        group, rank = divmod(number, ranks)
        if number not in held:
            name = _OF_GROUPS.sub(str(group), _OF_TENSORS.sub(str(rank), path.name))
            yield files.name(path.with_name(name))


def _folders(model: Path) -> Iterator[tuple[tuple[str, ...], Path]]:
    """Yield the folders of modules, each with their names; links to folders, which may lead back, are not followed."""
    pending: list[tuple[tuple[str, ...], Path]] = [((), model)]
    while pending:
        names, folder = pending.pop()
        yield names, folder
        below = ((name, folder / name) for name in list_folder(folder).folders)
        pending += [((*names, name), place) for name, place in below if not place.is_symlink()]


def _whole(files: RankFiles, name: str, held: Mapping[int, Path], lacks: bool) -> TensorSpec | None:
    """Merge a parameter from the files of its parts; None if none of them can be read."""
    copies: dict[Box, list[TensorSpec]] = {}
    shape: tuple[int, ...] = ()
    part: Any = None
    for file in held.values():
        if (opened := files.opened(file)) is None:
            lacks = True
            continue
        part = opened.root["data"]
        notes = {fact.place: fact.data["text"] for fact in opened.remarks if fact.kind is Kind.NOTE}
        if _SLICES not in notes and len(held) == 1 and not lacks:
            return _tensor(part)
        shape = tuple(map(int, _SIZE.findall(notes[_SHAPE])))
        for pair in notes[_SLICES].split(";"):
            own, of_whole = pair.split("#")
            spec = _tensor(part)
            copies.setdefault(_box(of_whole, shape), []).append(boxed(spec, _box(own, spec.shape)))
    if part is None:
        return None
    whole = TensorSpec(part.dtype, shape, contiguous_strides(shape))
    intact = sum(numel(box) for box, same in copies.items() if not all(map(is_torn, same)))
    if (lacks or any(is_torn(part) for same in copies.values() for part in same)) and intact < whole.numel:
        files.lacking[name] += (whole.numel - intact) * whole.itemsize
        return gone(name, whole, str(files.folder))
    if not all(agree(same, str(files.folder)) for same in copies.values()):
        files.damage.append(Fact.of(Kind.RANKS_DIFFER, keys=(name,)))
    return merge_parts(name, whole.dtype, shape, copies, str(files.folder))


def _tensor(part: Any) -> TensorSpec:
    if not isinstance(part, TensorSpec):
        raise ValueError("there is no tensor in place of data")
    return part


def _box(text: str, shape: Sequence[int]) -> Box:
    """Return the box of slices such as ``0,10,None|None,None,None``."""
    made = []
    for size, one in zip(shape, text.split("|"), strict=True):
        start, stop, step = (None if word == "None" else int(word) for word in one.split(","))
        begin, end, jump = slice(start, stop, step).indices(size)
        if jump != 1 or (stop is not None and stop > size):
            raise ValueError(f"the slice {one} of {size} elements")
        made.append((begin, max(end, begin)))
    return tuple(made)


def _natural(text: str) -> list[tuple[int, str]]:
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in _NUMBER.split(text)]
