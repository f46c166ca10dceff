"""The sections of ``benchmarks.speed`` about whole zoos, next to ``cp -r`` and typical loops."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.measure import CKPTFIX, Runs, Way, fetched_ratios, measure, time_answer
from benchmarks.peers import LOOPS
from benchmarks.speed_files import make_zoo
from benchmarks.speed_report import Section, duration, memory, size_name

MANY = 10_000
SMALL = 20_000
"""Bytes of each small file."""


def zoo_of_large_files(folder: Path, size: int) -> Iterator[Section]:
    """Measure a zoo of 200 files, together as large as the main file."""
    zoo, out = make_zoo(folder / "zoo", 200, size // 200), folder / "out"
    runs = _measured(zoo, out, [_copy_with_digests(zoo, out)])
    fetched = fetched_ratios([_copy(zoo, out), _migrate("values scanned", zoo, out)])
    copy = next(iter(runs.values())).median
    rows = [
        [name, f"{done.median / copy:.2f}", fetched.get(name, ""), _times(done), memory(done.peak)]
        for name, done in runs.items()
    ]
    yield Section(
        f"A zoo of 200 files of {size_name(size // 200)}",
        ["way", "times cp -r", "the same, memory fetched", "median (range)", "peak of anonymous memory"],
        rows,
    )


def zoo_of_small_files(folder: Path, size: int) -> Iterator[Section]:
    """Measure a zoo of 10,000 small files, and the same command again on the finished zoo. Ignores ``size``."""
    zoo, out = make_zoo(folder / "zoo", MANY, SMALL), folder / "out"
    runs = _measured(zoo, out)
    copy = next(iter(runs.values())).median
    rows = []
    for name, done in runs.items():
        each = f"{(done.median - copy) / MANY * 1e3:.1f} ms"
        rows.append([name, _times(done), each if done.median > copy else "", memory(done.peak)])
    again = _migrate("once more, finished", zoo, out)
    out.mkdir()
    time_answer(again.command, 1)
    rows.append([again.name, duration(time_answer(again.command, 5)), "", ""])
    shutil.rmtree(out)
    heads = ["way", "median (range)", "each file above the copy", "peak of anonymous memory"]
    yield Section(f"A zoo of {MANY:,} files of {size_name(SMALL)}", heads, rows)


def _measured(zoo: Path, out: Path, beside: Sequence[Way] = ()) -> dict[str, Runs]:
    """Return the runs of all ways. The loops of the peers take minutes, so they run once."""
    ways = [_copy(zoo, out), *beside, _migrate("values scanned", zoo, out)]
    return measure(ways, 3) | measure([*_loops(zoo, out)], 1)


def _times(done: Runs) -> str:
    low, high = done.spread
    return (
        f"{duration(done.median)} ({duration(low)} to {duration(high)}, {len(done.seconds)} runs)"
        if low < high
        else f"{duration(low)} (one run)"
    )


def _copy(zoo: Path, out: Path) -> Way:
    return Way("cp -r, sync", ["sh", "-c", 'cp -r "$0" "$1/new" && sync -f "$1/new"', str(zoo), str(out)], zoo, out)


def _copy_with_digests(zoo: Path, out: Path) -> Way:
    """Return a copy that also computes two digests per file, as ``migrate`` does, on two cores."""
    digests = 'find "$0" "$1/new" -type f -print0 | xargs -0 -P 2 -n 20 sha256sum > "$1/new/SHA256SUMS"'
    command = f'cp -r "$0" "$1/new" && {digests} && sync -f "$1/new"'
    return Way("cp -r, sha256sum of both, sync", ["sh", "-c", command, str(zoo), str(out)], zoo, out)


def _migrate(name: str, zoo: Path, out: Path) -> Way:
    return Way(f"**ckptfix migrate**: {name}", [*CKPTFIX, "migrate", str(zoo), str(out / "new"), "-q"], zoo, out)


def _loops(zoo: Path, out: Path) -> Iterator[Way]:
    for name, (label, _) in LOOPS.items():
        yield Way(label, [sys.executable, "-m", "benchmarks.peers", name, str(zoo), str(out)], zoo, out)
