"""FIL201 storage-damage: a storage with wrong bytes.

## What it finds
Tensors of a zip file whose storage fails its CRC-32: bits flipped on disk, in memory or in transfer. A checksum of zero
means that none was computed (`torch.serialization.set_crc32_options(False)`), so the storage cannot be checked. Other
parts of the file, such as an optimizer, are a separate finding. So are other files of a zip archive, such as that of
stable-baselines3, up to eight times the size of the checkpoint together.

## Why it matters
torch.load does not verify the checksum: the file loads with wrong values. One flipped exponent bit makes a weight 2¹²⁸
times too large; a flipped mantissa bit is never noticed. ckptfix verifies the checksum of a storage when it first reads
it: a damaged state_dict is never loaded into a model, and reading a single tensor gives a warning.

## Fix safety
Unsafe, and only on request: `--salvage` drops these tensors, and `--fill FILE` replaces them from another copy or an
earlier checkpoint. Fetching the file again is better. `--ignore FIL201` with `--salvage` accepts the loss; without
`--salvage` it accepts the bytes as they are. `--drop-optimizer` drops a damaged optimizer.

## Example
`fc.weight` with one flipped bit: checksum 3a5c1d20, but the archive says 98bdda3b.

## Sources
APPNOTE.TXT 4.4.7 (https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT), `torch/serialization.py`."""

from collections.abc import Iterator

from ckptfix.bytes.checksums import soundness, storages_of
from ckptfix.bytes.files import is_url
from ckptfix.bytes.sources import Content
from ckptfix.core.edits import Drop, Edit
from ckptfix.core.finding import FILE, Blocks, Finding, Fix, Level, Remedy, advise, counted
from ckptfix.core.wording import first_names
from ckptfix.maps.optimizer_states import parts_beside
from ckptfix.rules.fil203_damaged_file import donor_fill
from ckptfix.rules.rule import Context, Rule

_NAMED = 3  # damaged files that are listed
REMEDIES = (
    Remedy.of("fetch the file again"),
    Remedy.of("leaves these tensors out", salvage=True),
    Remedy.of("takes them from another copy", salvage=True, fill=FILE),
)


def storage_damage(rule: Rule, context: Context) -> Iterator[Finding]:
    """Name the tensors whose storage fails its checksum; drop or replace them if asked to."""
    keys_of = list(storages_of(context.checkpoint))
    context.statistics.values()  # the scan verifies most checksums while it reads
    yield from _beside(rule, context)
    yield from _in_archive(rule, context)
    are_sound = soundness([storage for storage, _ in keys_of])
    if all(are_sound):
        return
    bad = {key for (_, keys), is_sound in zip(keys_of, are_sound, strict=True) if not is_sound for key in keys}
    damaged = [key for key in context.checkpoint.entries if key in bad]
    specs = context.checkpoint.specs
    asked = damaged if context.settings.salvage else ()
    fills = {key: fill for key in asked if key in specs and (fill := donor_fill(key, specs[key], context))}
    left = [key for key in damaged if key not in fills]
    if fills:
        edits: list[Edit] = [*map(Drop, fills), *fills.values()]
        yield rule.finding(
            Level.ERROR,
            f"{_message(len(fills))}; replaced from {context.settings.fill}",
            keys=fills,
            fix=Fix.requested(edits),
        )
    if not left:
        return
    drop = Fix.requested(map(Drop, left)) if context.settings.salvage else None
    # With a target, a later rule reports the missing keys; without one, this finding has to stay.
    yield rule.finding(
        Level.ERROR,
        _message(len(left)),
        keys=left,
        fix=drop if context.target is not None else None,
        remedies=REMEDIES if drop is None else (REMEDIES[0], REMEDIES[2]),
        blocks=Blocks.NOTHING if context.settings.salvage else Blocks.WRITING,
    )
    if drop is not None and context.target is None:
        yield rule.finding(Level.NOTE, f"{counted(len(left), 'damaged tensor')} left out", keys=left, fix=drop)


def _in_archive(rule: Rule, context: Context) -> Iterator[Finding]:
    """Report other damaged files of the archive that the checkpoint is in, which are read with it: those that
    stable-baselines3 puts beside its policy."""
    checkpoint = context.checkpoint
    if not checkpoint.member or not context.settings.values or is_url(checkpoint.path):
        return
    from ckptfix.reading.archives.wrapped import damaged_beside  # imported late: few files need it

    if bad := damaged_beside(Content.of_file(checkpoint.path), checkpoint.member):
        yield rule.finding(
            Level.WARNING,
            f"{counted(len(bad), 'other file')} of the archive with wrong bytes: {first_names(bad, _NAMED)}",
            remedies=advise("fetch the archive again"),
        )


def _beside(rule: Rule, context: Context) -> Iterator[Finding]:
    """Report every other damaged part of the file: another set of weights, an optimizer."""
    for place, specs, is_optimizer in parts_beside(context.checkpoint):
        storages = {id(spec.storage): spec.storage for spec in specs if spec.storage is not None}
        if all(storage.crc32 is None for storage in storages.values()):
            continue
        context.statistics_of({str(number): spec for number, spec in enumerate(specs)}).values()
        if bad := soundness(list(storages.values())).count(False):
            from ckptfix.rules.opt101_stale_optimizer import dropping  # imported late: few files need it

            yield rule.finding(
                Level.ERROR,
                f"{counted(bad, 'storage')} of {place}, outside the weights, with wrong bytes",
                remedies=(REMEDIES[0], *(dropping(context) if is_optimizer else ())),
                is_accepted=is_optimizer and context.settings.drop_optimizer,
            )


def _message(count: int) -> str:
    return f"{counted(count, 'tensor')} with wrong bytes: the storage fails the checksum of the archive"
