"""Which files a pattern of ``zoo.toml`` means."""

from __future__ import annotations

import re
from collections.abc import Iterable


def compile_patterns(patterns: Iterable[str]) -> re.Pattern[str]:
    """One expression that fully matches the names that any of the patterns means.

    A pattern without ``/`` is about the last part of a name, wherever the file lies; one with ``/`` is about the whole
    name below the root. ``*`` and ``?`` stay inside of one part, ``**/`` is any number of folders, ``[…]`` are
    characters, and a ``/`` at the end means all that lies in that folder.
    """
    return re.compile("|".join(map(_expression, patterns)) or r"(?!)", re.DOTALL)


def _expression(pattern: str) -> str:
    place = "" if "/" in pattern.rstrip("/") else "(?:.*/)?"
    below = ".*" if pattern.endswith("/") else ""
    return f"(?:{place}{_translated(pattern.removeprefix('./').removeprefix('/'))}{below})"


_TOKEN = re.compile(
    r"(?P<folders>\*\*/)|(?P<any>\*\*)|(?P<star>\*)|(?P<one>\?)|\[(?P<not>!?)(?P<set>\]?[^\]]*)\]", re.DOTALL
)


def _translated(pattern: str) -> str:
    parts, end = [], 0
    for match in _TOKEN.finditer(pattern):
        parts += [re.escape(pattern[end : match.start()]), _meaning(match)]
        end = match.end()
    return "".join((*parts, re.escape(pattern[end:])))


def _meaning(match: re.Match[str]) -> str:
    if (characters := match["set"]) is not None:
        escaped = re.sub(r"([\\\[\]^&~|])", r"\\\1", characters)
        return f"[{'^/' if match['not'] else ''}{escaped}]" if characters else re.escape(match[0])
    words = {"folders": "(?:.*/)?", "any": ".*", "star": "[^/]*", "one": "[^/]"}
    return words[match.lastgroup or "any"]


def literal(name: str) -> str:
    """The pattern that means this name and no other."""
    return re.sub(r"([*?\[])", r"[\1]", name)
