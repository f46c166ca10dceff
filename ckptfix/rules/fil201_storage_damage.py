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

In a folder of several files, the finding names the damaged ones. A damaged tensor outside the weights of such a folder
is not written, because a storage that several files make up gets a new checksum, which would hide the damage.

## Example
`fc.weight` with one flipped bit: checksum 3a5c1d20, but the archive says 98bdda3b.

## Sources
APPNOTE.TXT 4.4.7 (https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT), `torch/serialization.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct

from ckptfix.bytes.checksums import damaged_parts, place_in, soundness, storages_of
from ckptfix.bytes.files import is_url
from ckptfix.bytes.sources import Content
from ckptfix.core.checkpoint import path_name
from ckptfix.core.edits import Drop, Edit
from ckptfix.core.finding import FILE, Blocks, Finding, Fix, Level, Remedy, advise, counted
from ckptfix.core.objects import tensors_by_path
from ckptfix.core.spec import Storage
from ckptfix.core.wording import first_names
from ckptfix.maps.optimizer_states import parts_beside
from ckptfix.rules.fil203_damaged_file import donor_fill
from ckptfix.rules.rule import Context, Rule

_NAMED = 3  # damaged files that are listed
REMEDIES = (
    Remedy.of("leaves these tensors out", salvage=True),
    Remedy.of("takes them from another copy", salvage=True, fill=FILE),
)
# In a folder of ranks, it keeps the rest of an optimizer; in one file, it leaves out weights only.
_LEAVING = (Remedy.of("leaves out what is damaged", salvage=True),)


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
    files = _Files.of(
        context,
        [(storage, keys) for (storage, keys), is_sound in zip(keys_of, are_sound, strict=True) if not is_sound],
    )
    specs = context.checkpoint.specs
    asked = damaged if context.settings.salvage else ()
    fills = {key: fill for key in asked if key in specs and (fill := donor_fill(key, specs[key], context))}
    left = [key for key in damaged if key not in fills]
    if fills:
        edits: list[Edit] = [*map(Drop, fills), *fills.values()]
        yield rule.finding(
            Level.ERROR,
            f"{_message(len(fills), files)}; replaced from {context.settings.fill}",
            keys=fills,
            evidence=files.evidence,
            fix=Fix.requested(edits),
        )
    if not left:
        return
    drop = Fix.requested(map(Drop, left)) if context.settings.salvage else None
    # With a target, a later rule reports the missing keys; without one, this finding has to stay.
    yield rule.finding(
        Level.ERROR,
        _message(len(left), files),
        keys=left,
        evidence=files.evidence,
        fix=drop if context.target is not None else None,
        remedies=(files.fetching, *(REMEDIES if drop is None else REMEDIES[1:])),
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
        are_sound = dict(zip(storages, soundness(list(storages.values())), strict=True))
        if not all(are_sound.values()):
            from ckptfix.rules.opt101_stale_optimizer import dropping  # imported late: few files need it

            names = {id(spec): path_name(path) for path, spec in tensors_by_path(context.checkpoint.root)}
            bad = [spec for spec in specs if spec.storage is not None and not are_sound[id(spec.storage)]]
            files = _Files.of(context, [(spec.storage, [names.get(id(spec), place)]) for spec in bad if spec.storage])
            yield rule.finding(
                Level.ERROR,
                f"{counted(files.storages, 'storage')} of {place}, outside the weights, with wrong bytes{files.where}",
                evidence=files.evidence or {"tensors": files.tensors[""]},
                remedies=(
                    files.fetching,
                    *(_LEAVING if files.where else ()),
                    *(dropping(context) if is_optimizer else ()),
                ),
                is_accepted=is_optimizer and context.settings.drop_optimizer,
            )


class _Files(Struct, frozen=True):
    """The tensors that use damaged storages, by file, whose name is empty if the checkpoint is in one file; and the
    number of these storages. A tensor may use several, and several tensors one."""

    tensors: Mapping[str, list[str]]
    storages: int

    @classmethod
    def of(cls, context: Context, damaged: Iterable[tuple[Storage, Iterable[str]]]) -> _Files:
        """Return the files of damaged storages, each given with the tensors that use it."""
        tensors: dict[str, dict[str, None]] = {}
        places: set[tuple[str, int]] = set()
        for storage, names in damaged:
            for part in damaged_parts(storage):
                places.add(place := place_in(context.checkpoint.path, part))
                tensors.setdefault(place[0], {}).update(dict.fromkeys(names))
        return cls({name: list(users) for name, users in tensors.items()}, len(places))

    @property
    def _names(self) -> str:
        return first_names([*filter(None, self.tensors)], _NAMED)

    @property
    def where(self) -> str:
        return f" in {self._names}" if self._names else ""

    @property
    def fetching(self) -> Remedy:
        return Remedy.of(f"fetch {self._names or 'the file'} again")

    @property
    def evidence(self) -> dict[str, Any]:
        return {"files": dict(self.tensors)} if self._names else {}


def _message(count: int, files: _Files) -> str:
    return f"{counted(count, 'tensor')} with wrong bytes{files.where}: the storage fails the checksum of the archive"
