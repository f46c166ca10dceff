"""The configuration file: the nearest ``ckptfix.toml``, or ``pyproject.toml`` with a table ``[tool.ckptfix]``.

Its keys are the long flags of the command line without their dashes in front, its values what the flags take. One
file counts: they are never merged, and a flag on the command line wins over it.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptfix.errors import UsageError

OUTPUT_FORMATS = ("full", "concise", "json", "github")
"""What ``--output-format`` takes."""

FORMATS = ("pth", "safetensors")
"""What ``--format`` takes."""


@dataclass(frozen=True)
class _Kind:
    """What a key takes: in words, and as a test. A bool is no number here: ``seed = true`` is a slip."""

    words: str
    fits: Callable[[Any], bool]


_TEXT = _Kind("a text", lambda value: isinstance(value, str))
_TEXTS = _Kind("a list of texts", lambda value: isinstance(value, list) and all(isinstance(x, str) for x in value))
_FLAG = _Kind("true or false", lambda value: isinstance(value, bool))
_WHOLE = _Kind("a whole number", lambda value: type(value) is int)
_NUMBER = _Kind("a number", lambda value: type(value) in (int, float))
_ARGUMENTS = _Kind("a table or a list", lambda value: isinstance(value, dict | list))

_KEYS = {
    "model": _TEXT,
    "model-args": _ARGUMENTS,
    "like": _TEXT,
    "select": _TEXTS,
    "ignore": _TEXTS,
    "unsafe-fixes": _FLAG,
    "weights": _TEXT,
    "for-torch": _TEXT,
    "no-values": _FLAG,
    "fill": _TEXT,
    "drop-mismatched": _FLAG,
    "replace": _TEXTS,
    "reset-running-stats": _FLAG,
    "recalibrate": _TEXT,
    "zero-non-finite": _FLAG,
    "flush-subnormals": _FLAG,
    "dtype": _TEXT,
    "seed": _WHOLE,
    "output-format": _TEXT,
    "quiet": _FLAG,
    "verbose": _FLAG,
    "backup": _FLAG,
    "format": _TEXT,
    "smoke": _FLAG,
    "input": _TEXTS,
    "device": _TEXT,
    "timeout": _NUMBER,
    "train-mode": _FLAG,
    "backward": _FLAG,
    "compare": _TEXT,
}
_CHOICES = {"output-format": OUTPUT_FORMATS, "format": FORMATS}
_FILES = ("like", "fill", "compare")
_WORDS = {"fill": ("target", "twin"), "compare": ("source",)}


@dataclass(frozen=True)
class Configuration:
    """The values of a configuration file by the flag's name in snake case (``for_torch``), and where they come from."""

    values: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None


def load_configuration(start: Path | None = None) -> Configuration:
    """The configuration for a working directory, the current one by default; empty where no file is found.

    Paths in it (``like``, ``fill``, ``compare``) are relative to the file that names them. Raises ``UsageError`` that
    names the file and the key.
    """
    start = (start or Path.cwd()).absolute()
    for folder in (start, *start.parents):
        own, shared = folder / "ckptfix.toml", folder / "pyproject.toml"
        if own.is_file():
            return _configuration(own, _parse(own))
        if shared.is_file():
            tool = _parse(shared).get("tool")
            table = tool.get("ckptfix") if isinstance(tool, dict) else None
            if isinstance(table, dict):
                return _configuration(shared, table)
            if table is not None:
                raise UsageError(f"{shared}: tool.ckptfix is to be a table")
    return Configuration()


def _parse(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        # Installed with Python 3.10 only, so mypy may or may not see it.
        import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

    try:
        document: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: this is no valid TOML: {error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: a TOML file is to be UTF-8: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise UsageError(f"{path}: the configuration cannot be read: {error.strerror}") from error
    return document


def _configuration(path: Path, table: Mapping[str, Any]) -> Configuration:
    return Configuration({key.replace("-", "_"): _checked(path, key, value) for key, value in table.items()}, path)


def _checked(path: Path, key: str, value: Any) -> Any:
    """The value in the form of the command line, once it is known to be one that its flag takes."""
    if key not in _KEYS:
        close = difflib.get_close_matches(key, _KEYS, 1)
        hint = f"did you mean {close[0]}?" if close else f"the keys are {', '.join(_KEYS)}"
        raise UsageError(f"{path}: there is no key {key}; {hint}")
    kind = _KEYS[key]
    if not kind.fits(value):
        raise UsageError(f"{path}: {key} is to be {kind.words} and not {value!r:.60}")
    choices = _CHOICES.get(key)
    if choices and value not in choices:
        raise UsageError(f"{path}: {key} is to be one of {', '.join(choices)} and not {value!r:.60}")
    if key in _FILES and value not in _WORDS.get(key, ()):
        return str(path.parent / value)
    return value
