"""A torch file that was unpacked into a folder, as some browsers do with any zip archive."""

from pathlib import Path

from ckptfix.bytes.files import open_bytes
from ckptfix.bytes.limits import Bounds
from ckptfix.bytes.listing import list_folder
from ckptfix.bytes.sources import FileBytes
from ckptfix.core.facts import Fact, Kind
from ckptfix.core.spec import ByteSource
from ckptfix.errors import HostileError
from ckptfix.reading.pickles.payload import refusing_payload
from ckptfix.reading.torch_files import torchscript
from ckptfix.reading.torch_files.torch_zip import TorchArchive, read_archive
from ckptfix.reading.weights.document import Document

NAME = "torch-folder"
FILE_LIMIT = 200_000


def looks_like(folder: Path) -> bool:
    """Return whether a folder, or the only folder in it, has the members of a torch file."""
    return _root(folder) is not None


def read_folder(folder: Path) -> Document:
    """Return the document of an unpacked torch file. Raises ``UnreadableError`` if a member is missing or truncated."""
    archive = FolderArchive(str(folder), _files(_root(folder) or folder))
    with refusing_payload(str(folder), archive.bounds.names):
        if "constants.pkl" in archive.members:
            document = torchscript.read_script(archive)
        else:
            document = read_archive(archive, NAME)
    document.remarks.append(Fact(Kind.UNPACKED_FOLDER))
    return document


class FolderArchive(TorchArchive):
    """The files of a folder by their paths in it. There are no checksums, which were in the archive's directory, and a
    truncated file is noticed when its storage is read."""

    def __init__(self, path: str, members: dict[str, Path]) -> None:
        nbytes = sum(file.stat().st_size for file in members.values())
        super().__init__(path, nbytes, Bounds(path, nbytes))
        self.members: dict[str, Path] = members

    def source(self, name: str) -> ByteSource:
        file = open_bytes(str(self.members[name]))
        return FileBytes(file, 0, file.size)


def _root(folder: Path) -> Path | None:
    folders = [folder / name for name in list_folder(folder).folders if name != "__MACOSX"]
    for root in [folder, *(folders if len(folders) == 1 else [])]:
        if (root / "data.pkl").is_file() and ((root / "version").is_file() or (root / "data").is_dir()):
            return root
    return None


def _files(root: Path) -> dict[str, Path]:
    """Return all files in a folder and its subfolders, except links, which may lead anywhere."""
    files: dict[str, Path] = {}
    for path in root.rglob("*"):
        if path.is_file() and not path.is_symlink() and not path.name.startswith("._") and path.name != ".DS_Store":
            files[path.relative_to(root).as_posix()] = path
        if len(files) > FILE_LIMIT:
            raise HostileError(f"{root}: more than {FILE_LIMIT} files; name the folder of one checkpoint")
    return files
