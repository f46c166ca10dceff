"""Reads folders that are one checkpoint, and finds the checkpoints in other folders."""

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

from msgspec.structs import replace

from ckptfix.bytes.files import small_text, why_unopened
from ckptfix.bytes.listing import Listing, list_folder
from ckptfix.bytes.sources import Content
from ckptfix.core.facts import Fact, Kind
from ckptfix.core.objects import tensors_in
from ckptfix.core.spec import TensorSpec
from ckptfix.core.wording import first_names
from ckptfix.errors import UnreadableError, damaged
from ckptfix.reading.folders import dcp, dcp_safetensors, offloaded, sharded
from ckptfix.reading.folders.rank_shards import (
    COMMON,
    LIGHTNING,
    LIGHTNING_RELEASE,
    MEGATRON_METADATA,
    OF_VERL,
    OPTIMIZERS,
    TORCH_DIST,
)
from ckptfix.reading.folders.ranks import (
    beside,
    fairscale,
    fairseq2,
    fsdp,
    llama,
    megatron,
    megatron_fsdp,
    nanotron,
    pipeline,
    torch_dist,
    universal,
    zero,
)
from ckptfix.reading.folders.ranks.files import RankFiles, latest_of
from ckptfix.reading.folders.ranks.names import LATEST_MEGATRON, LLAMA_PARAMS, POINTERS, iteration_name
from ckptfix.reading.folders.shard_index import file_inside
from ckptfix.reading.foreign.signatures import BUNDLES, PARTS, name_bundle
from ckptfix.reading.foreign.weightless import is_of_training, is_random_state
from ckptfix.reading.formats import read_document
from ckptfix.reading.torch_files import exploded
from ckptfix.reading.weights.document import Document

# All folder formats, in the order in which they are tried: modules with `NAME`, `looks_like(folder)` and
# `read_folder(folder)`.
FOLDER_FORMATS = (dcp, exploded, dcp_safetensors, sharded, offloaded)

# All frameworks whose ranks are merged, in the order in which they are tried: modules with
# `find(folder)`: the folder with files named like ranks, this one or one below it; None if there is none;
# `folder_of(file)`: the same for a file that is named like one of several ranks;
# `document(files)`: the merged document; None if the files turn out to be something else.
# The names of their files are in `ranks/names.py`.
FRAMEWORKS: tuple[ModuleType, ...] = (pipeline, universal, zero, megatron, llama, nanotron, fairseq2, fsdp)

# Formats of folders that only training frameworks load.
OF_TRAINING = frozenset(form.NAME for form in (*FRAMEWORKS, fairscale, dcp, dcp_safetensors))

# Suffixes of checkpoints, used only to name the files in a folder that may be meant.
SUFFIXES = frozenset(".pth .pt .bin .ckpt .safetensors .tar .pkl .pickle .npz .t7 .model .th .pyth .distcp".split())

# Names of the only weights file in a folder of transformers, diffusers, peft, accelerate and mlx-lm.
ADAPTERS = frozenset(
    "adapter_model.safetensors adapter_model.bin adapters.safetensors "
    "pytorch_lora_weights.safetensors pytorch_lora_weights.bin".split()
)
WEIGHTS = ADAPTERS | frozenset(
    "model.safetensors pytorch_model.bin diffusion_pytorch_model.safetensors diffusion_pytorch_model.bin".split()
)

# accelerate's file of the full weights of FSDP, which the HF Trainer also saves under one of the names above.
_OF_FSDP = "pytorch_model_fsdp.bin"

# The depth to which subfolders are searched for checkpoints, and the largest number of results.
_DEPTH, _MOST_NAMED = 3, 100
_PACKED = (".gz", ".bz2", ".xz", ".zip", ".zst", ".tgz")
_some = partial(first_names, most=6)


def weights_file(path: str) -> str | None:
    """Return the only weights file in a folder that a library wrote, beside its configuration and training state.

    None if there is none or several, or if the folder itself is a checkpoint."""
    folder = Path(path)
    try:
        found = (WEIGHTS | {_OF_FSDP}).intersection(list_folder(folder).files)
        names = [*(found - {_OF_FSDP} or found)]
        if len(names) != 1 or any(form.looks_like(folder) for form in FOLDER_FORMATS):
            return None
    except OSError:
        return None  # reading the folder reports the error
    return str(folder / names[0])


# Weights files and indexes of shards in the order in which these libraries look for them in a repository, which may
# have the same weights in several formats.
IN_REPOSITORIES = (
    *(f"{name}{end}" for name in ("model.safetensors", "pytorch_model.bin") for end in ("", ".index.json")),
    *(f"diffusion_pytorch_model.{kind}{end}" for kind in ("safetensors", "bin") for end in ("", ".index.json")),
    *(f"{name}.{kind}" for name in ("adapter_model", "pytorch_lora_weights") for kind in ("safetensors", "bin")),
)


def weights_url(url: str) -> str:
    """Return the URL of the weights in a repository or folder at a URL; the URL itself if it names a file.

    Raises ``UnreadableError`` if there are no weights, or several files."""
    url = url.rstrip("/")
    last = PurePosixPath(url.partition("://")[2])
    if last.suffix.lower() in (*SUFFIXES, *_PACKED, ".json") and len(last.parts) > (2 if url.startswith("hf:") else 1):
        return url
    from ckptfix.bytes.remote import files_beside

    names = files_beside(url)
    if names is None:
        return url
    likely = [name for name in names if Path(name).suffix.lower() in SUFFIXES or name.endswith(".index.json")]
    chosen = next((name for name in IN_REPOSITORIES if name in likely), likely[0] if len(likely) == 1 else None)
    if chosen is None and likely:
        raise UnreadableError(f"{url}: several files match; name one of them, for example {url}/{likely[0]}")
    if chosen is None:
        raise UnreadableError(f"{url}: no checkpoint found{f'; it holds {_some(names)}' if names else ''}")
    return f"{url}/{chosen}"


def read_folder(path: str, salvage: bool) -> Document:
    """Return the document of a folder. Raises ``UnreadableError`` if it has none."""
    folder = Path(path)
    try:
        for form in FOLDER_FORMATS:
            if form.looks_like(folder):
                document: Document = _read_dcp(folder, salvage) if form is dcp else form.read_folder(folder)
                beside.sort_groups(document.root)
                return document
        for framework in FRAMEWORKS:
            place = framework.find(folder)
            if place is not None and framework is llama and _has_fsdp(folder):
                raise UnreadableError(f"{path}: has both FSDP ranks and consolidated weights; name a file of either")
            if place is not None and (merged := _merged(framework, RankFiles(place, salvage))) is not None:
                return merged
        if (items := _read_items(folder, salvage)) is not None:
            beside.sort_groups(items.root)
            return items
        if (only := only_checkpoint(folder)) is not None:
            if only.is_dir():
                return read_folder(str(only), salvage)
            return read_siblings(only, salvage) or read_document(Content.of_file(str(only)))
        raise UnreadableError(f"{path}: {_contents(folder)}")
    except OSError as error:
        raise UnreadableError(f"{path}: {why_unopened(path, error)}") from error


def has_ranks(folder: Path) -> bool:
    """Return whether ranks wrote a folder, by the names in it, or by the first file if names do not tell.

    Raises ``UnreadableError`` if it has several such checkpoints."""
    try:
        return any(form.find(folder) is not None for form in FRAMEWORKS if form is not fsdp) or fsdp.is_named(folder)
    except OSError:
        return False  # reading the folder reports the error


def read_siblings(file: Path, salvage: bool) -> Document | None:
    """Return the document of all ranks beside a file that is one of them or names the latest save; None for any other
    file."""
    if (
        file.name in (*POINTERS, LLAMA_PARAMS)
        and file.is_file()
        and (has_ranks(file.parent) or dcp_items(file.parent)[1])
    ):
        return read_folder(str(file.parent), salvage)
    if dcp_safetensors.SHARD.fullmatch(file.name) and file.is_file():
        return dcp_safetensors.read_folder(file.parent)
    if (epoch := sharded.read_siblings(file)) is not None:
        return epoch
    for form in FRAMEWORKS:
        if (folder := form.folder_of(file)) is not None:
            files = RankFiles(folder, salvage, named=file)
            files.is_by_name = not _is_read_by(form, folder)
            return _merged(form, files)
    return None


def _is_read_by(form: ModuleType, folder: Path) -> bool:
    """Return whether this is the format of a framework's ranks by which a folder is read that has the files of one."""
    if any(each.looks_like(folder) for each in FOLDER_FORMATS):
        return False
    with suppress(UnreadableError):  # several saves
        chosen = next((each for each in FRAMEWORKS if each.find(folder) is not None), None)
        return chosen is form and not (form is llama and _has_fsdp(folder))
    return False


def _has_fsdp(folder: Path) -> bool:
    with suppress(UnreadableError):  # several sets, possibly none of FSDP
        return fsdp.is_named(folder)
    return False


def _merged(form: ModuleType, files: RankFiles) -> Document | None:
    """Return what a format makes of ranks. With ``salvage``, ranks with the data of another one count as missing."""
    document: Document | None = None
    try:
        with files.merging():
            document = form.document(files)
    except UnreadableError:
        if not files.salvage or (rest := files.without_misplaced()) is None:
            raise
    else:
        if not files.salvage or document is None or (rest := files.without_misplaced()) is None:
            return document
    with rest.merging():
        document = form.document(rest)
        return document


def _read_items(folder: Path, salvage: bool) -> Document | None:
    """Return the document of the latest or only DCP folder in a folder, merged with that of an optimizer beside it."""
    found, models = dcp_items(folder)
    if len(models) > 1 and (named := _latest(folder, models)) is not None:
        models = found = [named]
    if len(models) > 1:
        names = first_names([child.relative_to(folder).as_posix() for child in models])
        raise UnreadableError(
            f"{folder}: holds {len(models)} checkpoints of torch.distributed.checkpoint ({names}); name one of them"
        )
    if not models:
        return None
    (model,) = models
    if model == folder / OF_VERL[0]:
        document = _read_dcp(model, salvage, [child for child in found if child != model])
        return replace(document, path=str(folder)) if len(found) > 1 else document
    document = dcp_safetensors.read_folder(model) if dcp_safetensors.looks_like(model) else _read_dcp(model, salvage)
    root = document.root
    for child in found if isinstance(root, dict) else ():
        if child in models:
            continue
        other, damage = _part(child, child.name, salvage)
        root = {"model": root} if any(isinstance(value, TensorSpec) for value in root.values()) else root
        is_bare = is_of_training(other.root) or not isinstance(other.root, dict)
        root = {**({beside.OPTIMIZER: other.root} if is_bare else other.root), **root}
        document = replace(
            document,
            path=str(folder),
            root=root,
            names=document.names | other.names,
            remarks=[*document.remarks, *other.remarks],
            damage=[*document.damage, *damage],
        )
    return document


def _part(folder: Path, name: str, salvage: bool) -> tuple[Document, list[Fact]]:
    """Return the document of a DCP folder beside the weights, and its damage, which may be that it cannot be read."""
    try:
        document = dcp.read_folder(folder, salvage)
    except UnreadableError as error:
        return Document(str(folder), dcp.NAME, {}), [Fact.of(Kind.SHARD_UNREADABLE, name, error=str(error))]
    return document, [replace(fact, place=f"{name}/{fact.place}") for fact in document.damage]


def dcp_items(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the folders of torch.distributed.checkpoint in a folder, and those of them that are not optimizers.

    A model and its optimizer may each be in one more folder: ``weights/model`` and ``optimizer/optim`` of NeMo RL. So
    are the parts of verl's saves, unless they have the weights in another form too."""

    def below(place: Path) -> list[Path]:
        folders = [place / name for name in list_folder(place).folders]
        return [child for child in folders if dcp.looks_like(child) or dcp_safetensors.looks_like(child)]

    parts = [folder / part for part in OF_VERL if (folder / part).is_dir() and dcp.looks_like(folder / part)]
    if parts[:1] == [folder / OF_VERL[0]] and not _files(folder, parts):
        return parts, parts[:1]
    found = below(folder)
    optimizers = [] if found else [*folder.glob(f"{OPTIMIZERS}*/{OPTIMIZERS}*")]
    if len(optimizers) == 1 and optimizers[0] in below(optimizers[0].parent):
        others = [folder / name for name in list_folder(folder).folders if folder / name != optimizers[0].parent]
        models = [child for place in others for child in below(place)]
        return [*models, *optimizers], models
    return found, [child for child in found if not child.name.startswith(OPTIMIZERS)]


def _latest(folder: Path, found: Sequence[Path]) -> Path | None:
    """Return the folder that a file of Megatron or links of OLMo and Composer mark as the latest; None if none."""
    if (latest := latest_of(folder, LATEST_MEGATRON, dcp.looks_like, iteration_name)) is not None:
        return latest
    real = [child for child in found if not child.is_symlink()]
    links = {child.resolve() for child in found if child.is_symlink()}
    links |= {folder.resolve() / Path(small_text(file).strip()).name for file in folder.glob("*.symlink")}
    named = [child for child in real if child.resolve() in links]
    return named[0] if len(named) == len(links) == 1 else None


def _read_dcp(folder: Path, salvage: bool, beside: Sequence[Path] = ()) -> Document:
    """Return the document of a DCP folder, merged with the common data that one rank saved, and with the folders
    ``beside`` it that have the rest of the same save."""
    document = dcp.read_folder(folder, salvage)
    if not isinstance(document.root, dict):
        return document
    found, lost = None, list[Fact]()
    try:
        found = _common(folder, document)
    except UnreadableError as error:
        if not salvage:
            raise
        name = next(name for name in COMMON if (folder / name).is_file())
        lost = [Fact.of(Kind.SHARD_UNREADABLE, name, error=str(error))]
    if found is None and _is_torch_dist(folder):
        # If an item is damaged, it may be the common data.
        lacks = Fact.of(Kind.SHARDS_MISSING, names=(TORCH_DIST,), keys=0, nbytes=0, total=0)
        lost = lost or ([] if document.damage else [lacks])
        found = TORCH_DIST, Document(document.path, dcp.NAME, {})
    if found is None:
        root = _with_model(megatron_fsdp.whole_layers(document.root))
        return replace(document, root=root, damage=[*document.damage, *lost])
    name, common = found
    damage = lost or [Fact.of(Kind.SHARD_DAMAGED, name, cause=fact) for fact in common.damage]
    for place in beside:
        document, common, more = _merged_with(place, document, common, salvage)
        damage += more
    saved = {key: value for key, value in document.root.items() if key != _COMMON_STATE}
    root = {**saved, **{key: value for key, value in common.root.items() if key not in saved}}
    copies: dict[str, TensorSpec] = {}
    remarks = [*document.remarks, *common.remarks]
    if name == LIGHTNING and LIGHTNING_RELEASE in root:
        root = _of_lightning(root)
    if name == TORCH_DIST:
        root, copies, left_out = torch_dist.converted(root, common.root)
        remarks += [Fact(Kind.RANK_LEFT_OUT, name) for name in left_out]
        used = {**root.get("model", {}), **copies}
        kept = tuple(key for key, spec in used.items() if isinstance(spec, TensorSpec) and spec.dtype == "float32")
        halves = sorted({copy.dtype for copy in copies.values()} - {"float32"})
        remarks += [Fact.of(Kind.MASTERS, dtype=half, kept=kept) for half in halves]
    return replace(
        document,
        root=root,
        names=document.names | common.names,
        remarks=list(dict.fromkeys(remarks)),
        copies=copies,
        damage=[*document.damage, *damage],
    )


def _merged_with(
    place: Path, document: Document, common: Document, salvage: bool
) -> tuple[Document, Document, list[Fact]]:
    """Return a document and its common data, each merged with those in another folder, and the damage there."""
    name = place.relative_to(Path(document.path).parents[1]).as_posix()
    other, damage = _part(place, name, salvage)
    more = _common(place, other) if isinstance(other.root, dict) else None
    if more is None:
        return document, common, damage
    root = {key: value for key, value in other.root.items() if key != _COMMON_STATE}
    if twice := [str(key) for key in root if key in document.root]:
        raise UnreadableError(f"{place}: has {first_names(twice)}, as do the weights; the folders are from two saves")
    merged = replace(
        document,
        root={**document.root, **root},
        names=document.names | other.names | more[1].names,
        remarks=[*document.remarks, *other.remarks, *more[1].remarks],
    )
    damage += [Fact.of(Kind.SHARD_DAMAGED, name, cause=fact) for fact in more[1].damage]
    return merged, replace(common, root={**more[1].root, **common.root}), damage


# The item of the chunks with the common data of newer releases of Megatron, which write no `common.pt`:
# https://github.com/NVIDIA/Megatron-LM/pull/5160
_COMMON_STATE = "common_state/shard_0_1"


def _common(folder: Path, document: Document) -> tuple[str, Document] | None:
    """Return the data that one rank saved next to the chunks or as one of them, with the name of its file; None if
    there is none."""
    held = document.root.get(_COMMON_STATE)
    if isinstance(held, list) and held and isinstance(held[0], dict):
        return TORCH_DIST, Document(document.path, dcp.NAME, held[0])
    file = next((folder / name for name in COMMON if (folder / name).is_file()), None)
    if file is None:
        return None
    common = read_document(Content.of_file(str(file_inside(folder, file.name, str(folder / dcp.METADATA)))))
    if not isinstance(common.root, dict):
        raise damaged(file, "lacks the data next to the chunks")
    return file.name, common


def _with_model(root: Any) -> Any:
    """Return a container with its weights under ``model`` if they are among counters and the state of an optimizer, as
    torchtitan saves them."""
    if not isinstance(root, dict):
        return root
    weights = {
        name: value
        for name, value in root.items()
        if isinstance(value, TensorSpec) or str(name).endswith("_extra_state")
    }
    rest = {name: value for name, value in root.items() if name not in weights}
    nested = [*tensors_in(rest, is_of_training)]
    if not rest or "model" in root or any(spec.numel > 1 and not is_random_state(spec) for spec in nested):
        return root
    return {"model": weights, **rest} if any(spec.numel > 1 for spec in tensors_in(weights)) else root


def _of_lightning(root: dict[Any, Any]) -> dict[Any, Any]:
    """Return a container of Lightning with the names that its ``Trainer`` reads from a single file: in a folder, the
    weights are under ``model``, and each optimizer has its own name."""
    optimizers = [key for key in (f"optimizer_{number}" for number in range(len(root))) if key in root]
    whole = {"state_dict" if key == "model" else key: root[key] for key in root if key not in optimizers}
    return whole | ({"optimizer_states": [root[key] for key in optimizers]} if optimizers else {})


def _is_torch_dist(folder: Path) -> bool:
    """Return whether ``metadata.json`` says that Megatron wrote the folder, which then has common data."""
    return '"torch_dist"' in small_text(folder / MEGATRON_METADATA)


def _checkpoints(folder: Path) -> list[Path]:
    """Return the subfolders that are checkpoints of several files, as far as file names show."""
    found: list[Path] = []
    pending = deque((folder / name, 1) for name in list_folder(folder).folders)
    while pending and len(found) <= _MOST_NAMED:
        place, depth = pending.popleft()
        try:
            is_one = any(form.looks_like(place) for form in FOLDER_FORMATS) or has_ranks(place)
            items, models = dcp_items(place)
            is_one = is_one or len(models) == 1 < len(items)  # a model with its optimizer
            below = [place / name for name in list_folder(place).folders if depth < _DEPTH]
        except OSError:
            continue
        except UnreadableError:  # it has several
            is_one = True
        found += [place] * is_one
        pending += [(child, depth + 1) for child in below if not is_one]
    return found


def only_checkpoint(folder: Path) -> Path | None:
    """Return the only checkpoint in a folder, a file or a subfolder, by its name; None if there are several."""
    folders = _checkpoints(folder)
    rest = [place for place in folders if place.as_posix().endswith(OF_VERL[1:])]  # its weights may be in a file
    found = [*(place for place in folders if place not in rest), *_files(folder, folders)] or rest
    return found[0] if len(found) == 1 else None


def _files(folder: Path, checkpoints: Sequence[Path]) -> list[Path]:
    """Return the files in a folder and its subfolders that may be checkpoints, except those of ``checkpoints``."""
    found, apart = list[Path](), frozenset(checkpoints)
    folders = [folder]
    for _ in range(_DEPTH):
        inside = [(place, listing) for place in folders if place not in apart and (listing := _listed(place))]
        found += [place / name for place, listing in inside for name in listing.files if _is_likely(name)]
        folders = [place / name for place, listing in inside for name in listing.folders]
    return sorted(path for path in found if path not in apart)


def _contents(folder: Path) -> str:
    found = list_folder(folder)
    names = sorted([*found.files, *found.others, *(f"{name}/" for name in found.folders)])
    checkpoints = _checkpoints(folder)
    files = _files(folder, checkpoints)
    likely = [path.name for path in files if path.parent == folder]
    below = [
        path.relative_to(folder).as_posix() for path in (*checkpoints, *files) if path.is_dir() or path.parent != folder
    ]
    every = [*names]
    for place in found.folders:
        if (inside := _listed(folder / place)) is not None:
            every += (f"{place}/{name}" for name in inside.names)
            every += (
                f"{place}/{name}/.zarray" for name in inside.folders if (folder / place / name / ".zarray").exists()
            )
    bundle = name_bundle(every, PARTS) or name_bundle(every, BUNDLES)
    if not (likely or below) and bundle is not None:
        return f"a folder without a PyTorch checkpoint: {bundle}"
    if not names:
        return "an empty folder; name a checkpoint file"
    if likely or below:
        named = below if checkpoints or not likely else likely
        kind = "checkpoints" if checkpoints else "files"
        return f"a folder, but not a sharded checkpoint; name one of the {kind} in it: {_some(named)}"
    return f"a folder without a checkpoint in it; it holds {_some(names)}"


def _listed(folder: Path) -> Listing | None:
    """Return the names in a folder; None if it cannot be read."""
    with suppress(OSError):
        return list_folder(folder)
    return None


def _is_likely(name: str) -> bool:
    return Path(name).suffix.lower() in SUFFIXES and name not in COMMON
