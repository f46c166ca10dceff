"""Writes a checkpoint as a ``.pth`` file: the zip container, or the legacy one for readers older than torch 1.6."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any, BinaryIO

from ckptfix.bytes.checksums import proving
from ckptfix.bytes.copying import LARGE, Copier
from ckptfix.bytes.sources import located
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.progress import Task, tell_slower
from ckptfix.core.regions import Region, Regions
from ckptfix.core.spec import TensorSpec
from ckptfix.core.tree import tensors_in
from ckptfix.errors import Opt, WriteError
from ckptfix.reading.torch_files.torch_legacy import MAGIC, PROTOCOL
from ckptfix.writing.pickle_writer import PickleWriter, StorageRef
from ckptfix.writing.plain import plain_root
from ckptfix.writing.zip_writer import ZipWriter


class Placement:
    """Gives every region that the tensors of a tree cover a storage of its own in the new file, in the order of the
    tensors. Its key there is its place in ``regions``.
    """

    def __init__(self, root: Any, devices: tuple[str, ...]) -> None:
        specs = list(tensors_in(root))
        self._regions = Regions(specs)
        self._refs: dict[int, StorageRef] = {}
        self.regions: list[Region] = []
        self.itemsizes: list[int] = []
        for spec in specs:
            region, _ = self._regions.of(spec)
            if id(region) not in self._refs:
                device = region.storage.device if region.storage.device in devices else "cpu"
                self._refs[id(region)] = StorageRef(str(len(self.regions)), region.nbytes, device)
                self.regions.append(region)
                self.itemsizes.append(spec.itemsize)

    def __call__(self, spec: TensorSpec) -> tuple[StorageRef, int]:
        """Where the bytes of a strided tensor are in the new file, and its offset there in elements."""
        region, offset = self._regions.of(spec)
        return self._refs[id(region)], offset


def write_zip(checkpoint: Checkpoint, file: BinaryIO) -> Copier:
    """Write the zip container of torch ≥ 1.6. Gives the copier, which has the ranges that were read back."""
    root, _ = plain_root(checkpoint)
    placement = Placement(root, checkpoint.devices)
    changed = (region for region in placement.regions if not region.is_whole or region.storage.parts)
    pickle = PickleWriter(checkpoint.path, placement).dump(root)
    sums: dict[int, int] = {}
    storages = (region.storage for region in changed)
    with proving(checkpoint, storages), Copier(file, _task(checkpoint, placement)) as copier:
        archive = ZipWriter(copier)
        for name, data in (
            ("data.pkl", pickle),
            (".storage_alignment", b"64"),
            ("byteorder", sys.byteorder.encode()),
        ):
            archive.write(name, data)
        for key, region in enumerate(placement.regions):
            source, nbytes = region.storage.source, region.nbytes
            place = _place(region) if nbytes >= LARGE else None
            # A whole storage keeps the checksum of its source: damage that was there stays visible.
            crc = region.storage.crc32 if region.is_whole else None
            if crc is not None:
                archive.member(f"data/{key}", nbytes, crc, place)
                copier.copy(source, region.start, region.stop)
            else:
                tell_slower("given the checksum that its source lacks", nbytes)
                archive.member(f"data/{key}", nbytes, partial(sums.__getitem__, key), place)
                sums[key] = copier.copy(source, region.start, region.stop, is_summed=True)
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
            "leave out ",
            Opt("for_torch"),
        )
    placement = Placement(root, checkpoint.devices)
    system = {"protocol_version": PROTOCOL, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
    keys = [str(key) for key in range(len(placement.regions))]
    storages = (region.storage for region in placement.regions)
    with proving(checkpoint, storages), Copier(file, _task(checkpoint, placement)) as copier:
        for value in (MAGIC, PROTOCOL, system, root, keys):
            copier.write(_LegacyPickleWriter(checkpoint.path, placement).dump(value))
        for region, itemsize in zip(placement.regions, placement.itemsizes, strict=True):
            copier.write((region.nbytes // itemsize).to_bytes(8, "little"))
            copier.copy(region.storage.source, region.start, region.stop)
    return copier


class _LegacyPickleWriter(PickleWriter):
    """The same pickle with persistent ids of six parts; the last, a view of the storage, is None since torch 0.4."""

    _END_OF_ID = b"NtQ"
