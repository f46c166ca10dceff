"""What an exception of a place means, and whether trying again may help.

Each backend has exceptions of its own. They are known by their classes, as far as a backend has been imported, and told
apart by ``errno`` and by the HTTP status that they carry."""

from __future__ import annotations

import asyncio
import errno
import sys
from http.client import HTTPException

from ckptfix.zoo.places.errors import AbsentError, ForbiddenError, NoSpaceError, PlaceError, TransferError
from ckptfix.zoo.places.place import Entry

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
"""The base classes of what backends raise beside ``OSError``."""

_FORBIDDEN = ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "DefaultCredentialsError")
_SENSELESS = ("ParamValidationError", "InvalidURL", "UnsupportedProtocol")

_FINAL = {
    errno.ENOENT: AbsentError,
    errno.ENOTDIR: AbsentError,
    errno.EACCES: ForbiddenError,
    errno.EPERM: ForbiddenError,
    errno.EROFS: ForbiddenError,
    errno.ENOSPC: NoSpaceError,
    errno.EDQUOT: NoSpaceError,
    errno.EISDIR: PlaceError,
    errno.EEXIST: PlaceError,
    errno.EINVAL: PlaceError,
    errno.ENAMETOOLONG: PlaceError,
    errno.EILSEQ: PlaceError,
    errno.ELOOP: PlaceError,
    errno.ENOSYS: PlaceError,
}
"""What stays as it is, however often it is tried."""

_STATUS = {401: ForbiddenError, 403: ForbiddenError, 404: AbsentError, 410: AbsentError}
_PASSING = {408, 409, 412, 423, 425, 429}
"""The statuses below 500 that another try may change."""

_ADVICE: dict[type[PlaceError], str] = {
    AbsentError: "check the name",
    ForbiddenError: "get the right to it, or the credentials",
    NoSpaceError: "make room there",
}


def failures() -> tuple[type[Exception], ...]:
    """The classes of exceptions that a place may raise. What is none of them is a bug, and is not caught."""
    modules = ((sys.modules.get(module), name) for module, name in _BACKENDS)
    found = (getattr(module, name, None) for module, name in modules if module is not None)
    own = tuple(kind for kind in found if isinstance(kind, type) and issubclass(kind, Exception))
    # Until Python 3.11 that of asyncio is no other TimeoutError; a name that is no text is a UnicodeError.
    return (PlaceError, OSError, asyncio.TimeoutError, HTTPException, EOFError, UnicodeError, NotImplementedError, *own)


def is_passing(error: BaseException) -> bool:
    """Whether another try may help."""
    return _kind(error) is None


def explained(error: Exception, where: str, verb: str) -> PlaceError:
    """The error of a place that says what an exception means; ``verb`` is what could not be done to the file."""
    if isinstance(error, PlaceError):
        return error
    kind = _kind(error) or PlaceError
    said = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    advice = _ADVICE.get(kind)
    return kind(f"{where}: cannot be {verb}: {said}" + (f"; {advice}" if advice else ""))


def deny(entry: Entry | None, where: str) -> Entry:
    """The entry; raises ``AbsentError`` where there is none."""
    if entry is None:
        raise AbsentError(f"{where}: is not there, or is no file; check the name")
    return entry


def changed(where: str) -> PlaceError:
    """The error that a file is no longer the one that was listed."""
    return PlaceError(f"{where}: it changed since it was listed; run the same command again")


def _kind(error: BaseException) -> type[PlaceError] | None:
    """What an exception means for good; None where it may pass."""
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
