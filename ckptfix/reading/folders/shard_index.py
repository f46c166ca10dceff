"""The index of a sharded checkpoint, which maps keys to files of the folder.

transformers writes it as ``{"metadata": {"total_size": …}, "weight_map": {key: file name}}`` beside the shards
(https://huggingface.co/docs/transformers/big_models#sharded-checkpoint). File names that lead outside the folder are
refused."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path, PurePosixPath, PureWindowsPath

from msgspec import Struct

from ckptfix.bytes.files import is_url
from ckptfix.bytes.limits import unique_keys
from ckptfix.bytes.listing import list_folder
from ckptfix.bytes.sources import Content
from ckptfix.errors import HostileError, UnreadableError, damaged, hostile

WEIGHT_MAP = "weight_map"
_NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.\w+)")
_OF_TORCHTUNE = re.compile(r"(hf_model)_(\d{4})(_\d+\.pt)")  # before 0.5, with the epoch
PACKED = (".gz", ".bz2", ".xz")  # suffixes of shards that were compressed one by one
INDEX_LIMIT = 256 << 20  # bytes of the largest index that is parsed; a million keys take a third of it


class Numbering(Struct, frozen=True):
    """The common parts of the names of numbered shards: ``model-…-of-00003.safetensors``. ``total`` is empty if the
    names do not have it, as torchtune's ``hf_model_…_0.pt``."""

    stem: str
    total: str
    suffix: str

    def __str__(self) -> str:
        return f"{self.stem}-…-of-{self.total}{self.suffix}" if self.total else f"{self.stem}_…{self.suffix}"

    @property
    def count(self) -> int:
        return int(self.total)

    @classmethod
    def of(cls, name: str) -> Numbering | None:
        """Return the numbering to which a file name belongs; None if it is not numbered."""
        if match := _OF_TORCHTUNE.fullmatch(name):
            return cls(match[1], "", match[3])
        match = _NUMBERED.fullmatch(name)
        return cls(match[1], match[3], match[4]) if match else None

    def names(self, present: Iterable[str] = ()) -> list[str]:
        """Return the names of all shards; without a total, up to the last one in ``present``."""
        if not self.total:
            numbers = [
                int(match[2])
                for name in present
                if (match := _OF_TORCHTUNE.fullmatch(name)) and match[3] == self.suffix
            ]
            return [f"{self.stem}_{number:04}{self.suffix}" for number in range(1, max(numbers) + 1)]
        return [f"{self.stem}-{number:05}-of-{self.total}{self.suffix}" for number in range(1, self.count + 1)]


class ShardIndex(Struct, frozen=True):
    """The file of each key, in the order of the index; ``total_size`` is the declared size of all tensors in bytes."""

    path: str
    weight_map: Mapping[str, str]
    total_size: int | None = None
    groups: str = ""  # in the index of an optimizer's state (ColossalAI), the file with its groups

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(self.weight_map.values()))


# The start of an index without a `weight_map`, which accelerate accepts too: `{key: file}`.
_FLAT = re.compile(rb'\{\s*"[^"\\]{1,400}"\s*:\s*"[^"\\/]{1,200}\.(safetensors|bin|pt|pth)"\s*[,}]')


def is_index(content: Content) -> bool:
    """Return whether the content is a JSON object with a ``weight_map``, or a flat one with file names."""
    head = content[:1024].lstrip(b"\xef\xbb\xbf \t\r\n")
    if head[:1] != b"{" or not head[1:].lstrip().startswith(b'"'):
        return False
    return content.find(f'"{WEIGHT_MAP}"'.encode(), 0, INDEX_LIMIT) >= 0 or _FLAT.match(head) is not None


def parse_index(content: Content) -> ShardIndex:
    """Parse the index in a JSON file. Raises ``UnreadableError`` if it is malformed or has a key twice."""
    path = content.path
    if len(content) > INDEX_LIMIT:
        raise hostile(path, f"an index of {len(content)} bytes, too many for names")
    try:
        parsed = content.bounds.parse_json(content[:], unique_keys)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"the index is not valid JSON ({error})") from error
    if not isinstance(parsed, dict):
        raise damaged(path, "the index is not a JSON object")
    is_flat = WEIGHT_MAP not in parsed and _FLAT.match(content[:1024].lstrip(b"\xef\xbb\xbf \t\r\n"))
    weight_map, metadata = (parsed, None) if is_flat else (parsed.get(WEIGHT_MAP), parsed.get("metadata"))
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise damaged(path, "its weight_map lacks the file name for some keys")
    if not weight_map:
        raise damaged(path, "its weight_map is empty: the index names no tensor")
    total, groups = map(metadata.get, ("total_size", "param_groups")) if isinstance(metadata, dict) else (None, None)
    return ShardIndex(path, weight_map, total if type(total) is int and total > 0 else None, str(groups or ""))


def name_unpacked(name: str) -> str:
    """Return the name of a file before it was compressed."""
    return next((name.removesuffix(suffix) for suffix in PACKED if name.endswith(suffix)), name)


class LocalFolder(Struct, frozen=True, dict=True):
    """A local folder with shards."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def names(self) -> list[str]:
        try:
            return [*list_folder(self.path).files]
        except OSError as error:
            raise UnreadableError(f"{self.path}: cannot be listed: {error.strerror or error}") from error

    def find(self, name: str, said_by: str) -> str | None:
        """Return the path of a file that ``said_by`` names; None if it does not exist. Raises ``HostileError`` for a
        name that leads outside the folder."""
        # Most names are looked up in a listing, because an index may name any number of missing files.
        if "/" in name or "\\" in name or not name or "\0" in name or name in self._present:
            file = file_inside(self.path, name, said_by)
            return str(file) if os.path.isfile(file) else None  # noqa: PTH113 - Path.is_file raises for long names
        return None

    @cached_property
    def _present(self) -> frozenset[str]:
        return frozenset(self.names())


class RemoteFolder(Struct, frozen=True, dict=True):
    """The folder of a URL. HTTP servers do not list it, so files that an index names are assumed to exist."""

    url: str

    def __str__(self) -> str:
        return self.url

    def names(self) -> list[str]:
        return self._listed or []

    def find(self, name: str, said_by: str) -> str | None:
        if not name or name.startswith("/") or ".." in PurePosixPath(name).parts or "\\" in name or "://" in name:
            raise HostileError(f"{said_by}: it names the file {name!r:.80}, which leads outside the folder")
        is_absent = self._listed is not None and "/" not in name and name not in self._listed
        return None if is_absent else f"{self.url}/{name}"

    @cached_property
    def _listed(self) -> list[str] | None:
        from ckptfix.bytes.remote import files_beside

        return files_beside(self.url)


Folder = LocalFolder | RemoteFolder


def folder_of(path: str) -> Folder:
    return RemoteFolder(path.rpartition("/")[0]) if is_url(path) else LocalFolder(Path(path).parent)


def file_inside(folder: Path, name: str, said_by: str) -> Path:
    """Return the path of a file that ``said_by`` names, after checking that it is inside the folder.

    Links may lead into the folder, or to the real folder of the file ``said_by``, as in the cache of the Hugging Face
    hub. Raises ``HostileError`` for any name or link that leads elsewhere; a link to nothing is a missing file."""
    names = (PurePosixPath(name), PureWindowsPath(name))
    absolute = any(path.drive or path.root for path in names)
    if not name or "\0" in name or absolute or any(".." in path.parts for path in names):
        raise HostileError(
            f"{said_by}: it names the file {name!r:.80}, which leads outside the folder; do not use this checkpoint"
        )
    path = folder / name
    try:
        real, homes = path.resolve(), (folder.resolve(), Path(said_by).resolve().parent)
    # Before Python 3.13, a loop of links raises RuntimeError; a name that is not valid text raises ValueError.
    except (OSError, RuntimeError, ValueError) as error:
        raise HostileError(
            f"{said_by}: {name!r:.80} cannot be followed ({error}); do not use this checkpoint"
        ) from error
    if not any(real.is_relative_to(home) for home in homes) and os.path.lexists(real):
        raise HostileError(
            f"{said_by}: {name!r:.80} is a link that leads outside the folder, to {real};"
            " put the file itself there if you trust it"
        )
    return path
