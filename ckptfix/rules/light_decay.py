"""Matrices too large to be called decayed by their size, of which the optimizer in the file says that they decay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from functools import partial

from ckptfix.core.edits import Replace
from ckptfix.core.finding import Applicability, Finding, Fix, Level
from ckptfix.core.statistics import TensorStatistics
from ckptfix.rules.corroboration import Corroboration, Witness
from ckptfix.rules.replacing import Replacements, from_elsewhere
from ckptfix.rules.rule import Context, Rule
from ckptfix.values.roles import usual_rms

LIGHT = 0.5
"""Share of the start below which a matrix is worth a look at its optimizer."""

PROVEN = 0.1
"""Share below which it is a warning that no gradient arrived and that the optimizer's figures predict as little."""


def light_decay(
    rule: Rule, context: Context, matrices: Mapping[str, TensorStatistics], found: set[str], witness: Witness
) -> Iterator[Finding]:
    """Those of which the optimizer says that decay alone moved them, and that are no larger than that. ``found`` are
    the matrices that were reported already."""
    proven: dict[str, Corroboration] = {}
    light: dict[str, Corroboration] = {}
    for key, figures in matrices.items() if witness.knows_parameters else ():
        share = figures.rms / usual_rms(context.checkpoint.specs[key])
        if key not in found and share < LIGHT and not figures.nonfinite:
            corroboration = witness.on(key, share)
            predicted = corroboration.predicted or 1.0
            if corroboration.is_untouched and predicted < LIGHT:
                is_proven = max(share, predicted) < PROVEN and corroboration.agrees
                (proven if is_proven else light)[key] = corroboration
    edits = {key: _replacement(rule, key, context) for key in proven}
    for is_cured in (True, False):
        some = {key: proven[key] for key in proven if bool(edits[key]) is is_cured}
        cure = tuple(edit for key in some if (edit := edits[key]))
        if some:
            worst = min(some.values(), key=lambda corroboration: corroboration.observed)
            yield rule.finding(
                Level.WARNING,
                f"{counted_matrices(some)} decayed to {worst.observed:.1g} of the expected scale{worst.in_words}",
                keys=tuple(some),
                evidence=_evidence(some, matrices),
                fix=Fix(cure, Applicability.UNSAFE, asked=True) if cure else None,
                remedies=() if cure else from_elsewhere(rule),
            )
    if light:
        yield rule.finding(
            Level.NOTE,
            f"{counted_matrices(light)} seen no gradient, by the moments of the optimizer: only weight decay acted",
            keys=tuple(light),
            evidence=_evidence(light, matrices),
        )


def counted_matrices(found: Sized) -> str:
    """The subject of a message, with its verb."""
    return "1 weight matrix has" if len(found) == 1 else f"{len(found)} weight matrices have"


def _replacement(rule: Rule, key: str, context: Context) -> Replace | None:
    start = usual_rms(context.checkpoint.specs[key])
    return Replacements(context).of(rule.code, key, partial(_is_larger, PROVEN * start))


def _is_larger(least: float, figures: TensorStatistics) -> bool:
    return not figures.nonfinite and figures.rms >= least


def _evidence(some: Mapping[str, Corroboration], matrices: Mapping[str, TensorStatistics]) -> dict[str, object]:
    return {"tensors": {key: {"rms": matrices[key].rms} | some[key].evidence for key in some}}
