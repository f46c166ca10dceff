"""Ranges of files as torch's memory, without a copy.

A file is mapped privately: its bytes are those of the page cache and are read when they are looked at, and what is
written goes to a page of the process's own and never into the file. The mapping holds on to the file, so that its
removal, or a new file under its name, changes nothing. Nobody can guard against a file that is written in place while
a tensor of it lives: values change with it, and a look behind its new end kills the process (SIGBUS). So it is after
``torch.load(mmap=True)`` too, and so nothing is mapped for longer than a load takes unless it was asked for."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

from ckptfix.formats.sources import OpenFile, located
from ckptfix.regions import Region

if TYPE_CHECKING:
    import torch


class Mapping:
    """The files that a set of tensors lies in, each mapped as a whole when the first of them is asked for."""

    def __init__(self) -> None:
        self._maps: dict[OpenFile, mmap.mmap | None] = {}

    def storage(self, region: Region) -> torch.UntypedStorage | None:
        """The bytes of a region; None where they are no range of a file, or lie where their elements cannot be."""
        import torch

        place = located(region.storage.source)
        if place is None or not region.nbytes:
            return None
        start = place.offset + region.start
        whole = self._map(place.file)
        if whole is None or start % region.align or start + region.nbytes > len(whole):
            return None  # of a file that ends too early, the reader says so
        return torch.frombuffer(whole, dtype=torch.uint8, count=region.nbytes, offset=start).untyped_storage()

    def _map(self, file: OpenFile) -> mmap.mmap | None:
        if file not in self._maps:
            try:
                self._maps[file] = mmap.mmap(file.descriptor, 0, access=mmap.ACCESS_COPY)
            except (OSError, ValueError):  # a file system or a limit of the system is against it
                self._maps[file] = None
        return self._maps[file]
