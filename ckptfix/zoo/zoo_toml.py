"""Reads ``zoo.toml``, the table that says what to do with which files.

    exclude = ["runs/debug/"]

    [defaults]                        # for every file
    format = "safetensors"

    [[files]]                         # the first table that matches a file applies
    match = "resnet50-*.pth"
    model = "torchvision.models:resnet50"

The keys besides ``match`` and ``output`` are those of the configuration file, which are the options of ``repair``."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import asdict

from ckptfix.core.config import parse_toml
from ckptfix.core.likeness import KNOWN
from ckptfix.core.option import Scope
from ckptfix.core.options import (
    BY_NAME,
    from_toml,
    idle_options,
    is_texts,
    key_text,
    library_settings,
    toml_keys,
    without_rivals,
)
from ckptfix.core.settings import Settings
from ckptfix.core.wording import nearest
from ckptfix.engine.destination import files_read
from ckptfix.errors import CkptfixError, Opt, UsageError
from ckptfix.known.table import known_target
from ckptfix.modules.named import configuration_files
from ckptfix.zoo.naming import MIRRORED, check_template, compile_patterns, output_name

FILE_NAME = "zoo.toml"  # the default name of the table
_OF_DEFAULTS = toml_keys(Scope.REPAIR)
_OF_FILES = toml_keys(Scope.REPAIR, Scope.ONE_FILE)
TOP_KEYS = ("exclude", "defaults", "files")
_SHOWN = 80  # characters of a table's patterns that messages quote


class Treatment(Struct, frozen=True, dict=True):
    """What to do with the matching files: the options that the user chose, and the template of the output's name.

    Plain data, to be sent to a worker or another node. ``place`` is the table that it comes from."""

    patterns: tuple[str, ...] = ()
    choices: Mapping[str, Any] = field(default_factory=dict)
    output: str = MIRRORED
    place: str = ""

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of ``ckptfix.repair`` and ``ckptfix.check``."""
        return library_settings(self.choices)

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments that are fields of ``core.settings.Settings``."""
        return {name: value for name, value in self.arguments.items() if BY_NAME[name].is_setting}

    @property
    def model(self) -> str | None:
        """The model that the files have to fit."""
        return self.arguments.get("model")

    @property
    def like(self) -> str | None:
        """The checkpoint that the files have to fit."""
        return self.arguments.get("like")

    def output_name(self, name: str, form: str | None = None, *, is_folder: bool = False) -> str:
        """Return the name of the output for a source. ``form`` is the format of the source, if it is known."""
        return output_name(name, self.settings.get("format") or form, self.output, is_folder=is_folder)

    def digest(self, version: str) -> str:
        """Return a digest of what the result depends on: the settings, the version of ckptfix, and the other input
        files (by size and mtime at the time of the first call)."""
        return hashlib.sha256(f"{version}\n{self._fingerprint}".encode()).hexdigest()[:32]

    @cached_property
    def _fingerprint(self) -> str:
        files = list(self.files())
        read = {name for name, _ in files}
        settings = asdict(Settings(**self.settings))
        bare = {name: "file" if name in read and isinstance(value, str) else value for name, value in settings.items()}
        bare["adapter"] = [Path(text).name for text in settings["adapter"]]
        facts = {
            "model": self.model,
            "model_args": self.arguments.get("model_args", ()),
            "settings": bare,
            "output": self.output,
            **({"like": self.like} if self.like is not None and self.like.startswith(KNOWN) else {}),
            "files": [[name, stamp_of(file)] for name, file in files],
        }
        return json.dumps(facts, sort_keys=True, default=str)

    def files(self) -> Iterator[tuple[str, str]]:
        """Yield the input files besides the source, each with the name of its argument before it."""
        yield from files_read(self.arguments)
        if self.model is not None:
            # The code of the model if it is in the working directory, where it may change, or its configuration.
            file = self.model.partition(":")[0].replace(".", "/")
            places = (f"{file}.py", f"{file}/__init__.py", *configuration_files(self.model))
            yield from (("model", each) for each in places if Path(each).is_file())


class Table(Struct, frozen=True, dict=True):
    """What to do with each file of a zoo. An empty table gives every file the repairs that need no target."""

    treatments: tuple[Treatment, ...] = ()
    rest: Treatment = field(default_factory=Treatment)  # for files that no treatment matches
    exclude: tuple[str, ...] = ()
    path: Path | None = None

    @cached_property
    def _expressions(self) -> list[tuple[Treatment, re.Pattern[str]]]:
        return [(treatment, compile_patterns(treatment.patterns)) for treatment in self.treatments]

    @cached_property
    def _excluded(self) -> re.Pattern[str]:
        return compile_patterns(self.exclude)

    def models(self) -> dict[str, str]:
        """Return the models that treatments name, each with the file and the first table that name it."""
        file = f"{self.path}: " if self.path is not None else ""
        treatments = (self.rest, *reversed(self.treatments))
        named = {each.model: f"{file}{each.place}" for each in treatments if each.model is not None}
        return dict(sorted(named.items(), key=lambda pair: pair[1]))

    def treatment_of(self, name: str) -> Treatment:
        """Return the first treatment that matches a name relative to the zoo's root."""
        return next((each for each, expression in self._expressions if expression.fullmatch(name)), self.rest)

    def excludes(self, name: str) -> bool:
        """Return whether a file is left out of the migration."""
        return self._excluded.fullmatch(name) is not None

    def idle(self, names: Iterable[str]) -> list[str]:
        """Return a line for each treatment that applies to none of these names."""
        used = {id(self.treatment_of(name)) for name in names}
        return [
            f"{self.path or FILE_NAME}: {treatment.place} matches no file, or only files that an earlier table matches"
            for treatment in self.treatments
            if id(treatment) not in used
        ]


def plain_table(given: Mapping[str, Any] | None = None) -> Table:
    """Return the table for a zoo without zoo.toml. ``given`` are the options of the command line, by name."""
    table = Table(rest=_treatment("the command line", (), {}, {}, given or {}))
    return _without_idle_options(table, given or {})


def read_table(path: Path, given: Mapping[str, Any] | None = None) -> Table:
    """Read the table in a file. ``given``, the options of the command line, take precedence.

    Paths in it are relative to the file. Raises ``UsageError`` with the file, the table and the key."""
    document = parse_toml(path)
    for key in document:
        if key not in TOP_KEYS:
            raise UsageError(f"{path}: {_no_such_key(key, document[key])}")
    exclude, defaults, tables = document.get("exclude", []), document.get("defaults", {}), document.get("files", [])
    if not is_texts(exclude):
        raise UsageError(f"{path}: exclude must be a list of patterns, not {exclude!r:.60}")
    if not isinstance(defaults, dict):
        raise UsageError(f"{path}: defaults must be a table: write [defaults] above its keys")
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise UsageError(f"{path}: files must be one table for each group of files: write [[files]] above its keys")
    _check_patterns(f"{path}: exclude", exclude)

    common = _options(f"{path}: [defaults]", path.parent, defaults, _OF_DEFAULTS)
    treatments = []
    for number, table in enumerate(tables, 1):
        found = table.get("match")
        shown = ", ".join(map(str, found)) if isinstance(found, list) else str(found or "")
        place = f"[[files]] {number}" + (f" ({shown[:_SHOWN]}{'…' * (len(shown) > _SHOWN)})" if shown else "")
        where = f"{path}: {place}"
        if found is None:
            raise UsageError(f'{where} has no match; add match = "…"')
        if not isinstance(found, str) and not (is_texts(found) and found):
            raise UsageError(f"{where}: match has to be a pattern or a list of patterns, not {found!r:.60}")
        own = _options(where, path.parent, table, _OF_FILES, "match")
        patterns = (found,) if isinstance(found, str) else tuple(found)
        treatments.append(_treatment(where, patterns, common, own, given or {}, place))
    rest = _treatment(f"{path}: [defaults]", (), common, {}, given or {}, "[defaults]")
    return _without_idle_options(Table(tuple(treatments), rest, tuple(exclude), path), given or {})


def _without_idle_options(table: Table, given: Mapping[str, Any]) -> Table:
    """Return the table itself. Raises ``UsageError`` if an option given needs a model and no file has one."""
    if not any(each.model for each in (*table.treatments, table.rest)):
        for name in idle_options(given):
            if BY_NAME[name].needs_model and given[name] is not False:
                raise UsageError(Opt(name), " has no meaning without a model; add ", Opt("model", "pkg.mod:factory"))
    return table


def with_decision(treatment: Treatment, decision: Mapping[str, Any]) -> Treatment:
    """Return the treatment with the options decided for one file. Raises ``UsageError`` if they are not valid now."""
    common = {**treatment.choices, "output": treatment.output}
    return _treatment("an earlier decision", treatment.patterns, common, decision, {}, treatment.place)


def _no_such_key(key: str, value: object) -> str:
    if close := nearest(key, TOP_KEYS):
        hint = {"files": "[[files]]", "defaults": "[defaults]"}.get(close, close)
        return f"there is no {key}; did you mean {hint}?"
    if key in (*_OF_FILES, "output", "match"):
        return f"{key} is outside of a table; put it under [defaults], or under the [[files]] that it is for"
    return f"there is no {key}; a table of files begins with [[files]]"


def _options(
    where: str, folder: Path, table: Mapping[str, Any], keys: Mapping[str, Any], *others: str
) -> dict[str, Any]:
    if "exclude" in table:
        raise UsageError(f'{where}: exclude is for the whole zoo; write exclude = ["…"] above the first table')
    output = table.get("output", "")
    if not isinstance(output, str):
        raise UsageError(f"{where}: output has to be a string, not {output!r:.60}")
    return from_toml(where, folder, table, keys, "output", *others) | ({"output": output} if "output" in table else {})


def _treatment(
    where: str,
    patterns: Sequence[str],
    common: Mapping[str, Any],
    own: Mapping[str, Any],
    given: Mapping[str, Any],
    place: str = "",
) -> Treatment:
    _check_patterns(where, patterns)
    chosen = {**without_rivals(common, own), **own}
    chosen = {**without_rivals(chosen, given), **given}
    output = chosen.pop("output", None)
    for name in idle_options(chosen):
        if name not in own:
            del chosen[name]  # meant by the defaults for files that have a model or a target
        elif BY_NAME[name].needs_model and chosen[name] is not False:
            raise UsageError(
                f'{where}: {key_text(Opt(name))} has no meaning without a model; add model = "pkg.mod:factory"'
            )
    try:
        if output is not None:
            check_template(output)
        return treatment_of_choices(tuple(patterns), chosen, output, place)
    except CkptfixError as error:
        raise UsageError(f"{where}: {error.worded(key_text)}") from error


def treatment_of_choices(
    patterns: tuple[str, ...], choices: Mapping[str, Any], output: str | None, place: str
) -> Treatment:
    """Return the treatment with options by name. Raises ``CkptfixError`` if one is not valid."""
    from ckptfix.engine.validation import checked_settings, slip_of_fill  # imports the rules and formats
    from ckptfix.smoke.inputs import parse_inputs

    treatment = Treatment(patterns, dict(choices), output or MIRRORED, place)
    model, like, model_args = treatment.model, treatment.like, treatment.arguments.get("model_args", ())
    try:
        json.dumps(model_args)
    except TypeError as error:
        raise UsageError(f"model-args = {model_args!r:.60}: {error}; give texts, numbers, lists and tables") from error
    if model is not None and not all(model.partition(":")):
        raise UsageError(f"model = {model!r}: write it as pkg.mod:factory, the module and the name in it")
    for name, file in treatment.files():
        if "://" in file:
            raise UsageError(
                f"{name} = {file!r}: is a URL; copy the file to a disk that all workers see, and name it there"
            )
        if not Path(file).exists():
            slip = slip_of_fill(file) if name == "fill" else None
            raise UsageError(f"{name} = {file!r}: there is no such file; {slip or 'check the path'}")
    if like is not None and like.startswith(KNOWN):
        known_target(like.removeprefix(KNOWN))  # raises for an unknown model
    settings = checked_settings(treatment.settings, model, like)
    _ = settings.cast_dtype  # raises for an unknown dtype
    parse_inputs(settings.input)
    return treatment


def stamp_of(file: str) -> object:
    """Return size and mtime of a file; for a folder, or the index of shards, those of all its files."""
    path = Path(file)
    folder = path if path.is_dir() else path.parent if file.endswith(".index.json") else None
    if folder is None:
        return _stamp(path)
    return [[each.relative_to(folder).as_posix(), _stamp(each)] for each in sorted(folder.rglob("*"))]


def _stamp(path: Path) -> list[int] | None:
    try:
        facts = path.stat()
    except OSError:
        return None  # reported when the file is needed
    return [facts.st_size, facts.st_mtime_ns]


def _check_patterns(where: str, patterns: Iterable[str]) -> None:
    for pattern in patterns:
        try:
            compile_patterns([pattern])
        except re.error as error:
            raise UsageError(f"{where}: {pattern!r} is not a pattern ({error}); write [[] for a bracket") from error
        if not pattern.strip("/ "):
            raise UsageError(f"{where}: {pattern!r} matches nothing; write * for all files")
