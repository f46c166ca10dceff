"""What a migration wants of the place where a zoo is, and what can go wrong there.

Each backend has exceptions of its own. They are recognised by their classes, if the backend has been imported, and
told apart by ``errno`` and by the HTTP status that they carry."""

from __future__ import annotations

import asyncio
import errno
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Protocol

from ckptfix.errors import CkptfixError


class PlaceError(CkptfixError):
    """A place, or a file of it, cannot be listed, read or written."""


class AbsentError(PlaceError):
    """There is no such file, folder or bucket."""


class ForbiddenError(PlaceError):
    """The user has no permission for it."""


class NoSpaceError(PlaceError):
    """The disk has not enough room for a file."""


class TransferError(PlaceError):
    """A transfer failed as often as it was tried."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of a place, as the listing shows it."""

    name: str
    """Below the root, with ``/`` between the parts."""
    size: int
    stamp: str
    """Identifies the version of the file without reading it: mtime in ns, or an ETag."""
    fault: str | None = None
    """Why it cannot be read, if the listing shows that: a link that leads nowhere, a folder without permission."""
    special: bool = False
    """A socket, a pipe, a device, or a link to a folder that is listed elsewhere: ``fault`` says which. It is not
    missed in the result."""


class Place(Protocol):
    """A root with files below it: plain data that a worker or another node can open again by its name.

    Every method raises a ``PlaceError`` with its cause in one line. Transfers are retried if that may help.
    """

    @property
    def name(self) -> str:
        """As it was given, without a slash at the end."""

    @property
    def root(self) -> Path | None:
        """The local folder; None if files have to be fetched."""

    def walk(self) -> Iterator[Entry]:
        """Yield all files below the root, sorted by name."""

    def entry(self, name: str) -> Entry | None:
        """Return the file of a name; None if there is none."""

    def head(self, name: str, count: int) -> bytes:
        """Return the first bytes of a file, ``count`` at most."""

    def fetch(self, name: str, to: Path, known: Entry | None = None) -> None:
        """Copy a file to a local path, which is complete or absent afterwards.

        With ``known``, what a listing said of it, another version is an error."""

    def put(self, file: Path, name: str) -> None:
        """Copy a local file here, complete or not at all, and replace the one of that name."""

    def remove(self, name: str) -> None:
        """Remove a file; one that is not there is not an error."""

    def where(self, name: str) -> str:
        """Return what messages call a file of the place: its path or URL."""


_BACKENDS = (
    ("aiohttp", "ClientError"),
    ("azure.core.exceptions", "AzureError"),
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("gcsfs.retry", "HttpError"),
    ("google.api_core.exceptions", "GoogleAPIError"),
    ("google.auth.exceptions", "GoogleAuthError"),
    ("httpx", "HTTPError"),
    ("httpx2", "HTTPError"),  # of huggingface_hub 2
    ("paramiko", "SSHException"),
    ("requests", "RequestException"),
)
"""The base classes of what backends raise besides ``OSError``."""

_FORBIDDEN = ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "DefaultCredentialsError")
_SENSELESS = ("ParamValidationError", "InvalidURL", "UnsupportedProtocol")

_FINAL = {
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), AbsentError),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), ForbiddenError),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), NoSpaceError),
    **dict.fromkeys((errno.EISDIR, errno.EEXIST, errno.EINVAL, errno.ENAMETOOLONG), PlaceError),
    **dict.fromkeys((errno.EILSEQ, errno.ELOOP, errno.ENOSYS), PlaceError),
}
"""What stays as it is, however often it is tried."""

_STATUS = {401: ForbiddenError, 403: ForbiddenError, 404: AbsentError, 410: AbsentError}
_PASSING = {408, 409, 412, 423, 425, 429}
"""The statuses below 500 that another try may change."""

_ADVICE: dict[type[PlaceError], str] = {
    AbsentError: "check the name",
    ForbiddenError: "get the permission, or the credentials",
    NoSpaceError: "make room there",
}


def failures() -> tuple[type[Exception], ...]:
    """Return the classes of exceptions that a place may raise. Any other is a bug, and is not caught."""
    modules = ((sys.modules.get(module), name) for module, name in _BACKENDS)
    found = (getattr(module, name, None) for module, name in modules if module is not None)
    own = tuple(kind for kind in found if isinstance(kind, type) and issubclass(kind, Exception))
    # Until Python 3.11 asyncio's TimeoutError is not the built-in one; a name that is not text is a UnicodeError.
    return (PlaceError, OSError, asyncio.TimeoutError, HTTPException, EOFError, UnicodeError, NotImplementedError, *own)


def explained(error: Exception, where: str, verb: str) -> PlaceError:
    """Return the error of a place for an exception; ``verb`` is what could not be done to the file."""
    if isinstance(error, PlaceError):
        return error
    kind = final_kind(error) or PlaceError
    said = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    advice = _ADVICE.get(kind)
    return kind(f"{where}: cannot be {verb}: {said}" + (f"; {advice}" if advice else ""))


def deny(entry: Entry | None, where: str) -> Entry:
    """Return the entry; raise ``AbsentError`` for None."""
    if entry is None:
        raise AbsentError(f"{where}: is not there, or is not a file; check the name")
    return entry


def changed(where: str) -> PlaceError:
    """Return the error that a file is no longer the one that was listed."""
    return PlaceError(f"{where}: it changed since it was listed; run the same command again")


def final_kind(error: BaseException) -> type[PlaceError] | None:
    """Return what an exception means for good; None if another try may help."""
    if isinstance(error, PlaceError):
        return None if isinstance(error, TransferError) else type(error)
    if isinstance(error, FileNotFoundError):
        return AbsentError  # backends raise it without an errno
    if isinstance(error, PermissionError) or type(error).__name__ in _FORBIDDEN:
        return ForbiddenError
    if isinstance(error, (UnicodeError, NotImplementedError)) or type(error).__name__ in _SENSELESS:
        return PlaceError
    if isinstance(error, OSError) and error.errno in _FINAL:
        return _FINAL[error.errno]
    status = _status(error)
    if status is not None and 400 <= status < 500 and status not in _PASSING:
        return _STATUS.get(status, PlaceError)
    return None


def _status(error: BaseException) -> int | None:
    """The HTTP status that an exception carries, each backend in its own way."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        status = getattr(response, "status_code", None)  # requests, httpx
    for name in ("status", "code", "status_code"):  # aiohttp, gcsfs, azure
        status = status if isinstance(status, int) else getattr(error, name, None)
    return status if isinstance(status, int) else None
