"""The errors that ckptfix raises on purpose.

Each message is one line that says what is wrong, in which file, and what to do next. Anything else that escapes from
ckptfix is a bug of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec import Struct

LONGEST = 2000  # characters of a message: names in a file may be of any length


class Opt(Struct, frozen=True):
    """An option in a message. The library writes ``fill="target"``, the command line ``--fill target``.

    ``Opt("fill")`` is the option without a value: ``fill=``, ``--fill``."""

    name: str
    value: object = None

    def __str__(self) -> str:
        return f"{self.name}=" if self.value is None else f"{self.name}={self.value!r}"


Words = str | Opt  # a piece of a message


def joined(words: Iterable[Words], word: Callable[[Opt], str] = str) -> str:
    """Return the pieces of a message as one text, with the options as ``word`` writes them."""
    return "".join(piece if isinstance(piece, str) else word(piece) for piece in words)


def one_line(text: str) -> str:
    """Return the text as ``printable`` gives it, cut at its longest."""
    return printable(text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…")


def printable(text: str) -> str:
    """Return the text with control characters, line breaks and lone surrogates as escapes (``\\x1b``)."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


class CkptfixError(Exception):
    """The base of the errors that ckptfix raises on purpose. Its message is one printable line."""

    def __init__(self, *words: Words) -> None:
        super().__init__(*words)

    def __str__(self) -> str:
        return self.worded(str)

    @property
    def options(self) -> tuple[Opt, ...]:
        """The options that the message names."""
        return tuple(piece for piece in self.args if isinstance(piece, Opt))

    def without(self, start: str) -> tuple[Words, ...]:
        """Return the pieces of the message without its start, for another message."""
        first, *rest = self.args
        return (first.removeprefix(start) if isinstance(first, str) else first, *rest)

    def worded(self, word: Callable[[Opt], str]) -> str:
        """Return the message with the options as ``word`` writes them."""
        return one_line(joined(self.args, word))


class UnreadableError(CkptfixError):
    """The file holds no checkpoint that can be read: another format, damage, or a pointer to a file that was never
    fetched. If there is no file of the name, it is a ``FileNotFoundError`` too."""


def damaged(path: object, fault: str) -> UnreadableError:
    """Return the error of a file with a fault that only another copy of it cures."""
    return UnreadableError(f"{path}: {fault}; fetch it again")


class WeightlessError(UnreadableError):
    """The file is whole, and has no weights."""


class MissingFileError(UnreadableError, FileNotFoundError):
    """There is no file of this name."""


class MissingPackageError(CkptfixError, ImportError):
    """A package that this needs is not installed, or does not load."""


class DamageWarning(UserWarning):
    """A tensor may have other bytes than were saved, by its checksum, or as the file contradicts itself."""


class UnknownKeyError(CkptfixError, KeyError):
    """The checkpoint has no tensor under this key."""


class HostileError(CkptfixError):
    """The file was made to run code or to exhaust the machine. It is not an ``UnreadableError``, so that code which
    tries another way to read a file does not try it here.

    ``runs_code`` if it is known to be an attack of the first kind."""

    def __init__(self, *words: Words, runs_code: bool = False) -> None:
        super().__init__(*words)
        self.runs_code = runs_code


def hostile(path: object, fault: str) -> HostileError:
    """Return the error of a file that no save of a model makes, but an attack does."""
    return HostileError(f"{path}: {fault}; do not use this file")


class TargetError(CkptfixError):
    """The model or reference file that the checkpoint has to fit is not available.

    ``traceback_text`` is the user's own traceback if the user's factory raised, and empty otherwise."""

    def __init__(self, *words: Words, traceback_text: str = "") -> None:
        super().__init__(*words)
        self.traceback_text = traceback_text


class PlanError(CkptfixError):
    """The edits contradict each other or do not belong to this checkpoint."""


class AdapterError(CkptfixError):
    """The adapter cannot be merged into this checkpoint, or not from its tensors only."""


class WriteError(CkptfixError):
    """The result cannot be written in the form that was asked for."""


class UsageError(CkptfixError):
    """A setting has no meaning, or two settings exclude each other."""


class IdleRecipeError(UsageError):
    """A recipe of ``--adapt`` fits nothing, and a tensor is left that needs another one. The first option is the
    recipe."""


class InternalError(CkptfixError):
    """A bug of ckptfix that it has found itself, before anything was written."""
