"""Runs the rules over a checkpoint: findings, and the plan of the fixes that are allowed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.core.adaptations import HEAD, IDLE, adaptation
from ckptfix.core.buffers import COUNTED_SINCE
from ckptfix.core.checkpoint import Candidate, Checkpoint, path_name
from ckptfix.core.edits import Adapt, Disarm, Edit, Fill, Omit, Plain, Rename, RenameModule, Replace, Retag, Rewrite
from ckptfix.core.facts import Kind
from ckptfix.core.finding import Applicability, Blocks, Finding, Fix, Level
from ckptfix.core.objects import tensors_in
from ckptfix.core.plan import Plan, Step
from ckptfix.core.report import Call, Report
from ckptfix.core.settings import Settings
from ckptfix.errors import CkptfixError, IdleRecipeError, InternalError, Opt, Words
from ckptfix.maps.optimizer_states import parts_beside
from ckptfix.reading.opening import Source, open_file, open_source
from ckptfix.reading.weights.containers import SHARE
from ckptfix.rules import FITTING, FOR_LOADING, FOR_NAMES, RULES
from ckptfix.rules.rule import Context, Needs, Rule

if TYPE_CHECKING:
    from ckptfix.core.coverage import Coverage
    from ckptfix.core.likeness import Likeness
    from ckptfix.core.spec import TensorStatistics
    from ckptfix.core.target import Target
    from ckptfix.engine.changes import Measure
    from ckptfix.rules.rule import SourceModel
    from ckptfix.values.statistics import Statistics, WriteDraft

# Edits that keep every tensor unchanged.
KEEPING = (Rename, RenameModule, Plain, Retag, Rewrite, Disarm, Omit)


class Diagnosis(Struct, frozen=True):
    """What the rules found, the plan to fix it, and the resulting checkpoint."""

    findings: tuple[Finding, ...]
    fixed: tuple[Finding, ...]
    plan: Plan
    result: Checkpoint
    # The statistics that the value rules read, by key of the result.
    figures: Mapping[str, TensorStatistics] = field(default_factory=dict)

    @property
    def filled(self) -> Mapping[str, Fill | Replace]:
        """The edits that take values from elsewhere, by key."""
        edits = (edit for edit in self.plan.edits if isinstance(edit, (Fill, Replace)))
        return {edit.key: edit for edit in edits if edit.origin not in ("twin", "part")}


def diagnose(
    checkpoint: Checkpoint,
    target: Target | None,
    settings: Settings,
    donor: Checkpoint | None = None,
    measure: Measure | None = None,
    done: tuple[Checkpoint, Plan] | None = None,
    source_model: SourceModel | None = None,
    draft: WriteDraft | None = None,
) -> Diagnosis:
    """Run every selected rule; each sees the checkpoint after the fixes of the previous ones.

    ``done`` is the checkpoint as it was opened and the plan already applied to it, if any. ``source_model`` is the
    model that the file belongs to. ``draft`` writes the result early if that saves a pass over it. Raises
    ``InternalError`` if a second pass would still propose something, because then a rule is wrong (law 2)."""
    findings: list[Finding] = []
    fixed: list[Finding] = []
    plan, view, value_sources = Plan(), checkpoint, None
    before, made = done or (checkpoint, plan)

    def write_draft(view: Checkpoint) -> None:
        """Write a draft, unless the findings so far prevent its delivery."""
        is_refused = any(Blocks.WRITING in finding.blocks for finding in findings if finding not in fixed)
        if draft is not None and not is_refused:
            from ckptfix.core.coverage import obstacles

            if target is None or not obstacles(view, target):
                draft(view)

    statistics = _statistics(view, settings, write_draft)
    context = Context(view, target, statistics or {}, settings, donor, before, made, source_model)
    for rule in RULES:
        is_selected = settings.selects(rule.code)
        if not is_selected and not rule.is_wanted(settings):
            continue
        found = tuple(_propose(rule, context))
        if not is_selected:  # ignoring the rule hides its finding, but not the fix that an option requests
            found = tuple(finding for finding in found if finding.fix is not None)
        findings += found
        cured = [finding for finding in found if is_enabled(finding.fix, settings)]
        edits: tuple[Edit, ...] = tuple(
            edit for finding in cured if finding.fix is not None for edit in finding.fix.edits
        )
        if edits:
            from ckptfix.engine.applying import apply_step
            from ckptfix.engine.changes import ValueSources

            value_sources = value_sources or ValueSources(target, donor, measure)
            step = Step(rule.code, edits)
            plan, view = Plan((*plan.steps, step)), apply_step(view, step, value_sources)
            fixed += cured
            statistics = statistics and statistics.of(view, write_draft)
            context = replace(
                context, checkpoint=view, statistics=statistics or {}, plan=Plan((*made.steps, *plan.steps))
            )
    _refuse_idle_recipes(findings, settings)
    if plan:  # without a plan, every rule has seen the result already
        # The user's map has been applied.
        settings = replace(settings, rename_map=None)
        _refuse_unstable(replace(context, settings=settings), settings, plan)
    figures = statistics.known if statistics is not None else {}
    return Diagnosis(tuple(findings), tuple(fixed), plan, view, figures)


def carry_out(
    plan: Plan,
    checkpoint: Checkpoint,
    target: Target | None,
    settings: Settings,
    donor: Checkpoint | None,
    measure: Measure | None,
    draft: WriteDraft,
) -> Diagnosis:
    """Apply a saved plan, and run the rules on its result without applying more fixes."""
    from ckptfix.engine.applying import apply_plan
    from ckptfix.engine.changes import ValueSources

    result = apply_plan(plan, checkpoint, ValueSources(target, donor, measure))
    settings = replace(settings, unsafe_fixes=False, rename_map=None, adapt=())
    left = diagnose(result, target, settings, donor, done=(checkpoint, plan), draft=draft)
    return Diagnosis(left.findings, (), plan, result, left.figures)


def donor_of(target: Target | None, settings: Settings) -> Checkpoint | None:
    """Open the checkpoint of ``--fill FILE``, under the names of the target."""
    if settings.fill_file is None:
        return None
    donor = open_file(settings.fill_file)
    if target is None and settings.salvage:
        return donor
    return diagnose(donor, target, Settings(select=FOR_NAMES, values=False)).result


MOST_SETS = 16  # sets of weights to try against a target; the file is parsed again for each
MOST_PARAMETERS = 0.5  # minimum share of the target's parameters for choosing a set that does not fit


def with_fitting_set(source: Source, checkpoint: Checkpoint, target: Target | None, settings: Settings) -> Checkpoint:
    """Return the checkpoint with the set of weights that fits the target, or has most of its parameters, if the set
    that was opened does not and the user named none. The candidates are marked with whether they fit."""
    beside = [fact.place for fact in checkpoint.remarked(Kind.WEIGHTS_BESIDE)]
    names = dict.fromkeys((*(each.name for each in checkpoint.candidates), *beside))
    taken = path_name(checkpoint.container)
    if target is None or settings.weights is not None or len(names) < 2 or taken not in names:
        return checkpoint
    from ckptfix.core.coverage import measure_coverage, obstacles

    def fit(one: Checkpoint, unsafe_fixes: bool) -> tuple[bool, float]:
        allowed = Settings(select=FOR_LOADING, values=False, unsafe_fixes=unsafe_fixes, rename_map=settings.rename_map)
        try:
            result = diagnose(one, target, allowed).result
        except CkptfixError:  # the user's map may be for another set
            return False, 0.0
        return not obstacles(result, target), measure_coverage(result, target, {}).share

    sets, tried = {taken: checkpoint}, {taken: fit(checkpoint, True)}
    for name in list(names)[:MOST_SETS]:
        if name != taken:
            sets[name] = open_source(source, replace(settings, weights=name))
            tried[name] = fit(sets[name], False)
    fitting = {name: is_whole for name, (is_whole, _) in tried.items()}
    if not any(fitting.values()) and tried[taken][1] < MOST_PARAMETERS:
        fitting = {name: share >= MOST_PARAMETERS for name, (_, share) in tried.items()}
    is_best = fitting[taken] or not any(fitting.values())
    chosen = sets[taken if is_best else max(tried, key=lambda name: tried[name])]
    smaller = [Candidate.of(sets[name].container, sets[name].specs.values()) for name in beside if fitting.get(name)]
    marked = [replace(each, fits=fitting.get(each.name)) for each in (*checkpoint.candidates, *smaller)]
    return replace(chosen, candidates=tuple(marked))


def report_on(
    checkpoint: Checkpoint, target: Target | None, diagnosis: Diagnosis, settings: Settings, call: Call
) -> Report:
    """Return the report of a diagnosis for the user's call."""
    coverage: Coverage | None = None
    likeness: Likeness | None = None
    left: tuple[str, ...] = ()
    if target is None:
        from ckptfix.known.recognition import likeness_of

        is_renamed = call.function != "check" or settings.rename_map or settings.rename
        likeness = likeness_of(diagnosis.result if is_renamed else checkpoint)
    else:
        from ckptfix.core.coverage import lost_by_edits, measure_coverage, obstacles

        adapted = (edit for edit in diagnosis.plan.edits if isinstance(edit, Adapt))
        coverage = measure_coverage(diagnosis.result, target, diagnosis.filled, adapted)
        misfits = obstacles(diagnosis.result, target, settings.is_for_torch_before(COUNTED_SINCE))
        lost = lost_by_edits(checkpoint, diagnosis.result, target, diagnosis.filled)
        left = tuple(dict.fromkeys((*misfits, *lost)))
    specs = diagnosis.result.specs
    return Report(
        source=checkpoint.path,
        format=checkpoint.format,
        container=path_name(checkpoint.container),
        place=diagnosis.result.container,
        tensors=len(checkpoint.specs),
        numel=sum(spec.numel for spec in checkpoint.specs.values()),
        target=target.label if target is not None else None,
        findings=diagnosis.findings,
        fixed=diagnosis.fixed,
        edits=diagnosis.plan.edits,
        coverage=coverage,
        accepted=settings.accept,
        obstacles=left,
        remarks=target.remarks if target is not None else (),
        likeness=likeness,
        call=call,
        unexamined=tuple(unexamined(checkpoint)),
        figures=diagnosis.figures,
        layout={key: (spec.dtype, tuple(spec.shape)) for key, spec in specs.items() if key in diagnosis.figures},
    )


def unexamined(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the names of parts that are large enough to be weights, but are neither in the state_dict nor an
    optimizer."""
    least = sum(spec.numel for spec in checkpoint.specs.values()) / SHARE
    for key, entry in checkpoint.entries.items():
        inner = [] if key in checkpoint.specs else [spec.numel for spec in tensors_in(entry)]
        if inner and sum(inner) >= least:
            yield key
    for place, specs, is_optimizer in parts_beside(checkpoint):
        if sum(spec.numel for spec in specs) >= least and not is_optimizer:
            yield place


def _statistics(checkpoint: Checkpoint, settings: Settings, draft: WriteDraft | None) -> Statistics | None:
    if not settings.values:
        return None
    from ckptfix.values.decode import NARROWINGS
    from ckptfix.values.statistics import Statistics  # not imported if only names are checked

    return Statistics(checkpoint, NARROWINGS[settings.cast_dtype] if settings.cast_dtype else None, draft)


def _propose(rule: Rule, context: Context) -> Iterator[Finding]:
    """Yield the findings of a rule. If the file's own list of tensors is damaged, fixes that add, drop or change a
    tensor are unsafe: a missing tensor may exist under another name."""
    is_wanted = rule.is_wanted(context.settings)
    if rule.family in FITTING and not is_wanted and context.target is not None and context.target.loads is not None:
        from ckptfix.core.coverage import is_loaded_by_hooks

        if is_loaded_by_hooks(context.checkpoint, context.target):
            return  # what the model's own hooks load is not a defect, and renamed keys would load less
    is_doubtful = bool(context.checkpoint.remarked(Kind.DOUBTFUL_NAMES))
    for finding in rule.propose(context):
        fix = finding.fix
        if is_doubtful and fix is not None and not all(isinstance(edit, KEEPING) for edit in fix.edits):
            doubted = min(fix.applicability, Applicability.UNSAFE)
            finding = replace(finding, fix=replace(fix, applicability=doubted))
        yield finding


def is_enabled(fix: Fix | None, settings: Settings) -> bool:
    """Return whether a fix may be applied: it exists, and is safe or requested, or unsafe fixes are enabled."""
    if fix is None or fix.applicability is Applicability.DISPLAY_ONLY:
        return False
    return fix.asked or fix.applicability is Applicability.SAFE or settings.unsafe_fixes


def _refuse_idle_recipes(findings: Sequence[Finding], settings: Settings) -> None:
    """Raise ``IdleRecipeError`` for a recipe of ``--adapt`` that fits nothing, if a tensor is left that may need one.

    If none is left, nothing is wrong, because a configuration may be for files of several shapes."""
    idle = [text for finding in findings for text in finding.evidence.get(IDLE, ())]
    for finding in findings if idle else ():
        right = next((value for one in finding.remedies for name, value in one.options if name == "adapt"), None)
        is_left = not is_enabled(finding.fix, settings)
        # Tensors that have a recipe count as left even if --drop-mismatched would drop them.
        is_left = is_left or isinstance(right, tuple)
        if not is_left or finding.level is not Level.ERROR or (right is None and "shapes" not in finding.evidence):
            continue
        keys = f", such as {finding.keys[0]}" if finding.keys else ""
        if right is None:
            advice: tuple[Words, ...] = ("no recipe exists for that; omit it to see what helps",)
        else:
            advice = ("give ", Opt("adapt", right[0] if isinstance(right, tuple) else str(right)))
        raise IdleRecipeError(Opt("adapt", idle[0]), f" fits nothing here: {finding.message}{keys}; ", *advice)


def _refuse_unstable(context: Context, settings: Settings, plan: Plan) -> None:
    applied = {step.rule for step in plan.steps}
    # Class maps and recipes with explicit grids apply only once, because shapes do not show that they were applied.
    asked = {text: adaptation(text) for text in settings.adapt}
    once = tuple(text for text, each in asked.items() if each.name != HEAD and each.old is None)
    context = replace(context, settings=replace(settings, adapt=once))
    for rule in RULES:
        # A second scan of all values, some computed on reading, would be expensive, so only the value rules that
        # changed something run again.
        if settings.selects(rule.code) and (rule.code in applied or rule.needs is not Needs.VALUES):
            again = [finding for finding in _propose(rule, context) if is_enabled(finding.fix, settings)]
            if again:
                raise InternalError(
                    f"{context.checkpoint.path}: {rule.code} proposes another fix after all fixes were applied "
                    f"({again[0].message}); this is a bug of ckptfix, please report it; to skip this rule: ",
                    Opt("ignore", rule.code),
                )
