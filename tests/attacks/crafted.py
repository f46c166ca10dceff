"""Crafts files by hand, opcode by opcode. Opcodes: https://docs.python.org/3/library/pickletools.html."""

import io
import json
import struct
import zipfile
from collections.abc import Mapping
from typing import Any

PROTO = b"\x80\x02"
STORAGE = bytes(range(64))


def text(value: str) -> bytes:
    """Return BINUNICODE with a text."""
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def number(value: int) -> bytes:
    """Return LONG1 or LONG4 with a number."""
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw if len(raw) < 256 else b"\x8b" + struct.pack("<I", len(raw)) + raw


def get(index: int) -> bytes:
    """Return LONG_BINGET."""
    return b"j" + struct.pack("<I", index)


def put(index: int) -> bytes:
    """Return LONG_BINPUT."""
    return b"r" + struct.pack("<I", index)


def name(dotted: str) -> bytes:
    """Return GLOBAL with a dotted name."""
    module, _, attribute = dotted.rpartition(".")
    return f"c{module}\n{attribute}\n".encode()


def call(dotted: str, *args: bytes) -> bytes:
    """Return a call of a global with arguments."""
    return name(dotted) + b"(" + b"".join(args) + b"tR"


def pair(value: bytes, levels: int, first: int, opcode: bytes = b"\x86") -> bytes:
    """Return nested pairs of a value with itself: ``levels`` deep and 2^levels wide, in a few bytes."""
    made = value + put(first)
    for level in range(levels):
        made += get(first + level) + opcode + put(first + level + 1)
    return made


def storage(
    numel: int = 16, key: bytes = text("0"), device: bytes = text("cpu"), cls: str = "torch.FloatStorage"
) -> bytes:
    """Return the persistent id of a storage."""
    return b"(" + text("storage") + name(cls) + key + device + number(numel) + b"tQ"


def sizes(*values: int) -> bytes:
    """Return a tuple of numbers."""
    return b"(" + b"".join(map(number, values)) + b"t"


def tensor(
    shape: bytes = sizes(16), strides: bytes = sizes(1), offset: int = 0, base: bytes = b"", hooks: bytes = b"\x89}"
) -> bytes:
    """Return a call of ``_rebuild_tensor_v2``."""
    return call("torch._utils._rebuild_tensor_v2", base or storage(), number(offset), shape, strides, hooks)


def state_dict(**entries: bytes) -> bytes:
    """Return a pickle of a dict with values given as opcodes, and one valid tensor."""
    members = b"".join(text(key) + value for key, value in {"w": tensor(), **entries}.items())
    return PROTO + b"}(" + members + b"u."


def around(**extras: bytes) -> bytes:
    """Return a pickle of a container with a valid state_dict and these other entries."""
    inner = b"}(" + text("w") + tensor() + b"u"
    members = b"".join(text(key) + value for key, value in {"state_dict": inner, **extras}.items())
    return PROTO + b"}(" + members + b"u."


def torch_zip(pickle: bytes, members: Mapping[str, bytes] | None = None, method: int = zipfile.ZIP_STORED) -> bytes:
    """Return the zip container around a pickle, independent of the time."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for member, data in {"data.pkl": pickle, **({"data/0": STORAGE} if members is None else members)}.items():
            archive.writestr(zipfile.ZipInfo(f"archive/{member}"), data, method)
    return buffer.getvalue()


def legacy(
    pickle: bytes, keys: bytes = b"](" + text("0") + b"e", tail: bytes = struct.pack("<Q", 16) + STORAGE
) -> bytes:
    """Return the container of torch ≤ 1.5 around a pickle, whose storage ids have six parts."""
    magic = PROTO + number(0x1950A86A20F9469CFC6C) + b"."
    return magic + PROTO + number(1001) + b"." + PROTO + b"}." + pickle + PROTO + keys + b"." + tail


def safetensors(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """Return a safetensors file with any header, as JSON data or raw bytes."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data
