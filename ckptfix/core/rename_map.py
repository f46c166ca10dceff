"""A map from the names and layout of one implementation to those of another, as rules that users can edit.

    blocks.{n}.attn.qkv.{weight,bias} → layer.{n}.attention.{query,key,value}.{weight,bias}, split 3

``ckptfix.maps`` defines the patterns and the steps."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct, ValidationError, convert, field, to_builtins

from ckptfix.core.display import Displayed
from ckptfix.core.finding import counted
from ckptfix.core.parts import Shape
from ckptfix.errors import Opt, UsageError

if TYPE_CHECKING:
    from ckptfix.core.smoke_result import Equivalence

_NAMES = {"source": "from", "target": "to"}  # in JSON

MAP_VERSION = 1  # the version of a map's JSON form
LABELS = ("ambiguous", "likely", "certain", "verified")  # confidence in a rule, in ascending order
AMBIGUOUS, CERTAIN = LABELS[0], LABELS[2]

KeyPattern = Annotated[str, Meta(min_length=1)]


class MapRule(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, rename=_NAMES):
    """One line of a map: the keys of the source, the keys of the target, and the steps between them.

    ``label`` is the confidence in an inferred rule, empty for one written by hand; an ``ambiguous`` rule is not
    applied. ``alternatives`` are other patterns of the source that fit equally well. An ``optional`` rule may match no
    key. A rule ``by_hand`` is a pattern of ``--rename``: it is always applied, and never in reverse."""

    source: KeyPattern
    target: KeyPattern
    steps: tuple[str, ...] = ()
    label: str = ""
    alternatives: tuple[str, ...] = ()
    optional: bool = False
    by_hand: bool = False

    def __post_init__(self) -> None:
        if self.label not in ("", *LABELS):
            raise ValueError(f"the label is {self.label!r:.40}, but has to be one of {', '.join(LABELS)}")

    def __str__(self) -> str:
        return ", ".join((f"{self.source} → {self.target}", *self.steps))


class _MapFile(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, rename={"version": "ckptfix-map"}):
    version: int
    shapes: dict[str, Shape] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    rules: tuple[MapRule, ...] = ()


class RenameMap(Displayed, Struct, frozen=True):
    """The rules of a map, in order. ``name`` is the file or library that they come from.

    ``missing`` are keys of the target without a source in an inferred map, ``unused`` keys of the source without a
    place. ``shapes`` are the shapes of tensors that identify the files to which the map applies. ``proof`` is the
    result of running both models, if that was requested."""

    rules: tuple[MapRule, ...]
    name: str = ""
    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    proof: Equivalence | None = None

    def __repr__(self) -> str:
        return f"<RenameMap: {counted(len(self.rules), 'rule')}>"

    def json_text(self) -> str:
        """Return the map as JSON, with one rule per line."""
        fields = to_builtins(_MapFile(MAP_VERSION, dict(self.shapes), self.missing, self.unused))
        head = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items())
        rows = ",\n".join(f"    {json.dumps(to_builtins(rule), ensure_ascii=False)}" for rule in self.rules)
        return f'{{\n{head},\n  "rules": [\n{rows}\n  ]\n}}\n'

    @classmethod
    def from_json(cls, data: Any, name: str = "") -> RenameMap:
        """Return the map from its JSON form. Raises ``UsageError``, which names the rule, if it is invalid."""
        if not isinstance(data, Mapping) or not isinstance(data.get("rules"), list):
            raise UsageError(f"{name}: not a map of ckptfix; infer one and save it as JSON")
        if data.get("ckptfix-map") != MAP_VERSION:
            raise UsageError(f"{name}: the map has version {data.get('ckptfix-map')!r:.40}, not {MAP_VERSION}")
        try:
            file = convert({**data, "rules": ()}, _MapFile)
        except ValidationError as error:
            raise UsageError(f"{name}: not a map that this ckptfix takes: {error}") from error
        rules = tuple(_rule(row, number, name) for number, row in enumerate(data["rules"], 1))
        return cls(rules, name, shapes=tuple(file.shapes.items()))


def _rule(row: object, number: int, name: str) -> MapRule:
    try:
        return convert(row, MapRule)
    except ValidationError as error:
        raise UsageError(f"{name}: rule {number} {row!r:.100}: {error}") from error


def read_map(path: str | os.PathLike[str]) -> RenameMap:
    """Read a map from a JSON file. Raises ``UsageError`` if it is not a map."""
    name = os.fspath(path)
    try:
        data = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise UsageError(Opt("rename_map", name), f": cannot be read: {error.strerror}; check the path") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(Opt("rename_map", name), f": invalid JSON ({error})") from error
    return RenameMap.from_json(data, name)
