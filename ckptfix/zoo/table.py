"""``zoo.toml``: what belongs to what.

    exclude = ["runs/debug/"]

    [defaults]                        # for every file
    format = "safetensors"

    [[files]]                         # the first table that matches a file counts
    match = "resnet50-*.pth"
    model = "torchvision.models:resnet50"

The keys beside ``match`` and ``output`` are those of the configuration file, which are the flags of ``repair``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ckptfix.core.config import parse_toml
from ckptfix.core.options import Scope, from_toml, is_texts, key_text, toml_keys, without_model
from ckptfix.errors import Opt, UsageError
from ckptfix.zoo.items.naming import check_template
from ckptfix.zoo.patterns import compile_patterns
from ckptfix.zoo.treatment import Treatment, treatment_of_choices

__all__ = ["EMPTY", "FILE_NAME", "Table", "Treatment", "plain_table", "read_table", "with_decision"]

FILE_NAME = "zoo.toml"
"""What the table is called where nobody names it."""

_OF_DEFAULTS = toml_keys(Scope.REPAIR)
_OF_FILES = toml_keys(Scope.REPAIR, Scope.ONE_FILE)

_SHOWN = 80
"""Characters of its patterns by which a table is known in messages."""

TOP_KEYS = ("exclude", "defaults", "files")

_TARGET = ("model", "model_args", "like")


@dataclass(frozen=True)
class Table:
    """What to do with each file of a zoo. The empty one gives every file the repairs that need no target."""

    treatments: tuple[Treatment, ...] = ()
    rest: Treatment = field(default_factory=Treatment)
    """For the files that no treatment is for."""
    exclude: tuple[str, ...] = ()
    path: Path | None = None
    _expressions: tuple[re.Pattern[str], ...] = field(init=False, repr=False, compare=False)
    _excluded: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_expressions", tuple(compile_patterns(each.patterns) for each in self.treatments))
        object.__setattr__(self, "_excluded", compile_patterns(self.exclude))

    def treatment_of(self, name: str) -> Treatment:
        """What to do with the file of this name, relative to the zoo's root: the first match wins."""
        matching = (
            treatment
            for treatment, expression in zip(self.treatments, self._expressions, strict=True)
            if expression.fullmatch(name)
        )
        return next(matching, self.rest)

    def excludes(self, name: str) -> bool:
        """Whether a file is left out of the migration."""
        return self._excluded.fullmatch(name) is not None

    def idle(self, names: Iterable[str]) -> list[str]:
        """A line for each treatment that none of these names gets."""
        used = {id(self.treatment_of(name)) for name in names}
        return [
            f"{self.path or FILE_NAME}: {treatment.place} matches no file, or only files that an earlier table has"
            for treatment in self.treatments
            if id(treatment) not in used
        ]


EMPTY = Table()
"""The table of a zoo without one."""


def plain_table(given: Mapping[str, Any] | None = None) -> Table:
    """The table of a zoo without one: ``given`` are the flags of the command line, by name."""
    return Table(rest=_treatment("the command line", Path(), (), {}, {}, given or {}))


def read_table(path: Path, given: Mapping[str, Any] | None = None) -> Table:
    """The table of a file. ``given``, the flags of the command line, win over it.

    Paths in it are relative to the file. Raises ``UsageError`` that names the file, the table and the key.
    """
    document = parse_toml(path)
    for key in document:
        if key not in TOP_KEYS:
            raise UsageError(f"{path}: {_no_such_key(key, document[key])}")
    if not is_texts(document.get("exclude", [])):
        raise UsageError(f"{path}: exclude is to be a list of patterns and not {document['exclude']!r:.60}")
    defaults = document.get("defaults", {})
    if not isinstance(defaults, dict):
        raise UsageError(f"{path}: defaults is to be a table: write [defaults] above its keys")
    tables = document.get("files", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise UsageError(f"{path}: files is to be one table for each group of files: write [[files]] above its keys")

    folder = path.parent
    where = f"{path}: [defaults]"
    common = _options(where, folder, defaults, _OF_DEFAULTS)
    treatments = []
    for number, table in enumerate(tables, 1):
        patterns = table.get("match")
        shown = ", ".join(map(str, patterns)) if isinstance(patterns, list) else str(patterns or "")
        place = f"[[files]] {number}" + (f" ({shown[:_SHOWN]}{'…' * (len(shown) > _SHOWN)})" if shown else "")
        where = f"{path}: {place}"
        if patterns is None:
            raise UsageError(f'{where} says for no file what it says; add match = "…"')
        if not isinstance(patterns, str) and not (is_texts(patterns) and patterns):
            raise UsageError(f"{where}: match has to be a pattern, or a list of patterns, not {patterns!r:.60}")
        own = _options(where, folder, table, _OF_FILES, "match")
        patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
        treatments.append(_treatment(where, folder, patterns, common, own, given or {}, place))
    _check_patterns(f"{path}: exclude", document.get("exclude", []))
    rest = _treatment(f"{path}: [defaults]", folder, (), common, {}, given or {}, "[defaults]")
    return Table(tuple(treatments), rest, tuple(document.get("exclude", ())), path)


def with_decision(treatment: Treatment, decision: Mapping[str, Any]) -> Treatment:
    """The treatment with the flags, by name, that were given for a file alone. Raises ``UsageError`` where they have no
    meaning any more."""
    common = {**treatment.choices, "output": treatment.output}
    return _treatment("an earlier decision", Path(), treatment.patterns, common, decision, {}, treatment.place)


def _no_such_key(key: str, value: object) -> str:
    close = get_close_matches(key, TOP_KEYS, 1)
    if close:
        hint = {"files": "[[files]]", "defaults": "[defaults]"}.get(close[0], close[0])
        return f"there is no {key}; did you mean {hint}?"
    if key in (*_OF_FILES, "output", "match"):
        return f"{key} stands outside of a table; put it under [defaults], or under the [[files]] that it is for"
    return f"there is no {key}; a table of files begins with [[files]]"


def _options(
    where: str, folder: Path, table: Mapping[str, Any], keys: Mapping[str, Any], *others: str
) -> dict[str, Any]:
    """The options of a table, with its template of outputs."""
    output = table.get("output", "")
    if not isinstance(output, str):
        raise UsageError(f"{where}: output has to be a string, not {output!r:.60}")
    return from_toml(where, folder, table, keys, "output", *others) | ({"output": output} if "output" in table else {})


def _treatment(
    where: str,
    folder: Path,
    patterns: Sequence[str],
    common: Mapping[str, Any],
    own: Mapping[str, Any],
    given: Mapping[str, Any],
    place: str = "",
) -> Treatment:
    """The treatment that a table, the defaults and the command line come to."""
    _check_patterns(where, patterns)
    chosen = {**_without_rival_target(common, own), **own}
    chosen = {**_without_rival_target(chosen, given), **given}
    output = chosen.pop("output", None)
    for name in [] if "model" in chosen else without_model(chosen):
        if name in own and chosen[name] is not False:
            raise UsageError(
                f'{where}: {key_text(Opt(name))} has no meaning without a model; add model = "pkg.mod:factory"'
            )
        del chosen[name]  # the defaults have it for the files that have a model
    if chosen.get("fill") == "target" and "fill" not in own and not {"model", "like"} & chosen.keys():
        del chosen["fill"]  # and this for those that have a target
    try:
        if output is not None:
            check_template(output)
        return treatment_of_choices(tuple(patterns), chosen, output, place)
    except UsageError as error:
        raise UsageError(f"{where}: {error.worded(key_text)}") from error


def _without_rival_target(choices: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The choices without their target, where ``other`` names one: ``like`` in a table outdoes ``model``."""
    rival = any(name in other for name in _TARGET if name != "model_args")
    return {name: value for name, value in choices.items() if not (rival and name in _TARGET)}


def _check_patterns(where: str, patterns: Iterable[str]) -> None:
    for pattern in patterns:
        try:
            compile_patterns([pattern])
        except re.error as error:
            raise UsageError(f"{where}: {pattern!r} is no pattern ({error}); write [[] for a bracket") from error
        if not pattern.strip("/ "):
            raise UsageError(f"{where}: {pattern!r} matches nothing; write * for all files")
