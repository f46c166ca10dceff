"""The draft of a table, as text that a person goes on with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from ckptfix.core.finding import counted
from ckptfix.core.shell import no_option, typed
from ckptfix.reading.weights.candidates import AVERAGED
from ckptfix.report.figures import elements
from ckptfix.report.folding import folded_lines
from ckptfix.zoo.drafting.gathering import Group
from ckptfix.zoo.drafting.likeness import Confidence, Likeness
from ckptfix.zoo.drafting.survey import Layout, Sight
from ckptfix.zoo.drafting.toml import WIDTH, comment, quoted, texts, value
from ckptfix.zoo.patterns import literal

Found = Sequence[tuple[Group, Likeness]]

_FEW = 3
_KEYS = 8
_MOST_COMPARED = 300
"""Groups up to which each is compared with each."""
_NEAR = 0.1
"""Of all keys: the most by which two groups differ that are worth a comparison."""

_INTRODUCTION = """\
What belongs to what. The first [[files]] with a pattern that matches a file counts for it; a file that none matches \
gets the repairs that need no model. Patterns without a slash mean names at any depth, "folder/" all below it.
A line "# key = …" is a guess, or a choice that is yours: take the "# " away where it is right.
A model line runs that code when the files are migrated, and each file is then loaded into the model and tried.
Next: read this file, then `ckptfix migrate {zoo} NEW --dry-run`; `--help` has the rest.
"""


def write_draft(zoo: str, found: Found, sights: Sequence[Sight], others: int) -> str:
    """The text of ``zoo.toml``: an introduction, the defaults, a table for each group, and what could not be told."""
    lines: list[str] = []
    read = sum(len(group.sights) for group, _ in found)
    counts = f"{counted(len(sights), 'checkpoint')} in {zoo}: {read} read, {len(sights) - read} not; "
    lines += comment(f"{counts}{counted(len(found), 'layout')} of keys. {counted(others, 'other file')}.")
    lines.append("#")
    for paragraph in _INTRODUCTION.format(zoo=typed([no_option(zoo)])).splitlines():
        lines += comment(paragraph)
    needed = Counter(likeness.needs for _, likeness in found if likeness.needs and _is_active(likeness))
    if needed:
        lines += comment(f"The model lines that count want these packages: pip install {' '.join(sorted(needed))}")
    lines += ["", "[defaults]"]
    lines += [
        '# format = "safetensors"   # what is written; without it each file keeps its format',
        "# smoke = false            # models are named, but no forward pass is run",
        "# unsafe-fixes = true      # also fixes that drop, invent or cast a value",
        "",
    ]
    for number, (group, likeness) in enumerate(found, 1):
        lines += [*_group(number, group, likeness, found), ""]
    lines += _untold(found, sights)
    return "\n".join(lines).rstrip() + "\n"


def _group(number: int, group: Group, likeness: Likeness, found: Found) -> Iterator[str]:
    layout = group.layout
    title = (
        f"{number}. {likeness.title}: {counted(len(group.sights), 'file')}, "
        f"{counted(len(layout.shapes), 'tensor')}, {elements(layout.numel)}"
    )
    yield f"# {title} ".ljust(WIDTH, "-")
    confidence, *evidence = (f"{likeness.confidence.value}: {_first(likeness)}", *likeness.evidence[1:])
    yield from comment(confidence)
    for line in (*evidence, *_relatives(number, group, found), *_circumstances(group)):
        yield from comment(line, "# - ")
    if likeness.confidence in (Confidence.UNKNOWN, Confidence.GUESS):
        yield "# its keys:"
        shapes = layout.shapes
        for line in folded_lines(shapes, _KEYS, lambda key: str(list(shapes[key]))):
            yield from comment(line, "#     ")
    yield "[[files]]"
    yield from texts("match", group.patterns)
    yield from _target(number, likeness)
    yield from _weights(group)


def _first(likeness: Likeness) -> str:
    return likeness.evidence[0] if likeness.evidence else "nothing says what it is"


def _is_active(likeness: Likeness) -> bool:
    """Whether a model line counts as it stands: only where each name and shape is proven to be the model's."""
    return likeness.model is not None and likeness.confidence is Confidence.EXACT


def _target(number: int, likeness: Likeness) -> Iterator[str]:
    mark = "" if _is_active(likeness) else "# "
    model = likeness.model
    if likeness.code:
        name = f"model_{number}"
        yield "# for a target, put this into zoo_models.py beside this file, and take the next marks away:"
        yield from (
            f"#     {line}".rstrip() for line in "\n".join(likeness.code).replace("build()", f"{name}()").split("\n")
        )
        model = f"zoo_models:{name}"
    if model is None:
        model = "pkg.mod:factory"
    yield f"{mark}model = {quoted(model)}"
    if likeness.arguments:
        yield f"{mark}model-args = {value(likeness.arguments)}"


def _relatives(number: int, group: Group, found: Found) -> Iterator[str]:
    """Other groups of nearly the same layout: the same model with another head, most often."""
    if len(found) > _MOST_COMPARED:
        return
    own = group.layout.shapes
    told = []
    for other_number, (other, _) in enumerate(found, 1):
        theirs = other.layout.shapes
        if other_number == number or abs(len(own) - len(theirs)) > _NEAR * len(own):
            continue
        if other.layout is group.layout:
            told.append((0, f"the layout of {other_number}; what the files hold beside it differs"))
            continue
        if other.layout.names == group.layout.names:
            told.append((0, f"the keys of {other_number} in other shapes: {_differences(group.layout, other.layout)}"))
            continue
        missing = [key for key in theirs if key not in own]
        added = [key for key in own if key not in theirs]
        if len(missing) + len(added) <= _NEAR * len(own):
            parts = [(missing, "without"), (added, "with")]
            words = " and ".join(
                f"{word} {counted(len(keys), 'key')} ({_listed(keys[:_FEW], len(keys) - _FEW)})"
                for keys, word in parts
                if keys
            )
            told.append((len(missing) + len(added), f"like {other_number}, but {words}"))
    yield from (line for _, line in sorted(told)[:_FEW])


def _differences(one: Layout, other: Layout) -> str:
    differing = [key for key, shape in one.shapes.items() if other.shapes[key] != shape]
    told = [f"{key} {list(one.shapes[key])} and not {list(other.shapes[key])}" for key in differing[:_FEW]]
    return _listed(told, len(differing) - len(told))


def _circumstances(group: Group) -> Iterator[str]:
    """What is not the same in all files of a group, or what a newcomer has to know of them."""
    sights = group.sights
    for prefix, names in _by(sights, lambda sight: sight.prefix):
        # Without a model, the rules take off what is certainly a wrapper's, and nothing else.
        where = "" if prefix.startswith(("module.", "_")) else " where a model is named"
        place = "in the keys" if prefix.startswith("_") else "in front of the keys"
        yield f"{place} stands {prefix}, which is taken off{where}: {_which(names, sights)}"
    dtypes = _by(sights, lambda sight: "/".join(sight.dtypes))
    if [dtype for dtype, _ in dtypes] != ["float32"]:
        yield from (f"stored as {dtype}: {_which(names, sights)}" for dtype, names in dtypes)
    if old := [sight.name for sight in sights if not sight.counters]:
        yield f"norms without num_batches_tracked, as before torch 0.4.1, which is supplied: {_which(old, sights)}"
    if damaged := [sight.name for sight in sights if sight.damage]:
        yield f"damaged, but readable: {_which(damaged, sights)}"


def _weights(group: Group) -> Iterator[str]:
    """The state_dicts of files that hold several: a choice that is the user's."""
    first = group.sights[0]
    if not first.candidates:
        return
    rest = [each for each in first.candidates if each != first.weights]
    averaged = [each for each in rest if any(mark in each.lower() for mark in AVERAGED)]
    kind = "an averaged set (EMA) beside the raw one" if averaged else "several state_dicts"
    listed = _listed(first.candidates[:_KEYS], len(first.candidates) - _KEYS)
    yield from comment(f"each file has {kind}: {listed}; without this line {first.weights} is taken")
    yield f"# weights = {quoted((averaged or rest or [first.weights])[0])}"


def _untold(found: Found, sights: Sequence[Sight]) -> Iterator[str]:
    """What could not be told, and what can be done about it."""
    unknown = [group for group, likeness in found if likeness.confidence is Confidence.UNKNOWN]
    unread = [sight for sight in sights if sight.layout is None]
    if not (unknown or unread):
        return
    yield "# What could not be told ".ljust(WIDTH, "-")
    for group in unknown:
        yield from comment(f"which model this is: {_listed(group.names[:_FEW], len(group.names) - _FEW)}", "# - ")
    for sight in sorted(unread, key=lambda sight: (not sight.is_hostile, sight.name)):
        yield from comment(f"{sight.name}: {sight.fault}", "# - ")
        if sight.is_hostile and sight.whole:
            yield from _decision(sight, "disarm = true", "its tensors alone are written, and nothing of it runs")
        elif sight.whole:
            yield from _decision(sight, "salvage = true", f"{counted(sight.whole, 'tensor')} are whole")


def _decision(sight: Sight, line: str, remark: str) -> Iterator[str]:
    yield "#   [[files]]"
    yield f"#   match = {quoted('/' + literal(sight.name))}"
    yield f"#   {line}   # {remark}"


def _by(sights: Iterable[Sight], key: Callable[[Sight], str]) -> list[tuple[str, list[str]]]:
    """The names of the files by something that is said of them, the most frequent first; nothing said is left out."""
    found: dict[str, list[str]] = {}
    for sight in sights:
        if said := key(sight):
            found.setdefault(said, []).append(sight.name)
    return sorted(found.items(), key=lambda entry: (-len(entry[1]), entry[0]))


def _which(names: Sequence[str], sights: Sequence[Sight]) -> str:
    """Which of a group's files."""
    return "all" if len(names) == len(sights) else _listed(names[:_FEW], len(names) - _FEW)


def _listed(names: Sequence[str], more: int) -> str:
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")
