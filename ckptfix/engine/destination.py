"""Where the result of a repair goes, in which format, and whether there is anything to write."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from ckptfix.core.adaptations import adaptation
from ckptfix.core.checkpoint import IN_MEMORY, Checkpoint, path_name
from ckptfix.core.facts import Kind
from ckptfix.core.option import Type
from ckptfix.core.options import BY_NAME, INPUT_SUFFIXES
from ckptfix.core.plan import Plan
from ckptfix.core.settings import PTH, SAFETENSORS, UNIVERSAL, Settings
from ckptfix.errors import Opt, UsageError, WriteError
from ckptfix.reading.adapter_checks import adapter_paths
from ckptfix.reading.folders import sharded
from ckptfix.reading.torch_files import torch_zip
from ckptfix.writing.atomic import backup_of, refuse_name, refuse_output, sibling
from ckptfix.writing.output import FIRST_ZIP, ShardNames, output_format
from ckptfix.writing.safetensors import lost_extras

SUFFIXES = {".safetensors": SAFETENSORS, ".pth": PTH, ".pt": PTH, ".ckpt": PTH, ".bin": PTH, ".tar": PTH}


def differs(checkpoint: Checkpoint, plan: Plan, settings: Settings, is_form_asked: bool) -> bool:
    """Return whether a file with the result would differ from the source.

    ``settings.format`` is the format of the output, None for that of the source. If the user asked for a format, a
    folder of ranks becomes a file; shards stay shards."""
    if plan or checkpoint.member or checkpoint.damage or settings.shard_bytes is not None:
        return True
    if output_format(checkpoint, settings.format) != output_format(checkpoint, None):
        return True
    is_sharded = checkpoint.format in (sharded.NAME, sharded.NAME_SAFETENSORS)
    if is_form_asked and not is_sharded and checkpoint.folder:
        return True
    return checkpoint.format == torch_zip.NAME and settings.is_for_torch_before(FIRST_ZIP)


class Destination(Struct, frozen=True):
    """Where the result goes, and its format: ``form`` is ``pth``, ``safetensors`` or ``universal``.

    ``like`` is the file whose permissions it gets, ``backup_of`` the source whose old content is kept. Without
    ``flush``, the file is not flushed to disk on delivery, so that the caller can flush many files at once. ``before``
    is the ``state_of`` the file to be replaced, taken before it was read."""

    output: Path
    form: str
    like: Path | None = None
    backup_of: Path | None = None
    flush: bool = True
    before: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        settings: Settings,
        output: str | os.PathLike[str] | None,
        beside: bool,
        in_place: bool,
        backup: bool,
    ) -> Destination | None:
        """Return the requested destination, None if nothing is to be written. Raises ``UsageError`` if the arguments
        exclude each other.

        Its format is that of the settings, else that of the output's suffix, else that of the source."""
        given = {"output": output is not None, "beside": beside, "in_place": in_place}
        if sum(given.values()) > 1:
            one, other, *_ = (Opt(name) for name, is_given in given.items() if is_given)
            raise UsageError(one, " and ", other, " exclude each other: name another file, or replace the source")
        if backup and not in_place:
            raise UsageError(Opt("backup"), " needs ", Opt("in_place"), "; otherwise the source is never changed")
        source = Path(checkpoint.path) if checkpoint.format != IN_MEMORY else None
        if output is not None:
            if os.fspath(output).endswith(os.sep):
                raise UsageError(f"{output}: is the name of a folder; name the file to write in it")
            if os.fspath(output) == "-":
                raise UsageError("the output cannot go to stdout, because it is read back and compared; name a file")
            if source is None and checkpoint.container:
                raise UsageError(
                    "a container in memory may hold objects that cannot be written; save it with torch.save and "
                    f"repair that file, or give its entry {path_name(checkpoint.container)!r}"
                )
            return cls._named(Path(output), source, checkpoint, settings)
        if not (beside or in_place):
            return None
        if source is None:
            raise UsageError("a state_dict in memory has no path; name an output")
        if source.name in ("", ".."):  # "." has no name to derive another from
            source = source.resolve()
        # A member of an archive is written next to the archive under its own name; a folder becomes one file.
        named = Path(checkpoint.member or source.name.removesuffix(".index.json"))
        form = promised = output_format(checkpoint, None)
        if checkpoint.remarked(Kind.OTHER_SUFFIX):
            promised = SUFFIXES.get(named.suffix.lower(), PTH)
            form = PTH if lost_extras(checkpoint) else promised
        form = settings.format or form
        is_conversion = form != promised
        in_pieces = checkpoint.folder != "" or checkpoint.format.startswith(sharded.NAME)
        if in_place:
            if settings.shard_bytes is not None:
                pair = Opt("in_place"), " replaces one file, and ", Opt("shard_size")
                raise UsageError(f"{source}: ", *pair, " writes several; name an output")
            if checkpoint.member or in_pieces:
                whole = "a folder" if source.is_dir() else "in several files"
                inside = f"{checkpoint.member} in it" if checkpoint.member else whole
                raise UsageError(
                    f"{source}: ", Opt("in_place"), f" replaces a file, but the checkpoint is {inside}; name an output"
                )
            real = source.resolve()  # for a symbolic link, its target is replaced
            if is_conversion:
                pair = Opt("in_place"), " keeps the name, and ", Opt("format", form)
                raise UsageError(f"{real}: ", *pair, " needs another; name an output")
            return cls(real, form, real, real if backup else None)
        like = None if in_pieces else source
        # A folder named v1.5 has no suffix; an unpacked model.pth does.
        stem = named.name if source.is_dir() and named.suffix.lower() not in SUFFIXES else named.stem
        if form == UNIVERSAL:
            return cls(sibling(source, stem, ".universal"), form)
        suffix = named.suffix if like is not None and not is_conversion and named.suffix else f".{form}"
        return cls(sibling(source, stem, f".fixed{suffix}"), form, like)

    @classmethod
    def _named(cls, goal: Path, source: Path | None, checkpoint: Checkpoint, settings: Settings) -> Destination:
        refuse_name(goal)
        form = output_format(checkpoint, settings.format or SUFFIXES.get(goal.suffix.lower()))
        if goal.is_dir() and form != UNIVERSAL:
            raise UsageError(f"{goal}: is a folder; name the file to write in it")
        if settings.shard_bytes is not None and goal.suffix.lower() not in SUFFIXES:
            goal = goal.with_name(f"{goal.name}.{form}")  # other programs recognise shards by their suffix
        if goal.exists() and not goal.is_file():
            refuse_output(goal)
        if checkpoint.folder and _is_part(goal, Path(checkpoint.folder)):
            raise UsageError(f"{goal}: is part of the source; name another output")
        if source is not None and goal.exists() and goal.samefile(source):
            raise UsageError(f"{goal}: is the source itself; replace it with ", Opt("in_place", True))
        return cls(goal.resolve() if goal.is_symlink() else goal, form, None if form == UNIVERSAL else source)

    def refuse(self, settings: Settings, like: str | os.PathLike[str] | None, dry_run: bool) -> None:
        """Raise an error, before any work is done, if the result would replace a file that is read, or could not be put
        in place."""
        refuse_inputs(self.output, files_read({"like": like, **asdict(settings)}))
        if dry_run:
            return
        refuse_name(self.output)
        if self.output != self.like:
            refuse_output(self.output, settings.force)
        elif self.backup_of is not None:
            refuse_name(backup_of(self.backup_of))
        if settings.shard_bytes is not None:
            refuse_name(ShardNames(self.output, 2).longest)
        if not self.output.parent.is_dir():
            raise WriteError(
                f"{self.output}: the folder {self.output.parent} does not exist; create it, or choose another place"
            )

    def refuse_replaced(self, force: bool) -> None:
        """Raise an error if the file to be replaced has changed since it was read, or if a file was created at the
        output: a training run may save again meanwhile, and its file would be lost."""
        if self.before is None and self.output != self.like:
            refuse_output(self.output, force)
        if self.before is not None and state_of(self.output) != self.before:
            raise WriteError(f"{self.output}: was replaced or deleted since it was read; run the same command again")


def files_read(arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the files that a check or a repair with these arguments reads in addition to its source, each after the
    name of its argument."""
    for name, value in arguments.items():
        option = BY_NAME.get(name)
        if option is None or not value or not (option.is_setting or name == "like"):
            continue
        if option.kind is Type.FILE and isinstance(value, (str, os.PathLike)):
            path = os.fspath(value)
            is_name = option.is_word(path) or (name == "rename_map" and not Path(path).exists())  # a shipped map
            yield from () if is_name else ((name, path),)
        elif option.kind is Type.FILES:
            yield from ((name, path) for path in adapter_paths(value))
        elif option.kind is Type.PAIRS:
            yield from ((name, file) for text in value for file in adaptation(text).files())
        elif option.kind is Type.INPUTS:
            files = (text.rpartition("=")[2] for text in value)
            yield from ((name, file) for file in files if file.endswith(INPUT_SUFFIXES) and Path(file).is_file())


def refuse_inputs(output: str | os.PathLike[str], inputs: Iterable[tuple[str, str]]) -> None:
    """Raise ``UsageError`` if the output is one of the input files or in an input folder, also via links."""
    for name, given in inputs:
        if _is_part(Path(output), Path(given)):
            raise UsageError(f"{output}: is the file of ", Opt(name), ", which is only read; name another output")


def _is_part(file: Path, given: Path) -> bool:
    """Return whether a file is the given one or inside the given folder. Missing files are compared by path."""
    if given.is_dir():
        return file.exists() and given.resolve() in file.resolve().parents
    if file.exists() and given.exists():
        return file.samefile(given)
    return file.resolve() == given.resolve()


def state_of(file: object) -> tuple[int, ...] | None:
    """Return a value that changes if the file is written or replaced; None if there is no file."""
    if not isinstance(file, (str, os.PathLike)):
        return None
    try:
        found = Path(file).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
