#!/usr/bin/env python3
"""Measures the speed and memory of ckptfix next to ``cp`` and its peers: ``make bench``.

    python -m benchmarks.speed [--size 4GB] [--only NAME] [--folder DIR] [--readme benchmarks/README.md]

All files are created in a temporary folder and removed; they take at most five times the size at once.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path

from benchmarks.measure import CKPTFIX, ROUNDS, Runs, Way, ask, fetched_ratios, measure, time_answer
from benchmarks.peers import PEERS
from benchmarks.speed_files import (
    check_room,
    make_file,
    make_mesh_ranks,
    make_model_and_adapter,
    make_ranks,
    make_shards,
    many_keys,
    shapes,
)
from benchmarks.speed_report import Section, duration, machine, memory, rate, size_name, write_readme
from benchmarks.speed_zoo import zoo_of_large_files, zoo_of_small_files

DTYPES = (("float32", 4, 0.6), ("bfloat16", 2, 0.4), ("float16", 2, 0.4), ("float8_e4m3fn", 1, 0.1))
"""The dtypes to scan: name, bytes, and the required share of the read bandwidth."""

_MANY_RANKS: dict[str, Callable[[Path, Iterator[tuple[str, tuple[int, ...]]], int], Path]] = {
    "ZeRO 2": lambda folder, names, world: make_ranks(folder, names, 2, world),
    "ZeRO 3": lambda folder, names, world: make_ranks(folder, names, 3, world),
    "FSDP 2": lambda folder, names, world: make_mesh_ranks(folder, names, 0, world),
}

KEYS = (100, 1_000, 10_000, 50_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=_size, default="4GB", help="of the main files, such as 256MB  [default: 4GB]")
    parser.add_argument("--only", default="", help=f"sections whose name contains this: {', '.join(SECTIONS)}")
    parser.add_argument("--folder", type=Path, help="folder for the files; its file system is measured")
    parser.add_argument("--readme", type=Path, help="put the tables into this page too")
    given = parser.parse_args()
    size: int = given.size
    check_room(given.folder or Path(tempfile.gettempdir()), 4 * size)
    began, sections = time.time(), []
    for name, make in SECTIONS.items():
        if given.only not in name:
            continue
        folder = Path(tempfile.mkdtemp(prefix="ckptfix-bench-", dir=given.folder))
        try:
            for section in make(folder, size):
                sections.append(section)
                print(section, flush=True)
        finally:
            shutil.rmtree(folder)
    if given.readme is not None:
        write_readme(given.readme, sections, size, time.time() - began)
    print(machine())


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(MB|GB)", text)
    if found is None:
        raise argparse.ArgumentTypeError("give a size such as 256MB or 4GB")
    return int(float(found[1]) * (1e6 if found[2] == "MB" else 1e9))


def _cp(source: Path, out: Path) -> Way:
    goal = out / source.name
    return Way("cp, fsync", ["sh", "-c", 'cp "$0" "$1" && sync "$1"', str(source), str(goal)], source, out)


def _repair(name: str, source: Path, out: Path, suffix: str, *options: str) -> Way:
    command = [*CKPTFIX, "repair", str(source), "-o", str(out / f"model{suffix}"), *options]
    return Way(f"**ckptfix**: {name}", command, source, out)


def _peer(name: str, source: Path, out: Path, python: str = sys.executable) -> Way:
    label, _ = PEERS[name]
    return Way(label, [python, "-m", "benchmarks.peers", name, str(source), str(out)], source, out, is_peer=True)


def _compare(title: str, source: Path, ways: Sequence[Way], rounds: int = ROUNDS) -> Section:
    """Return the table of these ways, relative to the first one, which is ``cp``.

    ``cp`` and ckptfix are measured in both states of a virtual machine's memory (``measure``)."""
    runs, fetched = measure(ways, rounds), fetched_ratios(ways)
    cp = next(iter(runs.values())).median

    def row(name: str, done: Runs) -> list[str]:
        low, high = done.spread
        times = f"{duration(done.median)} ({duration(low)} to {duration(high)}, {len(done.seconds)} runs)"
        return [name, f"{done.median / cp:.2f}", fetched.get(name, ""), times, memory(done.peak)]

    rows = [row(name, done) for name, done in runs.items()]
    return Section(
        f"{title}, {size_name(source.stat().st_size)}",
        ["way", "times cp", "the same, memory fetched", "median (range)", "peak of anonymous memory"],
        rows,
    )


def torch_files(folder: Path, size: int) -> Iterator[Section]:
    """Measure key repair, conversion and full repair of a ``.pth`` file, and the peers."""
    source, out = make_file(folder / "source.pth", shapes(size)), folder / "out"
    names = "--no-values"
    ways = [
        _cp(source, out),
        _repair("keys, `.pth` → `.pth`", source, out, ".pth", names),
        _repair("`.pth` → safetensors", source, out, ".safetensors", names),
        _repair("full repair, `.pth` → `.pth`", source, out, ".pth"),
        _peer("mmap", source, out),
        _peer("torch", source, out),
        _peer("hf", source, out),
        _peer("timm", source, out),
    ]
    yield _compare("A `.pth` file", source, ways)


def safetensors_files(folder: Path, size: int) -> Iterator[Section]:
    """Measure key repair, conversion and full repair of a safetensors file."""
    source, out = make_file(folder / "source.safetensors", shapes(size)), folder / "out"
    ways = [
        _cp(source, out),
        _repair("keys, safetensors → safetensors", source, out, ".safetensors", "--no-values"),
        _repair("safetensors → `.pth`", source, out, ".pth", "--no-values"),
        _repair("full repair, safetensors → safetensors", source, out, ".safetensors"),
    ]
    yield _compare("A safetensors file", source, ways)


def adapters(folder: Path, size: int) -> Iterator[Section]:
    """Measure merging a LoRA adapter into its base; 4 GB take about two minutes."""
    source, out = make_model_and_adapter(folder, size), folder / "out"
    merge = ("--adapter", str(folder / "adapter"))
    ways = [
        _cp(source, out),
        _repair("merge an adapter", source, out, ".safetensors", *merge, "--no-values"),
        _repair("merge an adapter, full repair", source, out, ".safetensors", *merge),
    ]
    ways = [*(replace(way, rounds=3) for way in ways), replace(_peer("peft", source, out), rounds=1)]
    yield _compare("A LoRA adapter of rank 16 and its base", source, ways)


def ranks(folder: Path, size: int) -> Iterator[Section]:
    """Measure merging ranks of ZeRO and of a mesh into one file, a quarter of the size, and checking and merging many
    ranks with many tensors. DeepSpeed is the installed one, or that of the Python in ``CKPTFIX_DEEPSPEED``."""
    out, nbytes = folder / "out", size // 4
    source = make_file(folder / "whole.safetensors", shapes(nbytes))
    deepspeed = os.environ.get("CKPTFIX_DEEPSPEED") or (sys.executable if find_spec("deepspeed") else None)
    for stage in (2, 3):
        rank = make_ranks(folder / f"zero{stage}", shapes(nbytes), stage, 4)
        ways = [_repair("ranks → safetensors", rank.parent, out, ".safetensors", "--no-values")]
        ways.append(replace(_peer("ranks", rank, out), source=rank.parent))
        if deepspeed is not None:
            ways.append(replace(_peer("zero", rank, out, deepspeed), source=rank.parent))
        yield _compare(f"ZeRO {stage}, 4 ranks to one file", source, [_cp(source, out), *ways], 3)
        shutil.rmtree(rank.parent)
    for title, dim in (("FSDP 2", 0), ("Tensors split along their last dimension", -1)):
        rank = make_mesh_ranks(folder / "mesh", shapes(nbytes), dim, 4)
        ways = [_repair("ranks → safetensors", rank.parent, out, ".safetensors", "--no-values")]
        ways.append(replace(_peer("mesh", rank, out), source=rank.parent))
        yield _compare(f"{title}, 4 ranks to one file", source, [_cp(source, out), *ways], 3)
        shutil.rmtree(rank.parent)
    rows = []
    for (title, make), count in product(_MANY_RANKS.items(), (300, 10_000)):
        rank = make(folder / "many", many_keys(count, 64_000_000), 64)
        check = Way("", [*CKPTFIX, "check", "--no-values", str(rank.parent)])
        merge = _repair("", rank.parent, out, ".safetensors", "--no-values")
        done = [next(iter(measure([replace(way, source=None)], 3).values())) for way in (check, merge)]
        rows.append(
            [
                title,
                f"{count:,}",
                *(text for one in done for text in (duration(one.median), memory(one.peak))),
            ]
        )
        shutil.rmtree(rank.parent)
    heads = ["64 ranks, 64 MB", "tensors", "check --no-values", "memory", "to one file", "memory"]
    yield Section("Many ranks", heads, rows)


def legacy_files(folder: Path, size: int) -> Iterator[Section]:
    """Measure a file of torch ≤ 1.5, a quarter of the size."""
    source, out = make_file(folder / "source.legacy.pth", shapes(size // 4)), folder / "out"
    ways = [
        _cp(source, out),
        _repair("keys, legacy → `.pth`", source, out, ".pth", "--no-values"),
        _repair("legacy → safetensors", source, out, ".safetensors", "--no-values"),
        _repair("full repair, legacy → `.pth`", source, out, ".pth"),
    ]
    yield _compare("A legacy file", source, ways)


def sharded_files(folder: Path, size: int) -> Iterator[Section]:
    """Measure reading and writing shards, a quarter of the size."""
    out = folder / "out"
    index = make_shards(folder / "shards", size // 4, 4)
    source = make_file(folder / "source.safetensors", shapes(size // 4))
    limit = f"{size // 16 // 1_000_000}MB"
    ways = [
        _cp(source, out),
        _repair("4 shards → safetensors", index, out, ".safetensors", "--no-values"),
        _repair("safetensors → shards", source, out, ".safetensors", "--no-values", "--shard-size", limit),
    ]
    yield _compare("Shards of safetensors", source, ways)


def value_scan(folder: Path, size: int) -> Iterator[Section]:
    """Measure the statistics of all tensors relative to the memory bandwidth of one thread."""
    rows = []
    for dtype, itemsize, wanted in DTYPES:
        source = make_file(folder / f"{dtype}.safetensors", shapes(size // 4, itemsize), dtype)
        nbytes = source.stat().st_size
        megabytes = 512
        bandwidth = (megabytes << 20) / ask("benchmarks.in_process", "read", str(megabytes))[0]
        scanned = nbytes / ask("benchmarks.in_process", "scan", str(source))[0]
        source.unlink()
        rows.append(
            [dtype, size_name(nbytes), rate(scanned), rate(bandwidth), f"{scanned / bandwidth:.0%}", f"{wanted:.0%}"]
        )
    title = "The value scan alone, from a warm cache"
    yield Section(title, ["dtype", "file", "scan", "one thread reads", "share", "wanted"], rows)


def first_answers(folder: Path, size: int) -> Iterator[Section]:
    """Measure short commands as whole processes."""
    source = make_file(folder / "source.pth", shapes(size))
    other = make_file(folder / "source.safetensors", shapes(size // 4))
    large, small = (size_name(file.stat().st_size) for file in (source, other))
    commands: list[tuple[str, list[str], str]] = [
        ("`python -c pass`", [sys.executable, "-c", "pass"], ""),
        ("`ckptfix --version`", [*CKPTFIX, "--version"], "180 ms"),
        ("`ckptfix --help`", [*CKPTFIX, "--help"], "350 ms"),
        (f"`ckptfix inspect`, `.pth`, {large}", [*CKPTFIX, "inspect", str(source)], "250 ms"),
        (f"`ckptfix check --no-values`, `.pth`, {large}", [*CKPTFIX, "check", "--no-values", str(source)], "250 ms"),
        (f"`ckptfix inspect`, safetensors, {small}", [*CKPTFIX, "inspect", str(other)], "250 ms"),
        (
            f"`ckptfix check --no-values`, safetensors, {small}",
            [*CKPTFIX, "check", "--no-values", str(other)],
            "250 ms",
        ),
        ("`import torch`", [sys.executable, "-c", "import torch"], ""),
    ]
    rows = [[name, f"{time_answer(command) * 1e3:.0f} ms", wanted] for name, command, wanted in commands]
    yield Section("First answers", ["command", "median of 11", "wanted below"], rows)


def growth(folder: Path, size: int) -> Iterator[Section]:
    """Measure how the cost grows with the number of keys, and with the size."""
    out = folder / "out"
    rows = []
    for count in KEYS:
        source = make_file(folder / "keys.pth", many_keys(count, 64_000_000))
        check = time_answer([*CKPTFIX, "check", "--no-values", str(source)], 3)
        done = measure([_repair("", source, out, ".pth", "--no-values")], 3)["**ckptfix**: "]
        rows.append(
            [
                f"{count:,}",
                duration(check),
                duration(done.median),
                f"{done.median / count * 1e6:.0f} µs",
                memory(done.peak),
            ]
        )
    heads = ["keys", "check --no-values", "key repair", "repair by key", "peak of anonymous memory"]
    yield Section("Growth with the number of keys, 64 MB", heads, rows)
    rows = []
    for nbytes in (size // 400, size // 40, size // 4, size, 2 * size):
        source = make_file(folder / "size.pth", shapes(nbytes))
        copied, done = measure([_cp(source, out), _repair("", source, out, ".pth", "--no-values")], 3).values()
        rows.append(
            [
                size_name(source.stat().st_size),
                duration(copied.median),
                duration(done.median),
                f"{done.median / copied.median:.2f}",
                memory(done.peak),
            ]
        )
    heads = ["size", "cp, fsync", "key repair", "times cp", "peak of anonymous memory"]
    yield Section("Growth with the size, 400 keys", heads, rows)


def into_a_model(folder: Path, size: int) -> Iterator[Section]:
    """Measure ``ckptfix.load`` and ``repair_state_dict``, without starting Python and importing torch."""
    source = make_file(folder / "healthy.pth", shapes(size // 4), prefix="")
    wrapped = make_file(folder / "wrapped.pth", shapes(size // 4))
    measured = ask("benchmarks.in_process", "load", str(source))
    names, values, copied = ask("benchmarks.in_process", "memory", str(wrapped))
    rows = []
    for number, (way, peer) in enumerate(INTO_A_MODEL):
        columns = []
        for look in (0, 1):
            seconds = measured[2 * number + look]
            columns += [duration(seconds), f"{seconds / measured[2 * peer + look]:.2f}"]
        rows.append([way, *columns])
    in_memory = f"**ckptfix**.repair_state_dict, keys ({copied:.0f} tensors copied)"
    rows.append([f"{in_memory}, values=False", duration(names), "", "", ""])
    rows.append([in_memory, duration(values), "", "", ""])
    heads = ["way", "median of 5", "ratio", "and every value looked at once", "ratio"]
    yield Section(f"Into a model, {size_name(source.stat().st_size)}", heads, rows)


INTO_A_MODEL = (
    ("torch.load(mmap) + load_state_dict", 0),
    ("**ckptfix**.load", 0),
    ("**ckptfix**.load(mmap=True)", 0),
    ("**ckptfix**.load(mmap=True, values=False)", 0),
    ("torch.load(mmap) + load_state_dict(assign)", 4),
    ("**ckptfix**.load(assign=True)", 4),
    ("**ckptfix**.load(assign=True, values=False)", 4),
)
"""The ways of ``in_process.LOADS``, each with the index of the one it is compared with."""

SECTIONS: dict[str, Callable[[Path, int], Iterator[Section]]] = {
    "pth": torch_files,
    "safetensors": safetensors_files,
    "adapters": adapters,
    "ranks": ranks,
    "legacy": legacy_files,
    "shards": sharded_files,
    "scan": value_scan,
    "answers": first_answers,
    "growth": growth,
    "load": into_a_model,
    "zoo-large": zoo_of_large_files,
    "zoo-small": zoo_of_small_files,
}

if __name__ == "__main__":
    main()
