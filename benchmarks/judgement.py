#!/usr/bin/env python3
"""How often the value rules are right: healthy models have to stay quiet, planted defects have to be found.

    python -m benchmarks.judgement healthy [--only NAME] [--json FILE]     # false alarms
    python -m benchmarks.judgement held-out [--only NAME] [--json FILE]    # of models that no threshold was chosen on
    python -m benchmarks.judgement defects [--only NAME] [--json FILE]     # precision and recall
    python -m benchmarks.judgement page                                    # all three, and benchmarks/judgement.md

Every model is built from a table with a fixed seed; nothing is downloaded. A healthy model is checked fresh, with and
without its own class; after a few steps of training, in a file with its optimizer and a moving average; and cast to
float16 and bfloat16.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import Iterator, Mapping
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ckptfix
from benchmarks.judgement_page import NOT_BUILT, page, scores

STEPS = 3
"""The steps of the brief training."""

LARGEST_TRAINED = 8_000_000
"""Parameters above which a model is not trained, so that a laptop can repeat the table."""

PARTS = ("healthy", "held-out", "defects")

PAGE = Path(__file__).with_name("judgement.md")

PACKAGES = ("torch", "timm", "transformers", "peft", "diffusers", "numpy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*PARTS, "page"])
    parser.add_argument("--only", default="", help="models, or defects and strengths, whose name contains this")
    parser.add_argument("--jobs", type=int, default=2, help="processes, with one thread each")
    parser.add_argument("--json", type=Path, help="write the rows there")
    arguments = parser.parse_args()
    began = time.perf_counter()
    parts = PARTS if arguments.what == "page" else (arguments.what,)
    tasks = [(part, name, arguments.only) for part in parts for name in _names(part, arguments.only)]
    rows: dict[str, list[dict[str, Any]]] = {part: [] for part in parts}
    with multiprocessing.get_context("spawn").Pool(arguments.jobs, _start) as pool:
        for number, (part, found) in enumerate(pool.imap(_measure, tasks), 1):
            rows[part] += found
            print(f"\r{number} of {len(tasks)}", end="", flush=True)
    print()
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    _summarise(rows)
    if arguments.what == "page":
        PAGE.write_text(page(*(rows[part] for part in PARTS), facts=_facts(time.perf_counter() - began)))


def _names(part: str, only: str) -> list[str]:
    """Return the tasks of a part: its models, or the seeds of its defects."""
    if part == "defects":
        from benchmarks.defects import SEEDS

        return [str(seed) for seed in range(SEEDS)]
    return [name for name in _models(part) if only in name]


def _models(part: str) -> dict[str, Any]:
    from benchmarks.healthy_models import healthy_models
    from benchmarks.held_out_models import held_out_models

    models = healthy_models() if part == "healthy" else held_out_models()
    return {f"{model.family}/{model.name}": model for model in models}


def _start() -> None:
    torch.set_num_threads(1)


def _measure(task: tuple[str, str, str]) -> tuple[str, list[dict[str, Any]]]:
    part, name, only = task
    return part, list(_defects(int(name), only) if part == "defects" else _healthy(name, _models(part)[name]))


def _facts(seconds: float) -> dict[str, str]:
    return {
        "date": date.today().isoformat(),
        "versions": ", ".join(f"{package} {version(package)}" for package in PACKAGES)
        + f", Python {platform.python_version()}",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, no GPU used",
        "time": f"{seconds / 60:.0f} minutes",
    }


def _healthy(name: str, healthy: Any) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    try:
        model = healthy.build()
    except Exception as error:  # noqa: BLE001 - a release may have dropped the model; the table lists it
        yield {"model": name, "variant": NOT_BUILT, "why": _short(error)}
        return
    for variant, report in _variants(model, healthy.inputs):
        found = [finding for finding in report.findings if finding.code.startswith("VAL")]
        loud = [f"{finding.code} {finding.level.name.lower()}: {finding.message}" for finding in found if finding.level]
        notes = sorted({finding.code for finding in found if not finding.level})
        keys = [key for finding in found if finding.level for key in finding.keys[:4]]
        yield {"model": name, "variant": variant, "loud": loud, "notes": notes, "keys": keys}


def _variants(model: nn.Module, inputs: Any) -> Iterator[tuple[str, ckptfix.Report]]:
    state = model.state_dict()
    yield "fresh", ckptfix.check(state)
    if not hasattr(model, "saved"):
        yield "fresh, with its model", ckptfix.check(state, model)
    floats = any(value.is_floating_point() for value in state.values() if isinstance(value, torch.Tensor))
    for dtype in (torch.float16, torch.bfloat16) if floats else ():
        yield str(dtype).removeprefix("torch."), ckptfix.check(_cast(state, dtype))
    if inputs is None or sum(parameter.numel() for parameter in model.parameters()) > LARGEST_TRAINED:
        return
    try:
        saved = _trained(model, inputs(model))
    except Exception:  # noqa: BLE001 - inputs cannot be derived for every model; the page counts the trained ones
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.save(saved, Path(folder) / "trained.pth")
        yield "trained", ckptfix.check(Path(folder) / "trained.pth", select=("VAL",))
    yield "trained, float16", ckptfix.check(_cast(saved["model"], torch.float16))


def _trained(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """Train a few steps, and return the container of a trainer: weights, optimizer and moving average."""
    average = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    model.train()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = sum(tensor.float().square().mean() for tensor in _tensors(model(**inputs)))
        loss.backward()  # type: ignore[union-attr] # it is a tensor
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for key, value in model.state_dict().items():
            if value.is_floating_point():
                average[key].mul_(0.9).add_(value, alpha=0.1)
    return {"model": model.state_dict(), "model_ema": average, "optimizer": optimizer.state_dict(), "step": STEPS}


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        if output.is_floating_point() and output.requires_grad:
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors(value)


def _cast(state: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {
        key: value.to(dtype) if isinstance(value, torch.Tensor) and value.dtype == torch.float32 else value
        for key, value in state.items()
    }


def _defects(seed: int, only: str) -> Iterator[dict[str, Any]]:
    from benchmarks.defects import planted_defects

    for defect in planted_defects(seed):
        if only not in f"{defect.name}/{defect.strength}":
            continue
        report = ckptfix.check(*defect.checked, **defect.settings)
        named = {key for f in report.findings if f.code in defect.codes for key in f.keys}
        warned = {key for f in report.findings if f.code[:3] == "VAL" and f.level for key in f.keys}
        fitting = {key for f in report.findings if f.code in defect.codes and f.level for key in f.keys}
        yield {
            "defect": defect.name,
            "strength": defect.strength,
            "planted": len(defect.keys),
            "warned": len(fitting & defect.keys),
            "noted": len((named - fitting) & defect.keys),
            "false": len(warned - defect.keys - defect.companions),
            "codes": sorted({f.code for f in report.findings if f.code in defect.codes}),
        }


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]:.100}"


def _summarise(rows: Mapping[str, list[dict[str, Any]]]) -> None:
    for part, some in rows.items():
        if part == "defects":
            for (defect, strength), score in scores(some).items():
                print(f"{defect:50}{strength:34}{'  '.join(score.cells)}")
            continue
        built = [row for row in some if row["variant"] != NOT_BUILT]
        loud = [row for row in built if row["loud"]]
        print(f"{part}: {len({row['model'] for row in built})} models, {len(built)} checks, {len(loud)} with a warning")
        for row in some:
            if row["variant"] == NOT_BUILT:
                print(f"    {row['model']}: {NOT_BUILT}: {row['why']}")
            elif row["loud"]:
                print(f"    {row['model']}, {row['variant']}: {'; '.join(row['loud'])}: {', '.join(row['keys'])}")


if __name__ == "__main__":
    main()
