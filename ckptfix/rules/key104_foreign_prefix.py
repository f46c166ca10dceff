"""KEY104 foreign-prefix: the keys have a prefix that the target lacks, or the reverse.

## What it finds
A prefix of whole segments (`model.`, `net.`, `backbone.` or any other) whose removal or addition makes keys of the file
equal to keys of the target with the same shapes. Prefixes come from the evidence, not from a list: two keys have to
match (unless there is only one), and the prefix has to explain most of the file or the target. Keys with another shape
(another head) and entries that are not tensors follow the prefix that the rest confirms.

KEY106 handles layers whose names differ by more than a prefix. It also handles lists with an extra layer on one side,
if the other side has a layer of that shape outside the list: then `layers.0` is not `layers.0` but `proj_in`.

## Why it matters
A trainer that keeps the network in an attribute (Lightning's `self.model`, a detector's `backbone`) saves it under that
name; the plain network then reports every key as missing.

## Fix safety
Needs a target. Safe if a prefix is removed or added: the target confirms the renames by full names and shapes, and no
other prefix explains them. If two do (`encoder_q.` and `encoder_k.` of a contrastive model), both are shown and nothing
is renamed, unless only one set fits the target completely. Unsafe if more keys already fit than are renamed (an
auxiliary head may look like the missing one).

## Example
`model.backbone.conv1.weight` becomes `conv1.weight`; `conv1.weight` becomes `backbone.conv1.weight`.

## Sources
detectron2's `align_and_update_state_dicts` does this by longest common suffix and never looks at shapes
(Mask2Former#229, OneFormer#52)."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet

from ckptfix.core.buffers import modules_of
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.edits import renames
from ckptfix.core.finding import Applicability, Blocks, Finding, Fix, Level, Remedy, advise, counted
from ckptfix.core.spec import TensorSpec
from ckptfix.core.target import Target
from ckptfix.core.wrappers import two_sets
from ckptfix.rules.fil101_several_state_dicts import choice
from ckptfix.rules.quantised_layers import companions
from ckptfix.rules.rule import Context, Rule

# Most prefixes to change in one file. Each is searched among all keys; if every layer has its own, prefixes are not the
# problem.
MOST = 32
Prefixes = tuple[str, str]  # what is removed and what is added, each empty or with a dot at its end
MAX_DEPTH = 6  # segments of the longest prefix to try


def foreign_prefix(rule: Rule, context: Context, target: Target) -> Iterator[Finding]:
    """Remove or add the prefixes that the target confirms, the one with the most evidence first."""
    checkpoint = context.checkpoint
    if two_sets(checkpoint.entries):
        return
    known = target.slots.keys() | target.entries
    free = {key: entry for key, entry in checkpoint.entries.items() if key not in known}
    placed = known & checkpoint.entries.keys()
    in_place = len(placed)
    is_single = 1 in (len(checkpoint.specs), len(target.slots))
    chosen: dict[Prefixes, dict[str, str]] = {}
    rivals: list[Prefixes] = []
    while not rivals:
        ranked = (
            (prefixes, matches)
            for prefixes, matches in _ranked(free, known - placed, target)
            if len(matches) >= _enough(prefixes, chosen, is_single)
            and not (len(matches) < in_place and _have_places(matches, placed))
        )
        best = next((one for one in ranked if not _is_another_set(*one, free, placed)), None)
        if best is None:
            break
        if len(chosen) == MOST:
            return
        prefixes, matches = best
        names = set(matches.values())
        is_complete = target.slots.keys() - placed <= names
        rivals = [
            other
            for other, theirs in ranked
            if _is_rival(matches, names, theirs, is_complete) and not _is_another_set(other, theirs, free, placed)
        ]
        if not rivals:
            chosen[prefixes] = _with_followers(prefixes, matches, free, known - placed)
            free = {key: entry for key, entry in free.items() if key not in chosen[prefixes]}
            placed |= set(chosen[prefixes].values())
    for prefixes, matches in chosen.items():
        for key in _by_chance(prefixes, matches, free, known - placed, target):
            placed.remove(matches.pop(key))
    chosen = {prefixes: matches for prefixes, matches in chosen.items() if matches}
    if chosen and _explains(len(placed), checkpoint, target):
        chosen = {prefixes: matches | companions(matches, checkpoint.specs) for prefixes, matches in chosen.items()}
        yield _under_another_prefix(rule, chosen, is_safe=sum(map(len, chosen.values())) >= in_place)
    if rivals and _explains(len(placed) + len(matches), checkpoint, target):
        yield _ambiguous(rule, matches, [prefixes, *rivals], len(target.slots.keys() - placed))


def _explains(number: int, checkpoint: Checkpoint, target: Target) -> bool:
    """Return whether the placed keys are at least half of the file or of the target.

    Two norms of one width agree on a prefix by chance in a file whose layers all have other names."""
    return 2 * number >= min(len(target.slots), len(checkpoint.specs))


def _under_another_prefix(rule: Rule, chosen: Mapping[Prefixes, Mapping[str, str]], is_safe: bool) -> Finding:
    new = {key: name for matches in chosen.values() for key, name in matches.items()}
    counts = {_describe(prefixes): len(matches) for prefixes, matches in chosen.items()}
    shown = ", ".join(f"{what} ({counted(count, 'key')})" for what, count in counts.items())
    return rule.finding(
        Level.ERROR,
        f"{counted(len(new), 'key')} under a different prefix than in the target: {shown}",
        keys=new,
        evidence={"prefixes": counts},
        fix=Fix(renames(new), Applicability.SAFE if is_safe else Applicability.UNSAFE),
        blocks=Blocks.NOTHING if is_safe else Blocks.FILLING,
    )


def _ranked(
    free: Mapping[str, object], wanted: AbstractSet[str], target: Target
) -> list[tuple[Prefixes, dict[str, str]]]:
    """Return every prefix to remove or add, with the renames that it explains, in descending order of their number."""
    suffixes: dict[str, list[str]] = defaultdict(list)
    for key in wanted:
        for suffix in _suffixes(key):
            suffixes[suffix].append(key[: len(key) - len(suffix)])
    changes: dict[Prefixes, dict[str, str]] = defaultdict(dict)
    for key, entry in free.items():
        if not isinstance(entry, TensorSpec):
            continue
        for suffix in _suffixes(key):
            taken = key[: len(key) - len(suffix)]
            puts: Iterable[str] = ([""] if suffix in wanted else []) if taken else filter(None, suffixes.get(key, ()))
            for put in puts:
                if target.accepts(put + suffix, entry.shape):
                    changes[(taken, put)][key] = put + suffix
    return sorted(changes.items(), key=lambda item: (-len(item[1]), len("".join(item[0])), item[0]))


def _enough(prefixes: Prefixes, chosen: Iterable[Prefixes], is_single: bool) -> int:
    """Return how many keys have to agree on a change: one if there is only one, or if part of the prefix is
    confirmed."""
    is_related = any(
        mine and other and (mine.startswith(other) or other.startswith(mine))
        for change in chosen
        for mine, other in zip(prefixes, change, strict=True)
    )
    return 1 if is_single or is_related else 2


def _is_another_set(
    prefixes: Prefixes, matches: Mapping[str, str], free: Iterable[str], placed: AbstractSet[str]
) -> bool:
    """Return whether many keys under a prefix would get names that are taken: a second set of weights."""
    taken, put = prefixes
    conflicts = sum(key.startswith(taken) and put + key[len(taken) :] in placed for key in free)
    return 4 * conflicts > len(matches)


def _have_places(keys: Collection[str], placed: AbstractSet[str]) -> bool:
    """Return whether most keys, without their first segments, have the name of a key that is placed. They belong to a
    second set of weights, and its `ema.up.` is not a `down.` of the first."""
    second = sum(any("." in rest and rest in placed for rest in list(_suffixes(key))[1:]) for key in keys)
    return 2 * second > len(keys)


def _is_rival(
    matches: Mapping[str, str], names: AbstractSet[str], theirs: Mapping[str, str], is_complete: bool
) -> bool:
    """Return whether another change claims the same keys, or the same names, about as well. One that gives the same
    keys the same names is part of this one: `4.0.` and `layer1.0.` of `4.` and `layer1.`."""
    if theirs.items() <= matches.items():
        return False
    overlap = max(sum(key in matches for key in theirs), sum(name in names for name in theirs.values()))
    return bool(overlap) and (len(theirs) == len(matches) or (not is_complete and 2 * overlap > len(matches)))


def _with_followers(
    prefixes: Prefixes, matches: Mapping[str, str], free: Mapping[str, object], wanted: AbstractSet[str]
) -> dict[str, str]:
    """Return the renames, with those of keys under the same prefix that the target has in another form: with another
    shape, or, in a module that lacks a tensor, under another name, such as the `gamma` of a LayerNorm and the
    `base_layer.weight` of a module that peft wrapped."""
    taken, put = prefixes
    names = {key: put + key[len(taken) :] for key in free if key.startswith(taken)}
    lacking = {name.rpartition(".")[0] for name in wanted - set(matches.values())} - {""}
    return {
        key: name
        for key, name in names.items()
        if key in matches or name in wanted or (not lacking.isdisjoint(modules_of(name)) and name not in free)
    }


def _by_chance(
    prefixes: Prefixes, matches: Mapping[str, str], free: Mapping[str, object], wanted: Iterable[str], target: Target
) -> list[str]:
    """Return the keys in lists of layers whose numbers agree with the target's by chance: one side has another layer in
    the list, and the other side has one of its shape next to the list, under its own name.

    So `proj_in`, `layers.0` and `proj_out` of the target are not `layers.0` to `layers.2` of the file."""
    taken, put = prefixes
    file = {put + key[len(taken) :]: entry for key, entry in free.items() if key.startswith(taken)}
    left = {name: entry.shape for name, entry in file.items() if isinstance(entry, TensorSpec)}
    sides = left, {name: target.slots[name].shape for name in wanted if name in target.slots}
    lists: set[str] = set()
    for these, others in (sides, sides[::-1]):
        beside = {(outer, rest, shape) for name, shape in others.items() for outer, _, rest in _splits(name)}
        for name, shape in these.items():
            for outer, each, rest in _splits(name):
                if rest[:1].isdigit() and (outer, rest.partition(".")[2], shape) in beside:
                    lists.add(outer + each)
    return [key for key, name in matches.items() if any(outer + each in lists for outer, each, _ in _splits(name))]


def _splits(name: str) -> Iterator[tuple[str, str, str]]:
    """Yield each segment of a name except the last, with the text before it and after it."""
    segments = name.split(".")
    for at, segment in enumerate(segments[:-1]):
        yield "".join(f"{each}." for each in segments[:at]), segment, ".".join(segments[at + 1 :])


def _suffixes(key: str) -> Iterator[str]:
    """Yield the key and its endings that begin at a segment, the longest first."""
    position = 0
    for _ in range(MAX_DEPTH + 1):
        yield key[position:]
        position = key.find(".", position) + 1
        if not position:
            return


def _describe(prefixes: Prefixes) -> str:
    taken, put = prefixes
    return f"`{taken}` extra" if taken else f"`{put}` missing"


def _ambiguous(rule: Rule, matches: Mapping[str, str], choices: list[Prefixes], missing: int) -> Finding:
    shown = " or ".join(_describe(prefixes) for prefixes in choices[:4])
    return rule.finding(
        Level.ERROR,
        f"{counted(len(matches), 'key')} with more than one way to fit the target: {shown}",
        keys=matches,
        evidence={"choices": [_describe(prefixes) for prefixes in choices]},
        remedies=_remedies(choices, is_most=2 * len(matches) > missing),
        blocks=Blocks.FILLING,
    )


def _remedies(choices: list[Prefixes], is_most: bool) -> tuple[Remedy, ...]:
    """Return how to choose the set under one prefix if each of two sets fills most of the target."""
    sets = list(dict.fromkeys(taken[:-1] for taken, _ in choices if taken))
    if len(sets) < 2 or not is_most or len({put for _, put in choices}) > 1:
        text = "rename the keys to the target's names: nothing in the file shows which is which"
        return advise(text)
    return choice(sets)
