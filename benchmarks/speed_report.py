"""Formats the tables of ``benchmarks/speed.py`` for the terminal and the README."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("torch", "safetensors", "numpy", "timm")
README = """# Benchmarks

`make bench` measures speed and memory next to `cp` and other tools, and writes the tables below. `judgement.py`
measures how often the value rules are right (its docstring says how to run it).

## Speed and memory

{date}, {machine}. Main files of {size}, {minutes:.0f} minutes in all.

### Method

Each way is timed as a whole process, fsync included. The ways of a table run in turn, round by round, with a warm page
cache. Times are medians of five rounds (three for ways above 20 s and for zoos; the loops over zoos run once), and
ratios are to the `cp` of the same file with fsync in the same rounds. Anonymous memory is `RssAnon` of the process and
its children, sampled 200 times a second: private memory, without mapped files and the page cache. The files are
generated (400 tensors with the names of a vision transformer, normal random numbers, and the prefix `module.` to
remove). *Keys* and conversions run with `--no-values`; a *full repair* verifies checksums, scans all values, and runs
all rules. Every repair reads each copied range back and compares it, and opens its result again to prove that each
tensor is where its bytes were copied to. The peers do what their scripts do, with the libraries themselves
(`benchmarks/peers.py`); they verify nothing unless the table says so.

{sections}
### What bounds them

- The value scan: two threads read the file into buffers, which takes longer than the scan itself. Mapping the file
  would be faster with large pages, but truncating a mapped file kills the process.
- `ckptfix.load` verifies checksums and scans the values before it changes the model; torch does neither. It reads the
  tensors into new memory, which takes most of its time, while torch maps the file: truncating a mapped file kills the
  process. If the process has that memory already, 996 MB take 0.44 s without scanning the values, and `torch.load`
  without mmap takes 0.32 s. With `assign`, torch does not read the tensors at all. For 400 tensors, Python takes 50 ms,
  and torch itself 33 ms.
- A zoo: `cp -r` only copies; `migrate` also computes the SHA-256 of source and output, scans the values, and reads its
  copy back. Each file of 20 MB takes 75 ms of a core: 14 for the digests, 24 in the kernel, and 34 in Python, ten of
  which are starting and ending the processes. It keeps two cores busy. `cp -r` takes a third of the time if the host of
  a virtual machine does not have to allocate the memory for the copies first.
- A million files on a hundred nodes, on paper: [scale.md](scale.md).

## Run it again

```sh
make bench                                   # {size}, into .venv-bench; this rewrites the page
make bench BENCH="--size 256MB"              # a quick run
make bench BENCH="--only scan"               # one table; --help lists their names
make bench BENCH="--folder /mnt/other"       # another disk
```
"""


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
    """Write the page with the tables. ``size`` is in bytes, ``seconds`` the duration of the whole run."""
    tables = "\n".join(map(str, sections))
    path.write_text(
        README.format(
            date=date.today().isoformat(),
            machine=machine(),
            size=size_name(size),
            minutes=seconds / 60,
            sections=tables,
        ),
        encoding="utf-8",
    )


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
