"""KEY104 foreign-prefix: the keys stand under a prefix that the target does not have, or lack one that it has.

## What it finds
A prefix of whole segments (`model.`, `net.`, `backbone.`, `encoder.` or any other) whose removal or addition makes keys
of the file equal to keys of the target with the same shapes. Prefixes are found by counting the evidence, not from a
list. Where one prefix would have to be replaced by another, and at least four keys of two segments or more agree on it,
that is proposed too.

## Why it matters
A trainer that keeps the network in an attribute (Lightning's `self.model`, a detector's `backbone`) saves it under that
name; the plain network then reports every key as missing.

## Fix safety
Safe for a prefix taken off or put on: the target confirms every single rename by its whole name and its shape, and one
prefix explains the keys better than any other; where two do (`encoder_q.` and `encoder_k.` of a contrastive model),
both are shown and nothing is renamed. Unsafe for a replacement: two parts of a model may have the same inner names.
Needs a target.

## Example
`model.backbone.conv1.weight` becomes `conv1.weight`; `conv1.weight` becomes `backbone.conv1.weight`.

## Sources
detectron2's `align_and_update_state_dicts` does this by longest common suffix and never looks at shapes
(Mask2Former#229, OneFormer#52)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from ckptfix.checkpoint import TensorSpec
from ckptfix.finding import Applicability, Context, Finding, Fix, Level, Rule, rule
from ckptfix.rules.wrappers import colliding, renames
from ckptfix.target import Target

Prefixes = tuple[str, str]
"""What is taken off and what is put on, each with its dot at the end or empty."""

MAX_DEPTH = 6
"""Segments of a prefix that are tried."""


@rule("KEY104", "foreign-prefix")
def foreign_prefix(rule: Rule, context: Context) -> Iterator[Finding]:
    """Take off or put on the prefixes that the target confirms, the one with the most evidence first."""
    checkpoint, target = context.checkpoint, context.target
    if target is None:
        return
    free = {key: spec for key, spec in checkpoint.specs.items() if key not in target.slots}
    wanted = {key for key in target.slots if key not in checkpoint.entries}
    new: dict[str, str] = {}
    safe = True
    for _ in range(MAX_DEPTH):
        ranked = _ranked(free, wanted, target, pure=safe)
        if not ranked and safe and not new:
            safe, ranked = False, _ranked(free, wanted, target, pure=False)
        if not ranked:
            break
        (prefixes, matches), *others = ranked
        rivals = [
            other
            for other, theirs in others
            if len(theirs) == len(matches) and set(theirs.values()) & set(matches.values())
        ]
        if rivals:
            yield _ambiguous(rule, matches, [prefixes, *rivals])
            return
        new.update(matches)
        free = {key: spec for key, spec in free.items() if key not in matches}
        wanted -= set(matches.values())
    if not new or colliding(checkpoint.entries, new):
        return
    used = Counter(_describe(_prefixes(key, name)) for key, name in new.items())
    yield rule.finding(
        Level.ERROR,
        f"{len(new)} keys stand under another prefix than in the target: "
        + ", ".join(f"{what} ({count} keys)" for what, count in used.most_common()),
        keys=tuple(new),
        evidence={"prefixes": dict(used)},
        fix=Fix(renames(new), Applicability.SAFE if safe else Applicability.UNSAFE),
    )


def _ranked(
    free: dict[str, TensorSpec], wanted: set[str], target: Target, pure: bool
) -> list[tuple[Prefixes, dict[str, str]]]:
    """Every prefix change with the renames that the target confirms, the most of them first, then the shorter change.

    A ``pure`` change takes off or puts on, and has to match two keys, or all that there are, so that one common name
    (`weight`) proves nothing. A replacement has to match four keys by two segments."""
    suffixes: dict[str, list[str]] = defaultdict(list)
    for key in wanted:
        for depth, suffix in _suffixes(key):
            suffixes[suffix].append(key[: len(key) - len(suffix)])
            if depth == MAX_DEPTH:
                break
    changes: dict[Prefixes, dict[str, str]] = defaultdict(dict)
    for key, spec in free.items():
        for _, suffix in _suffixes(key):
            taken = key[: len(key) - len(suffix)]
            for put in suffixes.get(suffix, ()):
                fits = bool(taken) != bool(put) if pure else bool(taken and put and "." in suffix)
                if fits and target.accepts(put + suffix, spec.shape):
                    changes[(taken, put)][key] = put + suffix
    enough = max(min(2, len(free), len(wanted)), 1) if pure else 4
    proven = [(prefixes, matches) for prefixes, matches in changes.items() if len(matches) >= enough]
    return sorted(proven, key=lambda item: (-len(item[1]), len("".join(item[0])), item[0]))


def _suffixes(key: str) -> Iterator[tuple[int, str]]:
    """The key and its endings at segment borders, the longest first, with the number of segments before them."""
    yield 0, key
    position = key.find(".")
    for depth in range(1, MAX_DEPTH + 1):
        if position < 0:
            return
        yield depth, key[position + 1 :]
        position = key.find(".", position + 1)


def _prefixes(key: str, name: str) -> Prefixes:
    """The change that made one key into the other."""
    suffix = next(suffix for _, suffix in _suffixes(key) if name.endswith(suffix))
    return key[: len(key) - len(suffix)], name[: len(name) - len(suffix)]


def _describe(prefixes: Prefixes) -> str:
    taken, put = prefixes
    if taken and put:
        return f"`{taken}` instead of `{put}`"
    return f"`{taken}` too much" if taken else f"`{put}` missing"


def _ambiguous(rule: Rule, matches: dict[str, str], choices: list[Prefixes]) -> Finding:
    shown = " or ".join(_describe(prefixes) for prefixes in choices[:4])
    return rule.finding(
        Level.ERROR,
        f"{len(matches)} keys would fit the target in more than one way: {shown}",
        keys=tuple(matches),
        evidence={"choices": [list(prefixes) for prefixes in choices]},
        remedy="keep one of the sets of weights in the file and repair that",
    )
