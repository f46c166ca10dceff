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
class Kind:
    """What a key takes: in words, and as a test. A bool is no number here: ``seed = true`` is a slip."""

    words: str
    fits: Callable[[Any], bool]


TEXT = Kind("a text", lambda value: isinstance(value, str))
TEXTS = Kind("a list of texts", lambda value: isinstance(value, list) and all(isinstance(x, str) for x in value))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
WHOLE = Kind("a whole number", lambda value: type(value) is int)
NUMBER = Kind("a number", lambda value: type(value) in (int, float))
ARGUMENTS = Kind("a table or a list", lambda value: isinstance(value, dict | list))

KEYS: Mapping[str, Kind] = {
    "model": TEXT,
    "model-args": ARGUMENTS,
    "like": TEXT,
    "select": TEXTS,
    "ignore": TEXTS,
    "unsafe-fixes": FLAG,
    "weights": TEXT,
    "for-torch": TEXT,
    "no-values": FLAG,
    "fill": TEXT,
    "drop-mismatched": FLAG,
    "replace": TEXTS,
    "reset-running-stats": FLAG,
    "recalibrate": TEXT,
    "zero-non-finite": FLAG,
    "flush-subnormals": FLAG,
    "dtype": TEXT,
    "seed": WHOLE,
    "output-format": TEXT,
    "quiet": FLAG,
    "verbose": FLAG,
    "backup": FLAG,
    "format": TEXT,
    "smoke": FLAG,
    "input": TEXTS,
    "device": TEXT,
    "timeout": NUMBER,
    "train-mode": FLAG,
    "backward": FLAG,
    "compare": TEXT,
}
"""The keys of a configuration, each a long flag of the command line."""

_CHOICES = {"output-format": OUTPUT_FORMATS, "format": FORMATS}
_FILES = ("like", "fill", "compare", "recalibrate")
_WORDS = {"fill": ("target", "twin"), "compare": ("source",)}


@dataclass(frozen=True)
class Configuration:
    """The values of a configuration file by the flag's name in snake case (``for_torch``), and where they come from."""

    values: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None


def load_configuration(start: Path | None = None) -> Configuration:
    """The configuration for a working directory, the current one by default; empty where no file is found.

    Paths in it (``like``, ``fill``, ``compare``, ``recalibrate``) are relative to the file that names them. Raises
    ``UsageError`` that names the file and the key.
    """
    start = (start or Path.cwd()).absolute()
    for folder in (start, *start.parents):
        own, shared = folder / "ckptfix.toml", folder / "pyproject.toml"
        if own.is_file():
            return _configuration(own, parse_toml(own))
        if shared.is_file():
            tool = parse_toml(shared).get("tool")
            table = tool.get("ckptfix") if isinstance(tool, dict) else None
            if isinstance(table, dict):
                return _configuration(shared, table)
            if table is not None:
                raise UsageError(f"{shared}: tool.ckptfix is to be a table")
    return Configuration()


def parse_toml(path: Path) -> dict[str, Any]:
    """What a TOML file says. Raises ``UsageError`` that names the file and the place in it."""
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
    values = {key.replace("-", "_"): checked(str(path), path.parent, key, value) for key, value in table.items()}
    return Configuration(values, path)


def checked(where: str, folder: Path, key: str, value: Any, keys: Mapping[str, Kind] = KEYS) -> Any:
    """The value of a key in the form of the command line, once it is known to be one that its flag takes.

    ``where`` is the file, and the table in it, for the error; ``folder`` is what paths are relative to.
    """
    if key not in keys:
        close = difflib.get_close_matches(key, keys, 1)
        hint = f"did you mean {close[0]}?" if close else f"the keys are {', '.join(keys)}"
        raise UsageError(f"{where}: there is no key {key}; {hint}")
    kind = keys[key]
    if not kind.fits(value):
        raise UsageError(f"{where}: {key} is to be {kind.words} and not {value!r:.60}")
    choices = _CHOICES.get(key)
    if choices and value not in choices:
        raise UsageError(f"{where}: {key} is to be one of {', '.join(choices)} and not {value!r:.60}")
    if key in _FILES and value not in _WORDS.get(key, ()) and "://" not in value:
        return str(folder / value)
    return value
