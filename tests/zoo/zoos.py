"""Creates a zoo of some thirty files with every outcome, migrates it, and compares the results."""

import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file

from ckptfix.zoo.engine import Engine
from ckptfix.zoo.job import Done, Job
from ckptfix.zoo.performing import perform
from tests.cli.programs import run_here

TIMES = ("seconds", "peak_memory", "finished")
"""The fields of a record that may differ between two runs."""


class Alone(Engine):
    """An engine without processes, which take a second to start and do not see patches of this process."""

    def run_jobs(
        self, jobs: Iterable[Job], on_done: Callable[[Done], None], on_wait: Callable[[int], None] = lambda count: None
    ) -> None:
        """Run the jobs one after the other."""
        for job in jobs:
            on_done(perform(job, self.scratch))


class Grouped(Alone):
    """The same with staged outputs, like ``LocalEngine``."""

    is_grouped = True


def weights(seed: int, prefix: str = "") -> OrderedDict[str, torch.Tensor]:
    """Return a healthy state_dict."""
    generator = torch.Generator().manual_seed(seed)
    return OrderedDict(
        (f"{prefix}layers.{layer}.{name}", torch.randn(shape, generator=generator) * 0.1)
        for layer in range(3)
        for name, shape in (("weight", (16, 16)), ("bias", (16,)))
    )


class Payload:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/ckptfix-was-here",)


def build(folder: Path, samples: Path) -> Path:
    """Create the zoo, and return its folder."""
    for name in ("fine", "old/deep", "broken", "shards"):
        (folder / name).mkdir(parents=True)
    for number in range(4):
        torch.save(weights(number), folder / f"fine/model{number}.pth")
        torch.save({"state_dict": weights(number, "module."), "epoch": number}, folder / f"old/deep/run{number}.pth")
    save_file(dict(weights(7)), folder / "fine/model.safetensors")
    save_file(dict(weights(8, "module.")), folder / "old/model.safetensors")
    for sample in samples.glob("*.*"):
        if sample.suffix in (".pth", ".safetensors"):
            shutil.copyfile(sample, folder / "old" / sample.name)
    whole = (folder / "fine/model0.pth").read_bytes()
    (folder / "old/packed.pth.gz").write_bytes(gzip.compress(whole, mtime=0))
    (folder / "old" / f"net-{hashlib.sha256(whole).hexdigest()[:8]}.pth").write_bytes(whole)
    (folder / "old/net-0badf00d.pth").write_bytes(whole)
    old = (folder / "old/deep/run0.pth").read_bytes()
    (folder / "old" / f"run-{hashlib.sha256(old).hexdigest()[:8]}.pth").write_bytes(old)
    nan = weights(9)
    nan["layers.0.weight"][3, 3] = float("nan")
    torch.save(nan, folder / "broken/nan.pth")
    (folder / "broken/empty.pth").write_bytes(b"")
    (folder / "broken/cut.pth").write_bytes(whole[: len(whole) // 2])
    (folder / "broken/page.pth").write_bytes(b"<html><title>404 Not Found</title></html>")
    torch.save({"state_dict": weights(12), "note": Payload()}, folder / "broken/evil.pth")
    first, second = weights(10), weights(11)
    save_file({f"a.{key}": value for key, value in first.items()}, folder / "shards/model-00001-of-00002.safetensors")
    save_file({f"b.{key}": value for key, value in second.items()}, folder / "shards/model-00002-of-00002.safetensors")
    home = {
        f"{side}.{key}": f"model-0000{number}-of-00002.safetensors"
        for number, side in ((1, "a"), (2, "b"))
        for key in first
    }
    (folder / "shards/model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": home}))
    (folder / "README.md").write_text("old models\n")
    (folder / "manifest.jsonl").write_text("{}\n")
    return folder


def tree(folder: Path) -> dict[str, Any]:
    """Return the content of a migrated zoo, without the times in its manifest."""
    found: dict[str, Any] = {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }
    found["folders"] = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_dir())
    lines = found["manifest.jsonl"].decode().splitlines()
    found["manifest.jsonl"] = [
        {name: value for name, value in json.loads(line).items() if name not in TIMES} for line in lines
    ]
    return found


def outcomes(folder: Path) -> dict[str, str]:
    """Return the outcome of each source."""
    lines = (folder / "manifest.jsonl").read_text().splitlines()
    return {line["source"]: line["outcome"] for line in map(json.loads, lines)}


def migrate(*words: object, script: str = "from ckptfix.cli import main; main()") -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own; ``script`` may run something else before it."""
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.argv[0] = 'ckptfix'\n{script}", "migrate", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=Path(str(words[0])).parent,
    )


def migrate_here(*words: object) -> subprocess.CompletedProcess[str]:
    """Run the command line in this process, without workers."""
    with patch("ckptfix.zoo.engine.LocalEngine", lambda scratch, **_: Grouped(scratch)):
        return run_here("migrate", *map(str, words), cwd=Path(str(words[0])).parent)
