"""``ckptfix migrate --init``: look at the files of a zoo, and draft the table that says what belongs to what.

survey        each checkpoint is opened; no tensor is read and none of its code runs
gathering     files of equal layout are one group, with the patterns that mean exactly them
recognition   each group by its exact structure, by its family, or by the words of its files
writing       the table, with what says so, and with what could not be told
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptfix.zoo.drafting.gathering import Group, gather
from ckptfix.zoo.drafting.likeness import Likeness
from ckptfix.zoo.drafting.recognition import liken
from ckptfix.zoo.drafting.survey import survey
from ckptfix.zoo.drafting.writing import write_draft
from ckptfix.zoo.items.listing import Item, Kind
from ckptfix.zoo.places import Place


def draft_table(place: Place, items: Sequence[Item], room: float | None = None) -> str:
    """The text of a ``zoo.toml`` for a zoo, the same for the same files. ``room`` is that of ``survey``."""
    sights = survey(place, items, room)
    others = [item.name for item in items if item.kind is Kind.OTHER]
    groups = gather(sights, others)
    found = [(group, _likeness(group)) for group in groups]
    named = {group.layout.digest: likeness for group, likeness in reversed(found) if likeness.model is not None}
    told = [
        (group, likeness if likeness.model is not None else named.get(group.layout.digest, likeness))
        for group, likeness in found
    ]
    return write_draft(place.name, told, sights, len(others))


def _likeness(group: Group) -> Likeness:
    return liken(group.layout.shapes, [hint for sight in group.sights for hint in sight.hints], group.names)
