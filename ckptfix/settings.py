"""Every setting of a check or a repair, with its default, in one place."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ckptfix.errors import UsageError

_SIZE = re.compile(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([KMGT]I?)?B?\s*")
_UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 1 << 10,
    "MI": 1 << 20,
    "GI": 1 << 30,
    "TI": 1 << 40,
}


@dataclass(frozen=True)
class SmokeSettings:
    """How the forward test runs.

    ``inputs`` are the texts given with ``--input``, one for each argument of ``forward``: a shape (``2x3x224x224``), a
    shape with an integer range (``2x16:int:0:1000``), a name before either (``input_ids=2x16:int:0:1000``), or a file
    (``.npy``, ``.pt``, ``.safetensors``). Empty: an input is derived from the model. ``timeout`` is in seconds."""

    inputs: tuple[str, ...] = ()
    device: str = "auto"
    timeout: float = 300.0
    seed: int = 0


@dataclass(frozen=True)
class Settings:
    """What the user asked for.

    ``weights`` and ``member`` pick a state_dict of the container and a file of the archive; ``salvage`` takes what is
    whole of a damaged file, and ``disarm`` the weights alone of one that is built to run code. ``select`` and
    ``ignore`` hold rule codes or their beginnings (``KEY``, ``VAL201``). ``fill`` is ``target`` or the path of a donor
    file. ``for_torch`` is a version such as ``0.4.0``. ``smoke`` None means: where a factory is given. ``format`` is
    ``pth`` or ``safetensors``; None keeps that of the source. ``shard_size`` (``5GB``) writes shards of at most so many
    bytes with an index, and None one file."""

    weights: str | None = None
    member: str | None = None
    salvage: bool = False
    disarm: bool = False
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    unsafe_fixes: bool = False
    fill: str | None = None
    drop_mismatched: bool = False
    for_torch: str | None = None
    values: bool = True
    seed: int = 0
    format: str | None = None
    shard_size: str | None = None
    smoke: bool | None = None
    smoke_settings: SmokeSettings = field(default_factory=SmokeSettings)

    def selects(self, code: str) -> bool:
        """Whether the rule of this code is to run."""
        chosen = not self.select or any(code.startswith(start) for start in self.select)
        return chosen and not any(code.startswith(start) for start in self.ignore)

    @property
    def shard_bytes(self) -> int | None:
        """The most bytes of tensors in one file, None for one file of any size.

        Raises ``UsageError`` where ``shard_size`` is no size.
        """
        if self.shard_size is None:
            return None
        match = _SIZE.fullmatch(self.shard_size.upper())
        size = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
        if size <= 0:
            raise UsageError(f"--shard-size {self.shard_size!r} is no size; write it like 5GB or 500MB")
        return size

    def is_for_torch_before(self, release: str) -> bool:
        """Whether the result is meant for a torch older than ``release``.

        Raises ``UsageError`` where ``for_torch`` is no version.
        """
        if self.for_torch is None:
            return False
        from packaging.version import InvalidVersion, Version

        try:
            return Version(self.for_torch) < Version(release)
        except InvalidVersion as error:
            raise UsageError(f"--for-torch {self.for_torch!r} is no version; write it like 0.4.0") from error
