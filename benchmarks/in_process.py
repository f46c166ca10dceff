"""Timings inside of one fresh process, without its start: ``python -m benchmarks.in_process WHAT …`` prints seconds."""

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
    """Seconds of one thread that looks at each of so many megabytes of memory once."""
    import numpy as np

    numbers = np.arange((int(megabytes) << 20) // 8, dtype=np.uint64)
    return [_median(numbers.max)]


def scan(path: str) -> list[float]:
    """Seconds of the statistics of every tensor, from a warm cache."""
    import ckptfix
    from ckptfix.values import Statistics

    def work() -> None:
        for figures in Statistics(ckptfix.open_checkpoint(path)).values():
            assert figures.nonfinite == 0

    return [_median(work)]


def load(path: str) -> list[float]:
    """Seconds of ``torch.load(mmap)`` with ``load_state_dict(assign)`` and of ``ckptfix.load``, in turn; and of both
    together with one look at every value, since a mapped file is only read when it is looked at.
    """
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
                where.register_parameter(name, nn.Parameter(torch.empty(spec.shape)))

    def by_torch(model: nn.Module) -> object:
        return model.load_state_dict(torch.load(path, weights_only=True, mmap=True), strict=True, assign=True)

    def by_ckptfix(model: nn.Module) -> object:
        return ckptfix.load(model, path)

    seconds: dict[str, list[float]] = {"torch": [], "ckptfix": [], "torch looked": [], "ckptfix looked": []}
    for _ in range(ROUNDS + 1):
        for name, way in (("torch", by_torch), ("ckptfix", by_ckptfix)):
            model: Any = Model()
            for parameter in model.parameters():
                parameter.data.zero_()  # a model that was built has its memory
            began = time.perf_counter()
            way(model)
            seconds[name].append(time.perf_counter() - began)
            for parameter in model.parameters():
                parameter.detach().view(torch.int32).amax()
            seconds[f"{name} looked"].append(time.perf_counter() - began)
            del model
    return [statistics.median(runs[1:]) for runs in seconds.values()]


def in_memory(path: str) -> list[float]:
    """Seconds of ``repair_state_dict``, and how many of the tensors that it gave back were copied."""
    import torch

    import ckptfix

    given = torch.load(path, weights_only=True)
    repaired, _ = ckptfix.repair_state_dict(given, values=False)
    kept = {tensor.data_ptr() for tensor in given.values()}
    copied = sum(tensor.data_ptr() not in kept for tensor in repaired.values())
    return [_median(lambda: ckptfix.repair_state_dict(given, values=False)), copied]


if __name__ == "__main__":
    ways: dict[str, Callable[[str], list[float]]] = {
        "read": read_bandwidth,
        "scan": scan,
        "load": load,
        "memory": in_memory,
    }
    print(*ways[sys.argv[1]](sys.argv[2]))
