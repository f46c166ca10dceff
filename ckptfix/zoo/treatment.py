"""What is done with a group of files of a zoo."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ckptfix.core.options import REPAIR, command_words, library_settings
from ckptfix.core.settings import Settings
from ckptfix.errors import Opt, UsageError
from ckptfix.zoo.items.naming import MIRRORED, output_name


@dataclass(frozen=True)
class Treatment:
    """The settings of ``repair`` for the files that match. It is plain data, for a worker or another node.

    ``settings`` are fields of ``core.settings.Settings``, and ``choices`` what the user wrote, for the command that
    says how to go on with one file. ``place`` is the table that it comes from."""

    patterns: tuple[str, ...] = ()
    model: str | None = None
    model_args: Any = ()
    like: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    output: str = MIRRORED
    choices: Mapping[str, Any] = field(default_factory=dict)
    place: str = ""

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of ``ckptfix.repair`` and ``ckptfix.check``."""
        target = {"model": self.model, "like": self.like}
        named = {name: value for name, value in target.items() if value is not None}
        return {**named, **({"model_args": self.model_args} if self.model_args else {}), **self.settings}

    def command(self, source: str, **more: Any) -> tuple[str, ...]:
        """The ``ckptfix repair`` of one file with these settings, word by word."""
        return command_words(REPAIR, source, {**self.choices, **more})

    def output_name(self, name: str, form: str | None = None, *, is_folder: bool = False) -> str:
        """What the output for a source is called. ``form`` is the format of the source, where it is known."""
        return output_name(name, self.settings.get("format") or form, self.output, is_folder=is_folder)

    def digest(self, version: str) -> str:
        """Changes when the result may: with a setting, with the version of ckptfix, or with a file that is read beside
        the source. Those are told by size and mtime, as they are when it is first asked.
        """
        return hashlib.sha256(f"{version}\n{self._fingerprint}".encode()).hexdigest()[:32]

    @cached_property
    def _fingerprint(self) -> str:
        settings = Settings(**self.settings)
        bare = replace(
            settings,
            fill=settings.fill if settings.fill_file is None else "file",
            recalibrate=settings.recalibrate and "file",
            compare=settings.compare and ("source" if settings.compare == "source" else "file"),
        )
        facts = {
            "model": self.model,
            "model_args": self.model_args,
            "settings": asdict(bare),
            "output": self.output,
            "files": [[name, stamp_of(file)] for name, file in self.files()],
        }
        return json.dumps(facts, sort_keys=True, default=str)

    def files(self) -> Iterator[tuple[str, str]]:
        """What is read beside the source: the settings' names and their files."""
        settings = Settings(**self.settings)
        named = {
            "like": self.like,
            "fill": settings.fill_file,
            "recalibrate": settings.recalibrate,
            "compare": None if settings.compare == "source" else settings.compare,
        }
        yield from ((name, file) for name, file in named.items() if file is not None)
        for text in settings.input:
            if Path(file := text.rpartition("=")[2]).is_file():
                yield "input", file
        if self.model is not None:
            # The code of the model, where it lies in the working directory: its author works on it.
            file = self.model.partition(":")[0].replace(".", "/")
            yield from (("model", each) for each in (f"{file}.py", f"{file}/__init__.py") if Path(each).is_file())


def treatment_of_choices(
    patterns: tuple[str, ...], choices: Mapping[str, Any], output: str | None, place: str
) -> Treatment:
    """The treatment of flags by name. Raises ``UsageError`` where one has no meaning."""
    from ckptfix.engine.validation import parsed_settings  # the rules and formats come with it

    arguments = library_settings(choices)
    model, like = arguments.pop("model", None), arguments.pop("like", None)
    model_args = arguments.pop("model_args", ())
    settings = parsed_settings(arguments)
    if model is not None and like is not None:
        raise UsageError(Opt("model"), " and ", Opt("like"), " exclude each other")
    if settings.smoke and model is None:
        raise UsageError(Opt("smoke"), " runs a model; add ", Opt("model", "pkg.mod:factory"))
    if (settings.fill == "target" or settings.drop_mismatched) and model is None and like is None:
        needy = Opt("fill", "target") if settings.fill == "target" else Opt("drop_mismatched")
        raise UsageError(needy, " needs something to fit; add ", Opt("model"), " or ", Opt("like"))
    _ = settings.cast_dtype  # raises for an unknown dtype
    try:
        json.dumps(model_args)
    except TypeError as error:
        raise UsageError(f"model-args = {model_args!r:.60}: {error}; give texts, numbers, lists and tables") from error
    if model is not None and not all(model.partition(":")):
        raise UsageError(f"model = {model!r}: write it as pkg.mod:factory, the module and the name in it")
    treatment = Treatment(patterns, model, model_args, like, arguments, output or MIRRORED, dict(choices), place)
    for name, file in treatment.files():
        if "://" in file:
            raise UsageError(
                f"{name} = {file!r}: is a URL; copy the file to a disk that all workers see, and name it there"
            )
        if not Path(file).exists():
            raise UsageError(f"{name} = {file!r}: there is no such file; check the path")
    return treatment


def stamp_of(file: str) -> object:
    """What changes with a file: size and mtime; of a folder, or of an index with its shards, those of all its files."""
    path = Path(file)
    folder_of = path if path.is_dir() else path.parent if file.endswith(".index.json") else None
    if folder_of is None:
        return _stamp(path)
    return [[each.relative_to(folder_of).as_posix(), _stamp(each)] for each in sorted(folder_of.rglob("*"))]


def _stamp(path: Path) -> list[int] | None:
    try:
        facts = path.stat()
    except OSError:
        return None  # it is missing when it is needed, and that is said there
    return [facts.st_size, facts.st_mtime_ns]
