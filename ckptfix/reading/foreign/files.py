"""Files that are not checkpoints, and what they are instead.

Torch's messages for these (``invalid load key, 'v'``, ``Unsupported operand 60``) name the first byte and nothing else.
A file is looked up here only after no format could read it, so that nothing that may be a checkpoint is called
something else. Names of files are evidence only if the bytes say nothing."""

from __future__ import annotations

import base64
import binascii
import codecs
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from ckptfix.bytes.sources import BLOCK, Content
from ckptfix.reading.archives.wrapped import looks_like_checkpoint
from ckptfix.reading.foreign.pages import CORE_ML, PYTORCH, READ, TENSORFLOW, as_text, name_text

_FLAX = f"load it with Flax (flax.serialization.msgpack_restore) and save its arrays from there, or {PYTORCH}"
_RIGHT = "is it the right file?"
_NUMPY = "load it with numpy.load and save it under the name of its parameter in a state_dict"
_HDF5 = "open it with h5py or Keras and save its arrays from there"
_MOBILE = "it cannot be turned back into a state_dict here; look for the file that it was made from"
_GGUF = "its weights are mostly quantised; look for the original safetensors or PyTorch file"
_DECRYPT = "decrypt it first"

SIGNATURES: tuple[tuple[int, bytes, str, str], ...] = (
    (0, b"GGUF", "a GGUF file of llama.cpp", _GGUF),
    *((0, magic, "a GGML file of llama.cpp or whisper.cpp", _GGUF) for magic in (b"lmgg", b"fmgg", b"tjgg", b"algg")),
    (0, b"\x93NUMPY", "a single NumPy array (.npy), which has no name", _NUMPY),
    (4, b"TFL3", "a TensorFlow Lite model", f"read it with tf.lite.Interpreter, or {PYTORCH}"),
    (4, b"PTMF", "a model for PyTorch Mobile (flatbuffer)", _MOBILE),
    (4, b"ET12", "a program of ExecuTorch (.pte)", _MOBILE),
    (0, b"\x12\x01" + bytes(14), "a parameter file of MXNet", f"load it with mxnet.nd.load, or {PYTORCH}"),
    (0, b"\0\0\0\0\x02\0\0\0\x05\0\0\0", "a weight file of Darknet", f"convert it with a tool for YOLO, or {PYTORCH}"),
    (0, b"\x0c\xdb\x3a\x2a", "a file of an Orbax checkpoint (JAX)", "name its folder to orbax.checkpoint"),
    (4, b"\x01\0\0\0\x03\0\0\0V 1", "a Lua Torch7 file", "read it with the package torchfile, and save a state_dict"),
    (0, b"MATLAB 5.0 MAT-file", "a MATLAB file", "read it with scipy.io.loadmat, and save a state_dict"),
    (0, b"Salted__", "a file encrypted by OpenSSL", _DECRYPT),
    (0, b"age-encryption.org/", "a file encrypted by age", _DECRYPT),
    (0, b"%PDF-", "a PDF document", _RIGHT),
    (0, b"\x89PNG\r\n\x1a\n", "a PNG image", _RIGHT),
    (0, b"GIF87a", "a GIF image", _RIGHT),
    (0, b"GIF89a", "a GIF image", _RIGHT),
    (0, b"II*\0\x08\0\0\0", "a TIFF image", _RIGHT),
    (0, b"MM\0*\0\0\0\x08", "a TIFF image", _RIGHT),
    (8, b"WEBP", "a WebP image", _RIGHT),
    (8, b"WAVEfmt ", "a sound file", _RIGHT),
    (8, b"AVI LIST", "a video", _RIGHT),
    (4, b"ftyp", "a video or image of the MPEG-4 family", _RIGHT),
    (0, b"\x1aE\xdf\xa3", "a Matroska video", _RIGHT),
    (0, b"OggS\0", "a sound file", _RIGHT),
    (0, b"fLaC\0", "a sound file", _RIGHT),
    (0, b"\x7fELF", "a program or library of Linux", _RIGHT),
    (0, b"\xcf\xfa\xed\xfe", "a program or library of macOS", _RIGHT),
    (0, b"PAR1", "a Parquet table", _RIGHT),
    (0, b"ARROW1\0\0", "an Arrow table", _RIGHT),
    (0, b"SQLite format 3\0", "a SQLite database", _RIGHT),
)
"""Where a file has which bytes, what it then is, and what to do."""

_V, _T = rb"[\x80-\xff]{0,4}[\0-\x7f]", rb"[\x20-\x7e]"
"""A number of a protocol buffer (https://protobuf.dev/programming-guides/encoding/), and a letter."""

_NODE = rb"\n" + _V + rb"\n" + _V + _T
"""A list whose first element begins with its name."""

_META_GRAPH = rb"\n" + _V + rb".{0,64}?\x12" + _V + _NODE + _T
"""Facts about a graph, and the graph (``meta_graph.proto``)."""

PATTERNS: tuple[tuple[re.Pattern[bytes], str, str], ...] = tuple(
    (re.compile(pattern, re.DOTALL), what, remedy)
    for pattern, what, remedy in (
        (rb"\xff\xd8\xff[\xdb\xe0-\xef].{2}(JFIF|Exif|ICC_|Adobe|\0)", "a JPEG image", _RIGHT),
        (
            # flax/serialization.py: a map whose values are extensions of type 1, with shape, dtype and bytes.
            rb"([\x81-\x8f]|\xde..|\xdf.{4})[\xa1-\xbf\xd9].*?(\xc7.|\xc8..|\xc9.{4})\x01\x93[\x90-\x9f\xdc]",
            "a MessagePack file of Flax (JAX)",
            _FLAX,
        ),
        (
            # onnx.proto: the version, who wrote it, and a graph that begins with the names of its first node.
            rb"\x08[\x01-\x1f](\x12"
            + _V
            + _T
            + rb"{0,99})?(\x1a"
            + _V
            + _T
            + rb"{0,99})?.{0,64}?:"
            + _V
            + rb"\n"
            + _V
            + rb"[\n\x12\x1a\x22]"
            + _V
            + _T,
            "an ONNX model",
            f"its weights need not have the names of a state_dict; run it with onnxruntime, or {PYTORCH}",
        ),
        (rb"\x08[\x01-\x0f]\x12" + _V + _META_GRAPH, "a SavedModel of TensorFlow", TENSORFLOW),
        (rb"\x08[\x01-\x1f]\x12" + _V + _NODE, "a Core ML model", CORE_ML),
        (
            rb"\n" + _V + _T + rb"{1,255}.{0,64}?\xa2\x06" + _V + rb"\n" + _V + _T,
            "a model of Caffe",
            f"convert it with a tool for Caffe models, or {PYTORCH}",
        ),
        (_NODE + _T + rb"{0,255}\x12" + _V + _T, "a frozen graph of TensorFlow", TENSORFLOW),
        (_META_GRAPH, "the graph of a TensorFlow checkpoint (.meta), without its weights", TENSORFLOW),
    )
)
"""How files begin that have no signature, what they then are, and what to do."""

_TABLE_MAGIC = bytes.fromhex("57fb808b247547db")
"""The end of a table of LevelDB (``table/format.h``), the form of a TensorFlow checkpoint's index."""

_HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
_BASE64 = re.compile(rb"(data:[\w/.+-]*;base64,)?([A-Za-z0-9+/\s]{64,})")
_CHUNKED = re.compile(
    rb"(?:HTTP/.{1,60000}?\r\n\r\n)?[0-9A-Fa-f]{1,15}[ \t]*(?:;[^\r\n]{0,200})?\r\n(.{1,512})", re.DOTALL
)
"""The body of an HTTP answer (RFC 9112, section 7.1): each chunk follows its size."""

_SIGNS = 16
"""Signs of a changed encoding that are no accident."""

_SCANNED = 64 << 20
"""Bytes from which it is believed that all of a file is UTF-8."""

_MANGLED = (b"version: 1\r\n", b"\x80\x02\x8a\r\n")
UNFINISHED = frozenset(".crdownload .part .partial .download .opdownload .incomplete .aria2 .!ut .!qb".split())
"""Suffixes of downloads that go on."""

_ZLIB = (b"x\x01", b"x^", b"x\x9c", b"x\xda")
_ARRAY_OF_JOBLIB = b"joblib.numpy_pickle"
_JOBLIB = "load it with joblib.load, if you trust where it is from, and save its arrays as a state_dict"

_LEAST_TEXT = 8
"""Bytes from which on it is no accident that all of them are letters."""

_ZERO_HEAD = 64
"""Zeros at the start from which on it is no accident."""

_NOISE = 4096
_EVEN = 7.9
"""Bits in a byte from which on bytes look random; weights in float32 have fewer than 7.5."""


def name_stranger(content: Content) -> str | None:
    """What the file is, with the remedy, where it is a known stranger; None otherwise."""
    for namer in _NAMERS:
        if (said := namer(content)) is not None:
            return f"{content.path}: {said}"
    return None


def name_mangled(content: Content) -> str | None:
    """What a transfer as text did to a checkpoint, where it cannot be undone, as a clause; None for any other file."""
    if bytes(content.buffer[:16]).startswith(_MANGLED):
        return "every line feed in it became CR LF by a transfer in text mode; transfer it again in binary mode"
    head = bytes(content.buffer[:READ])
    if as_text(head) is None and _replaced(content) >= _SIGNS:
        return (
            "was saved as text: every byte that is not text became the sign U+FFFD, which cannot be undone; fetch it"
            " again in binary mode (not as text of a response, and not through an editor)"
        )
    if _is_utf16(head):
        return (
            "was saved as text in UTF-16, as `>` of PowerShell does: some of its bytes were changed and some are gone,"
            " which cannot be undone; fetch it again into a file (curl -o, Invoke-WebRequest -OutFile)"
        )
    return None


def is_chunked(content: Content) -> bool:
    """Return whether a file is a checkpoint in the chunks of an HTTP answer: their sizes are among its bytes."""
    match = _CHUNKED.match(bytes(content.buffer[:READ]))
    return match is not None and looks_like_checkpoint(match[1])


def _transcoded(content: Content) -> str | None:
    """Name what a checkpoint went through that takes only text, and how to get it back."""
    head = bytes(content.buffer[:READ])
    if (match := _BASE64.match(head)) and looks_like_checkpoint(_decoded(match[2])):
        return "is a checkpoint written as base64 text; decode it first (base64 -d FILE > NEW)"
    if is_chunked(content):
        return "is the answer of a web server with the sizes of its chunks in it; fetch it with curl -o, without them"
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)
        was = text.encode("cp1252" if any(ord(letter) > 0xFF for letter in text) else "latin-1", "ignore")
    except UnicodeDecodeError:
        return None
    if sum(byte >= 0x80 for byte in was) < _SIGNS or not looks_like_checkpoint(was):
        return None
    return (
        "was saved as text: bytes from 0x80 on became letters of UTF-8; fetch it again in binary mode (not as text of a"
        " response, and not through an editor)"
    )


def _decoded(letters: bytes) -> bytes:
    """Return the first bytes of base64 text; nothing if it is not base64."""
    letters = b"".join(letters.split())[:1024]
    try:
        return base64.b64decode(letters[: len(letters) // 4 * 4], validate=True)
    except binascii.Error:
        return b""


def _replaced(content: Content) -> int:
    """Return how often U+FFFD is in a file that is UTF-8; 0 for any other file."""
    decoder, signs = codecs.getincrementaldecoder("utf-8")(), 0
    for start in range(0, min(len(content), _SCANNED), BLOCK):
        try:
            signs += decoder.decode(bytes(content.buffer[start : start + BLOCK])).count("\ufffd")
        except UnicodeDecodeError:
            return 0
    return signs


def _is_utf16(head: bytes) -> bool:
    """Whether bytes are UTF-16 in which no text is: each byte of a code page became one of a few hundred letters."""
    upper = head[3::2] if head.startswith(codecs.BOM_UTF16_LE) else head[2::2]
    is_marked = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) and len(upper) >= _LEAST_TEXT
    return is_marked and all(byte < 0x30 or byte == 0xFF for byte in upper) and as_text(head) is None


def _signed(content: Content) -> str | None:
    head = bytes(content.buffer[:32])
    if any(bytes(content.buffer[at : at + 8]) == _HDF5_MAGIC for at in (0, 512, 1024, 2048)):
        kind = "a Keras model in HDF5" if b"keras" in bytes(content.buffer[:READ]) else "an HDF5 file (Keras, h5py)"
        return f"{kind}, not a PyTorch checkpoint; {_HDF5}"
    for offset, magic, what, remedy in SIGNATURES:
        if head.startswith(magic, offset):
            return f"{what}, not a PyTorch checkpoint; {remedy}"
    for pattern, what, remedy in PATTERNS:
        if pattern.match(content.buffer[:READ]):
            return f"{what}, not a PyTorch checkpoint; {remedy}"
    if bytes(content.buffer[-8:]) == _TABLE_MAGIC:
        return f"the index of a TensorFlow checkpoint, whose weights are in its .data files; {TENSORFLOW}"
    if head[:2] == b"BM" and int.from_bytes(head[2:6], "little") == len(content):
        return f"a bitmap image, not a PyTorch checkpoint; {_RIGHT}"
    at = int.from_bytes(bytes(content.buffer[60:64]), "little")
    if head[:2] == b"MZ" and bytes(content.buffer[at : at + 4]) == b"PE\0\0":
        return f"a program or library of Windows, not a PyTorch checkpoint; {_RIGHT}"
    return None


def _joblib(content: Content) -> str | None:
    """A file of joblib.dump: a pickle with the bytes of arrays between its opcodes, often compressed by zlib."""
    head = bytes(content.buffer[:READ])
    if head.startswith(b"\x80") and _ARRAY_OF_JOBLIB in head:
        return f"a file of joblib with NumPy arrays, not a PyTorch checkpoint; {_JOBLIB}"
    if head.startswith(_ZLIB):
        try:
            inside = zlib.decompressobj().decompress(head, 64)
        except zlib.error:
            return None
        if looks_like_checkpoint(inside):
            return f"a stream of zlib, as joblib.dump(…, compress=…) writes it; {_JOBLIB}, or expand it with zlib"
    return None


def _text(content: Content) -> str | None:
    head = bytes(content.buffer[:READ])
    text = as_text(head)
    if text is None or len(head) < _LEAST_TEXT or looks_like_checkpoint(head):
        return None
    return name_text(text, len(content))


def _zeros(content: Content) -> str | None:
    if bytes(content.buffer[:1024]).strip(b"\0") or bytes(content.buffer[-1024:]).strip(b"\0"):
        return None
    return (
        f"nothing but zeros at its start and end ({len(content)} bytes): the space was reserved and the download"
        " never arrived; fetch it again"
    )


def _zero_head(content: Content) -> str | None:
    head = bytes(content.buffer[:READ])
    zeros = len(head) - len(head.lstrip(b"\0"))
    if zeros < _ZERO_HEAD:
        return None
    least = "at least " if zeros == len(head) else ""
    return (
        f"begins with {least}{zeros} zeros, where every checkpoint says what it is: that part never arrived, or was"
        " wiped; fetch it again"
    )


def _by_name(content: Content) -> str | None:
    """What the name and the neighbours say of bytes that say nothing themselves."""
    path = Path(content.member or content.path)
    suffix = path.suffix.lower()
    if suffix == ".aria2":
        return "the notes of aria2 on a download, not the file itself; resume it with `aria2c -c`, then name the file"
    if suffix in UNFINISHED:
        return f"a download that is not finished (its name ends in {path.suffix}); resume it, or fetch the file again"
    if re.search(r"\.data-\d{5}-of-\d{5}$", path.name):
        return f"by its name the data of a TensorFlow checkpoint; {TENSORFLOW}"
    if path.parent.name == "data" and path.name.isdigit():
        return "by its place a storage of a torch file that was unpacked; name the folder that holds data.pkl"
    return None


def _noise(content: Content) -> str | None:
    head = bytes(content.buffer[:READ])
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
    """What can be said of a file that no format knows: by its name, by how even its bytes are, or by the first few."""
    head = bytes(content.buffer[:8])
    plain = f"neither a torch file nor safetensors (it starts with {head!r}); is it the right file, and is it complete?"
    return _by_name(content) or _zero_head(content) or _noise(content) or plain


_NAMERS: tuple[Callable[[Content], str | None], ...] = (_zeros, name_mangled, _transcoded, _joblib, _signed, _text)
"""In the order in which they are asked."""
