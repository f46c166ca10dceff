"""Formats the tables of ``benchmarks/speed.py`` for the terminal and the README."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from textwrap import fill

PACKAGES = ("torch", "safetensors", "numpy", "timm")
# The parts of the page that are replaced: the paragraph with the machine, and all tables.
_FACTS = re.compile(r"(?<=## Speed and memory\n\n).*?\n(?=\n)", re.DOTALL)
_TABLES = re.compile(r"(?<=\n)### [^\n]*\n\n\|.*(?=### What bounds them)", re.DOTALL)


@dataclass(frozen=True)
class Section:
    """A table with its title."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __str__(self) -> str:
        lines = [self.heads, ["---"] * len(self.heads), *self.rows]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"### {self.title}\n\n{table}\n"


def write_readme(path: Path, sections: Sequence[Section], size: int, seconds: float) -> None:
    """Replace the tables of a page. ``size`` of the main files is in bytes, ``seconds`` that of the whole run."""
    facts = (
        f"{date.today().isoformat()}, {machine()}. Main files of {size_name(size)}, {seconds / 60:.0f} minutes in all."
    )
    page = _FACTS.sub(lambda _: f"{fill(facts, 120)}\n", path.read_text(encoding="utf-8"), count=1)
    path.write_text(_TABLES.sub(lambda _: "".join(f"{section}\n" for section in sections), page), encoding="utf-8")


def machine() -> str:
    """Return processor, memory, kernel and versions in one line."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    cores = len(os.sched_getaffinity(0))
    return (
        f"{cores} cores of {cpu}, {ram / (1 << 30):.0f} GiB of memory, {platform.system()} "
        f"{platform.release().partition('-')[0]}, Python {platform.python_version()}, {packages}"
    )


def duration(seconds: float) -> str:
    """Return a duration in seconds, or in milliseconds below 0.1 s."""
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"


def memory(nbytes: int) -> str:
    """Return a size of memory in MiB or GiB."""
    return f"{nbytes / (1 << 30):.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes / (1 << 20):.0f} MiB"


def size_name(nbytes: int) -> str:
    """Return a size of files in kB, MB or GB."""
    if nbytes < 1e6:
        return f"{nbytes / 1e3:.0f} kB"
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"


def rate(nbytes: float) -> str:
    """Return a rate in GB/s."""
    return f"{nbytes / 1e9:.1f} GB/s"
