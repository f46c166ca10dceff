"""The settings of a check or a repair as the code reads them, and as the library's functions take them.

Each is an option with ``is_setting`` in the table of options; ``tests/core/test_options.py`` holds them together."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from msgspec import Struct

from ckptfix.core.rename_map import RenameMap
from ckptfix.errors import Opt, UsageError

_SIZE = r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([KMGT]I?)?B?\s*"
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {"KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40}


FORMATS = PTH, SAFETENSORS, UNIVERSAL = "pth", "safetensors", "universal"  # what `--format` takes

# What `--dtype` takes, by torch's names.
CAST_DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")

_SHORT_DTYPES = {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp8": "float8_e4m3fn"}

SOURCE = "source"  # what `--compare` calls the file that is repaired


def parse_size(option: str, text: str) -> int:
    """Return the bytes that ``5GB`` or ``500 MiB`` stands for. Raises ``UsageError`` if the text is not a size."""
    match = re.fullmatch(_SIZE, str(text).upper())  # a script may well give a number of bytes
    size = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if size <= 0:
        raise UsageError(Opt(option, text), ": not a size; write it like 5GB or 500MB")
    return size


class CheckSettings(TypedDict, total=False):
    """The settings of ``ckptfix.check``: the options of ``ckptfix check`` that have these names, with underscores."""

    weights: str | None
    member: str | None
    salvage: bool
    select: str | Sequence[str]
    ignore: str | Sequence[str]
    unsafe_fixes: bool
    rename_layers: bool
    source_model: Any
    rename_map: RenameMap | str | os.PathLike[str] | None
    rename: str | Sequence[str]
    fill: str | os.PathLike[str] | None
    adapter: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
    unmerge: bool
    drop_mismatched: bool
    adapt: str | Sequence[str] | Mapping[str, str]
    replace: str | Sequence[str]
    reset_running_stats: bool
    zero_non_finite: bool
    flush_subnormals: bool
    dtype: str | None
    for_torch: str | None
    values: bool
    optimizer_positions: bool
    seed: int
    timeout: float
    format: str | None


class RepairSettings(CheckSettings, total=False):
    """The settings of ``ckptfix.repair``, ``load`` and ``repair_state_dict``, likewise those of ``ckptfix repair``."""

    disarm: bool
    drop_optimizer: bool
    keep_optimizer: bool
    accept: str | Sequence[str]
    allow_untrained: bool
    force: bool
    untie: bool
    recalibrate: str | None
    shard_size: str | None
    smoke: bool | None
    input: str | Sequence[str]
    device: str
    train_mode: bool
    backward: bool
    compare: str | None


class Settings(Struct, frozen=True):
    """What the user asked for.

    Each field is the option of its name, whose help in ``core.options`` says what it does. None stands for what happens
    without the option: ``format`` is that of the source, and ``smoke`` runs the forward test if there is a factory.
    ``source_model`` may be an ``nn.Module``, and ``rename_map`` a ``RenameMap``."""

    weights: str | None = None
    member: str | None = None
    salvage: bool = False
    disarm: bool = False
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    accept: tuple[str, ...] = ()
    unsafe_fixes: bool = False
    rename_layers: bool = False
    source_model: Any = None
    rename_map: RenameMap | str | None = None
    rename: tuple[str, ...] = ()
    fill: str | None = None
    adapter: tuple[str, ...] = ()
    unmerge: bool = False
    drop_mismatched: bool = False
    adapt: tuple[str, ...] = ()
    allow_untrained: bool = False
    replace: tuple[str, ...] = ()
    reset_running_stats: bool = False
    recalibrate: str | None = None
    zero_non_finite: bool = False
    flush_subnormals: bool = False
    optimizer_positions: bool = False
    drop_optimizer: bool = False
    keep_optimizer: bool = False
    dtype: str | None = None
    for_torch: str | None = None
    values: bool = True
    seed: int = 0
    format: str | None = None
    shard_size: str | None = None
    untie: bool = False
    force: bool = False
    smoke: bool | None = None
    input: tuple[str, ...] = ()
    device: str = "auto"
    timeout: float = 300.0
    train_mode: bool = False
    backward: bool = False
    compare: str | None = None

    def selects(self, code: str) -> bool:
        """Return whether the rule of this code is to run."""
        chosen = not self.select or any(code.startswith(start) for start in self.select)
        return chosen and not any(code.startswith(start) for start in self.ignore)

    @property
    def fill_file(self) -> str | None:
        """The donor file, None if ``fill`` does not name one."""
        return None if self.fill in ("target", "twin") else self.fill

    @property
    def compare_file(self) -> str | None:
        """The other file whose outputs are compared, None without one."""
        return None if self.compare == SOURCE else self.compare

    @property
    def cast_dtype(self) -> str | None:
        """What floats are cast to, by torch's name. Raises ``UsageError`` if ``dtype`` is not a known float."""
        if self.dtype is None:
            return None
        name = _SHORT_DTYPES.get(self.dtype, self.dtype)
        if name not in CAST_DTYPES:
            raise UsageError(Opt("dtype", self.dtype), f": unknown dtype; give one of {', '.join(CAST_DTYPES)}")
        return name

    @property
    def shard_bytes(self) -> int | None:
        """The most bytes of tensors in one file, None for one file of any size.

        Raises ``UsageError`` if ``shard_size`` is not a size."""
        return None if self.shard_size is None else parse_size("shard_size", self.shard_size)

    def is_for_torch_before(self, release: str) -> bool:
        """Return whether the result is meant for a torch older than ``release``.

        Raises ``UsageError`` if ``for_torch`` is not a version."""
        if self.for_torch is None:
            return False
        from packaging.version import InvalidVersion, Version

        try:
            return Version(self.for_torch) < Version(release)
        except InvalidVersion as error:
            raise UsageError(Opt("for_torch", self.for_torch), ": not a version; write it like 0.4.0") from error
