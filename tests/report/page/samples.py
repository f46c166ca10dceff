"""Records of a small migration with all outcomes, and names that look like markup."""

import math
import random
from collections.abc import Mapping
from typing import Any

HOSTILE = (
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 2'>.pth",
    "\"><svg onload=window.hacked=3>'.pth",
    "<!--<script>-->.pth",
    "line\u2028and\u2029paragraph.pth",
    "lone\ud800surrogate\udcff.pth",
    "nul\x00esc\x1b[31mdel\x7f.pth",
    "turned\u202egnp.exe",
    "&lt;b&gt; &amp; %3Cscript%3E.pth",
    "{{ 7 * 7 }} ${7 * 7} {% raw %}.pth",
    "javascript:window.hacked=4",
    "__proto__",
    "über/日本語/🙂.pth",
)

VERSIONS = {"ckptfix": "0.1.0", "Python": "3.11.7", "torch": "2.13.0", "platform": "Linux x86_64"}

PREFIX = {
    "code": "KEY102",
    "name": "wrapper-prefix",
    "level": "error",
    "message": "4 keys with the wrapper prefix `module.`",
    "keys": [f"module.layers.{number}.weight" for number in range(4)],
    "evidence": {"prefix": "module", "share": 1.0},
    "fixable": True,
    "fixed": True,
    "remedies": [],
}
NAN = {
    "code": "VAL101",
    "name": "non-finite",
    "level": "error",
    "message": "1 tensor is not finite: 3 NaN among 16 values",
    "keys": ["layers.2.weight"],
    "evidence": {"nan": 3},
    "fixed": False,
    "remedies": [
        {"options": {"replace": ["VAL101"], "fill": "twin"}, "text": "takes these keys from the file's EMA set"}
    ],
}
RENAMES = [{"edit": "rename", "key": key, "to": key.removeprefix("module.")} for key in PREFIX["keys"]]  # type: ignore[attr-defined]  # a list of texts


def record(source: str, outcome: str = "already fine", **rest: Any) -> dict[str, Any]:
    """Return a line of a manifest."""
    facts = {
        "version": 1,
        "source": source,
        "size": 46_830_571,
        "stamp": "1",
        "settings": "x",
        "outcome": outcome,
        "sha256": "19c8e357" * 8,
        "format": "torch-zip",
        "tensors": 4,
        "numel": 64,
        "seconds": 1.25,
        "peak_memory": 31_000_000,
        "attempts": 1,
        "finished": "2026-11-21T19:12:03Z",
        "versions": VERSIONS,
        "findings": [],
        "edits": [],
    }
    return {**facts, **rest}


def repaired(source: str, **rest: Any) -> dict[str, Any]:
    """Return the record of a file with a removed prefix."""
    parameters = {"parameters": 64, "parameters_from_file": 64, "buffers": 0, "buffers_from_file": 0, "filled": {}}
    facts = {
        "findings": [PREFIX],
        "edits": RENAMES,
        "output": source.replace(".pth", ".safetensors"),
        "coverage": {**parameters, "share": 1.0},
        "smoke": {
            "passed": True,
            "device": "cpu",
            "note": "",
            "inputs": ["float32[2, 4]"],
            "outputs": ["float32[2, 4]"],
        }
        | {"seconds": 0.01, "checks": ["training mode: finite"], "compared": None},
    }
    return record(source, "repaired", **{**facts, **rest})


def undecided(source: str) -> dict[str, Any]:
    """Return the record of a file with NaN."""
    command = f"ckptfix repair {source} --replace VAL101 --fill twin"
    return record(source, "needs a decision", findings=[PREFIX, NAN], command=command)


def unreadable(source: str) -> dict[str, Any]:
    """Return the record of a truncated file."""
    nothing = {"format": None, "tensors": None, "numel": None}
    return record(source, "unreadable", error=f"{source}: the file ends after 1.2 MB of 97.8 MB", **nothing)


def weights(
    source: str, count: int = 4, flagged: Mapping[int, list[str]] | None = None, seed: int = 1, nonfinite: int = 3
) -> dict[str, Any]:
    """Return a line of weights.jsonl."""
    flagged = flagged or {}
    chance = random.Random(seed)
    layers = []
    for number in range(count):
        rms = 10 ** (-2 + 0.8 * math.sin(number / 9) + chance.gauss(0, 0.15))
        layers.append(
            {
                "key": f"layers.{number}.weight",
                "dtype": "float32",
                "shape": [4, 4],
                "numel": 16,
                "rms": rms,
                "minimum": -3.1 * rms,
                "maximum": 4.2 * rms,
                "zeros": 2 if number == 1 else 0,
                "nonfinite": nonfinite if number in flagged else 0,
                "histogram": "0012359dmuzwrhc1" if number % 2 else "",
                "xxh3": "0" * 32,
                "flagged": flagged.get(number, []),
            }
        )
    return {"version": 1, "source": source, "layers": layers}


def zoo() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the records and the weights of a migration with all outcomes."""
    records = [
        *(repaired(f"2019/resnet/resnet{depth}.pth") for depth in (18, 34, 50, 101)),
        *(record(f"2021/vit/vit{size}.pth") for size in "bls"),
        undecided("2017/net/nan.pth"),
        unreadable("2017/net/torn.pth"),
        record("2017/net/big.pth", "failed", error="the worker was killed twice (out of memory); give --memory 8GB"),
        record("README.txt", "other", format=None, tensors=None, numel=None),
    ]
    lines = [weights(each["source"], seed=number) for number, each in enumerate(records[:7])]
    return records, [*lines, weights("2017/net/nan.pth", flagged={2: ["VAL101"]})]
