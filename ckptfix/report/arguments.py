"""The flags of the command line, wherever they were given, as arguments of the library, and back as a command."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ckptfix.core.settings import SmokeSettings
from ckptfix.core.shell import no_option
from ckptfix.errors import UsageError

_PASSED_ON = (
    "weights",
    "for_torch",
    "unsafe_fixes",
    "fill",
    "drop_mismatched",
    "reset_running_stats",
    "recalibrate",
    "zero_non_finite",
    "flush_subnormals",
    "dtype",
    "seed",
    "format",
    "smoke",
    "member",
    "salvage",
    "disarm",
    "shard_size",
)
_SWITCHES = (
    "unsafe_fixes",
    "no_values",
    "drop_mismatched",
    "reset_running_stats",
    "zero_non_finite",
    "flush_subnormals",
    "in_place",
    "backup",
    "salvage",
    "disarm",
    "train_mode",
    "backward",
)
_SMOKE = ("device", "timeout", "seed", "train_mode", "backward", "compare")


def library_arguments(choices: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of ``check`` and ``repair``. Raises ``UsageError`` for a value that has no meaning."""
    arguments = {name: choices[name] for name in ("model", "like", *_PASSED_ON) if name in choices}
    if "model" in arguments and "like" in arguments:
        raise UsageError("--model and --like exclude each other: both say what the checkpoint has to fit")
    if "model_args" in choices:
        arguments["model_args"] = _model_args(choices["model_args"])
    for name in ("select", "ignore"):
        if name in choices:
            arguments[name] = _codes(name, choices[name])
    if "replace" in choices:
        arguments["replace"] = tuple(name for value in choices["replace"] for name in value.replace(",", " ").split())
    if "no_values" in choices:
        arguments["values"] = not choices["no_values"]
    smoke = {name: choices[name] for name in _SMOKE if name in choices}
    if "input" in choices:
        smoke["inputs"] = tuple(choices["input"])
    if smoke:
        arguments["smoke_settings"] = SmokeSettings(**smoke)
    return arguments


def repair_command(source: str, choices: Mapping[str, Any]) -> tuple[str, ...]:
    """The repair that goes with these choices, word by word, for the advice of a report."""
    words = ["ckptfix", "repair", no_option(source)]
    for name in (
        "model",
        "model_args",
        "like",
        "weights",
        "member",
        "for_torch",
        "fill",
        "recalibrate",
        "dtype",
        "shard_size",
        "output",
        "format",
        "device",
        "timeout",
        "compare",
        "seed",
    ):
        if name in choices:
            value = choices[name]
            words += [f"--{name.replace('_', '-')}", value if isinstance(value, str) else json.dumps(value)]
    for name in ("select", "ignore", "replace", "input"):
        for value in choices.get(name, ()):
            words += [f"--{name}", value]
    for name in _SWITCHES:
        if choices.get(name):
            words.append(f"--{name.replace('_', '-')}")
    if "smoke" in choices:
        words.append("--smoke" if choices["smoke"] else "--no-smoke")
    return tuple(words)


def _model_args(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        arguments = json.loads(value)
    except ValueError as error:
        raise UsageError(f"--model-args {value}: this is no valid JSON ({error}); write '{{\"depth\": 18}}'") from error
    if not isinstance(arguments, dict | list):
        raise UsageError(f"--model-args {value}: give an object of keyword arguments or an array of positional ones")
    return arguments


def _codes(name: str, values: list[str]) -> tuple[str, ...]:
    """Codes from ``KEY,BUF101 VAL``. One that begins no rule would silently check nothing, so it is refused."""
    from ckptfix.rules import RULES

    codes = tuple(code.upper() for value in values for code in value.replace(",", " ").split())
    for code in codes:
        if not any(rule.code.startswith(code) for rule in RULES):
            raise UsageError(f"--{name} {code}: no rule has a code that begins so; see ckptfix rule --all")
    return codes
