"""Opens a path as a checkpoint: a file of any format, a packed one, an index of shards, or a folder."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ckptfix.bytes.files import is_url
from ckptfix.bytes.listing import list_folder
from ckptfix.bytes.sources import Content
from ckptfix.core.checkpoint import IN_MEMORY, Candidate, Checkpoint
from ckptfix.core.facts import Fact, Kind
from ckptfix.core.lazy import torch
from ckptfix.core.objects import holds_tensors, tensors_in
from ckptfix.core.settings import SOURCE, Settings
from ckptfix.core.spec import Storage, TensorSpec
from ckptfix.errors import CkptfixError, Opt, UnreadableError, UsageError
from ckptfix.reading import sniffing
from ckptfix.reading.folders.rank_shards import BESIDE_CHUNKS, may_be_rank
from ckptfix.reading.formats import open_content, read_document
from ckptfix.reading.weights.containers import LazyTensors, open_document
from ckptfix.reading.weights.document import Document
from ckptfix.reading.weights.prefixed_sets import with_pick

# Modules that only some files need are imported when they are used, so that the first answer is quick.


Source = str | os.PathLike[str] | Mapping[str, Any]  # a checkpoint file, or a state_dict in memory


def is_remote(source: object) -> bool:
    return isinstance(source, str) and is_url(source)


def open_source(source: Source, settings: Settings) -> Checkpoint:
    """Open a checkpoint file or a state_dict in memory with the settings of a repair."""
    if not isinstance(source, Mapping):
        if not isinstance(source, (str, os.PathLike)):
            raise UsageError(f"the source is of type {type(source).__name__}; give a path or a state_dict")
        path, weights = os.fspath(source), settings.weights
        checkpoint = open_file(path, weights, salvage=settings.salvage, member=settings.member, narrow=False)
        return _with_trainers_files(checkpoint, Path(path))
    if settings.compare == SOURCE:
        raise UsageError(
            Opt("compare", "source"), ": a state_dict in memory is not a file; name a file to compare with"
        )
    checkpoint = open_state_dict(source)
    if any(isinstance(entry, Mapping) and holds_tensors(entry) for entry in checkpoint.entries.values()):
        # A container, as torch.load returns it.
        return open_document(Document(checkpoint.path, IN_MEMORY, checkpoint.root), settings.weights, narrow=False)
    return checkpoint if settings.weights is None else with_pick(checkpoint, settings.weights)


def open_state_dict(state_dict: Mapping[Any, Any]) -> Checkpoint:
    """Return a state_dict in memory as a checkpoint. Nothing is copied: unedited entries keep their memory."""
    storages: dict[int, Storage] = {}
    entries = {str(key): _specs_of(value, storages) for key, value in state_dict.items()}
    if len(entries) < len(state_dict):
        raise UnreadableError("state_dict: a key occurs twice, as a string and as a number; keep one of them")
    specs = [value for value in entries.values() if isinstance(value, TensorSpec)]
    metadata = getattr(state_dict, "_metadata", None)
    remarks = [Fact.of(Kind.NON_STRING_KEY, key=str(key)) for key in state_dict if not isinstance(key, str)]
    if any(_is_array(value) for value in state_dict.values()):
        remarks.append(Fact(Kind.NUMPY_WEIGHTS))
    return Checkpoint(
        path="state_dict",
        format=IN_MEMORY,
        entries=entries,
        metadata=None if metadata is None else {str(module): dict(versions) for module, versions in metadata.items()},
        root=entries,
        devices=(),
        candidates=(Candidate.of((), specs),),
        remarks=tuple(remarks),
        reader=LazyTensors(),
    )


def _specs_of(value: Any, storages: dict[int, Storage]) -> Any:
    """Return an entry of a state_dict in memory with its tensors as specs, also those inside packed parameters."""
    if _is_array(value):
        value = _from_array(value)
    if isinstance(value, torch.Tensor):
        from ckptfix.reading.tensors import spec_of_tensor

        return spec_of_tensor(value, storages)
    if type(value) in (tuple, list):
        return type(value)(_specs_of(item, storages) for item in value)
    if type(value) in (dict, OrderedDict):
        made = type(value)((key, _specs_of(item, storages)) for key, item in value.items())
        getattr(made, "__dict__", {}).update(getattr(value, "__dict__", {}))  # a state_dict's _metadata
        return made
    return value


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")  # if it is not imported, there are no arrays
    return numpy is not None and isinstance(value, numpy.ndarray)


def _from_array(array: Any) -> Any:
    """Return a numpy array as a tensor, which shares its memory if torch can; arrays of text or objects as a list."""
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    is_sharable = native.flags.writeable and all(stride >= 0 for stride in native.strides)
    try:
        return torch.from_numpy(native if is_sharable else native.copy())
    except TypeError:  # torch has no such element type
        return array.tolist()


# The files of the Hugging Face Trainer and accelerate next to a model that its edits may change.
OPTIMIZERS = ("optimizer.pt", "optimizer.bin", "scheduler.pt", "scheduler.bin")
# All files from which they, ColossalAI and torchtune resume, with any number of ranks.
OF_TRAINERS = re.compile(
    r"(optimizer|scheduler)\.(pt|bin)|lr_scheduler|recipe_state\.pt|scaler\.pt|rng_state(_\d+)?\.pth"
    r"|random_states_\d+\.pkl|sampler(_\d+)?\.bin|dl_state_dict(_\d+)?\.bin|custom_checkpoint_\d+\.pkl"
    r"|training_args\.bin|trainer_state\.json"
)

# The names of their files for the model itself.
MODELS = frozenset(
    f"{name}{end}"
    for name in ("model.safetensors", "pytorch_model.bin", "pytorch_model.pt")
    for end in ("", ".index.json")
) | {"adapter_model.safetensors", "adapter_model.bin"}


def _with_trainers_files(checkpoint: Checkpoint, path: Path) -> Checkpoint:
    """Return the checkpoint with a trainer's optimizer beside it, and a remark for each payload in such files."""
    folder = path if path.is_dir() else path.parent
    if not (path.is_dir() or (path.name in MODELS and folder.is_dir())):
        return checkpoint
    beside: dict[str, Any] = {}
    armed: list[Fact] = []
    for name in filter(OF_TRAINERS.fullmatch, list_folder(folder).files):
        if not name.endswith(".json"):
            file = folder / name
            with contextlib.suppress(UnreadableError, UsageError):  # a check of that file reports the error
                document = read_document(Content.of_file(str(file)))
                armed += [replace(fact, place=file.name) for fact in document.remarks if fact.kind is Kind.PAYLOAD]
                if file.name in OPTIMIZERS:
                    beside[file.name] = document.root
    return replace(checkpoint, beside=beside, remarks=(*checkpoint.remarks, *armed))


def open_file(
    path: str, weights: str | None = None, *, salvage: bool = False, member: str | None = None, narrow: bool = True
) -> Checkpoint:
    """Open the checkpoint in a file or folder. No tensor is read, and no code of the file runs.

    ``weights`` picks one of several state_dicts by its name in the container, or one of several sets in a state_dict by
    the prefix of its keys; without ``narrow``, the other sets stay and ``Checkpoint.picked`` has the picked one.
    ``member`` picks one of several files in an archive. ``salvage`` keeps the intact tensors of a damaged file, and
    ``Checkpoint.lost`` has the others. Raises ``UnreadableError`` with the cause if the file cannot be opened, and
    ``HostileError`` if it is built to do harm."""
    is_part = path.endswith((".distcp", ".metadata")) or Path(path).name in BESIDE_CHUNKS
    if is_part and Path(path).with_name(".metadata").is_file():
        path = str(Path(path).parent)  # of torch.distributed.checkpoint, which is a folder
    if os.path.isdir(path):  # noqa: PTH112 - Path.is_dir raises for names that are too long and folders without access
        from ckptfix.reading.folders.folders import read_folder, weights_file

        file = weights_file(path)
        if file is None or _are_in_ranks(file):
            return open_document(read_folder(path, salvage), weights, salvage=salvage, narrow=narrow)
        path = file
    if is_url(path):
        from ckptfix.reading.folders.folders import weights_url

        path = weights_url(path)
    elif member is None and (document := _read_ranks(path, salvage)) is not None:
        if os.path.isdir(document.path) and _has_other_weights(document.path):  # noqa: PTH112
            document = replace(document, path=path, folder=document.path)
        return open_document(document, weights, salvage=salvage, narrow=narrow)
    content = open_content(path, member)
    document = _read_index(content) or read_document(content)
    checkpoint = open_document(document, weights, salvage=salvage, narrow=narrow)
    return replace(checkpoint, path=path, member=content.member) if content.member else checkpoint


def _has_other_weights(folder: str) -> bool:
    """Return whether a folder of ranks has a weights file that is opened instead of them if the folder is named."""
    from ckptfix.reading.folders.folders import weights_file

    return (file := weights_file(folder)) is not None and not _are_in_ranks(file)


def _are_in_ranks(file: str) -> bool:
    """Return whether a file of ``save_pretrained`` under ZeRO 3 is empty, with its elements in the ranks beside it."""
    from ckptfix.reading.folders.folders import has_ranks

    with contextlib.suppress(CkptfixError):  # reading the files reports the error
        if has_ranks(Path(file).parent):
            found = [*tensors_in(read_document(Content.of_file(file)).root)]
            return bool(found) and not any(spec.numel for spec in found)
    return False


def _read_ranks(path: str, salvage: bool) -> Document | None:
    """Return the document of all ranks of a training run if the file is one of them by name; None otherwise."""
    if not may_be_rank(path):
        return None
    from ckptfix.reading.folders.folders import read_siblings

    try:
        return read_siblings(Path(path), salvage)
    except OSError:
        return None  # opening the file reports the error


def _read_index(content: Content) -> Document | None:
    """Return the document of a sharded checkpoint if the content is its index; None otherwise."""
    if not sniffing.may_be_json(content):
        return None
    from ckptfix.reading.folders import shard_index, sharded

    return sharded.read(content) if shard_index.is_index(content) else None
