"""An S3 server on localhost whose answers fail as a test plans."""

import io
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

Environ = dict[str, Any]
Application = Callable[[Environ, Callable[..., Any]], Iterable[bytes]]

THROTTLED = (
    b'<?xml version="1.0"?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>'
)
FORBIDDEN = b'<?xml version="1.0"?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>'
BROKEN = b'<?xml version="1.0"?><Error><Code>InternalError</Code><Message>We encountered an error.</Message></Error>'


class Trouble(Enum):
    """How a request fails."""

    THROTTLED = "503 Slow Down", THROTTLED
    BROKEN = "500 Internal Server Error", BROKEN
    FORBIDDEN = "403 Forbidden", FORBIDDEN
    RESET = "the connection is reset before the server sees the request", b""
    CUT = "the answer ends in the middle of its body", b""
    SHORT = "half the body is sent, and the headers say that this is all", b""
    HALF_STORED = "the server stores half of what is sent, and reports success", b""
    HELD = "no answer is sent until the trouble ends", b""


@dataclass
class Planned:
    """Trouble for the next requests with a method and a path."""

    trouble: Trouble
    method: str
    path: str
    times: int
    after: int = 0
    """Requests that succeed before it."""


@dataclass
class Bucket:
    """The server, with a bucket for each test."""

    app: Application
    url: str = ""
    planned: list[Planned] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    """Method and path of every request."""
    _arrival: threading.Condition = field(default_factory=threading.Condition)
    _release: threading.Event = field(default_factory=threading.Event)

    def plan(self, trouble: Trouble, method: str, path: str, times: int = 1, after: int = 0) -> None:
        """Let the next ``times`` requests whose path ends with ``path`` fail, after ``after`` that succeed."""
        self.planned.append(Planned(trouble, method, path, times, after))

    def count(self, method: str, path: str) -> int:
        """Return the number of requests whose path ends with ``path``."""
        return sum(each.startswith(f"{method} ") and each.endswith(path) for each in self.requests)

    def wait_for(self, method: str, path: str, times: int) -> None:
        """Wait for this number of requests whose path contains ``path``."""
        with self._arrival:
            arrived = self._arrival.wait_for(
                lambda: sum(each.startswith(f"{method} ") and path in each for each in self.requests) >= times,
                timeout=300,
            )
        assert arrived, f"{times} requests {method} {path} did not come"

    def end_trouble(self) -> None:
        """Let all further requests succeed. Held ones never get an answer."""
        self.planned.clear()
        self._release.set()
        self._release = threading.Event()

    def __call__(self, environ: Environ, start: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        with self._arrival:
            self.requests.append(f"{method} {path}")
            self._arrival.notify_all()
        trouble = self._next(method, path)
        if trouble is None:
            return self.app(environ, start)
        if trouble is Trouble.RESET:
            return _reset(environ)
        if trouble is Trouble.HELD:
            self._release.wait()
            raise ConnectionAbortedError
        status, body = trouble.value
        if body:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
            return [] if method == "HEAD" else [body]
        if trouble is Trouble.HALF_STORED:
            return self.app(_halved(environ), start)
        return self._shortened(environ, start, trouble)

    def _next(self, method: str, path: str) -> Trouble | None:
        for plan in self.planned:
            if plan.times and plan.method == method and path.endswith(plan.path):
                if plan.after:
                    plan.after -= 1
                    continue
                plan.times -= 1
                return plan.trouble
        return None

    def _shortened(self, environ: Environ, start: Callable[..., Any], trouble: Trouble) -> Iterable[bytes]:
        answer: list[Any] = []
        body = b"".join(self.app(environ, lambda *given: answer.extend(given[:2])))
        half = body[: len(body) // 2]
        headers = [pair for pair in answer[1] if pair[0].lower() != "content-length"]
        said = len(half if trouble is Trouble.SHORT else body)
        start(answer[0], [*headers, ("Content-Length", str(said)), ("Connection", "close")])
        return [half]


def _reset(environ: Environ) -> Iterable[bytes]:
    connection: socket.socket = environ["werkzeug.socket"]
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.shutdown(socket.SHUT_RDWR)  # the request's handler holds it open, and closes it with a reset
    raise ConnectionResetError


def _halved(environ: Environ) -> Environ:
    body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
    half = body[: len(body) // 2]
    checksums = [name for name in environ if "CHECKSUM" in name or name in ("HTTP_CONTENT_MD5", "HTTP_X_AMZ_TRAILER")]
    kept = {name: value for name, value in environ.items() if name not in checksums}
    return kept | {"wsgi.input": io.BytesIO(half), "CONTENT_LENGTH": str(len(half))}


@contextmanager
def serving() -> Iterator[Bucket]:
    """Run the server in the block."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, type: str, message: str, *args: Any) -> None:
            """Log nothing: failures are planned."""

    bucket = Bucket(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, bucket, threaded=True, request_handler=Quiet)
    bucket.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield bucket
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
