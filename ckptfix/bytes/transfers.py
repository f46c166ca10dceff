"""Errors of places (a disk, a server, a bucket), and retries of those that may pass."""

import asyncio
import errno
import math
import random
import sys
import time
from collections.abc import Callable, Mapping
from email.message import Message
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from typing import TypeVar

from msgspec import Struct

from ckptfix.core.progress import report_pause
from ckptfix.errors import CkptfixError

T = TypeVar("T")


class PlaceError(CkptfixError):
    """A place, or a file of it, cannot be listed, read or written."""


class AbsentError(PlaceError):
    """The file, folder or bucket does not exist."""


class ForbiddenError(PlaceError):
    """The user has no permission."""


class NoSpaceError(PlaceError):
    """The disk has too little space for a file."""


class TransferError(PlaceError):
    """All attempts of a transfer failed."""


# The base classes of exceptions that backends raise besides `OSError`.
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

_FORBIDDEN = ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "DefaultCredentialsError")
_SENSELESS = ("ParamValidationError", "InvalidURL", "UnsupportedProtocol")

# Errors that do not go away when the operation is retried.
_FINAL = {
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), AbsentError),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), ForbiddenError),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), NoSpaceError),
    **dict.fromkeys((errno.EISDIR, errno.EEXIST, errno.EINVAL, errno.ENAMETOOLONG), PlaceError),
    **dict.fromkeys((errno.EILSEQ, errno.ELOOP, errno.ENOSYS), PlaceError),
}

_STATUS = {401: ForbiddenError, 403: ForbiddenError, 404: AbsentError, 410: AbsentError}
_PASSING = {408, 409, 412, 423, 425, 429}  # the statuses below 500 that may succeed when retried

_ADVICE: dict[type[PlaceError], str] = {
    AbsentError: "check the name",
    ForbiddenError: "get permission or credentials",
    NoSpaceError: "free space there",
}


def failures() -> tuple[type[Exception], ...]:
    """Return the classes of exceptions that a place may raise. Any other exception is a bug, and is not caught."""
    modules = ((sys.modules.get(module), name) for module, name in _BACKENDS)
    found = (getattr(module, name, None) for module, name in modules if module is not None)
    own = tuple(kind for kind in found if isinstance(kind, type) and issubclass(kind, Exception))
    # Before Python 3.11, asyncio's TimeoutError is not the built-in one; names that are not text raise UnicodeError.
    return (PlaceError, OSError, asyncio.TimeoutError, HTTPException, EOFError, UnicodeError, NotImplementedError, *own)


def explained(error: Exception, where: str, verb: str) -> PlaceError:
    """Return the ``PlaceError`` for an exception; ``verb`` (a participle) is what could not be done to the file."""
    if isinstance(error, PlaceError):
        return error
    kind = final_kind(error) or PlaceError
    said = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    advice = _ADVICE.get(kind)
    return kind(f"{where}: cannot be {verb}: {said.splitlines()[0]}" + (f"; {advice}" if advice else ""))


def final_kind(error: BaseException) -> type[PlaceError] | None:
    """Return the class of a permanent error; None if a retry may help."""
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
    if status is not None and 300 <= status < 500 and status not in _PASSING:
        return _STATUS.get(status, PlaceError)
    return None


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of an exception, which each backend stores differently; None if it has none."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        status = getattr(response, "status_code", None)  # requests, httpx
    for name in ("status", "code", "status_code"):  # aiohttp, gcsfs, azure
        status = status if isinstance(status, int) else getattr(error, name, None)
    return status if isinstance(status, int) else None


def _asked_pause(error: BaseException) -> float:
    """Return the seconds that a server asks to wait (``Retry-After``, RFC 9110); 0 if it does not ask."""
    headers = getattr(error, "headers", None) or getattr(getattr(error, "response", None), "headers", None)
    said = str(headers.get("Retry-After") or "") if isinstance(headers, Mapping | Message) else ""
    if said.isdecimal():
        return float(said)
    try:
        return max(parsedate_to_datetime(said).timestamp() - time.time(), 0.0) if said else 0.0
    except ValueError:  # not a date
        return 0.0


class Patience(Struct, frozen=True):
    """How often to retry, and how long to wait: about ``first`` seconds, then twice that and so on up to ``longest``,
    or as long as a server asks, up to ``asked``.

    Pauses vary at random by up to half, so that workers that were throttled together do not return together."""

    attempts: int = 6
    first: float = 0.5
    longest: float = 30.0
    asked: float = 300.0

    def pause(self, tried: int) -> float:
        """Return the seconds to wait after ``tried`` attempts."""
        return float(min(self.first * 2 ** (tried - 1), self.longest) * random.uniform(0.5, 1.5))


# About 15 seconds in all. Backends also retry a few times themselves before one of these attempts fails.
BATCH_PATIENCE = Patience()


def persistently(action: Callable[[], T], where: str, verb: str, patience: Patience | None = None) -> T:
    """Return the result of ``action``, retrying it after failures that may pass.

    Raises a ``PlaceError`` at once after a permanent failure (no permission, missing, no space), and ``TransferError``
    after the last attempt."""
    patience = patience or BATCH_PATIENCE
    for tried in range(1, patience.attempts + 1):
        try:
            return action()
        except failures() as error:
            if final_kind(error) is not None:
                raise explained(error, where, verb) from error
            asked = _asked_pause(error)
            if tried == patience.attempts or asked > patience.asked:
                tries = f"{tried} tries" if tried > 1 else "1 try"
                later = f"in {math.ceil(asked)} s, as the server asks" if asked else "later"
                raise TransferError(f"{explained(error, where, verb)} ({tries}); run it again {later}") from error
        seconds = max(patience.pause(tried), asked)
        report_pause(f"{where}: its server asks to wait" if asked else f"{where} cannot be {verb} now", seconds)
        time.sleep(seconds)
    raise AssertionError("nothing was tried")
