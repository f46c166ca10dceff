"""Commands as they are typed into a shell, whatever is in the names of their files."""

from __future__ import annotations

import shlex
from collections.abc import Iterable


def typed(words: Iterable[str]) -> str:
    """Return the command of these words, on one line that bash, zsh and ksh take apart into the same words again."""
    return " ".join(map(quoted, words))


def quoted(word: str) -> str:
    """Return one word of a command. Line breaks, bytes that are no text, and what nobody can see, become escapes."""
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
