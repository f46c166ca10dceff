"""Settings are checked before any work begins: what has no meaning, or needs another setting, is said in one line."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptfix.core.settings import Settings
from ckptfix.errors import UsageError
from ckptfix.reading.opening import open_file
from ckptfix.rules import RULES

LONGEST_TIMEOUT = 10**6
"""Seconds, eleven days: what every clock of the system can wait for."""


def checked_settings(given: Mapping[str, Any], model: object = None, like: object = None) -> Settings:
    """Return the settings of a repair towards a model or a reference file.

    Raises ``UsageError`` for one that is unknown, has no meaning, or needs another, a model or a reference."""
    try:
        settings = Settings(**given)
    except TypeError as error:
        raise UsageError(f"a setting is not known ({error}); see ckptfix.core.settings.Settings") from error
    settings = replace(settings, select=_codes(settings.select), ignore=_codes(settings.ignore))
    names: object = settings.replace
    settings = replace(settings, replace=(names,) if isinstance(names, str) else tuple(settings.replace))
    if settings.replace and settings.fill is None:
        raise UsageError("--replace says which values to replace, and --fill by which: add --fill twin, target or FILE")
    if settings.cast_dtype and not settings.values:
        raise UsageError("--dtype looks at the values before it casts them; leave --no-values out")
    if settings.fill is not None:
        if not isinstance(settings.fill, (str, os.PathLike)):
            raise UsageError(f"fill is {settings.fill!r:.60}; give 'target', 'twin', or the path of a checkpoint")
        settings = replace(settings, fill=os.fspath(settings.fill))
    if settings.format not in (None, "pth", "safetensors"):
        raise UsageError(f"format {settings.format!r} is not known; give pth or safetensors")
    timeout = settings.smoke_settings.timeout
    if not 0 < timeout <= LONGEST_TIMEOUT:
        raise UsageError(f"a timeout of {timeout:g} s has no meaning; give seconds above 0 and up to {LONGEST_TIMEOUT}")
    settings.is_for_torch_before("0")  # says in one line that a version is none
    _ = settings.shard_bytes  # and that a size is none
    _check_target(settings, model, like)
    return settings


def _check_target(settings: Settings, model: object, like: object) -> None:
    """Raise ``UsageError`` if the settings need a model or a reference file that is not given."""
    has_factory, has_target = isinstance(model, str), model is not None or like is not None
    if model is not None and like is not None:
        raise UsageError("model and like exclude each other: both say what the checkpoint has to fit")
    if settings.smoke and not has_factory:
        raise UsageError("the forward test needs a factory: give --model pkg.mod:factory")
    if settings.smoke_settings.compare is not None and (settings.smoke is False or not has_factory):
        raise UsageError("--compare is about the outputs of the forward test, which needs --model and no --no-smoke")
    if settings.compare_file is not None:
        open_file(settings.compare_file)  # a slip of its name shows before anything runs
    if settings.fill == "target" and not has_target:
        raise UsageError("--fill target takes values from a model or a reference; add --model or --like")
    if settings.fill_file is not None and not (has_target or settings.salvage or settings.replace):
        raise UsageError(
            f"--fill {settings.fill_file}: what is missing shows only against a target; add --model or --like, or say "
            "with --replace which values it replaces"
        )
    if settings.recalibrate is not None and model is None:
        raise UsageError("--recalibrate runs data through the model; add --model pkg.mod:factory")
    if settings.recalibrate is not None and not Path(settings.recalibrate).is_file():
        raise UsageError(f"--recalibrate {settings.recalibrate}: there is no such file; check the path")


def _codes(given: Any) -> tuple[str, ...]:
    """Rule codes or their beginnings; one that begins no code would silently check nothing."""
    if not isinstance(given, Iterable):
        raise UsageError(f"the codes of rules are {given!r:.60}; give one such as 'KEY101', or a list of them")
    codes = (given,) if isinstance(given, str) else tuple(given)
    for code in codes:
        if not isinstance(code, str) or not any(rule.code.startswith(code) for rule in RULES):
            raise UsageError(f"no rule has a code that begins with {code!r}; see `ckptfix rule --all`")
    return codes
