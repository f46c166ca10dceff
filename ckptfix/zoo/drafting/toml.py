"""Texts in TOML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any

from ckptfix.errors import one_line

WIDTH = 110

_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
_BARE = re.compile(r"[A-Za-z0-9_-]+")


def quoted(text: str) -> str:
    """A text between quotes. Bytes of a name that are no UTF-8 have no form in TOML: each becomes ``?``, which means
    any character in a pattern.
    """
    return f'"{"".join(map(_escaped, text))}"'


def _escaped(char: str) -> str:
    if char in _ESCAPES:
        return _ESCAPES[char]
    if 0xD800 <= ord(char) <= 0xDFFF:
        return "?"
    return char if char.isprintable() else f"\\U{ord(char):08x}"


def value(given: Any) -> str:
    """A value: a text, a number, a list or a table in one line."""
    if isinstance(given, str):
        return quoted(given)
    if isinstance(given, bool):
        return "true" if given else "false"
    if isinstance(given, Mapping):
        return f"{{ {', '.join(f'{_key(name)} = {value(each)}' for name, each in given.items())} }}"
    if isinstance(given, Sequence):
        return f"[{', '.join(map(value, given))}]"
    return repr(given)


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else quoted(name)


def comment(text: str, mark: str = "# ") -> Iterator[str]:
    """A remark in lines of a bearable width; the later ones are set in."""
    later = "#".ljust(len(mark) + 2)
    first, *rest = wrap(one_line(text), WIDTH - len(later), break_on_hyphens=False) or [""]
    yield f"{mark}{first}".rstrip()
    yield from (f"{later}{line}" for line in rest)


def texts(name: str, given: Iterable[str]) -> Iterator[str]:
    """A key with one text, or with a list of them, a line for each where one line is too short."""
    given = tuple(given)
    line = f"{name} = {value(given[0] if len(given) == 1 else given)}"
    if len(line) <= WIDTH or len(given) == 1:
        yield line
        return
    yield f"{name} = ["
    yield from (f"  {quoted(each)}," for each in given)
    yield "]"
