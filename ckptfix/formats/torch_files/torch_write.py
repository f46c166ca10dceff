"""Writes a checkpoint as a ``.pth`` file: the zip container, or the legacy one for readers older than torch 1.6."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any, BinaryIO

from ckptfix.checkpoint import Checkpoint, TensorSpec
from ckptfix.dtypes import DTYPES
from ckptfix.errors import WriteError
from ckptfix.formats.pickles.pickle_writer import PickleWriter, StorageRef
from ckptfix.formats.raw.checksums import proving
from ckptfix.formats.raw.copying import Copier
from ckptfix.formats.raw.sources import located
from ckptfix.formats.torch_files.torch_legacy import MAGIC, PROTOCOL
from ckptfix.formats.torch_files.zip_writer import Checksum, ZipWriter
from ckptfix.formats.weights.plain import plain_root
from ckptfix.formats.weights.tree import tensors_in
from ckptfix.progress import Task, tell_slower
from ckptfix.regions import Region, Regions


class Placement:
    """Gives every region that the tensors of a tree cover a storage of its own in the new file, in the order of the
    tensors.
    """

    def __init__(self, root: Any, devices: tuple[str, ...]) -> None:
        self._devices = devices
        specs = list(tensors_in(root))
        self._regions = Regions(specs)
        self.keys: dict[int, str] = {}
        self.regions: list[Region] = []
        self.itemsizes: dict[str, int] = {}
        for spec in specs:
            region, _ = self._regions.of(spec)
            if id(region) not in self.keys:
                key = self.keys[id(region)] = str(len(self.regions))
                self.regions.append(region)
                self.itemsizes[key] = spec.itemsize

    def __call__(self, spec: TensorSpec) -> StorageRef:
        """Where the bytes of a strided tensor are in the new file."""
        region, offset = self._regions.of(spec)
        device = region.storage.device if region.storage.device in self._devices else "cpu"
        return StorageRef(self.keys[id(region)], region.nbytes, device, offset)


def write_zip(checkpoint: Checkpoint, file: BinaryIO) -> Copier:
    """Write the zip container of torch ≥ 1.6. Gives the copier, which has the ranges that were read back."""
    root, _ = plain_root(checkpoint)
    placement = Placement(root, checkpoint.devices)
    changed = (region for region in placement.regions if not region.is_whole or region.storage.parts)
    pickle = PickleWriter(checkpoint.path, placement).dump(root)
    sums: dict[str, int] = {}
    with proving(checkpoint, (region.storage for region in changed)):
        archive = ZipWriter(file)
        for name, data in (
            ("data.pkl", pickle),
            (".storage_alignment", b"64"),
            ("byteorder", sys.byteorder.encode()),
        ):
            archive.write(name, data)
        with Copier(file, _task(checkpoint, placement)) as copier:
            for region in placement.regions:
                source, key = region.storage.source, placement.keys[id(region)]
                # A whole storage keeps the checksum of its source: damage that was there stays visible.
                crc: int | Checksum | None = region.storage.crc32 if region.is_whole else None
                if crc is None:
                    tell_slower("given the checksum that its source lacks", region.nbytes)
                    crc = partial(sums.__getitem__, key)
                with archive.member(f"data/{key}", region.nbytes, crc, _place(region)):
                    sums[key] = copier.copy(source, region.start, region.stop, is_summed=not isinstance(crc, int))
        archive.write("version", b"3\n")
        archive.close()
    return copier


def _place(region: Region) -> int | None:
    """Where a region lies in its file, where its bytes are a range of one."""
    place = located(region.storage.source)
    return None if place is None else place.offset + region.start


def _task(checkpoint: Checkpoint, placement: Placement) -> Task:
    return Task(f"writing {checkpoint.path}", sum(region.nbytes for region in placement.regions))


def write_legacy(checkpoint: Checkpoint, file: BinaryIO) -> Copier:
    """Write the container of torch ≤ 1.5, which cannot read the zip one. Gives the copier, as ``write_zip`` does."""
    root, _ = plain_root(checkpoint)
    modern = {spec.dtype for spec in tensors_in(root) if DTYPES[spec.dtype].storage is None}
    if modern:
        # Neither an old torch nor a new one reads an untyped storage from this container.
        raise WriteError(
            f"{checkpoint.path}: the container for torch before 1.6 cannot hold {min(modern)}; cast the tensors, or "
            "leave "
            "out --for-torch"
        )
    placement = Placement(root, checkpoint.devices)
    system = {"protocol_version": PROTOCOL, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
    keys = [placement.keys[id(region)] for region in placement.regions]
    copier = Copier(file, _task(checkpoint, placement))
    with proving(checkpoint, (region.storage for region in placement.regions)), copier:
        for value in (MAGIC, PROTOCOL, system, root, keys):
            file.write(_LegacyPickleWriter(checkpoint.path, placement).dump(value))
        for region, key in zip(placement.regions, keys, strict=True):
            file.write((region.nbytes // placement.itemsizes[key]).to_bytes(8, "little"))
            copier.copy(region.storage.source, region.start, region.stop)
    return copier


class _LegacyPickleWriter(PickleWriter):
    """The same pickle with persistent ids of six parts; the last, a view of the storage, is None since torch 0.4."""

    def _storage(self, ref: StorageRef, storage: str | None, itemsize: int) -> None:
        super()._storage(ref, storage, itemsize)
        self._out[-1] = b"NtQ"
