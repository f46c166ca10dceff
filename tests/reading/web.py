"""A web server on localhost that serves ranges of files, counts what it sends, and fails as a test plans."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote


@dataclass
class Web:
    """A server of the files below ``root``. A repository of the hub is the folder with its name, for any revision."""

    root: Path
    url: str = ""
    ranges: bool = True
    token: str = ""
    """The token that the hub requires."""
    elsewhere: str = ""
    """The server to which the hub redirects for the content of files."""
    troubles: list[int | str | tuple[int, str, str]] = field(default_factory=list)
    """How the next requests fail: with a status, a status and a header, or ``cut`` for half of the answer."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Repositories by old names, from which the hub redirects."""
    sent: int = 0
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    """The path of each request, and its ``Authorization``."""
    version: str = "1"

    def answer(self, to: BaseHTTPRequestHandler) -> None:
        self.requests.append((to.path, to.headers["Authorization"]))
        trouble = self.troubles.pop(0) if self.troubles else None
        hub = re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/[^/]+/?(.*)", to.path)
        resolved = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.*)", to.path)
        if isinstance(trouble, int):
            to.send_error(trouble)
        elif isinstance(trouble, tuple):
            headers: dict[str, Any] = {trouble[1]: trouble[2]}
            self.send(to, trouble[0], **headers)
        elif (old := (hub or resolved)) and (new := self.renamed.get(old[1])):
            self.send(to, 307, Location=to.path.replace(old[1], new, 1))
        elif (hub or resolved) and self.token and to.headers["Authorization"] != f"Bearer {self.token}":
            to.send_error(401)
        elif hub and not (folder := self.root / hub[1] / hub[2]).is_dir():
            to.send_error(404)
        elif hub:
            kinds = [(path, "directory" if path.is_dir() else "file") for path in sorted(folder.iterdir())]
            entries = [{"type": kind, "path": str(path.relative_to(self.root / hub[1]))} for path, kind in kinds]
            self.send(to, 200, json.dumps(entries).encode())
        elif resolved and self.elsewhere:
            self.send(to, 302, Location=f"{self.elsewhere}/{resolved[1]}/{resolved[2]}")
        else:
            self.send_file(to, self.root / unquote("/".join(resolved.groups()) if resolved else to.path[1:]), trouble)

    def send_file(self, to: BaseHTTPRequestHandler, file: Path, trouble: object) -> None:
        if not file.is_file():
            to.send_error(404)
            return
        size = file.stat().st_size
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", to.headers["Range"] or "") if self.ranges else None
        start, stop = (int(wanted[1]), min(int(wanted[2]) + 1, size)) if wanted else (0, size)
        if wanted and start >= size:
            empty: dict[str, Any] = {"Content-Range": f"bytes */{size}"}
            self.send(to, 416, **empty)
            return
        headers = {"Content-Range": f"bytes {start}-{stop - 1}/{size}"} if wanted else {}
        with file.open("rb") as content:
            content.seek(start)
            # Whole files are sent in pieces: a client that only wants the start disconnects.
            pieces = [content.read(stop - start)] if wanted else iter(lambda: content.read(1 << 16), b"")
            self.send(to, 206 if wanted else 200, *pieces, size=stop - start, cut=trouble == "cut", **headers)

    def send(self, to: BaseHTTPRequestHandler, status: int, *pieces: bytes, size: int = -1, cut=False, **headers: str):
        to.send_response(status)
        to.send_header("Content-Length", str(size if size >= 0 else sum(map(len, pieces))))
        to.send_header("ETag", f'"{self.version}"')
        for name, value in headers.items():
            to.send_header(name, value)
        to.end_headers()
        for piece in pieces:
            part = piece[: len(piece) // 2] if cut else piece
            self.sent += len(part)  # before it is sent: the client may finish before this thread continues
            try:
                to.wfile.write(part)
            except OSError:
                break
        to.close_connection = True


@contextmanager
def serving(root: Path) -> Iterator[Web]:
    """Serve the files below a folder."""
    web = Web(root)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            web.answer(self)

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    web.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield web
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
