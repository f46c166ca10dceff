"""How names and commands are formatted in messages."""

import re
import shlex
from collections.abc import Iterable, Sequence

LISTED = 4  # names of a list that are shown
KEEP_STATISTICS = (
    "they normalise inputs and outputs: convert the file with the library that wrote it (LeRobot has a migration), or "
    "normalise in your code; without them the model runs on other numbers"
)


def first_names(names: Sequence[object], most: int = LISTED) -> str:
    """List the first few names and the number of others."""
    rest = len(names) - most
    return ", ".join(map(str, names[:most])) + (f" and {rest} more" if rest > 0 else "")


def nearest(name: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """Return the known name most similar to a mistyped one, empty if none has a similarity of at least ``likeness``
    (0 to 1)."""
    from difflib import get_close_matches  # only needed for mistakes

    return next(iter(get_close_matches(name, list(known), 1, likeness)), "")


def folded_places(places: Iterable[str]) -> dict[str, list[str]]:
    """Group places in a container that differ only in list indices, each group under a name such as
    ``logging.ema[…] (1000)``."""
    groups: dict[str, list[str]] = {}
    for place in places:
        groups.setdefault(re.sub(r"\[\d+\]", "[…]", place), []).append(place)
    return {f"{name} ({len(group)})" if len(group) > 1 else group[0]: group for name, group in groups.items()}


def shell_join(words: Iterable[str]) -> str:
    """Join the words of a command into one line that bash, zsh and ksh split into the same words."""
    return " ".join(map(shell_quote, words))


def shell_quote(word: str) -> str:
    """Quote one word of a command. Line breaks, undecodable bytes and invisible characters are escaped."""
    if word.isprintable():
        return shlex.quote(word)
    return f"$'{''.join(map(_escaped, word))}'"


def no_option(name: str) -> str:
    """Return a file name in a form that a command does not take for an option."""
    return f"./{name}" if name.startswith("-") else name


def _escaped(sign: str) -> str:
    if sign in "\\'":
        return f"\\{sign}"
    if sign.isprintable():
        return sign
    is_byte = "\udc80" <= sign <= "\udcff"
    raw = sign.encode("utf-8", "surrogateescape" if is_byte else "surrogatepass")
    return "".join(f"\\{byte:03o}" for byte in raw)
