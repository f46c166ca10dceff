"""How names and commands are written in messages."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence

LISTED = 4  # names of a list that are given
KEEP_STATISTICS = (
    "they normalise inputs and outputs: convert the file with the library that wrote it (LeRobot has a migration), or "
    "normalise in your code; without them the model runs on other numbers"
)


def first_names(names: Sequence[object], most: int = LISTED) -> str:
    """Return the first few names, and how many more there are."""
    rest = len(names) - most
    return ", ".join(map(str, names[:most])) + (f" and {rest} more" if rest > 0 else "")


def nearest(name: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """Return the one of the known names that a mistyped one is most like, from 0 to 1; empty if none is."""
    from difflib import get_close_matches  # which only a slip needs

    return next(iter(get_close_matches(name, list(known), 1, likeness)), "")


def folded_places(places: Iterable[str]) -> dict[str, list[str]]:
    """Return places in a container by what names them together: those that differ in the numbers of lists only are one,
    ``logging.ema[…] (1000)``."""
    groups: dict[str, list[str]] = {}
    for place in places:
        groups.setdefault(re.sub(r"\[\d+\]", "[…]", place), []).append(place)
    return {f"{name} ({len(group)})" if len(group) > 1 else group[0]: group for name, group in groups.items()}


def typed(words: Iterable[str]) -> str:
    """Return the command of these words, on one line that bash, zsh and ksh take apart into the same words again."""
    return " ".join(map(quoted, words))


def quoted(word: str) -> str:
    """Return one word of a command. Line breaks, bytes that are no text, and invisible characters become escapes."""
    if word.isprintable():
        return shlex.quote(word)
    return f"$'{''.join(map(_escaped, word))}'"


def no_option(name: str) -> str:
    """Return the name of a file so that a command does not take it for an option."""
    return f"./{name}" if name.startswith("-") else name


def _escaped(sign: str) -> str:
    if sign in "\\'":
        return f"\\{sign}"
    if sign.isprintable():
        return sign
    is_byte = "\udc80" <= sign <= "\udcff"
    raw = sign.encode("utf-8", "surrogateescape" if is_byte else "surrogatepass")
    return "".join(f"\\{byte:03o}" for byte in raw)
