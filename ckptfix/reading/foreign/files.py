"""Recognises files that are not checkpoints, and names what they are instead.

torch's messages for these (``invalid load key, 'v'``, ``Unsupported operand 60``) name only the first byte. Files are
tested here only after all formats failed, so that no checkpoint is called something else. File names count only if the
content does not tell."""

import base64
import codecs
import html
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Struct

from ckptfix.bytes.sources import BLOCK, Content
from ckptfix.core.facts import Fact, Kind
from ckptfix.reading.archives.wrapped import looks_like_checkpoint
from ckptfix.reading.foreign import signatures
from ckptfix.reading.foreign.signatures import remedy
from ckptfix.reading.sniffing import is_pickle

_RIGHT = "is it the right file?"
_HDF5 = "open it with h5py or Keras and save its arrays from there"

# The end of a table of LevelDB (`table/format.h`), the form of a TensorFlow checkpoint's index.
_TABLE_MAGIC = bytes.fromhex("57fb808b247547db")

_HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
_BASE64 = re.compile(rb"(data:[\w/.+-]*;base64,)?([A-Za-z0-9+/\s]{64,})")
# A chunked HTTP response (RFC 9112, section 7.1): each chunk follows its size.
_CHUNKED = re.compile(
    rb"(?:HTTP/.{1,60000}?\r\n\r\n)?[0-9A-Fa-f]{1,15}[ \t]*(?:;[^\r\n]{0,200})?\r\n(.{1,512})", re.DOTALL
)

_SIGNS = 16  # characters of a changed encoding that are not a coincidence
_SCANNED = 64 << 20  # bytes that are tested for UTF-8
_MANGLED = (b"version: 1\r\n", b"\x80\x02\x8a\r\n")
# Suffixes of unfinished downloads.
UNFINISHED = frozenset(".crdownload .part .partial .download .opdownload .incomplete .aria2 .!ut .!qb".split())

_ZLIB = (b"x\x01", b"x^", b"x\x9c", b"x\xda")
_ARRAY_OF_JOBLIB = b"joblib.numpy_pickle"
_JOBLIB = "if you trust its source, load it with joblib.load and save its weights as a state_dict"
_LEAST_TEXT = 8  # bytes of text that are not a coincidence
_ZERO_HEAD = 64  # zeros at the start that are not a coincidence
_NOISE = 4096  # bytes that are needed to measure the entropy
_EVEN = 7.9  # bits of entropy per byte from which bytes look random; float32 weights have less than 7.5


def name_foreign_file(content: Content) -> str | None:
    """Return what the file is, with the remedy, if it is of a known kind; None otherwise."""
    for namer in _NAMERS:
        if (said := namer(content)) is not None:
            return f"{content.path}: {said}"
    return None


def name_mangled(content: Content) -> str | None:
    """Return how a transfer as text damaged a checkpoint irreversibly, as a clause; None for any other file."""
    if content[:16].startswith(_MANGLED):
        return "a transfer in text mode turned every line feed into CR LF; transfer it again in binary mode"
    head = content[:READ]
    replaced, letters = _made_letters(content) if as_text(head) is None else (0, 0)
    again = "fetch it again in binary mode (not as response text or through an editor)"
    if replaced >= _SIGNS:
        return f"was saved as text: every non-text byte became U+FFFD, which cannot be undone; {again}"
    # Pickles of protocol 0 and 1 store the bytes of tensors as text anyway.
    is_text = is_pickle(content) and head[8:9] != b"{"
    if letters >= _SIGNS and not is_text:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)
        page = "cp1252" if any(ord(letter) > 0xFF for letter in text) else "latin-1"
        if looks_like_checkpoint(text.encode(page, "ignore")):
            return f"was saved as text: bytes from 0x80 on were encoded as UTF-8; {again}"
    if _is_utf16(head):
        return (
            "was saved as UTF-16 text, as PowerShell's `>` does: some bytes were changed and some lost, which cannot "
            "be undone; fetch it again into a file (curl -o, Invoke-WebRequest -OutFile)"
        )
    return None


def is_chunked(content: Content) -> bool:
    """Return whether a file is a checkpoint as a chunked HTTP response, with the sizes of the chunks in it."""
    match = _CHUNKED.match(content[:READ])
    return match is not None and looks_like_checkpoint(match[1])


def _transcoded(content: Content) -> str | None:
    """Return how a checkpoint was encoded for a transfer, and how to decode it; None for any other file."""
    head = content[:READ]
    if (match := _BASE64.match(head)) and looks_like_checkpoint(_decoded(match[2])):
        return "is a checkpoint written as base64 text; decode it first (base64 -d FILE > NEW)"
    if is_chunked(content):
        return "is a web server's chunked response, chunk sizes included; fetch it with curl -o, which removes them"
    return None


def _decoded(letters: bytes) -> bytes:
    """Return the first bytes of base64 text."""
    letters = b"".join(letters.split())[:1024]
    return base64.b64decode(letters[: len(letters) // 4 * 4])


def _made_letters(content: Content) -> tuple[int, int]:
    """Count U+FFFD and the letters of Latin-1 in a file that is UTF-8; 0 for other files, and for few letters."""
    decoder, replaced, letters = codecs.getincrementaldecoder("utf-8")(), 0, 0
    signs = 0
    for start in range(0, min(len(content), _SCANNED), BLOCK):
        try:
            text = decoder.decode(content[start : start + BLOCK])
        except UnicodeDecodeError:
            return 0, 0
        signs += len(text)
        replaced += text.count("\ufffd")
        letters += len(text.encode("latin-1", "ignore")) - len(text.encode("ascii", "ignore"))
    return replaced, letters if letters > signs // 10 else 0


def _is_utf16(head: bytes) -> bool:
    """Return whether bytes are UTF-16 but not text: each byte was decoded with a code page of a few hundred letters."""
    upper = head[3::2] if head.startswith(codecs.BOM_UTF16_LE) else head[2::2]
    is_marked = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) and len(upper) >= _LEAST_TEXT
    return is_marked and all(byte < 0x30 or byte == 0xFF for byte in upper) and as_text(head) is None


def _signed(content: Content) -> str | None:
    head = content[:32]
    if any(content[at : at + 8] == _HDF5_MAGIC for at in (0, 512, 1024, 2048)):
        kind = "a Keras model in HDF5" if b"keras" in content[:READ] else "an HDF5 file (Keras, h5py)"
        return f"{kind}, not a PyTorch checkpoint; {_HDF5}"
    head = content[:READ]
    for known in signatures.signatures():
        if known.begins.match(head, known.at):
            return f"{known.what}, not a PyTorch checkpoint; {known.remedy}"
    if content[-8:] == _TABLE_MAGIC:
        return f"the index of a TensorFlow checkpoint (the weights are in its .data files); {remedy('tensorflow')}"
    if head[:2] == b"BM" and int.from_bytes(head[2:6], "little") == len(content):
        return f"a bitmap image, not a PyTorch checkpoint; {_RIGHT}"
    at = int.from_bytes(content[60:64], "little")
    if head[:2] == b"MZ" and content[at : at + 4] == b"PE\0\0":
        return f"a program or library of Windows, not a PyTorch checkpoint; {_RIGHT}"
    return None


def name_joblib(content: Content) -> str | None:
    """Name a file of joblib.dump: a pickle with the bytes of arrays between its opcodes, often compressed with zlib."""
    head = content[:READ]
    if head.startswith(b"\x80") and _ARRAY_OF_JOBLIB in head:
        return f"a joblib file with NumPy arrays between its pickles, which torch cannot read; {_JOBLIB}"
    if head.startswith(_ZLIB):
        try:
            inside = zlib.decompressobj().decompress(head, 64)
        except zlib.error:
            return None
        if looks_like_checkpoint(inside):
            return f"a zlib stream, as joblib.dump(…, compress=…) writes it; {_JOBLIB}, or expand it with zlib"
    return None


def _text(content: Content) -> str | None:
    head = content[:READ]
    text = as_text(head)
    if text is None or looks_like_checkpoint(head) or (len(head) < _LEAST_TEXT and text[0] != "<"):
        return None
    return name_content(text, len(content))


def _zeros(content: Content) -> str | None:
    if content[:1024].strip(b"\0") or content[-1024:].strip(b"\0"):
        return None
    return (
        f"only zeros at its start and end ({len(content)} bytes): the space was reserved, but the download"
        " never finished; fetch it again"
    )


def _zero_head(content: Content) -> str | None:
    head = content[:READ]
    zeros = len(head) - len(head.lstrip(b"\0"))
    if zeros < _ZERO_HEAD:
        return None
    least = "at least " if zeros == len(head) else ""
    return (
        f"begins with {least}{zeros} zeros in place of the header of a checkpoint: that part never arrived, or was"
        " wiped; fetch it again"
    )


def _by_name(content: Content) -> str | None:
    """Name a file by its name and folder, if its content does not tell."""
    path = Path(content.member or content.path)
    suffix = path.suffix.lower()
    if suffix == ".aria2":
        return "aria2's record of a download, not the file itself; resume it with `aria2c -c`, then name the file"
    if suffix in UNFINISHED:
        return f"an unfinished download (its name ends in {path.suffix}); resume it, or fetch the file again"
    if re.search(r"\.data-\d{5}-of-\d{5}$", path.name):
        return f"by its name, the data of a TensorFlow checkpoint; {remedy('tensorflow')}"
    if path.parent.name == "data" and path.name.isdigit():
        return "by its location, a storage of an unpacked torch file; name the folder that has data.pkl"
    return None


def _noise(content: Content) -> str | None:
    head = content[:READ]
    if len(head) < _NOISE:
        return None
    entropy = -sum(count / len(head) * math.log2(count / len(head)) for count in Counter(head).values())
    if entropy < _EVEN:
        return None
    return (
        f"neither a torch file nor safetensors (it starts with {head[:8]!r}), and its bytes look random, as those of"
        " encrypted or packed files do; decrypt or unpack it first, or fetch it again"
    )


def describe_unknown(content: Content) -> str:
    """Describe an unknown file by its name, its entropy, or its first bytes."""
    head = content[:8]
    plain = f"neither a torch file nor safetensors (it starts with {head!r}); is it the right file, and is it complete?"
    return _by_name(content) or _zero_head(content) or _noise(content) or plain


# In the order in which they are tried.
_NAMERS: tuple[Callable[[Content], str | None], ...] = (_zeros, name_mangled, _transcoded, name_joblib, _signed, _text)


SEARCHED = 1 << 16  # bytes at the start of a file in which a checkpoint may begin after other data

_ZIP = re.compile(
    rb"PK\x03\x04.{26}[^\0]{0,1024}?(data\.pkl|model\.json|version|constants\.pkl|data/\d|code/)", re.DOTALL
)
_LEGACY = re.compile(rb"\x80[\x02-\x05](?:\x95.{8})?\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19\.", re.DOTALL)
_SAFETENSORS = re.compile(rb"(?=(.{6}\0\0)\{\s*\")", re.DOTALL)
_STARTS = (b"PK\x03\x04", b"\x80\x02\x8a\nl\xfc\x9cF")
_BARE_LINE_FEED = re.compile(rb"(?<!\r)\n")
_MANGLED_LINES = 4  # line feeds after carriage returns that are not a coincidence, if there are no others


class Undone(Struct, frozen=True):
    """A content with its damage undone, and the damage.

    If ``exact``, the result is right only if it has no other damage: otherwise it is unknown which tensors are intact.
    """

    content: Content
    cause: Fact
    exact: bool = False


def undo(content: Content) -> Undone | None:
    """Return the content with its damage undone; None if it has none that can be undone."""
    if is_chunked(content):
        return None
    if _is_mangled(content):
        whole = content[:].replace(b"\r\n", b"\n")
        return Undone(Content(content.path, whole, None, content.member), Fact(Kind.CRLF), exact=True)
    if content[:4] == _STARTS[0] or content[: len(_STARTS[1])] == _STARTS[1]:
        return None
    end = 8 + int.from_bytes(content[:8], "little")
    if content[8:9] == b"{" and end > 9 and content[end - 1 : end] in (b"}", b" "):
        return None  # what begins later was appended to a safetensors file
    start = min(_starts(content), default=None)
    if start is None:
        return None
    cause = Fact.of(Kind.PRECEDED, nbytes=start, head=content[: min(start, 20)])
    return Undone(content.window(start, len(content)), cause)


def _is_mangled(content: Content) -> bool:
    head = content[:SEARCHED]
    if head.count(b"\r\n") < _MANGLED_LINES or _BARE_LINE_FEED.search(head):
        return False
    # Each block begins one byte early, so that it includes a carriage return before its first line feed.
    blocks = (content[max(0, start - 1) : start + BLOCK] for start in range(0, len(content), BLOCK))
    return not any(_BARE_LINE_FEED.search(block, 1) for block in blocks)


def _starts(content: Content) -> Iterator[int]:
    """Yield the positions after the start at which a checkpoint of any format seems to begin."""
    head = content[: SEARCHED + 64]
    for pattern in (_ZIP, _LEGACY):
        yield from (match.start() for match in pattern.finditer(head) if match.start())
    for match in _SAFETENSORS.finditer(head):
        length = int.from_bytes(match[1], "little")
        end = match.start() + 8 + length
        if match.start() and length >= 2 and content[max(end - 1, 0) : end] in (b"}", b" "):
            yield match.start()


READ = 1 << 16  # bytes of a file that are tested for text
AGAIN = "check the URL and your access to it, and download the file again"
_MARKUP = 1 << 14  # characters of a page that are searched for its title
_QUOTED = 120
_ANSWER = 400  # characters of the longest text that may be a server's error message
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
    """Decode bytes as text, with or without a byte order mark; None if they are not text.

    The bytes may end in the middle of a character."""
    mark, encoding = next((pair for pair in _BOMS if data.startswith(pair[0])), (b"", "utf-8"))
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(data.removeprefix(mark))
    except UnicodeDecodeError:
        return None
    return None if _CONTROL.search(text) or not text.strip() else text.strip()


def name_content(text: str, size: int) -> str:
    """Return what a text file is, from its first part; ``size`` is the size of the file in bytes."""
    for namer in (_pointer, _headers, _json, _markup, _source):
        if (said := namer(text, size)) is not None:
            return said
    if len(text) <= _ANSWER and _REFUSAL.search(text):
        return f"a server's response, not a checkpoint: {_quoted(text)}; {AGAIN}"
    return f"a text file, not a checkpoint: {_quoted(text)}; is it the right file?"


def _quoted(text: str) -> str:
    line = " ".join(text.split())
    return f'"{line}"' if len(line) <= _QUOTED else f'"{line[: _QUOTED - 1]}…"'


def _pointer(text: str, size: int) -> str | None:
    if not _LFS.match(text):
        return signatures.name_text(text)
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
    return f"a web server's response with its headers, not a checkpoint: {_quoted(said)}; {AGAIN}"


def _json(text: str, size: int) -> str | None:
    if text[0] not in "{[":
        return None
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        if not re.match(r"[{\[]\s*[{\"]", text):
            return None
        state = "" if size > READ else ", cut short or damaged,"
        return f"a JSON file{state}, not a checkpoint; name the file that has the weights"
    if isinstance(parsed, dict) and len(parsed) <= _FEW and parsed.keys() & _OF_ANSWERS:
        return f"a web service's response, not a checkpoint: {_quoted(text)}; {AGAIN}"
    names = ", ".join(f"{name!s:.30}" for name in list(parsed)[:4]) if isinstance(parsed, dict) else ""
    held = f" with {names}" if names else ""
    return f"a JSON file{held}, not a checkpoint; name the file that has the weights"


# The keys under which web services report errors, and the largest number of keys in such an object.
_OF_ANSWERS = frozenset("error errors error_description Error fault message Message detail msg reason".split())
_FEW = 8


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
        what = "a storage service's error response, not a checkpoint"
        return f"{what}: {_quoted(said)}; {AGAIN}" if said else f"{what}; {AGAIN}"
    if is_page or name.lower() in _HTML:
        title = _title(text)
        entitled = f", {_quoted(title)}" if title else ""
        remedy = AGAIN
        if "Google Drive" in title:
            remedy = "confirm the download in a browser, or wait until the quota is free again, and fetch it again"
        return f"a web page{entitled}, not a checkpoint, probably an error or login page; {remedy}"
    if name:
        return f"an XML file (<{name:.30}>), not a checkpoint; is it the right file?"
    return None


def _title(page: str) -> str:
    """Return the title of a page, or its first heading or text."""
    for pattern in _TITLES:
        if (found := pattern.search(page[:_MARKUP])) is not None:
            text = " ".join(html.unescape(re.sub(r"<[^<>]*>", " ", found[1])).split())
            if text:
                return text
    return ""


def _source(text: str, size: int) -> str | None:
    if text.startswith("#!") or len(_PYTHON.findall(text)) >= 2 or (_PYTHON.match(text) and "\n" in text):
        return "source code, not a checkpoint; name the file that has the weights"
    return None
