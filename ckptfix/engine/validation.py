"""Settings are checked before any work begins: what has no meaning, or needs another setting, is said in one line."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ckptfix.core.settings import Settings
from ckptfix.errors import UsageError
from ckptfix.rules import RULES

LONGEST_TIMEOUT = 10**6
"""Seconds, eleven days: what every clock of the system can wait for."""


def checked_settings(given: Mapping[str, Any]) -> Settings:
    """The settings of a repair. Raises ``UsageError`` where one is unknown, has no meaning, or needs another."""
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
    return settings


def _codes(given: Any) -> tuple[str, ...]:
    """Rule codes or their beginnings; one that begins no code would silently check nothing."""
    if not isinstance(given, Iterable):
        raise UsageError(f"the codes of rules are {given!r:.60}; give one such as 'KEY101', or a list of them")
    codes = (given,) if isinstance(given, str) else tuple(given)
    for code in codes:
        if not isinstance(code, str) or not any(rule.code.startswith(code) for rule in RULES):
            raise UsageError(f"no rule has a code that begins with {code!r}; see `ckptfix rule --all`")
    return codes
