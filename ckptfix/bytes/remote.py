"""Files at URLs, read in ranges: the names in a checkpoint of any size take a few hundred kB.

``http``, ``https`` and ``hf`` need no package; every other scheme is handled by fsspec."""

from __future__ import annotations

import json
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from http.client import HTTPResponse
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import quote, unquote
from urllib.request import HTTPRedirectHandler, Request, build_opener

from ckptfix.bytes.files import OpenFile
from ckptfix.bytes.transfers import Patience, PlaceError, TransferError, persistently
from ckptfix.core.wording import shell_join
from ckptfix.errors import UnreadableError, UsageError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

T = TypeVar("T")


# Bytes of the smallest and largest request. The smallest takes hardly longer than one for a single byte; sequential
# reads double the size each time.
LEAST, MOST = 1 << 16, 8 << 20
KEPT = 8  # answers cached in memory besides the first: two for each thread that reads
TIMEOUT = 60.0  # seconds without a byte after which a request has failed
PATIENCE = Patience(attempts=4, asked=60.0)  # about four seconds unless the server asks for more: the user waits

# The extra of ckptfix that installs the package of a scheme.
EXTRAS = {"s3": "s3", "gs": "gcs", "gcs": "gcs", "hf": "hf", "az": "azure", "abfs": "azure", "abfss": "azure"}

# The fields in which backends give the version of a file, most reliable first.
STAMPS = "ETag etag md5Hash blob_id content_md5 LastModified mtime modified updated created".split()

_HUB = re.compile(r"hf://(?:(datasets|spaces)/)?([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.*))?")


class Answer(NamedTuple):
    """A range of a file, the size of the whole file, and a text that identifies its version."""

    data: bytes
    size: int
    stamp: str


class RemoteFile(OpenFile):
    """A file at a URL. Raises ``UnreadableError`` if it cannot be read, or if its server does not send ranges."""

    is_remote = True

    def __init__(self, url: str) -> None:
        self.path, self.descriptor = url, -1
        self._range = _range_of(url)
        self._lock = threading.Lock()
        self._answers: deque[tuple[int, bytes]] = deque(maxlen=KEPT)
        first = self._ask(0, LEAST)
        self._head, self._length, self._version = first.data, first.size, first.stamp

    @property
    def size(self) -> int:
        return self._length

    def read(self, start: int, count: int) -> bytes:
        stop, parts = min(start + count, self._length), []
        while start < stop:
            begin, data = self._known(start) or self._fetched(start, stop)
            parts.append(data[start - begin : stop - begin])
            start += len(parts[-1])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def fill(self, buffer: memoryview, start: int) -> None:
        data = self.read(start, buffer.nbytes)
        if len(data) < buffer.nbytes:
            raise self.ends_early(start, buffer.nbytes, len(data))
        buffer[:] = data

    def refuse_changed(self) -> None:
        self._check(self._ask(0, 1))

    def _known(self, start: int) -> tuple[int, bytes] | None:
        with self._lock:
            for begin, data in ((0, self._head), *self._answers):
                if begin <= start < begin + len(data):
                    return begin, data
        return None

    def _fetched(self, start: int, stop: int) -> tuple[int, bytes]:
        with self._lock:
            before = next((len(data) for begin, data in self._answers if begin + len(data) == start), 0)
        end = start + min(max(stop - start, 2 * before, LEAST), MOST)
        if end >= self._length:  # the end of a file, such as the directory of an archive, is read backwards
            start, end = max(0, min(start, self._length - LEAST)), self._length
        answer = self._ask(start, end)
        self._check(answer)
        with self._lock:
            self._answers.append((start, answer.data))
        return start, answer.data

    def _check(self, answer: Answer) -> None:
        if (answer.size, answer.stamp) != (self._length, self._version):
            raise UnreadableError(f"{self.path}: changed while it was read; run the same command again")

    def _ask(self, start: int, stop: int) -> Answer:
        return _answered(lambda: self._complete(start, stop), self.path, "read")

    def _complete(self, start: int, stop: int) -> Answer:
        answer = self._range(start, stop)
        if len(answer.data) < min(stop, answer.size) - start:
            raise TransferError(f"{self.path}: {len(answer.data)} bytes were received of a range of {stop - start}")
        return answer


def _answered(action: Callable[[], T], url: str, verb: str) -> T:
    try:
        return persistently(action, url, verb, PATIENCE)
    except PlaceError as error:
        raise UnreadableError(*error.args) from error


def download_advice(url: str) -> str:
    """Return the advice to download a file, as the end of a sentence."""
    words = download_words(url)
    return f"download it first: {shell_join(words)}" if words else "copy it to this machine first"


def download_words(url: str) -> list[str]:
    """Return the command that downloads a checkpoint into the working directory, as arguments; empty if none does."""
    if _HUB.fullmatch(url):
        kind, name, revision, path = _hub_parts(url)
        words = ["hf", "download", name, *([] if path.endswith(".index.json") or not path else [path])]
        words += ["--repo-type", kind.removesuffix("s")] if kind else []
        words += ["--revision", revision] if revision != "main" else []
        return [*words, "--local-dir", "."]
    return ["curl", "-LO", url] if url.startswith(("http://", "https://")) else []


def local_name(url: str) -> str:
    """Return the path of a checkpoint in the working directory after the command of ``download_words``."""
    if _HUB.fullmatch(url):
        return _hub_parts(url)[3] or "."
    return url.partition("?")[0].rstrip("/").rpartition("/")[2]


def files_beside(url: str) -> list[str] | None:
    """Return the names of the files in the folder of a URL, sorted; None if its server does not list them."""
    scheme = url.partition("://")[0]
    if scheme in ("http", "https"):
        return None
    listed = partial(_hub_names if scheme == "hf" else _store_names, url)
    return sorted(_answered(listed, url, "listed"))


# ---- servers


class _Redirects(HTTPRedirectHandler):
    """A handler of redirects that sends the token to the same server only (for a renamed repository)."""

    def redirect_request(self, old: Request, *answer: Any) -> Request | None:
        new = super().redirect_request(old, *answer)
        token = old.unredirected_hdrs.get("Authorization")
        if new is not None and token is not None and (new.type, new.host) == (old.type, old.host):
            new.add_unredirected_header("Authorization", token)
        return new


def _opened(request: Request, token: str | None) -> HTTPResponse:
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        answer: HTTPResponse = build_opener(_Redirects).open(request, timeout=TIMEOUT)
    except HTTPError:
        raise
    except URLError as error:  # it wraps the error of the connection
        raise error.reason if isinstance(error.reason, OSError) else error from error
    return answer


def _http_range(name: str, url: str, token: str | None, start: int, stop: int) -> Answer:
    """Return a range of a file of an HTTP server. The token is for that server only, and not for one that it redirects
    to."""
    request = Request(url, headers={"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"})
    try:
        with _opened(request, token) as answer:
            stamp = answer.headers["ETag"] or answer.headers["Last-Modified"] or ""
            if answer.status == 206:
                ranged = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", answer.headers["Content-Range"] or "")
                if ranged is not None and int(ranged[1]) == start:
                    return Answer(answer.read(stop - start), int(ranged[2]), stamp)
            elif start == 0 and len(data := answer.read(LEAST)) < LEAST:  # a small file as a whole
                return Answer(data[:stop], len(data), stamp)
    except HTTPError as error:
        if error.code == 416 and start == 0 and error.headers.get("Content-Range") == "bytes */0":
            return Answer(b"", 0, "")
        if error.code != 416 or start:
            raise _explained(name, error) from error
    raise UnreadableError(f"{name}: its server sends only whole files, not ranges; {download_advice(name)}")


def _store_range(system: AbstractFileSystem, path: str, start: int, stop: int) -> Answer:
    if start == 0:
        system.invalidate_cache(path)
    info = system.info(path)
    size = int(info.get("size") or 0)
    stop = min(stop, size)
    return Answer(read_range(system, path, start, stop) if start < stop else b"", size, stamp_of(info))


def _range_of(url: str) -> Callable[[int, int], Answer]:
    """Return the function that reads a range of a file (``start``, ``stop``); it returns fewer bytes at the end."""
    scheme = url.partition("://")[0]
    if scheme == "hf":
        kind, name, revision, path = _hub_parts(url)
        place = f"{kind}/{name}" if kind else name
        resolved = f"{_endpoint()}/{place}/resolve/{quote(revision, safe='')}/{quote(path)}"
        return partial(_http_range, url, resolved, _token())
    if scheme in ("http", "https"):
        return partial(_http_range, url, url, _token() if url.startswith(f"{_endpoint()}/") else None)
    return partial(_store_range, *file_system(url))


def file_system(url: str) -> tuple[AbstractFileSystem, str]:
    """Return the file system of fsspec for a URL, and the path in it. The backend finds keys and endpoints as it always
    does. fsspec shares one file system of each kind between all threads of a process."""
    from fsspec.core import url_to_fs

    scheme = url.partition("://")[0]
    try:
        system, path = url_to_fs(url)
    except ImportError as error:
        extra = EXTRAS.get(scheme)
        advice = f"install it with pip install 'ckptfix[{extra}]'" if extra else str(error)
        raise UsageError(f"{url}: the package for {scheme}:// is not installed; {advice}") from error
    except ValueError as error:
        raise UsageError(f"{url}: {error}; name a folder, or a URL that fsspec knows") from error
    return system, path.rstrip("/")


def read_range(system: AbstractFileSystem, path: str, start: int, stop: int) -> bytes:
    """Read a range of a file in one request."""
    if system.async_impl:
        return bytes(system.cat_file(path, start=start, end=stop))
    with system.open(path, "rb", cache_type="none") as file:  # the default cache reads megabytes ahead
        file.seek(start)
        return bytes(file.read(stop - start))


def stamp_of(info: Mapping[str, Any]) -> str:
    """Return as text the version of a file that a backend gives, which may be a number or a date."""
    value = next((info[field] for field in STAMPS if info.get(field)), "")
    if isinstance(value, datetime):
        value = value.timestamp()
    return f"{value:.6f}" if isinstance(value, float) else str(value).strip('"')


def _store_names(url: str) -> list[str]:
    system, path = file_system(url)
    found = system.ls(path, detail=True)
    return [info["name"].rstrip("/").rpartition("/")[2] for info in found if info["type"] == "file"]


# ---- the Hugging Face hub (https://huggingface.co/docs/hub/api)


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def _token() -> str | None:
    """Return the token in HF_TOKEN, or the one that ``hf auth login`` stored."""
    # https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables
    if token := os.environ.get("HF_TOKEN"):
        return token
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    try:
        stored = Path(os.environ.get("HF_TOKEN_PATH") or Path(home, "token")).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return stored.strip() or None


def _explained(url: str, error: HTTPError) -> Exception:
    """Return the error for a refusal of the hub, which also refuses unknown names; any other error as it is."""
    if not url.startswith("hf://"):
        return error
    kind, name, revision, _ = _hub_parts(url)
    code = error.headers["X-Error-Code"]
    if code == "GatedRepo":
        page = f"{_endpoint()}/{kind}/{name}" if kind else f"{_endpoint()}/{name}"
        then = " for your token" if _token() else ", and set HF_TOKEN to your token"
        return UnreadableError(f"{url}: access is granted on request; ask for it at {page}{then}")
    if code == "RevisionNotFound":
        return UnreadableError(f"{url}: the repository has no revision {revision}; name a branch, a tag or a commit")
    if error.code not in (401, 403):
        return error
    then = " and the permissions of your token" if _token() else ", and set HF_TOKEN if it is private or gated"
    return UnreadableError(f"{url}: no such repository, or no access to it; check the name{then}")


def _hub_parts(url: str) -> tuple[str, str, str, str]:
    """Split a URL of the hub into the kind of repository (empty for models), its name, the revision and the path."""
    match = _HUB.fullmatch(url)
    if match is None:
        raise UsageError(
            f"{url}: name a repository as hf://OWNER/NAME, hf://OWNER/NAME/FILE or hf://OWNER/NAME@REVISION"
        )
    return match[1] or "", match[2], unquote(match[3] or "main"), match[4] or ""


def _hub_names(url: str) -> list[str]:
    kind, name, revision, path = _hub_parts(url)
    where = f"{_endpoint()}/api/{kind or 'models'}/{name}/tree/{quote(revision, safe='')}/{quote(path)}".rstrip("/")
    names: list[str] = []
    while where:
        try:
            with _opened(Request(where), _token()) as answer:
                entries = json.load(answer)
                more = re.search(r'<([^>]+)>;\s*rel="next"', answer.headers["Link"] or "")
        except HTTPError as error:
            raise _explained(url, error) from error
        names += [str(entry["path"]).rpartition("/")[2] for entry in entries if entry["type"] == "file"]
        where = more[1] if more else ""
    return names
