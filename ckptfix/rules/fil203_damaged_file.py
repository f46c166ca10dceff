"""FIL203 damaged-file: the file is cut short, unfinished, mangled, or has something before or after it.

## What it finds
What `--salvage` had to get past to open the file: an end that is missing, space that was reserved and never filled, a
missing shard, a transfer in text mode, bytes before or after the checkpoint. The keys are the lost tensors, with their
share of all numbers if that is known. Without `--salvage` such a file is refused, for the same reason. A stale index,
and a `__metadata__` of safetensors with values that are not texts, leave all tensors whole: such files are read as they
are. In a file without checksums, a name of one other bit than the names around it ask for (`layer1.0.biaw`), and the
tag of a device that does not exist, are signs of damage as well.

## Why it matters
A load of the whole file fails, and the messages of torch (`failed finding central directory`, `unexpected EOF`,
`invalid load key`) do not say that most of the weights are still there.

## Fix safety
Safe: the file is written again without the damage, and every tensor that is kept is bit for bit what was saved. Lost
tensors stay lost, and the exit code is 1, unless `--fill FILE` supplies them from another checkpoint under the same key
and with the same shape (with `--model` or `--like`, FIT101 does that).

Three kinds of doubt stay a warning:

- A file may have lost or gained bytes elsewhere than at its end. If its values tell the place, what comes after it is
  read from there. Tensors whose place they do not tell, and those of a packed file that fails its checksum, are kept
  and named.
- If the list of the tensors (`data.pkl`) fails its checksum, a key may be misspelt. Then no fix that adds, drops or
  changes a tensor counts as safe: what seems to be missing may be there under another name.
- If ranks hold different values of a tensor of which each should have a copy, those of the first are kept.

## Example
    ckptfix repair half.pth --salvage --fill yesterday.pth
    # 11 tensors are whole, 4 are lost (69.8 % of the numbers), filled from yesterday.pth

## Sources
https://github.com/Lightning-AI/pytorch-lightning/issues/688 (a killed save),
https://pytorch.org/docs/stable/notes/serialization.html"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckptfix.core.checkpoint import IN_MEMORY, Checkpoint
from ckptfix.core.edits import Fill, Rewrite
from ckptfix.core.facts import ABSENT, BESIDE, Kind, clause, clauses
from ckptfix.core.finding import FILE, Finding, Fix, Level, Remedy, advise, counted
from ckptfix.core.spec import TensorSpec
from ckptfix.rules.flipped_bits import misspelt, misspelt_entries, odd_devices
from ckptfix.rules.rule import Context, Rule


def damaged_file(rule: Rule, context: Context) -> Iterator[Finding]:
    """Say what is wrong with the file, and what of it is lost; fill that from the donor."""
    checkpoint = context.checkpoint
    if damage := (*checkpoint.damage, *checkpoint.remarked(*BESIDE)):
        cause = clauses(damage)
        fix = Fix.safe((Rewrite(cause),))
        evidence = {"damage": [clause(fact) for fact in damage]}
        yield rule.finding(Level.WARNING, f"the file {cause}", fix=fix, evidence=evidence)
    if differing := [key for fact in damage if fact.kind is Kind.RANKS_DIFFER for key in fact.data["keys"]]:
        yield rule.finding(
            Level.WARNING,
            f"{counted(len(differing), 'tensor')} may differ from what was saved: the ranks hold different values",
            keys=tuple(key for key in checkpoint.specs if any(f".{path}".endswith(f".{key}") for path in differing)),
            remedies=advise("fetch the files of one save again"),
        )
    doubts = [clause(fact) for fact in checkpoint.remarked(Kind.DOUBTFUL_NAMES)]
    if doubts:
        yield rule.finding(
            Level.WARNING,
            f"the file {'; '.join(doubts)}: names, shapes and places of its tensors may differ from what was saved",
            remedies=advise(
                "fetch the file again, or name the model to compare with; nothing is added or left out unasked"
            ),
        )
    yield from _flipped_bits(rule, checkpoint)
    yield from _doubtful_values(rule, checkpoint)
    yield from _unnamed(rule, context)
    trailing = [fact.data["nbytes"] for fact in checkpoint.remarked(Kind.TRAILING_BYTES)]
    if trailing:
        keys = _of_last_storage(checkpoint)
        doubt = "; where they came into the last storage and were not appended, its tensors are not what was saved"
        said = f"{trailing[0]} bytes after the checkpoint do not belong to it{doubt if keys else ''}"
        yield rule.finding(Level.NOTE, said, keys=keys)
    strays = [fact.place for fact in checkpoint.remarked(Kind.STRAY_FILE)]
    if strays:
        files = f"{strays[0]} holds" if len(strays) == 1 else f"{strays[0]} and {len(strays) - 1} more files hold"
        yield rule.finding(
            Level.NOTE,
            f"{files} nothing of this checkpoint: an earlier save left it here, or its metadata was not fetched",
        )
    for fact in checkpoint.remarked(Kind.LAST_SHARD) if context.target is None else ():
        said = f"{fact.place} {clause(fact)}: without a later one, tensors end too early"
        yield rule.finding(Level.NOTE, said, remedies=advise("count the files, or name the model to compare with"))
    fills = {key: fill for key, spec in checkpoint.lost.items() if (fill := donor_fill(key, spec, context))}
    if fills:
        yield rule.finding(
            Level.ERROR,
            f"{_lost(checkpoint, {key: checkpoint.lost[key] for key in fills})}; filled from {context.settings.fill}",
            keys=fills,
            fix=Fix.requested(fills.values()),
        )
    left = {key: spec for key, spec in checkpoint.lost.items() if key not in fills}
    if left:
        again = "the missing files" if any(fact.kind in ABSENT for fact in damage) else "the file again"
        yield rule.finding(
            # With a target, what is missing of it is the finding of another rule, and may be filled there.
            Level.ERROR if context.target is None else Level.NOTE,
            _lost(checkpoint, left),
            keys=left,
            evidence={"lost": {key: spec and [spec.dtype, list(spec.shape)] for key, spec in left.items()}},
            remedies=(
                *advise(f"fetch {again}"),
                Remedy.of("completes it from another checkpoint", salvage=True, fill=FILE),
            ),
        )


def _flipped_bits(rule: Rule, checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield the names in which one bit seems to have changed, in a file without checksums."""
    storages = [storage for spec in checkpoint.specs.values() for storage in spec.storages]
    if checkpoint.format == IN_MEMORY or all(storage.crc32 is not None for storage in storages):
        return
    keys = misspelt(checkpoint.specs)
    entries = misspelt_entries(checkpoint.root if isinstance(checkpoint.root, dict) else ())
    devices = odd_devices(checkpoint.devices)
    if keys or entries or devices:
        said = [f"{key!r} for {name!r}" for key, name in (*keys.items(), *entries.items())]
        said += [f"the device {tag!r}" for tag in devices]
        yield rule.finding(
            Level.WARNING,
            f"one bit of a name seems to have changed ({', '.join(said[:3])}{' …' if len(said) > 3 else ''}); the file "
            "has no checksum, and its values may have changed too",
            keys=keys,
            remedies=advise("fetch the file again, or compare it with another copy (ckptfix diff)"),
        )


def _doubtful_values(rule: Rule, checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield the tensors whose bytes may be wrong, by the reason; ``.`` means all without a checksum."""
    reasons: dict[str, list[str]] = {}
    for fact in checkpoint.remarked(Kind.DOUBTFUL_VALUES):
        reasons.setdefault(clause(fact), []).append(fact.place)
    for reason, places in reasons.items():
        named = set(places)
        keys = tuple(
            key
            for key, spec in checkpoint.specs.items()
            if key in named or ("." in named and not all(storage.crc32 is not None for storage in spec.storages))
        )
        if keys:
            yield rule.finding(
                Level.WARNING,
                f"{counted(len(keys), 'tensor')} may differ from what was saved: {reason}",
                keys=keys,
                remedies=advise("fetch the file again, or compare the result with another copy (ckptfix diff)"),
            )


def _unnamed(rule: Rule, context: Context) -> Iterator[Finding]:
    """Yield what is wrong with the files of a checkpoint, or its notes, and concerns no tensor whose name is known."""
    remarked = context.checkpoint.remarked
    said: list[tuple[Level, str, str]] = []
    for fact in remarked(Kind.UNNAMED_LOSS):
        # With a target, what is missing of it is the finding of another rule.
        level = Level.ERROR if context.target is None else Level.NOTE
        what = f"tensors are lost whose names are not known: those of {clause(fact)}"
        said.append((level, what, "fetch the missing files, or name the model to compare with"))
    for fact in remarked(Kind.DAMAGED_NOTE):
        what = f"the note {fact.place} in __metadata__ {clause(fact)}: names that share a tensor may be missing"
        cure = "write it again from the file that it was made of, or name the model to compare with"
        said.append((Level.WARNING, what, cure))
    for fact in remarked(Kind.INDEX_SIZE):
        if fact.place == ".":
            said.append((Level.NOTE, f"{clause(fact)}: one of them may belong to another save", ""))
        else:
            what = f"{clause(fact)}, and {fact.place} has other dtypes than the rest: shards of two saves are mixed"
            said.append((Level.WARNING, what, "fetch all shards of one save again"))
    for fact in remarked(Kind.PACKED_MEMBERS):
        what = (
            "compressed, which torch.save never does: another program packed the file again, and torch.load(mmap=True)"
        )
        said.append((Level.NOTE, f"{clause(fact)} {what} refuses it", ""))
    if packed := remarked(Kind.PACKED_SHARD):
        files = packed[0].place if len(packed) == 1 else f"{packed[0].place} and {len(packed) - 1} more"
        said.append((Level.NOTE, f"shards are compressed one by one ({files}); other loaders need them unpacked", ""))
    for level, message, advice in said:
        yield rule.finding(level, message, remedies=advise(advice) if advice else ())


def _of_last_storage(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the tensors in the storage that ends where bytes follow which belong to nothing."""
    last = {fact.place for fact in checkpoint.remarked(Kind.LAST_STORAGE)}
    return tuple(
        key
        for key, spec in checkpoint.specs.items()
        if any(part.key in last for storage in spec.storages for part in (storage, *storage.parts))
    )


def _lost(checkpoint: Checkpoint, lost: Mapping[str, TensorSpec | None]) -> str:
    """Return how many tensors, and which share of all numbers of the file, where all sizes are known."""
    said = f"{len(lost)} of {counted(len(checkpoint.specs) + len(checkpoint.lost), 'tensor')} lost"
    sizes = [spec.numel for spec in lost.values() if spec is not None]
    total = sum(spec.numel for spec in (*checkpoint.specs.values(), *checkpoint.lost.values()) if spec is not None)
    if None in checkpoint.lost.values() or not total:
        return said
    return f"{said}, {100 * sum(sizes) / total:.3g} % of the numbers"


def donor_fill(key: str, spec: TensorSpec | None, context: Context) -> Fill | None:
    """Return the fill from ``--fill FILE`` under the same key; None if the file does not have it in the shape of
    ``spec``.

    With a target the rule on missing keys fills, under the names that the target has."""
    if context.donor is None or context.target is not None:
        return None
    stored = context.donor.specs.get(key)
    if stored is None or not stored.has_data or (spec is not None and stored.shape != spec.shape):
        return None
    return Fill(key, stored.dtype, stored.shape, "donor", donor_key=key)
