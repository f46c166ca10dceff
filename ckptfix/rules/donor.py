"""What a donor file can supply for a tensor that is gone, where no target says what has to be there."""

from __future__ import annotations

from ckptfix.core.edits import Fill
from ckptfix.core.spec import TensorSpec
from ckptfix.rules.rule import Context


def donor_fill(key: str, spec: TensorSpec | None, context: Context) -> Fill | None:
    """The fill from ``--fill FILE`` under the same key; None where the file does not have it in the shape of ``spec``.

    With a target the rule on missing keys fills, under the names that the target has."""
    if context.donor is None or context.target is not None:
        return None
    stored = context.donor.specs.get(key)
    if stored is None or not stored.has_data or (spec is not None and stored.shape != spec.shape):
        return None
    return Fill(key, stored.dtype, stored.shape, "donor", donor_key=key)
