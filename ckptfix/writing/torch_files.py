"""Writes a checkpoint as a ``.pth`` file: the zip container, or the legacy one for readers older than torch 1.6."""

import struct
import sys
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO, NamedTuple

from ckptfix.bytes.checksums import storages_of, verifying
from ckptfix.bytes.copying import LARGE, PAGE, Copier
from ckptfix.bytes.sources import ranges_of
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.objects import tensors_in
from ckptfix.core.progress import Task
from ckptfix.core.spec import Region, Regions, TensorSpec
from ckptfix.errors import Opt, WriteError
from ckptfix.reading.torch_files.torch_legacy import MAGIC, PROTOCOL
from ckptfix.writing.pickle_writer import PickleWriter, StorageRef
from ckptfix.writing.plain import plain_root


class Placement:
    """The storages of a new file, one for each region that the tensors of a tree cover, in the order of the tensors.

    The key of a storage is the index of its region in ``regions``. torch reads a storage with one dtype only, so views
    of the same bytes with different dtypes get separate ones."""

    def __init__(self, root: Any, devices: tuple[str, ...]) -> None:
        specs = list(tensors_in(root))
        of_class: dict[str | None, list[TensorSpec]] = {}
        for spec in specs:
            of_class.setdefault(DTYPES[spec.dtype].storage, []).append(spec)
        self._regions = {name: Regions(views) for name, views in of_class.items()}
        self._refs: dict[int, StorageRef] = {}
        self.regions: list[Region] = []
        self.itemsizes: list[int] = []
        for spec in specs:
            region, _ = self._place(spec)
            if id(region) not in self._refs:
                device = region.storage.device if region.storage.device in devices else "cpu"
                self._refs[id(region)] = StorageRef(str(len(self.regions)), region.nbytes, device)
                self.regions.append(region)
                self.itemsizes.append(spec.itemsize)

    def __call__(self, spec: TensorSpec) -> tuple[StorageRef, int]:
        """Return the storage of a strided tensor in the new file, and its offset there in elements."""
        region, offset = self._place(spec)
        return self._refs[id(region)], offset

    def _place(self, spec: TensorSpec) -> tuple[Region, int]:
        return self._regions[DTYPES[spec.dtype].storage].of(spec)


def write_zip(checkpoint: Checkpoint, file: BinaryIO) -> Copier:
    """Write the zip container of torch ≥ 1.6. Returns the copier with the ranges that were read back."""
    root, _ = plain_root(checkpoint)
    placement = Placement(root, checkpoint.devices)
    kept = _kept_checksums(checkpoint)
    changed = (
        region
        for region in placement.regions
        if not region.is_whole or region.storage.parts or (kept is not None and id(region.storage) not in kept)
    )
    pickle = PickleWriter(checkpoint.path, placement).dump(root)
    sums: dict[int, int] = {}
    storages = (region.storage for region in changed)
    task = _task(checkpoint, placement)
    with verifying(checkpoint, storages) as verifier, Copier(file, task, verifier) as copier:
        archive = ZipWriter(copier)
        for name, data in (("data.pkl", pickle), (".storage_alignment", b"64"), ("byteorder", sys.byteorder.encode())):
            archive.write(name, data)
        for key, region in enumerate(placement.regions):
            source, nbytes = region.storage.source, region.nbytes
            place = _place(region) if nbytes >= LARGE else None
            # A whole storage keeps the checksum of its source, so that damage stays visible.
            crc = region.storage.crc32 if region.is_whole else None
            if crc is not None:
                archive.member(f"data/{key}", nbytes, crc, place)
                copier.copy(source, region.start, region.stop)
            else:
                archive.member(f"data/{key}", nbytes, partial(sums.__getitem__, key), place)
                sums[key] = copier.copy(source, region.start, region.stop, is_summed=True)
        archive.write("version", b"3\n")
        archive.close()
    return copier


def _kept_checksums(checkpoint: Checkpoint) -> set[int] | None:
    """Return the ids of the storages that are written with the checksum of their source even if it is wrong; None for
    all storages. In a folder, these are the weights', which FIL201 reports: most others are computed from several files
    and get new checksums, so damage in any of them is refused."""
    return {id(storage) for storage, _ in storages_of(checkpoint)} if checkpoint.folder else None


def _place(region: Region) -> int | None:
    """Return the position of a region in its file; None if its first bytes are not in a file."""
    ranges = ranges_of(region.storage.source, region.start, region.stop)
    return ranges[0].offset if ranges else None


def _task(checkpoint: Checkpoint, placement: Placement) -> Task:
    return Task(f"writing {checkpoint.path}", sum(region.nbytes for region in placement.regions))


def write_legacy(checkpoint: Checkpoint, file: BinaryIO) -> Copier:
    """Write the container of torch ≤ 1.5, which cannot read the zip one. Returns the copier like ``write_zip``."""
    root, _ = plain_root(checkpoint)
    modern = {spec.dtype for spec in tensors_in(root) if DTYPES[spec.dtype].storage is None}
    if modern:
        # No version of torch reads an untyped storage from this container.
        raise WriteError(
            f"{checkpoint.path}: the container for torch before 1.6 cannot hold {min(modern)}; cast the tensors, or "
            "leave out ",
            Opt("for_torch"),
        )
    placement = Placement(root, checkpoint.devices)
    system = {"protocol_version": PROTOCOL, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
    keys = [str(key) for key in range(len(placement.regions))]
    storages = (region.storage for region in placement.regions)
    task = _task(checkpoint, placement)
    with verifying(checkpoint, storages) as verifier, Copier(file, task, verifier) as copier:
        for value in (MAGIC, PROTOCOL, system, root, keys):
            copier.write(_LegacyPickleWriter(checkpoint.path, placement).dump(value))
        for region, itemsize in zip(placement.regions, placement.itemsizes, strict=True):
            copier.write((region.nbytes // itemsize).to_bytes(8, "little"))
            copier.copy(region.storage.source, region.start, region.stop)
    return copier


class _LegacyPickleWriter(PickleWriter):
    """A writer of persistent ids with six parts; the last one, a view of the storage, is None since torch 0.4."""

    _END_OF_ID = b"NtQ"


ALIGNMENT = 64  # torch aligns the data of each member, so that tensors of a mapped file are aligned
_LIMIT = 0xFFFFFFFF
_CRC_AT = 14  # in a local header
_EPOCH = (0, 33)  # 1980-01-01 00:00, the earliest time of the format, so that equal content makes equal files

# The first fields of all headers. The first number is the version needed to read the member.
_LOCAL, _LOCAL_ZIP64 = (struct.pack("<4s5H", b"PK\x03\x04", needed, 0, 0, *_EPOCH) for needed in (20, 45))
_DIRECTORY, _DIRECTORY_ZIP64 = (struct.pack("<4s6H", b"PK\x01\x02", 45, needed, 0, 0, *_EPOCH) for needed in (20, 45))
_SIZES = struct.Struct("<3I2H")  # the checksum, both sizes, and those of the path and of the extra fields
_PLACE, _PADDING = struct.Struct("<3H2I"), struct.Struct("<2sH")


Checksum = Callable[[], int]  # returns the CRC-32 of a member; called when the archive is closed


class _WrittenMember(NamedTuple):
    name: bytes
    crc: int | Checksum
    size: int
    offset: int


class ZipWriter:
    """A writer of members to a seekable file; ``close`` writes the directory."""

    def __init__(self, file: BinaryIO | Copier) -> None:
        self._file = file
        self._members: list[_WrittenMember] = []
        self._end = file.tell()

    def write(self, name: str, data: bytes) -> None:
        self.member(name, len(data), zlib.crc32(data))
        self._file.write(data)

    def member(self, name: str, size: int, crc: int | Checksum, place: int | None = None) -> None:
        """Append a member of ``size`` bytes, which the caller writes to the file next.

        ``place`` is the position of the bytes in another file: a large member keeps its offset within a page if that
        is aligned."""
        offset = self._end_of_members()
        path = f"archive/{name}".encode()
        is_aligned = place is not None and place % ALIGNMENT == 0 and size >= LARGE
        header = _local_header(path, crc if isinstance(crc, int) else 0, size, offset, place if is_aligned else None)
        self._file.write(header)
        self._members.append(_WrittenMember(path, crc, size, offset))
        self._end = offset + len(header) + size

    def _end_of_members(self) -> int:
        """Return the end of the file. Raises ``ValueError`` if the last member does not end there."""
        end = self._file.tell()
        if end != self._end:
            last = self._members[-1]
            declared = f"member {last.name.decode()} was declared with {last.size} bytes"
            raise ValueError(f"{declared} and got {end - self._end + last.size}")
        return end

    def close(self) -> None:
        """Fill in the checksums that were not known before, and write the directory at the end."""
        start, records = self._end_of_members(), []
        for path, crc, size, offset in self._members:
            if isinstance(crc, int):
                known = crc
            else:
                known = crc()
                self._file.seek(offset + _CRC_AT)
                self._file.write(known.to_bytes(4, "little"))
            records.append(_directory_record(path, known, size, offset))
        if self._file.tell() != start:
            self._file.seek(start)
        directory, count = b"".join(records), len(records)
        self._file.write(directory)
        size = len(directory)
        if start >= _LIMIT or count >= 0xFFFF or size >= _LIMIT:
            self._file.write(struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, start))
            self._file.write(struct.pack("<4sIQI", b"PK\x06\x07", 0, start + size, 1))
        count, size, start = min(count, 0xFFFF), min(size, _LIMIT), min(start, _LIMIT)
        self._file.write(struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, count, count, size, start, 0))


def _local_header(path: bytes, crc: int, size: int, offset: int, place: int | None) -> bytes:
    zip64 = struct.pack("<2H2Q", 1, 16, size, size) if size >= _LIMIT else b""
    size, start = min(size, _LIMIT), offset + 30 + len(path) + len(zip64)
    # The padding is an extra field with the id FB, as in torch's writer: 4 bytes and as many more as are needed.
    padding = (-start - 4) % ALIGNMENT if place is None else (place - start - 4) % PAGE
    sizes = _SIZES.pack(crc, size, size, len(path), len(zip64) + 4 + padding)
    begin = _LOCAL_ZIP64 if zip64 else _LOCAL
    return b"".join((begin, sizes, path, zip64, _PADDING.pack(b"FB", padding), b"Z" * padding))


def _directory_record(path: bytes, crc: int, size: int, offset: int) -> bytes:
    if size < _LIMIT and offset < _LIMIT:
        return _DIRECTORY + _SIZES.pack(crc, size, size, len(path), 0) + _PLACE.pack(0, 0, 0, 0, offset) + path
    large = [value for value in (size, size, offset) if value >= _LIMIT]
    extra = struct.pack(f"<2H{len(large)}Q", 1, 8 * len(large), *large)
    size, offset = min(size, _LIMIT), min(offset, _LIMIT)
    sizes = _SIZES.pack(crc, size, size, len(path), len(extra))
    return b"".join((_DIRECTORY_ZIP64, sizes, _PLACE.pack(0, 0, 0, 0, offset), path, extra))
