"""Timings inside a new process, without its start: ``python -m benchmarks.in_process WHAT …`` prints seconds."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

ROUNDS = 5


def _median(work: Callable[[], object]) -> float:
    work()
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def read_bandwidth(megabytes: str) -> list[float]:
    """Return the seconds that one thread takes to read so many megabytes of memory."""
    import numpy as np

    numbers = np.arange((int(megabytes) << 20) // 8, dtype=np.uint64)
    return [_median(numbers.max)]


def scan(path: str) -> list[float]:
    """Return the seconds of computing the statistics of all tensors, with a warm cache."""
    import ckptfix
    from ckptfix.values.statistics import Statistics

    checkpoint = ckptfix.open_checkpoint(path)  # reads no tensor and keeps no statistics

    def work() -> None:
        for figures in Statistics(checkpoint).values():
            assert figures.nonfinite == 0

    return [_median(work)]


def load(path: str) -> list[float]:
    """Return the seconds of each of ``LOADS`` in turn, first without and then with reading every value afterwards,
    since a mapped file is only read on access."""
    import torch
    from torch import nn

    import ckptfix

    specs = ckptfix.open_checkpoint(path).specs

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for key, spec in specs.items():
                where: nn.Module = self
                *folders, name = key.split(".")
                for folder in folders:
                    if not hasattr(where, folder):
                        where.add_module(folder, nn.Module())
                    where = where.get_submodule(folder)
                # Zeros are written, as a built model has its memory allocated.
                where.register_parameter(name, nn.Parameter(torch.zeros(spec.shape)))

    def by_torch(model: nn.Module, assign: bool, values: bool, mmap: bool) -> object:
        return model.load_state_dict(torch.load(path, weights_only=True, mmap=True), strict=True, assign=assign)

    def by_ckptfix(model: nn.Module, assign: bool, values: bool, mmap: bool) -> object:
        return ckptfix.load(model, path, assign=assign, values=values, mmap=mmap)

    seconds: dict[tuple[str, bool], list[float]] = {(name, look): [] for name in LOADS for look in (False, True)}
    for _ in range(ROUNDS + 1):
        for name, look in seconds:
            peer, *options = name.split()
            way = by_torch if peer == "torch" else by_ckptfix
            model: Any = Model()
            began = time.perf_counter()
            way(model, "assign" in options, values="names" not in options, mmap="mmap" in options)
            for parameter in model.parameters() if look else ():
                parameter.detach().view(torch.int32).amax()
            seconds[name, look].append(time.perf_counter() - began)
            del model
    return [statistics.median(runs[1:]) for runs in seconds.values()]


LOADS = (
    *("torch", "ckptfix", "ckptfix mmap", "ckptfix mmap names"),
    *("torch assign", "ckptfix assign", "ckptfix assign names"),
)
"""The ways to load: by whom, whether mapped or assigned, and whether the value rules are left out (``names``)."""


def in_memory(path: str) -> list[float]:
    """Return the seconds of ``repair_state_dict`` without and with the value rules, and how many tensors it copied."""
    import torch

    import ckptfix

    given = torch.load(path, weights_only=True)
    repaired, _ = ckptfix.repair_state_dict(given)
    kept = {tensor.data_ptr() for tensor in given.values()}
    copied = sum(tensor.data_ptr() not in kept for tensor in repaired.values())
    names = _median(lambda: ckptfix.repair_state_dict(given, values=False))
    return [names, _median(lambda: ckptfix.repair_state_dict(given)), copied]


if __name__ == "__main__":
    ways: dict[str, Callable[[str], list[float]]] = {
        "read": read_bandwidth,
        "scan": scan,
        "load": load,
        "memory": in_memory,
    }
    print(*ways[sys.argv[1]](sys.argv[2]))
