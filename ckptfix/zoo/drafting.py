"""Drafts ``zoo.toml`` for ``ckptfix migrate --init``: which files belong to which model, and the evidence.

``survey`` opens each checkpoint and groups those with equal layouts. A group is recognised by its exact structure, a
class, characteristic keys, or the names of its files. ``ckptfix.known`` has the structures that libraries build,
``families.toml`` the characteristic names of other models."""

import glob
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from textwrap import wrap

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.core.config import parse_toml
from ckptfix.core.finding import counted
from ckptfix.core.likeness import Fit, Likeness
from ckptfix.core.parts import Shapes
from ckptfix.core.wording import first_names, no_option, shell_join
from ckptfix.errors import one_line
from ckptfix.known.recognition import recognise
from ckptfix.known.table import table
from ckptfix.modules.named import SCHEMES
from ckptfix.reading.weights.containers import is_averaged
from ckptfix.report.key_lists import folded_lines
from ckptfix.report.likeness import likeness_text
from ckptfix.report.style import elements
from ckptfix.zoo.items import Item
from ckptfix.zoo.places import Place
from ckptfix.zoo.survey import Group, ItemSummary, gather, survey

_FAMILIES = Path(__file__).with_name("families.toml")
_BUILDERS = ("timm", "torchvision")  # libraries whose models are recognised in names of files
_SHOWN = 4


class Confidence(Enum):
    """How certain an architecture is."""

    EXACT = "exact"  # every name and shape matches the model
    GUESS = "guess"  # only a class, a characteristic key or the names of the files suggest it
    UNKNOWN = "unknown"


class Architecture(Struct, frozen=True):
    """An architecture. ``model`` or ``like`` is its line in the table; ``needs`` is the package that contains it."""

    title: str
    confidence: Confidence
    evidence: tuple[str, ...] = ()
    model: str | None = None
    needs: str | None = None
    like: str | None = None


def find_architecture(shapes: Shapes, classes: Iterable[str], names: Iterable[str]) -> Architecture:
    """Return the architecture of a layout. ``classes`` are those of models that were pickled whole, ``names`` those of
    the files, which decide between equal structures and are evidence for or against."""
    names = tuple(names)
    stems = [re.sub(r"[^a-z0-9]+", "_", name.rpartition("/")[2].lower()).strip("_") for name in names]
    known = recognise(shapes, names)
    if known is not None and known.fit in (Fit.EXACT, Fit.HEADLESS):
        found = _exact(known)
    else:
        found = _by_class(classes) or _by_family(shapes) or _by_name(stems)
        if known is not None:
            found = replace(found, evidence=(*found.evidence, f"names and shapes: {likeness_text(known)}"))
    return replace(found, evidence=(*found.evidence, *_named(found, stems)))


@cache
def named_models() -> Mapping[str, str]:
    """Return the names of the models that a draft can name, with the library of each."""
    pairs = [(library, name) for library, _, name in (each.partition("/") for each in table().names())]
    return {name: library for library, name in sorted(pairs) if library in _BUILDERS}  # torchvision's wins over timm's


def name_in(stem: str) -> str | None:
    """Return the longest name of a model that a file's name contains as whole words, None without one."""
    text = f"_{stem}_"
    return max((name for name in named_models() if f"_{name}_" in text), key=len, default=None)


def _exact(known: Likeness) -> Architecture:
    title = known.names[0].partition("/")[2]
    evidence = (f"every name and shape is that of {likeness_text(known)}",)
    if known.model is None:
        return Architecture(title, Confidence.EXACT, evidence, like=known.target)
    return Architecture(title, Confidence.EXACT, evidence, known.model, SCHEMES[known.model.partition(":")[0]][1])


def _by_class(classes: Iterable[str]) -> Architecture | None:
    word, _ = next(iter(Counter(each for each in classes if "." in each).most_common(1)), ("", 0))
    module, _, own = word.rpartition(".")
    model = f"{'your_script' if module == '__main__' else module}:{own}"
    return Architecture(own, Confidence.GUESS, (f"saved whole, as {word}",), model) if word else None


def _by_family(shapes: Shapes) -> Architecture | None:
    """Return the family that has one of the keys as a characteristic name, None if no family does."""
    for title, family in parse_toml(_FAMILIES).items():
        expression = re.compile(family["pattern"])
        if (key := next(filter(expression.fullmatch, shapes), None)) is not None:
            remark = f"; {family['remark']}" if "remark" in family else ""
            return Architecture(title, Confidence.GUESS, (f"by the name {key}{remark}",))
    return None


def _by_name(stems: Sequence[str]) -> Architecture:
    """Return the architecture that the names of the files suggest."""
    name = next((name for stem in stems if (name := name_in(stem)) is not None), None)
    if name is None:
        return Architecture("unknown", Confidence.UNKNOWN, ("names and shapes match no known architecture",))
    library = named_models()[name]
    line = f"the file names say {name}, but names and shapes do not match {library}'s {name}"
    return Architecture(name, Confidence.GUESS, (line,), f"{library}:{name}", SCHEMES[library][1])


def _named(found: Architecture, stems: Sequence[str]) -> list[str]:
    """Return the evidence in the names of the files for or against an exact architecture."""
    if found.confidence is not Confidence.EXACT:
        return []
    named = Counter(name for stem in stems if (name := name_in(stem)) is not None)
    return [
        f"{'' if name in found.title or found.title in name else 'BUT '}the name says {name} ({counted(count, 'file')})"
        for name, count in named.most_common(_SHOWN)
    ]


Found = Sequence[tuple[Group, Architecture]]

WIDTH = 110
_FEW, _KEYS = 3, 8

_INTRODUCTION = """\
Which files belong to which model. The first [[files]] table that matches a file applies; files that no table matches \
get the repairs that need no model. Patterns without a slash match names at any depth, "folder/" everything below it.
A line "# key = …" is a guess or a choice: remove the "# " to use it.
A model line runs that code during the migration: each file is loaded into the model, and the model is run once.
Next: read this file, then `ckptfix migrate {zoo} NEW --dry-run`; `--help` has the rest.
"""

_DEFAULTS = """\

[defaults]
# format = "safetensors"   # what is written; without it each file keeps its format
# smoke = false            # models are named, but no forward pass is run
# unsafe-fixes = true      # also fixes that drop, invent or cast a value
"""


def write_draft(zoo: str, found: Found, summaries: Sequence[ItemSummary], others: int) -> str:
    """Return the text of ``zoo.toml``: an introduction, defaults, a table for each group, and open questions."""
    read = sum(len(group.summaries) for group, _ in found)
    counts = f"{counted(len(summaries), 'checkpoint')} in {zoo}: {read} read, {len(summaries) - read} not; "
    lines = [*comment(f"{counts}{counted(len(found), 'layout')} of keys. {counted(others, 'other file')}."), "#"]
    for paragraph in _INTRODUCTION.format(zoo=shell_join([no_option(zoo)])).splitlines():
        lines += comment(paragraph)
    if needed := sorted({each.needs for _, each in found if each.needs and _is_active(each)}):
        lines += comment(f"The active model lines need these packages: pip install {' '.join(needed)}")
    lines += _DEFAULTS.splitlines()
    for number, (group, architecture) in enumerate(found, 1):
        lines += ["", *_group(number, group, architecture, found)]
    lines += ["", *_open(found, summaries)]
    return "\n".join(lines).rstrip() + "\n"


def _group(number: int, group: Group, found: Architecture, groups: Found) -> Iterator[str]:
    shapes = group.layout.shapes
    size = f"{counted(len(shapes), 'tensor')}, {elements(group.layout.numel)}"
    yield f"# {number}. {found.title}: {counted(len(group.summaries), 'file')}, {size} ".ljust(WIDTH, "-")
    yield from comment(f"{found.confidence.value}: {found.evidence[0] if found.evidence else found.title}")
    for line in (*found.evidence[1:], *_nearest(number, group, groups), *_circumstances(group)):
        yield from comment(line, "# - ")
    if found.confidence in (Confidence.UNKNOWN, Confidence.GUESS):
        yield "# its keys:"
        for line in folded_lines(shapes, _KEYS, lambda key: str(list(shapes[key]))):
            yield from comment(line, "#     ")
    yield "[[files]]"
    yield from texts("match", group.patterns)
    mark = "" if _is_active(found) else "# "
    if found.like is not None:
        yield f"{mark}like = {quoted(found.like)}"
    else:
        yield f"{mark}model = {quoted(found.model or 'pkg.mod:factory')}"
    yield from _weights(group)


def _is_active(found: Architecture) -> bool:
    """Return whether the model line is active and not a comment, as for an exact match."""
    return (found.model or found.like) is not None and found.confidence is Confidence.EXACT


def _nearest(number: int, group: Group, groups: Found) -> Iterator[str]:
    """Yield a remark on another group with the same keys, which is mostly the same model with another head."""
    own = group.layout
    for other_number, (other, _) in enumerate(groups, 1):
        if other_number != number and other.layout.shapes.keys() == own.shapes.keys():
            if other.layout is own:
                yield f"the layout of table {other_number}; the rest of the files differs"
            else:
                pairs = ((key, shape, other.layout.shapes[key]) for key, shape in own.shapes.items())
                unlike = [f"{key} {list(one)} instead of {list(two)}" for key, one, two in pairs if one != two]
                yield f"the keys of table {other_number} with other shapes: {first_names(unlike, _FEW)}"
            return


def _circumstances(group: Group) -> Iterator[str]:
    """Yield remarks on the files of a group: prefixes, dtypes, age and damage."""
    summaries = group.summaries
    for prefix, names in _by(summaries, lambda summary: summary.prefix):
        # Without a model, the rules only remove what is certainly a wrapper's.
        condition = "" if prefix.startswith(("module.", "_")) else " if a model is named"
        place = "the keys contain" if prefix.startswith("_") else "the keys begin with"
        yield f"{place} {prefix}, which is removed{condition}: {_which(names, summaries)}"
    dtypes = _by(summaries, lambda summary: "/".join(summary.dtypes))
    if [dtype for dtype, _ in dtypes] != ["float32"]:
        yield from (f"stored as {dtype}: {_which(names, summaries)}" for dtype, names in dtypes)
    if old := [summary.name for summary in summaries if not summary.counters]:
        yield f"norms without num_batches_tracked, as before torch 0.4.1; it is added: {_which(old, summaries)}"
    if damaged := [summary.name for summary in summaries if summary.is_damaged]:
        yield f"damaged, but readable: {_which(damaged, summaries)}"


def _weights(group: Group) -> Iterator[str]:
    """Yield the choice between the state_dicts of files that have several."""
    first = group.summaries[0]
    if not first.candidates:
        return
    rest = [each for each in first.candidates if each != first.weights]
    averaged = [each for each in rest if is_averaged(each)]
    kind = "an averaged set (EMA) along with the raw one" if averaged else "several state_dicts"
    named = f"{kind}: {first_names(first.candidates, _FEW)}"
    yield from comment(f"each file has {named}; without this line {first.weights} is used")
    yield f"# weights = {quoted((averaged or rest or [first.weights])[0])}"


def _open(found: Found, summaries: Sequence[ItemSummary]) -> Iterator[str]:
    """Yield the unknown groups and unreadable files, with tables for what can be done."""
    unknown = [group for group, architecture in found if architecture.confidence is Confidence.UNKNOWN]
    unread = [summary for summary in summaries if summary.layout is None]
    if not (unknown or unread):
        return
    yield "# Open questions ".ljust(WIDTH, "-")
    for group in unknown:
        yield from comment(f"which model this is: {first_names(group.names, _FEW)}", "# - ")
    for summary in sorted(unread, key=lambda summary: (not summary.is_hostile, summary.name)):
        yield from comment(f"{summary.name}: {summary.fault}", "# - ")
        if summary.whole:
            yield "#   [[files]]"
            yield f"#   match = {quoted('/' + glob.escape(summary.name))}"
            if summary.is_hostile:
                yield "#   disarm = true   # writes only its tensors, and runs nothing in it"
            else:
                yield f"#   salvage = true   # {counted(summary.whole, 'tensor')} are complete"


def _by(summaries: Iterable[ItemSummary], key: Callable[[ItemSummary], str]) -> list[tuple[str, list[str]]]:
    """Return the names of the files grouped by a non-empty ``key``, the most frequent first."""
    found: dict[str, list[str]] = {}
    for summary in summaries:
        if said := key(summary):
            found.setdefault(said, []).append(summary.name)
    return sorted(found.items(), key=lambda entry: (-len(entry[1]), entry[0]))


def _which(names: Sequence[str], summaries: Sequence[ItemSummary]) -> str:
    return "all" if len(names) == len(summaries) else first_names(names, _FEW)


def quoted(text: str) -> str:
    """Return a text as a TOML string. Bytes of a name that are not UTF-8 cannot be written in TOML: each becomes ``?``,
    which matches any character in a pattern."""
    known = re.sub(r"[\ud800-\udfff]", "?", re.sub(r'["\\]', r"\\\g<0>", text))
    return '"' + "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in known) + '"'


def comment(text: str, mark: str = "# ") -> Iterator[str]:
    """Yield the lines of a comment, wrapped, with a hanging indent."""
    later = "#".ljust(len(mark) + 2)
    first, *rest = wrap(one_line(text), WIDTH - len(later), break_on_hyphens=False) or [""]
    yield f"{mark}{first}".rstrip()
    yield from (f"{later}{line}" for line in rest)


def texts(name: str, given: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a TOML key with one string or a list of them, which is split if it is long."""
    given = tuple(given)
    line = f"{name} = " + (quoted(given[0]) if len(given) == 1 else f"[{', '.join(map(quoted, given))}]")
    if len(line) <= WIDTH or len(given) == 1:
        yield line
    else:
        yield from (f"{name} = [", *(f"  {quoted(each)}," for each in given), "]")


def draft_table(place: Place, items: Sequence[Item], room: float | None = None) -> str:
    """Return the text of a ``zoo.toml`` for a zoo, deterministically. ``room`` is passed to ``survey``."""
    summaries = survey(place, items, room)
    seen = {summary.name for summary in summaries}
    others = [item.name for item in items if item.name not in seen]
    found = []
    for group in gather(summaries, others):
        classes = [summary.whole_model for summary in group.summaries if summary.whole_model]
        found.append((group, find_architecture(group.layout.shapes, classes, group.names)))
    named = {group.layout.digest: each for group, each in reversed(found) if each.model or each.like}
    same = [(group, each if each.model or each.like else named.get(group.layout.digest, each)) for group, each in found]
    return write_draft(place.name, same, summaries, len(others))
