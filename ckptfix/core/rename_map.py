"""A map from the names and the layout of one implementation to those of another, as rules that a person can edit.

    blocks.{n}.attn.qkv.{weight,bias} → layer.{n}.attention.{query,key,value}.{weight,bias}, split 3

``ckptfix.maps`` says what the patterns and the steps mean."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from ckptfix.core.display import Displayed
from ckptfix.core.finding import counted
from ckptfix.errors import Opt, UsageError

if TYPE_CHECKING:
    from ckptfix.core.smoke_result import Equivalence

MAP_VERSION = 1  # the version of a map's JSON form
LABELS = ("ambiguous", "likely", "certain", "verified")  # how far a rule can be trusted, in order
AMBIGUOUS, CERTAIN = LABELS[0], LABELS[2]


class MapRule(Struct, frozen=True):
    """One line of a map: the keys of the source, the keys of the target, and what is done on the way.

    ``label`` says how far an inferred rule can be trusted, empty for one written by hand; one that is ``ambiguous`` is
    not applied. ``alternatives`` are other patterns of the source that fit as well. An ``optional`` rule may match no
    key. One ``by_hand`` is a pattern of ``--rename``: it is always applied, and never backwards."""

    source: str
    target: str
    steps: tuple[str, ...] = ()
    label: str = ""
    alternatives: tuple[str, ...] = ()
    optional: bool = False
    by_hand: bool = False

    def __str__(self) -> str:
        return ", ".join((f"{self.source} → {self.target}", *self.steps))

    def to_json(self) -> dict[str, Any]:
        """Return the rule as a JSON object; what is empty is left out."""
        values = (self.source, self.target, [*self.steps], self.label, [*self.alternatives], self.optional)
        return {name: value for name, value in zip(_FIELDS, values, strict=True) if value}


_FIELDS = ("from", "to", "steps", "label", "alternatives", "optional")


class RenameMap(Displayed, Struct, frozen=True):
    """The rules of a map, in order. ``name`` is the file or the library that they come from.

    ``missing`` are the keys of the target that an inferred map has no source for, ``unused`` the keys of the source
    that it has no place for. ``shapes`` are of tensors that only a file which the map is for has in this shape.
    ``proof`` is what came of running both models, if that was asked for."""

    rules: tuple[MapRule, ...]
    name: str = ""
    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    proof: Equivalence | None = None

    def __repr__(self) -> str:
        return f"<RenameMap: {counted(len(self.rules), 'rule')}>"

    def json_text(self) -> str:
        """Return the map as JSON, a rule per line."""
        rows = ",\n".join(f"    {json.dumps(rule.to_json(), ensure_ascii=False)}" for rule in self.rules)
        fields = {
            "ckptfix-map": MAP_VERSION,
            "shapes": dict(self.shapes),
            "missing": [*self.missing],
            "unused": [*self.unused],
        }
        head = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items() if value)
        return f'{{\n{head},\n  "rules": [\n{rows}\n  ]\n}}\n'

    @classmethod
    def from_json(cls, data: Any, name: str = "") -> RenameMap:
        """Return the map of JSON data. Raises ``UsageError`` that names the rule if it is not one."""
        if not isinstance(data, Mapping) or not isinstance(data.get("rules"), list):
            raise UsageError(f"{name}: not a map of ckptfix; infer one and save it as JSON")
        if data.get("ckptfix-map") != MAP_VERSION:
            raise UsageError(f"{name}: the map has version {data.get('ckptfix-map')!r:.40}, not {MAP_VERSION}")
        if unknown := data.keys() - {"ckptfix-map", "shapes", "missing", "unused", "rules"}:
            raise UsageError(f"{name}: {min(unknown)!r:.40} is not a field of a map; remove or correct it")
        shapes = data.get("shapes", {})
        if not isinstance(shapes, Mapping) or not all(_is_shape(shape) for shape in shapes.values()):
            raise UsageError(f"{name}: 'shapes' has to be an object with a list of sizes for each key")
        rules = tuple(_rule(f"{name}: rule {at}", rule) for at, rule in enumerate(data["rules"], 1))
        return cls(rules, name, shapes=tuple((key, tuple(shape)) for key, shape in shapes.items()))


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def read_map(path: str | os.PathLike[str]) -> RenameMap:
    """Return the map in a file. Raises ``UsageError`` if there is none."""
    name = os.fspath(path)
    try:
        data = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise UsageError(Opt("rename_map", name), f": cannot be read: {error.strerror}; check the path") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(Opt("rename_map", name), f": invalid JSON ({error})") from error
    return RenameMap.from_json(data, name)


def _rule(where: str, data: Any) -> MapRule:
    if not isinstance(data, Mapping) or not data.keys() <= set(_FIELDS):
        raise UsageError(f"{where} is {data!r:.80}; a rule is an object with {', '.join(_FIELDS)}")
    given = {"steps": [], "label": "", "alternatives": [], "optional": False, **data}
    for name in ("from", "to"):
        if not isinstance(given.get(name), str) or not given[name]:
            raise UsageError(f"{where} has no {name!r}: name the keys, such as blocks.{{n}}.weight")
    for name in ("steps", "alternatives"):
        if not isinstance(given[name], list) or not all(isinstance(text, str) for text in given[name]):
            raise UsageError(f"{where}: {name!r} has to be a list of strings")
    if given["label"] not in ("", *LABELS) or not isinstance(given["optional"], bool):
        raise UsageError(f"{where}: 'label' is one of {', '.join(LABELS)}, 'optional' is true or false")
    return MapRule(
        given["from"],
        given["to"],
        tuple(given["steps"]),
        given["label"],
        tuple(given["alternatives"]),
        given["optional"],
    )
