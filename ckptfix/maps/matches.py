"""An inferred map as data: for each key of the target, its source and the confidence in it."""

from collections.abc import Iterable, Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.core.parts import Part, Shapes, used_in_full
from ckptfix.core.rename_map import RenameMap
from ckptfix.maps.trees import Choice, Label


class Match(Struct, frozen=True):
    """The source of a key of the target; ``alternatives`` are other source keys that fit."""

    parts: tuple[Part, ...]
    label: Label
    alternatives: tuple[str, ...] = ()


class Inference(Struct, frozen=True):
    """An inferred map: the matches by key of the target, and the shapes of both sides.

    ``maps`` are the shipped maps that it comes from. ``origin`` is ``loader`` if it comes from the library's own
    loader, ``values`` if from the values of both sides, ``spelling`` if the names are equal without their dots.
    ``choices`` are the pairs of subtrees that it rests on, with their margin over the next best."""

    matches: dict[str, Match]
    source: Shapes
    target: Shapes
    maps: tuple[RenameMap, ...] = ()
    origin: str = ""
    choices: Mapping[Choice, float] = field(default_factory=dict)

    def doubt(self, keys: Iterable[str], label: Label = Label.AMBIGUOUS) -> None:
        """Lower the labels of these keys to ``label`` at most."""
        for key in keys:
            self.matches[key] = replace(self.matches[key], label=min(label, self.matches[key].label))

    def doubt_torn_tensors(self) -> None:
        """Mark a part of a tensor as ambiguous if another part is: a tensor is split as a whole or not at all."""
        parts = {key: match.parts for key, match in self.matches.items() if match.label > Label.AMBIGUOUS}
        self.doubt(parts.keys() - used_in_full(parts, self.source).keys())

    @property
    def single_sources(self) -> dict[str, str]:
        """The source key of each match with one part."""
        return {key: match.parts[0].source for key, match in self.matches.items() if len(match.parts) == 1}

    @property
    def missing(self) -> list[str]:
        return [key for key in self.target if key not in self.matches]

    def lacking(self, tied: Mapping[str, tuple[str, ...]]) -> list[str]:
        """Return the keys of the target without a source, except those tied to a key with one."""
        return [key for key in self.missing if self.matches.keys().isdisjoint(tied.get(key, ()))]

    @property
    def unused(self) -> list[str]:
        used = {part.source for match in self.matches.values() for part in match.parts}
        return [key for key in self.source if key not in used]
