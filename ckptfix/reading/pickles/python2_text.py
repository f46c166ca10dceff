"""Strings of Python 2, which are bytes, and of which a pickle does not say whether they were text.

``torch.load`` takes each of them for UTF-8 (``encoding="utf-8"``, with and without ``weights_only``) and refuses a file
in which one is not. So text that is UTF-8 gives the names that torch gives. Anything else is read as Latin-1, which
keeps every byte: the bytes of numpy arrays come as such strings too, and may look like UTF-8 by chance, so that
``raw_bytes`` gives back what the file has in either case."""

from __future__ import annotations


class Utf8Text(str):
    """A string of Python 2 that is UTF-8 and not ASCII."""

    __slots__ = ()


def python2_text(raw: bytes) -> str:
    """The text of a string of Python 2: a ``Utf8Text``, or a plain ``str`` of one character for each byte."""
    if not raw.isascii():
        try:
            return Utf8Text(raw, "utf-8")
        except UnicodeDecodeError:
            pass
    return raw.decode("latin-1")


def raw_bytes(text: str, errors: str = "strict") -> bytes:
    """The bytes of a string of Python 2. Raises ``UnicodeEncodeError`` where the text is none."""
    return text.encode("utf-8" if isinstance(text, Utf8Text) else "latin-1", errors)
