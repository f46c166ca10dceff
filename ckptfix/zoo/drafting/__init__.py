"""``ckptfix migrate --init``: look at the files of a zoo, and draft the table that says what belongs to what.

survey        each checkpoint is opened; no tensor is read and none of its code runs
gathering     files of equal layout are one group, with the patterns that match exactly them
recognition   each group by its exact structure, by a class, by telling keys, or by the names of its files
writing       the table, with the evidence, and with what is open
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptfix.zoo.drafting.gathering import gather
from ckptfix.zoo.drafting.recognition import find_architecture
from ckptfix.zoo.drafting.survey import survey
from ckptfix.zoo.drafting.writing import write_draft
from ckptfix.zoo.items.grouping import Item, Kind
from ckptfix.zoo.places import Place


def draft_table(place: Place, items: Sequence[Item], room: float | None = None) -> str:
    """Return the text of a ``zoo.toml`` for a zoo, the same for the same files. ``room`` is that of ``survey``."""
    sights = survey(place, items, room)
    others = [item.name for item in items if item.kind is Kind.OTHER]
    found = [
        (
            group,
            find_architecture(
                group.layout.shapes, [sight.whole_model for sight in group.sights if sight.whole_model], group.names
            ),
        )
        for group in gather(sights, others)
    ]
    named = {group.layout.digest: each for group, each in reversed(found) if each.model or each.like}
    same = [(group, each if each.model or each.like else named.get(group.layout.digest, each)) for group, each in found]
    return write_draft(place.name, same, sights, len(others))
