"""The configuration file: the nearest ``ckptfix.toml``, or ``pyproject.toml`` with a table ``[tool.ckptfix]``.

Its keys are the long flags of the command line without their dashes, its values what the flags take. Files are never
merged, and the command line overrides the file."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from ckptfix.errors import UsageError


class Configuration(Struct, frozen=True):
    """The options of a configuration file by name (``for_torch``), and the file's path."""

    values: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None


def load_configuration(start: Path | None = None) -> Configuration:
    """Return the configuration for a working directory, the current one by default; empty if there is no file.

    Paths in it are relative to the file. Raises ``UsageError``, which names the file and the key, if it is invalid."""
    start = (start or Path.cwd()).absolute()
    for folder in (start, *start.parents):
        own, shared = folder / "ckptfix.toml", folder / "pyproject.toml"
        if own.is_file():
            return _configuration(own, parse_toml(own))
        if shared.is_file():
            tool = parse_toml(shared, "ckptfix").get("tool")
            table = tool.get("ckptfix") if isinstance(tool, dict) else None
            if isinstance(table, dict):
                return _configuration(shared, table)
            if table is not None:
                raise UsageError(f"{shared}: tool.ckptfix has to be a table")
    return Configuration()


def parse_toml(path: Path, word: str = "") -> dict[str, Any]:
    """Return the content of a TOML file, or ``{}`` if its text lacks ``word``: importing the parser takes longer than
    many checks. Raises ``UsageError``, which names the file and the place, if it is invalid."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8, as TOML requires: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise UsageError(f"{path}: cannot read the configuration: {error.strerror}") from error
    if word not in text:
        return {}
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        # Installed with Python 3.10 only, so mypy may or may not see it.
        import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

    try:
        document: dict[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also for a number of 5,000 digits, or deeply nested arrays
        raise UsageError(f"{path}: invalid TOML: {error}") from error
    return document


def _configuration(path: Path, table: Mapping[str, Any]) -> Configuration:
    from ckptfix.core.option import Scope
    from ckptfix.core.options import from_toml, toml_keys  # not needed without a configuration file

    return Configuration(from_toml(str(path), path.parent, table, toml_keys(Scope.CONFIG, Scope.REPAIR)), path)
