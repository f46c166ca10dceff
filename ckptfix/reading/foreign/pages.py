"""Text in the place of a checkpoint: what a server answered instead of the file, git-lfs pointers, and other text.

Each function gives a clause that follows the file's name, with the remedy, or None. Where the text says itself what
went wrong, the clause quotes it."""

from __future__ import annotations

import codecs
import html
import json
import re
from collections.abc import Iterator
from typing import Any

READ = 1 << 16
"""Bytes of a text that are looked at."""

AGAIN = "check the address and the right to read it, and download the file again"
_MARKUP = 1 << 14
"""Letters of a page in which its title is looked for."""

_QUOTED = 120
_ANSWER = 400
"""Letters of the longest text that may be a server's answer as a whole."""

_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_CONTROL = re.compile("[\0-\x08\x0e-\x1a\x1c-\x1f\x7f]")
_LFS = re.compile(r"version https://git-lfs\.github\.com/spec/")
_HTTP = re.compile(r"HTTP/\d(?:\.\d)? (\d{3}[^\r\n]*)")
_HTML = frozenset("html head body title meta script center h1 pre div p".split())
_PROLOG = re.compile(r"\s*(<\?.*?\?>|<!--.*?-->|<!doctype[^>]*>)\s*", re.IGNORECASE | re.DOTALL)
_ROOT = re.compile(r"<([A-Za-z_][\w.:-]*)")
_TITLES = tuple(
    re.compile(rf"<{tag}\b[^>]*>(.*?)</{tag}>", re.IGNORECASE | re.DOTALL) for tag in ("title", "h1", "h2", "body")
)
_REFUSAL = re.compile(
    r"not found|no such|invalid|denied|forbidden|unauthori[sz]ed|error|expired|unavailable|quota|too many|log ?in|"
    r"sign ?in|access|bad request|time-?out|moved|redirect|rate limit|gated|restricted",
    re.IGNORECASE,
)
_PYTHON = re.compile(
    r"^(import [\w.]+|from [\w.]+ import .+|(async )?def \w+\(.*|class \w+.*:|@\w[\w.]*(\(.*)?)\s*$", re.MULTILINE
)


def as_text(data: bytes) -> str | None:
    """Return the text that bytes are, with or without a byte order mark; None if they are none.

    The bytes may end in the middle of a letter."""
    mark, encoding = next((pair for pair in _BOMS if data.startswith(pair[0])), (b"", "utf-8"))
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(data.removeprefix(mark))
    except UnicodeDecodeError:
        return None
    return None if _CONTROL.search(text) or not text.strip() else text.strip()


def name_text(text: str, size: int) -> str:
    """Return what the text of a file is; ``size`` is that of the file in bytes."""
    for namer in (_pointer, _headers, _json, _markup, _known):
        if (said := namer(text, size)) is not None:
            return said
    if len(text) <= _ANSWER and _REFUSAL.search(text):
        return f"the answer of a server and not a checkpoint: {_quoted(text)}; {AGAIN}"
    return f"a text file and not a checkpoint: {_quoted(text)}; is it the right file?"


def _quoted(text: str) -> str:
    """Return the beginning of a text, as one line in quotes."""
    line = " ".join(text.split())
    return f'"{line}"' if len(line) <= _QUOTED else f'"{line[: _QUOTED - 1]}…"'


def _pointer(text: str, size: int) -> str | None:
    if not _LFS.match(text):
        return None
    declared, digest = re.search(r"^size (\d{1,18})\s*$", text, re.MULTILINE), re.search(r"oid sha256:(\w{8,64})", text)
    of = f" of a file of {int(declared[1])} bytes" if declared else ""
    of += f" with the sha256 {digest[1][:8]}…" if digest else ""
    return (
        f"a git-lfs pointer{of}, not the file itself (it has {size} bytes); run `git lfs pull` in the repository,"
        " or download the file from its page there"
    )


def _headers(text: str, size: int) -> str | None:
    answer = _HTTP.match(text)
    if answer is None:
        return None
    _, _, body = text.replace("\r\n", "\n").partition("\n\n")
    said = _title(body) or answer[1]
    return f"the answer of a web server with its headers, and not a checkpoint: {_quoted(said)}; {AGAIN}"


def _json(text: str, size: int) -> str | None:
    if text[0] not in "{[":
        return None
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        if not re.match(r"[{\[]\s*[{\"]", text):
            return None
        state = "" if size > READ else ", cut short or damaged,"
        return f"a JSON file{state} and not a checkpoint; name the file that holds the weights"
    if isinstance(parsed, dict) and size <= READ:
        said = ", ".join(dict.fromkeys(_complaints(parsed)))
        if said:
            return f"the answer of a web service and not a checkpoint: {_quoted(said)}; {AGAIN}"
    names = ", ".join(f"{name!s:.30}" for name in list(parsed)[:4]) if isinstance(parsed, dict) else ""
    held = f" with {names}" if names else ""
    return f"a JSON file{held}, and not a checkpoint; name the file that holds the weights"


_FAULTS = ("error", "errors", "error_description", "Error", "fault")
_SAID = ("message", "Message", "detail", "msg", "title", "reason", "description")
_FEW = 8
"""Members of an object up to which a message in it is all that it has to say."""


def _complaints(answer: dict[str, Any]) -> Iterator[str]:
    """Yield what an answer says went wrong: texts under the names that web services give them."""
    faults = [answer[name] for name in _FAULTS if answer.get(name)]
    if faults or len(answer) <= _FEW:
        yield from _texts([*faults, *(answer[name] for name in _SAID if isinstance(answer.get(name), str))])


def _texts(values: list[Any]) -> Iterator[str]:
    for value in values[:_FEW]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            yield from _texts(value)
        elif isinstance(value, dict):
            yield from _texts([value[name] for name in (*_SAID, "code") if name in value][:1])


def _markup(text: str, size: int) -> str | None:
    if text[0] != "<":
        return None
    text, at = text[:_MARKUP], 0
    is_page = text[:14].lower() == "<!doctype html"
    while (prolog := _PROLOG.match(text, at)) is not None:
        at = prolog.end()
    root = _ROOT.match(text, at)
    name = root[1].rpartition(":")[2] if root else ""
    if name.lower() in ("error", "errorresponse"):
        fields = re.findall(r"<(Code|Message)>(.*?)</\1>", text, re.IGNORECASE | re.DOTALL)
        said = ": ".join(html.unescape(value).strip() for _, value in fields)
        what = "the error answer of a storage service and not a checkpoint"
        return f"{what}: {_quoted(said)}; {AGAIN}" if said else f"{what}; {AGAIN}"
    if is_page or name.lower() in _HTML:
        title = _title(text)
        entitled = f", {_quoted(title)}" if title else ""
        remedy = AGAIN
        if "Google Drive" in title:
            remedy = "confirm the download in a browser, or wait until the quota is free again, and fetch it again"
        return f"a web page{entitled}, and not a checkpoint: an error or a login page in its place; {remedy}"
    if name:
        return f"an XML file (<{name:.30}>) and not a checkpoint; is it the right file?"
    return None


def _title(page: str) -> str:
    """Return what a page is called: its title, or else its first heading or text."""
    for pattern in _TITLES:
        if (found := pattern.search(page[:_MARKUP])) is not None:
            text = " ".join(html.unescape(re.sub(r"<[^<>]*>", " ", found[1])).split())
            if text:
                return text
    return ""


_KNOWN = (
    (re.compile(r"-----BEGIN PGP"), "encrypted by PGP; decrypt it first"),
    (re.compile(r"age-encryption\.org/"), "encrypted by age; decrypt it first"),
    (re.compile(r"4\n1\n3\nV 1\n"), "a Lua Torch7 file; read it with the package torchfile, and save a state_dict"),
    (
        re.compile(r"model_checkpoint_path: "),
        "TensorFlow's note of its latest checkpoint; load it with TensorFlow and save its weights from there",
    ),
    (re.compile(r"\[(net|convolutional)\]"), "a Darknet configuration and not its weights; name the .weights file"),
)
"""How texts begin that have a name."""


def _known(text: str, size: int) -> str | None:
    for pattern, said in _KNOWN:
        if pattern.match(text):
            return said
    if text.startswith("#!") or len(_PYTHON.findall(text)) >= 2 or (_PYTHON.match(text) and "\n" in text):
        return "source code and not a checkpoint; name the file that holds the weights"
    return None
