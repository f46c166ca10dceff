"""The errors that ckptfix raises on purpose.

Each message is one line that says what is wrong, in which file, and what to do next. Any other exception that escapes
from ckptfix is a bug."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import Struct

LONGEST = 2000  # characters of a message; names in a file may have any length


class Opt(Struct, frozen=True):
    """An option named in a message. The library writes ``fill="target"``, the command line ``--fill target``.

    ``Opt("fill")`` is the option without a value: ``fill=``, ``--fill``."""

    name: str
    value: object = None

    def __str__(self) -> str:
        return f"{self.name}=" if self.value is None else f"{self.name}={self.value!r}"


Words = str | Opt  # a piece of a message


def joined(words: Iterable[Words], word: Callable[[Opt], str] = str) -> str:
    """Join the pieces of a message, formatting options with ``word``."""
    return "".join(piece if isinstance(piece, str) else word(piece) for piece in words)


def one_line(text: str) -> str:
    """Return the text on one printable line, truncated to ``LONGEST`` characters."""
    return printable(text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…")


def printable(text: str) -> str:
    """Escape control characters, line breaks and lone surrogates (``\\x1b``)."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


class CkptfixError(Exception):
    """The base class of the errors that ckptfix raises on purpose. Its message is one printable line."""

    def __init__(self, *words: Words) -> None:
        super().__init__(*words)

    def __str__(self) -> str:
        return self.worded(str)

    @property
    def options(self) -> tuple[Opt, ...]:
        """The options that the message names."""
        return tuple(piece for piece in self.args if isinstance(piece, Opt))

    def without(self, start: str) -> tuple[Words, ...]:
        """Return the pieces of the message without the prefix ``start``, for use in another message."""
        first, *rest = self.args
        return (first.removeprefix(start) if isinstance(first, str) else first, *rest)

    def worded(self, word: Callable[[Opt], str]) -> str:
        """Return the message with its options formatted by ``word``."""
        return one_line(joined(self.args, word))


class UnreadableError(CkptfixError):
    """The file has no readable checkpoint: it has another format, is damaged, or is a pointer to a file that was never
    fetched. If the file does not exist, the error is a ``FileNotFoundError`` too.

    ``data`` is what is known about the damage, for the JSON report."""

    def __init__(self, *words: Words, data: Mapping[str, Any] | None = None) -> None:
        super().__init__(*words)
        self.data = data or {}


def damaged(path: object, fault: str) -> UnreadableError:
    """Return the error for a file whose damage only a fresh copy repairs."""
    return UnreadableError(f"{path}: {fault}; fetch it again")


class WeightlessError(UnreadableError):
    """The file is intact but has no weights."""


class MissingSaveError(UnreadableError):
    """A folder's file names a save as the latest that is missing, while others are there."""


class MissingFileError(UnreadableError, FileNotFoundError):
    """No file has this name."""


class MissingPackageError(CkptfixError, ImportError):
    """A required package is not installed, or its import fails."""


class DamageWarning(UserWarning):
    """A tensor may differ from what was saved: its checksum fails, or the file contradicts itself."""


class UnknownKeyError(CkptfixError, KeyError):
    """The checkpoint has no tensor under this key."""


class HostileError(CkptfixError):
    """The file was made to run code or to exhaust the machine. It is not an ``UnreadableError``, so that callers which
    fall back to another reader do not do so here.

    ``runs_code`` is set if the file is known to run code."""

    def __init__(self, *words: Words, runs_code: bool = False) -> None:
        super().__init__(*words)
        self.runs_code = runs_code


def hostile(path: object, fault: str) -> HostileError:
    """Return the error for a file that no framework would save but an attacker would."""
    return HostileError(f"{path}: {fault}; do not use this file")


class TargetError(CkptfixError):
    """The model or reference file that the checkpoint has to fit is not available.

    ``traceback_text`` is the traceback of the user's factory if that raised, else empty."""

    def __init__(self, *words: Words, traceback_text: str = "") -> None:
        super().__init__(*words)
        self.traceback_text = traceback_text


class PlanError(CkptfixError):
    """The edits contradict each other or do not belong to this checkpoint."""


class AdapterError(CkptfixError):
    """The adapter cannot be merged into this checkpoint, or its tensors are not enough to do so."""


class WriteError(CkptfixError):
    """The result cannot be written in the requested form."""


class UsageError(CkptfixError):
    """A setting is invalid, or two settings exclude each other."""


class IdleRecipeError(UsageError):
    """A recipe of ``--adapt`` fits no tensor, and some tensor needs another one. The first option is the recipe."""


class TakenNameError(UsageError):
    """Two files of a zoo would get the same name."""


class InternalError(CkptfixError):
    """A bug of ckptfix that it detected itself, before anything was written."""
