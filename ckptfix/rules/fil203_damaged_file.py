"""FIL203 damaged-file: the file is cut short, unfinished, mangled, or has extra bytes before or after it.

## What it finds
Damage that `--salvage` had to work around: a missing end, space that was reserved but never filled, a missing shard, a
transfer in text mode, bytes before or after the checkpoint. The keys are the lost tensors, with their share of all
numbers if it is known. Without `--salvage`, such a file is refused. A stale index, or a safetensors `__metadata__` with
values other than strings, leaves all tensors intact: such files are read anyway. In a file without checksums, a name
that one flipped bit explains (`layer1.0.biaw`) and the tag of a device that does not exist are signs of damage too.

## Why it matters
Loading the file fails, and torch's messages (`failed finding central directory`, `unexpected EOF`, `invalid load key`)
do not say that most of the weights are still there.

## Fix safety
Safe: the file is written without the damage, and every tensor that is kept is bit for bit what was saved. Lost tensors
stay lost, with exit code 1, unless `--fill FILE` supplies them from another checkpoint with the same key and shape
(with `--model` or `--like`, FIT101 does that).

If a tensor of the optimizer is lost, the optimizer is left out, and an error says so. If the model states of ZeRO 1 or
2 have all weights in the training's dtype, the finding has the command that takes them.

Three kinds of doubt stay a warning:

- A file may have lost or gained bytes before its end. If its values show where, the rest is read from the right place.
  Tensors whose position remains unclear, and those of a packed file that fails its checksum, are kept and listed.
- If the list of tensors (`data.pkl`) fails its checksum, a key may be misspelt. Then no fix that adds, drops or changes
  a tensor counts as safe, because a key that seems missing may exist under another name.
- If ranks have different values for a tensor that each should have a copy of, those of most ranks are kept, or the
  first rank's.

## Example
    ckptfix repair half.pth --salvage --fill yesterday.pth
    # 11 tensors are whole, 4 are lost (69.8 % of the numbers), filled from yesterday.pth

## Sources
https://github.com/Lightning-AI/pytorch-lightning/issues/688 (a killed save),
https://pytorch.org/docs/stable/notes/serialization.html"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from string import ascii_letters

from ckptfix.core.buffers import RUNNING_STATISTICS
from ckptfix.core.checkpoint import IN_MEMORY, Checkpoint
from ckptfix.core.edits import Fill, Rewrite
from ckptfix.core.facts import BESIDE, Fact, Kind, clause, clauses, fact_to_json, in_copy, to_fetch
from ckptfix.core.finding import FILE, Finding, Fix, Level, Remedy, advise, counted
from ckptfix.core.spec import TensorSpec
from ckptfix.core.wording import first_names
from ckptfix.maps.names import template
from ckptfix.reading.folders.rank_shards import COMMON
from ckptfix.rules.rule import Context, Rule

Defect = tuple[Level, str, str, Collection[str]]  # a finding's level, message, advice and keys


def damaged_file(rule: Rule, context: Context) -> Iterator[Finding]:
    """Report what is wrong with the file and what is lost; fill that from the donor."""
    checkpoint, has_target = context.checkpoint, context.target is not None
    if damage := (*checkpoint.damage, *checkpoint.remarked(*BESIDE)):
        cause = clauses(damage)
        evidence = {
            "damage": [clause(fact) for fact in damage],
            "facts": {clause(fact): fact_to_json(fact) for fact in damage},
        }
        yield rule.finding(Level.WARNING, f"the file {cause}", evidence=evidence, fix=Fix.safe((Rewrite(cause),)))
    for level, message, advice, keys in (*_doubts(checkpoint, damage), *_of_files(checkpoint, has_target)):
        yield rule.finding(level, message, keys, remedies=advise(advice) if advice else ())
    if beside := [fact for fact in damage if _is_beside(fact, checkpoint)]:
        places = {place for fact in beside for place in fact.data.get("names", (fact.place,))}
        otherwise = "at step 0" if places <= {*COMMON} else "with a new optimizer"
        if all(fact.kind is Kind.STATES_LOST for fact in beside):
            otherwise = "with new moments of these parameters"
        yield rule.finding(
            Level.ERROR,
            f"data other than weights is lost: the file {'; '.join(map(clause, beside))}",
            remedies=advise(f"fetch {to_fetch(damage)}; otherwise training starts {otherwise}"),
        )
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
        yield rule.finding(
            # With a target, another rule reports what is missing, and may fill it.
            Level.NOTE if has_target else Level.ERROR,
            _lost(checkpoint, left),
            keys=left,
            evidence={"lost": {key: spec and [spec.dtype, list(spec.shape)] for key, spec in left.items()}},
            remedies=(
                *advise(f"fetch {to_fetch(damage)}"),
                *(Remedy.of(in_copy(fact)) for fact in checkpoint.remarked(Kind.COMPLETE_COPY)),
                Remedy.of("completes it from another checkpoint", salvage=True, fill=FILE),
            ),
        )


def _is_beside(fact: Fact, checkpoint: Checkpoint) -> bool:
    """Return whether damage has cost data besides the weights: a part of the container, or of a checkpoint of several
    files of which no weight is lost."""
    is_of_files = fact.kind in (Kind.SHARDS_MISSING, Kind.SHARD_UNREADABLE)
    is_named = not any(checkpoint.remarked(Kind.UNNAMED_LOSS))
    return fact.kind in (Kind.EXTRAS_LOST, Kind.STATES_LOST, Kind.COPIES_TAKEN) or (
        is_of_files and is_named and not checkpoint.lost
    )


def _doubts(checkpoint: Checkpoint, damage: Collection[Fact]) -> Iterator[Defect]:
    """Yield the reasons why names or values may differ from what was saved."""
    ranks = [fact for fact in damage if fact.kind is Kind.RANKS_DIFFER]
    if differing := [key for fact in ranks for key in fact.data["keys"]]:
        keys = [key for key in checkpoint.specs if any(f".{path}".endswith(f".{key}") for path in differing)]
        what = f"{counted(len(differing), 'tensor')} may differ from what was saved: the ranks have different values"
        used = list(dict.fromkeys(fact.data["others"][0] for fact in ranks if fact.data.get("others")))
        what += f"; those of {first_names(used) if used else 'the first'} are used"
        odd = list(dict.fromkeys(name for fact in ranks if fact.data.get("is_minor") for name in fact.data["names"]))
        yield Level.WARNING, what, f"fetch {first_names(odd) if odd else 'all files of one save'} again", keys
    if doubts := [clause(fact) for fact in checkpoint.remarked(Kind.DOUBTFUL_NAMES)]:
        what = f"the file {'; '.join(doubts)}: its names, shapes and offsets may differ from what was saved"
        cure = "fetch the file again, or name the model to compare with; nothing is added or dropped automatically"
        yield Level.WARNING, what, cure, ()
    yield from _flipped_bits(checkpoint)
    reasons: dict[str, set[str]] = {}
    for fact in checkpoint.remarked(Kind.DOUBTFUL_VALUES):
        reasons.setdefault(clause(fact), set()).add(fact.place)
    for reason, named in reasons.items():  # the place "." means all tensors without a checksum
        unproved = {key for key, spec in checkpoint.specs.items() if "." in named and not _has_checksums(spec)}
        if keys := [key for key in checkpoint.specs if key in named | unproved]:
            what = f"{counted(len(keys), 'tensor')} may differ from what was saved: {reason}"
            cure = "fetch the file again, or compare the result with another copy (ckptfix diff)"
            yield Level.WARNING, what, cure, keys


def _flipped_bits(checkpoint: Checkpoint) -> Iterator[Defect]:
    """Yield the names in which one bit seems to have changed, in a file without checksums."""
    if checkpoint.format == IN_MEMORY or all(map(_has_checksums, checkpoint.specs.values())):
        return
    keys = misspelt(checkpoint.specs)
    entries = misspelt_entries(checkpoint.root if isinstance(checkpoint.root, dict) else ())
    said = [f"{key!r} for {name!r}" for key, name in (*keys.items(), *entries.items())]
    said += [f"the device {tag!r}" for tag in odd_devices(checkpoint.devices)]
    if said:
        what = (
            f"one bit of a name seems to have changed ({', '.join(said[:3])}{' …' if len(said) > 3 else ''}); the file "
            "has no checksum, and its values may have changed too"
        )
        yield Level.WARNING, what, "fetch the file again, or compare it with another copy (ckptfix diff)", keys


def _has_checksums(spec: TensorSpec) -> bool:
    return all(storage.crc32 is not None for storage in spec.storages)


def _of_files(checkpoint: Checkpoint, has_target: bool) -> Iterator[Defect]:
    """Yield what is wrong with the files or the metadata of a checkpoint, and what does not belong to it."""
    remarked = checkpoint.remarked
    for fact in remarked(Kind.UNNAMED_LOSS):
        # With a target, another rule reports what is missing.
        level = Level.NOTE if has_target else Level.ERROR
        what = f"tensors with unknown names are lost: those of {clause(fact)}"
        yield level, what, f"fetch {to_fetch(checkpoint.damage)}, or name the model to compare with", ()
    for fact in remarked(Kind.DAMAGED_NOTE):
        what = f"the note {fact.place} in __metadata__ {clause(fact)}: names of tied tensors may be missing"
        cure = "write it again from the original file, or name the model to compare with"
        yield Level.WARNING, what, cure, ()
    for fact in remarked(Kind.INDEX_SIZE):
        if fact.place == ".":
            yield Level.NOTE, f"{clause(fact)}: one of them may belong to another save", "", ()
        else:
            what = f"{clause(fact)}, and {fact.place} has other dtypes than the rest: shards of two saves are mixed"
            yield Level.WARNING, what, "fetch all shards of one save again", ()
    for fact in remarked(Kind.PACKED_MEMBERS):
        what = "compressed, which torch.save never does: another program repacked the file, and torch.load(mmap=True)"
        yield Level.NOTE, f"{clause(fact)} {what} refuses it", "", ()
    if packed := remarked(Kind.PACKED_SHARD):
        files = packed[0].place if len(packed) == 1 else f"{packed[0].place} and {len(packed) - 1} more"
        yield Level.NOTE, f"shards are compressed one by one ({files}); other loaders need them unpacked", "", ()
    for fact in remarked(Kind.TRAILING_BYTES)[:1]:
        last = {each.place for each in remarked(Kind.LAST_STORAGE)}
        parts = {
            key: {part.key for s in spec.storages for part in (s, *s.parts)} for key, spec in checkpoint.specs.items()
        }
        keys = [key for key, names in parts.items() if names & last]
        doubt = "; if they were inserted into the last storage instead of appended, its tensors are wrong"
        what = f"{fact.data['nbytes']} bytes after the checkpoint do not belong to it{doubt * bool(keys)}"
        yield Level.NOTE, what, "", keys
    if strays := [fact.place for fact in remarked(Kind.STRAY_FILE)]:
        files = f"{strays[0]} holds" if len(strays) == 1 else f"{strays[0]} and {len(strays) - 1} more files hold"
        what = f"{files} nothing of this checkpoint: left over from an earlier save, or its metadata was not fetched"
        yield Level.NOTE, what, "", ()
    for fact in remarked(Kind.LAST_SHARD) if not has_target else ():
        what = f"{fact.place} {clause(fact)}: if later ones are missing, tensors end too early"
        yield Level.NOTE, what, "count the files, or name the model to compare with", ()


def _lost(checkpoint: Checkpoint, lost: Mapping[str, TensorSpec | None]) -> str:
    """Return in words how many tensors are lost, and their share of all numbers if every size is known."""
    said = f"{len(lost)} of {counted(len(checkpoint.specs) + len(checkpoint.lost), 'tensor')} lost"
    sizes = [spec.numel for spec in lost.values() if spec is not None]
    total = sum(spec.numel for spec in (*checkpoint.specs.values(), *checkpoint.lost.values()) if spec is not None)
    if None in checkpoint.lost.values() or not total:
        return said
    return f"{said}, {100 * sum(sizes) / total:.3g} % of the numbers"


def donor_fill(key: str, spec: TensorSpec | None, context: Context) -> Fill | None:
    """Return the fill for a key from ``--fill FILE``; None if that file does not have it in the shape of ``spec``.

    With a target, the rule on missing keys fills instead, under the target's names."""
    if context.donor is None or context.target is not None:
        return None
    stored = context.donor.specs.get(key)
    if stored is None or not stored.has_data or (spec is not None and stored.shape != spec.shape):
        return None
    return Fill(key, stored.dtype, stored.shape, "donor", donor_key=key)


# Names in which one bit seems to have changed: keys, entries of the container and tags of devices.
MANY = 100  # keys with a unique form; with more, the keys have no pattern that one could break
_OF_LAYERS = RUNNING_STATISTICS | {"weight", "bias"}
_OF_TRAINERS = "state_dict model_state_dict model optimizer optimizer_state_dict scheduler lr_scheduler epoch".split()

# The devices of any torch release, including those of other makers' chips.
_DEVICE = re.compile(r"(cpu|cuda|hip|mps|meta|xpu|hpu|npu|xla|ipu|mtia|mlu|musa|vulkan|maia|privateuseone)(:\w+)*")


def misspelt(keys: Collection[str]) -> dict[str, str]:
    """Return the keys that differ by one bit from a name in the pattern of the others, with these names.

    Numbers and short words do not count: two of them may differ by one bit and both be right."""
    known = {key: template(key) for key in keys}
    forms = Counter(known.values())
    parents = Counter([key.rpartition(".")[0] for key in known])
    leaves = Counter([key.rpartition(".")[2] for key in known])
    alone = [key for key, form in known.items() if forms[form] == 1]
    split = {key: key.rpartition(".") for key in alone}
    odd = [key for key, (parent, _, leaf) in split.items() if parents[parent] == 1 or leaves[leaf] == 1]
    found: dict[str, str] = {}
    for key in odd if len(odd) <= MANY else ():
        for name in _one_bit_from(key):
            parent, _, leaf = name.rpartition(".")
            is_same = parent == split[key][0]
            is_word = len(leaf) > 1  # or else a number in other lists, which any name of one letter is a bit from
            is_beside = is_word and parents[parent] > is_same and leaves[leaf] - (leaf == split[key][2]) > 1
            is_usual = leaf in _OF_LAYERS and (is_same or parents[parent] > 0)
            if name not in known and (is_beside or is_usual or forms[template(name)] > 1) and _is_slip(key, name):
                found[key] = name
    return found


def misspelt_entries(keys: Iterable[object]) -> dict[object, str]:
    """Return the keys of a container that differ by one bit from an entry that trainers write, with the right names."""
    wrong = {other: name for name in _OF_TRAINERS for other in _one_bit_from(name)}
    return {key: wrong[key] for key in keys if key in wrong}


def odd_devices(tags: Iterable[str]) -> list[str]:
    """Return the tags that no device can have, or that differ by one bit from one of torch's."""
    return [
        tag
        for tag in tags
        if not _DEVICE.fullmatch(tag)
        and (not re.fullmatch(r"[A-Za-z]\w*(:\w+)*", tag) or any(map(_DEVICE.fullmatch, _one_bit_from(tag))))
    ]


def _one_bit_from(name: str) -> Iterator[str]:
    for at, char in enumerate(name):
        for bit in range(8):
            yield f"{name[:at]}{chr(ord(char) ^ 1 << bit)}{name[at + 1 :]}"


def _is_slip(key: str, name: str) -> bool:
    """Return whether the one different character is a slip, and not part of two numbers or two short words."""
    at = next(at for at, (one, other) in enumerate(zip(key, name, strict=True)) if one != other)
    if not name[at].isalpha():
        return not (key[at].isdigit() and name[at].isdigit())
    before, after = name[:at].rstrip(ascii_letters), name[at:].lstrip(ascii_letters)
    return len(name) - len(before) - len(after) >= 4
