"""Files that are built to run code or to exhaust the machine end in a typed error or in inert data, in bounded time and
memory, with nothing run and nothing written."""

import json
import re
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import ckptfix
from ckptfix.core.finding import Level
from ckptfix.errors import CkptfixError, HostileError, UnreadableError
from tests.attacks.crafted import (
    PROTO,
    STORAGE,
    around,
    call,
    get,
    legacy,
    name,
    number,
    pair,
    put,
    safetensors,
    sizes,
    state_dict,
    storage,
    tensor,
    text,
    torch_zip,
)
from tests.attacks.outcomes import REFUSED, outcome

Crafted = Callable[[], bytes]

HASH = (1 << 61) - 1  # all its multiples have the hash 0


def shared_lists(levels: int) -> bytes:
    """Return a list that contains one list twice, and so on."""
    made = b"]" + put(100)
    for level in range(levels):
        here = get(100 + level)
        made += b"0](" + here + here + b"e" + put(101 + level)
    return made


def with_metadata(value: bytes) -> bytes:
    """Return a state_dict whose ``_metadata`` contains the value."""
    row = b"}(" + text("") + b"}(" + text("version") + value + b"uu"
    entries = name("collections.OrderedDict") + b")R(" + text("w") + tensor() + b"u"
    return PROTO + entries + b"}(" + text("_metadata") + row + b"ub."


def module(children: bytes, cls: str = "models.Net") -> bytes:
    """Return a pickled nn.Module with the given ``_modules``."""
    return (
        name(cls)
        + b")\x81}("
        + text("_parameters")
        + b"}("
        + text("p")
        + tensor()
        + b"u"
        + text("_buffers")
        + b"}"
        + text("_modules")
        + children
        + b"ub"
    )


def shared_modules(levels: int) -> bytes:
    """Return a module whose two children are the same module, and so on: 2^levels places."""
    made = PROTO + module(b"}") + put(500)
    for level in range(levels):
        here = get(500 + level)
        made += module(b"}(" + text("a") + here + text("b") + here + b"u") + put(501 + level)
    return made + b"."


def colliding(count: int, wrap: bytes = b"") -> bytes:
    """Return a dict whose keys all have the same hash."""
    return b"}(" + b"".join(number(HASH * (i + 1)) + wrap + b"N" for i in range(count)) + b"u"


# Odd but harmless data: the weights are read, and everything around them is inert.
INERT: dict[str, Crafted] = {
    "getattr on a module is a name": lambda: around(
        x=call("builtins.getattr", name("torch.serialization"), text("os"))
    ),
    "an extension code names nothing": lambda: around(x=b"\x82\x01", y=b"\x83\x01\x02", z=b"\x84\x01\0\0\0"),
    "an instance by INST": lambda: around(x=b"(" + text("1+1") + b"imodels\nNet\n"),
    "an object by OBJ": lambda: around(x=b"(" + name("models.Net") + text("1+1") + b"o"),
    "an object by NEWOBJ_EX": lambda: around(x=name("models.Net") + b")" + b"}(" + text("a") + b"Nu" + b"\x92"),
    "calling what a call gave": lambda: around(x=call("models.make") + b")R)R)R"),
    "calling a number": lambda: around(x=b"K\x07)R"),
    "BUILD on a number, a text, a tuple, a list": lambda: around(
        a=b"K\x07}b", b=text("x") + b"}b", c=b"N\x85}b", d=b"]}b"
    ),
    "BUILD on a tensor": lambda: around(x=tensor() + b"}(" + text("shape") + sizes(1 << 40) + b"ub"),
    "BUILD with a state that is no dict": lambda: around(x=name("models.Net") + b")\x81K\x01b"),
    "BUILD that puts __class__ into an OrderedDict": lambda: around(
        x=name("collections.OrderedDict") + b")R" + b"}(" + text("__class__") + name("models.Net") + b"ub"
    ),
    "a memo index of 2^32 - 1": lambda: around(x=b"N" + put((1 << 32) - 1) + b"0" + get((1 << 32) - 1)),
    "a memo index of a hundred digits": lambda: around(x=b"Np" + b"9" * 100 + b"\n"),
    "a list that holds itself": lambda: around(x=b"]" + put(9) + get(9) + b"a"),
    "a dict that holds itself": lambda: around(x=b"}" + put(9) + text("me") + get(9) + b"s"),
    "an object that holds itself": lambda: around(
        x=name("models.A") + b")\x81" + put(9) + b"}(" + text("me") + get(9) + b"ub"
    ),
    "a state_dict that holds itself": lambda: (
        PROTO + b"}" + put(9) + text("w") + tensor() + b"s" + text("me") + get(9) + b"s."
    ),
    "a tuple that holds itself": lambda: around(
        x=b"]" + put(9) + b"0" + get(9) + b"\x85" + put(8) + b"0" + get(9) + get(8) + b"a"
    ),
    "an entry of lists shared 2^60 times": lambda: state_dict(x=shared_lists(60)),
    "tuples shared 2^60 times": lambda: around(x=pair(b"N", 60, 100)),
    "lists shared 2^60 times": lambda: around(x=shared_lists(60)),
    "an object of tuples shared 2^60 times": lambda: around(x=name("models.A") + pair(b")", 60, 100) + b"\x85\x81"),
    "an empty name": lambda: around(x=b"c\n\n)R"),
    "a name with escape codes and line feeds": lambda: around(x=text("os\n\x1b[2J") + text("sys\ntem") + b"\x93)R"),
    "a key with escape codes": lambda: state_dict(**{"\x1b[31m\n\r\0": tensor()}),
    "half a surrogate pair": lambda: state_dict(**{"\ud800": tensor()}),
    "a number of a million digits": lambda: around(x=number(1 << 3_000_000)),
    "a Size that is none": lambda: state_dict(x=call("torch.Size", text("abc"))),
    "a device that is none": lambda: state_dict(x=call("torch.device", number(1), number(2), number(3))),
    "a dtype that torch lacks": lambda: state_dict(x=name("torch.float9")),
    "a set of objects": lambda: around(x=b"\x8f(" + name("models.A") + b")\x81\x90"),
    "a sparse tensor of 2^62 elements": lambda: state_dict(
        x=call(
            "torch._utils._rebuild_sparse_tensor",
            text("torch.sparse_coo"),
            b"("
            + tensor(sizes(2, 0), sizes(1, 1), base=storage(8, cls="torch.LongStorage"))
            + tensor(sizes(0), sizes(1))
            + sizes(1 << 31, 1 << 31)
            + b"t",
        )
    ),
    "a _metadata of lists shared 2^60 times": lambda: with_metadata(shared_lists(60)),
    "a _metadata that holds itself": lambda: with_metadata(b"]" + put(9) + get(9) + b"a"),
    "a _metadata of objects": lambda: with_metadata(name("models.A") + b")\x81"),
    "a _metadata of tensors": lambda: with_metadata(tensor()),
    "a _metadata of numbers": lambda: with_metadata(b"K\x01"),
    "a tensor as a key": lambda: around(x=b"}" + tensor() + b"Ns"),
    "three thousand empty objects": lambda: around(x=b"](" + (name("models.A") + b")\x81") * 3_000 + b"e"),
}

WEARING = re.compile(r"2\^60|over and|thousand|1000 deep")
"""Names of the files that take long, or would."""

# Built to exhaust the machine, or damaged: refused with a one-line error.
REFUSED_PICKLES: dict[str, Crafted] = {
    "FRAME that claims 2^60 bytes": lambda: PROTO + b"\x95" + struct.pack("<Q", 1 << 60) + state_dict()[2:],
    "ends before its STOP": lambda: state_dict()[:-1],
    "nothing but STOP": lambda: b"\x80\x02.",
    "protocol 255": lambda: b"\x80\xff}.",
    "an opcode that is none": lambda: PROTO + b"\xf0.",
    "BINBYTES8 of 2^60": lambda: around(x=b"\x8e" + struct.pack("<Q", 1 << 60) + b"a"),
    "BYTEARRAY8 of 2^60": lambda: around(x=b"\x96" + struct.pack("<Q", 1 << 60) + b"a"),
    "BINUNICODE8 of 2^63": lambda: around(x=b"\x8d" + struct.pack("<Q", 1 << 63)),
    "BINUNICODE of 2^32 - 1": lambda: around(x=b"X\xff\xff\xff\xff"),
    "LONG4 of 2^31": lambda: around(x=b"\x8b" + struct.pack("<I", 1 << 31)),
    "BINSTRING of 2^31": lambda: around(x=b"T" + struct.pack("<I", 1 << 31)),
    "NEXT_BUFFER": lambda: around(x=b"\x97"),
    "a recall of what was never kept": lambda: around(x=get(12345)),
    "POP of an empty stack": lambda: PROTO + b"0000",
    "POP_MARK without a mark": lambda: PROTO + b"N1.",
    "STACK_GLOBAL of numbers": lambda: around(x=b"K\x01K\x02\x93"),
    "STACK_GLOBAL of tuples shared 2^60 times": lambda: around(x=pair(b"N", 60, 100) + pair(b"N", 60, 200) + b"\x93"),
    "APPENDS to a number": lambda: around(x=b"K\x01(Ne"),
    "SETITEMS of a number": lambda: around(x=b"K\x01(NNu"),
    "SETITEMS without a value": lambda: around(x=b"}(NNNu"),
    "a list as a key": lambda: around(x=b"}]Ns"),
    "text that is no UTF-8": lambda: around(x=b"X\x02\0\0\0\xff\xff"),
    "a text line without quotes": lambda: around(x=b"Sabc\n"),
    "an escape that is none": lambda: around(x=b"S'\\xZZ'\n"),
    "a number that is none": lambda: around(x=b"Iabc\n"),
    "a number of a million decimal digits": lambda: around(x=b"L" + b"9" * 1_000_000 + b"L\n"),
    "a key of nested tuples shared 2^60 times": lambda: around(x=b"}" + pair(b"N", 60, 100) + b"Ns"),
    "a member of a set of nested tuples shared 2^60 times": lambda: around(x=b"\x8f(" + pair(b"N", 60, 100) + b"\x90"),
    "a frozenset of nested tuples shared 2^60 times": lambda: around(x=b"(" + pair(b"N", 60, 100) + b"\x91"),
    "a key of ten thousand bits": lambda: around(x=b"}" + number(1 << 10_000) + b"Ns"),
    "a hundred thousand keys of one hash": lambda: around(x=colliding(100_000)),
    "tuple keys of one hash": lambda: around(x=colliding(1000, b"\x85")),
    "an OrderedDict of pairs of one hash": lambda: around(
        x=call("collections.OrderedDict", b"](" + b"".join(number(HASH * i) + b"N\x86" for i in range(1000)) + b"e")
    ),
    "a set of numbers of one hash": lambda: around(
        x=call("builtins.set", b"](" + b"".join(number(HASH * i) for i in range(1000)) + b"e")
    ),
    "a list copied over and over": lambda: around(
        x=b"](" + b"N" * 100_000 + b"e" + put(5) + b"0](" + (name("builtins.list") + get(5) + b"\x85R") * 20_000 + b"e"
    ),
    "a dict given over and over": lambda: around(
        x=b"](" + b"N" * 100_000 + b"e" + put(5) + b"0](" + (name("models.A") + get(5) + b"R") * 20_000 + b"e"
    ),
    "a state set over and over": lambda: around(
        x=b"}("
        + b"".join(text(f"{i:05}") + b"N" for i in range(50_000))
        + b"u"
        + put(5)
        + b"0"
        + name("collections.OrderedDict")
        + b")R"
        + (get(5) + b"b") * 20_000
    ),
    "getattr on its own result over and over": lambda: around(
        x=name("models.A")
        + b"".join(put(7) + b"0" + name("builtins.getattr") + get(7) + text("a" * 50) + b"\x86R" for _ in range(100))
    ),
    "a rebuild function of itself, over and over": lambda: around(
        x=name("torch._tensor._rebuild_from_type_v2")
        + put(3)
        + b"0"
        + b")"
        + b"".join(put(4) + b"0" + get(3) + name("models.T") + get(4) + b"\x87" for _ in range(5000))
        + put(4)
        + b"0"
        + get(3)
        + get(4)
        + b"R"
    ),
    "__newobj__ of itself, over and over": lambda: around(
        x=call("copyreg.__newobj__", *[name("copyreg.__newobj__")] * 5000)
    ),
    "modules inside of each other 1000 deep": lambda: (
        PROTO
        + module(b"}")
        + b"".join(put(9) + b"0" + module(b"}(" + text("m") + get(9) + b"u") for _ in range(1000))
        + b"."
    ),
    "modules shared 2^60 times": lambda: shared_modules(60),
    "a module that holds itself": lambda: (
        PROTO
        + name("models.A")
        + b")\x81"
        + put(9)
        + b"}("
        + text("_parameters")
        + b"}"
        + text("_buffers")
        + b"}"
        + text("_modules")
        + b"}("
        + text("me")
        + get(9)
        + b"u"
        + b"ub."
    ),
    "a storage that is not there": lambda: state_dict(x=tensor(base=storage(key=text("7")))),
    "a storage named by a path": lambda: state_dict(x=tensor(base=storage(key=text("../../etc/passwd")))),
    "a storage named by shared tuples": lambda: state_dict(x=tensor(base=storage(key=pair(b"N", 60, 100)))),
    "a device of shared tuples": lambda: state_dict(x=tensor(base=storage(device=pair(b"N", 60, 100)))),
    "a storage of 2^62 elements": lambda: state_dict(x=tensor(base=storage(1 << 62))),
    "a storage of no known class": lambda: state_dict(x=tensor(base=storage(cls="os.system"))),
    "a persistent id that is none": lambda: state_dict(x=b"K\x01Q"),
    "a persistent id of shared tuples": lambda: state_dict(x=pair(b"N", 60, 100) + b"\x85Q"),
    "a view that is between two elements": lambda: state_dict(
        x=tensor(
            base=b"("
            + text("storage")
            + name("torch.FloatStorage")
            + text("0")
            + text("cpu")
            + number(16)
            + text("v")
            + b"G"
            + struct.pack(">d", 0.5)
            + number(4)
            + b"\x87tQ"
        )
    ),
    "a tensor after the end of its storage": lambda: state_dict(x=tensor(sizes(16), sizes(1), 1)),
    "a tensor before its storage": lambda: state_dict(x=tensor(sizes(1), sizes(1), -1)),
    "negative strides": lambda: state_dict(x=tensor(sizes(4), sizes(-1), 4)),
    "a shape of 2^40 by 2^40 and strides of zero": lambda: state_dict(x=tensor(sizes(1 << 40, 1 << 40), sizes(0, 0))),
    "a shape of 2^100": lambda: state_dict(x=tensor(sizes(1 << 100), sizes(0))),
    "a shape of a hundred thousand dimensions": lambda: state_dict(
        x=tensor(b"(" + b"K\x02" * 100_000 + b"t", b"(" + b"K\0" * 100_000 + b"t")
    ),
    "a shape of shared tuples": lambda: state_dict(x=tensor(pair(b"N", 60, 100))),
    "more strides than sizes": lambda: state_dict(x=tensor(sizes(2), sizes(1, 1))),
    "a thousand views of 512 MB out of 64 bytes": lambda: state_dict(
        **{f"k{i}": tensor(sizes(1 << 17, 1 << 10), sizes(0, 0)) for i in range(1000)}
    ),
    "a tensor without a storage": lambda: state_dict(
        x=call("torch._utils._rebuild_tensor_v2", b"N", b"K\0", sizes(1), sizes(1), b"\x89", b"}")
    ),
    "a tensor with an argument more than torch takes": lambda: state_dict(x=tensor(hooks=b"\x89}}K\x07")),
    "a rebuild function without arguments": lambda: state_dict(x=call("torch._utils._rebuild_tensor_v2")),
    "a quantised tensor of no known scheme": lambda: state_dict(
        x=call(
            "torch._utils._rebuild_qtensor",
            storage(),
            b"K\0",
            sizes(4),
            sizes(1),
            b"(" + name("os.system") + b"K\x01K\0t",
            b"\x89",
            b"}",
        )
    ),
    "a sparse tensor inside of sparse tensors": lambda: state_dict(
        x=tensor()
        + b"".join(
            put(9)
            + b"0"
            + call(
                "torch._utils._rebuild_sparse_tensor",
                text("torch.sparse_coo"),
                b"(" + get(9) + get(9) + sizes(4) + b"t",
            )
            for _ in range(3)
        )
    ),
    "a file inside of files": lambda: _nested(6),
    "a dict that names itself as a module": lambda: around(x=b"(" + text("module") + pair(b"N", 60, 100) + b"N\x87Q"),
}


def _nested(levels: int) -> bytes:
    made = torch_zip(state_dict())
    for _ in range(levels):
        made = PROTO + call("torch.storage._load_from_bytes", b"B" + struct.pack("<I", len(made)) + made) + b"."
    return made


def test_an_archive_in_the_place_of_a_tensor(tmp_path):
    archive = torch_zip(around())
    made = PROTO + call("torch.storage._load_from_bytes", b"B" + struct.pack("<I", len(archive)) + archive) + b"."
    (tmp_path / "nested.pkl").write_bytes(made)
    with pytest.raises(HostileError, match="a zip archive with its own pickle"):
        ckptfix.open_checkpoint(tmp_path / "nested.pkl")


def _member(head: bytes, data: bytes = b"") -> dict[str, bytes]:
    return {"data/0": STORAGE, head.decode("latin-1"): data}


def _patched(old: bytes, new: bytes, which: int = -1, content: bytes | None = None) -> bytes:
    """Return a valid zip file with one occurrence of some bytes replaced."""
    content = torch_zip(state_dict()) if content is None else content
    parts = content.split(old)
    assert len(parts) > 1
    which %= len(parts) - 1
    return old.join(parts[: which + 1]) + new + old.join(parts[which + 1 :])


def _doubled() -> bytes:
    import io
    import warnings

    buffer = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w") as archive:
        warnings.simplefilter("ignore")
        archive.writestr("archive/data.pkl", state_dict())
        archive.writestr("archive/data.pkl", PROTO + call("os.system", text("touch PWNED")) + b".")
        archive.writestr("archive/data/0", STORAGE)
    return buffer.getvalue()


def _packed_by(method: int) -> bytes:
    """Return a valid zip file whose headers and directory name another compression method."""
    content = bytearray(torch_zip(state_dict()))
    for signature, place in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        for found in re.finditer(re.escape(signature), bytes(content)):
            content[found.start() + place : found.start() + place + 2] = struct.pack("<H", method)
    return bytes(content)


def _bomb(nbytes: int, declared: int) -> bytes:
    """Return a deflated data.pkl whose directory entry declares another size."""
    content = torch_zip(state_dict(x=b"X" + struct.pack("<I", nbytes) + b"a" * nbytes), method=zipfile.ZIP_DEFLATED)
    true = struct.pack("<I", len(state_dict(x=b"X" + struct.pack("<I", nbytes))) + nbytes)
    return content.replace(true, struct.pack("<I", declared))


def _overlapping(count: int, method: int) -> bytes:
    """Return many members whose directory entries point to one local header."""
    data = bytes(1 << 20)
    raw = data if method == zipfile.ZIP_STORED else zlib.compress(data, 9)[2:-4]
    crc = zlib.crc32(data)
    keys = [str(index) for index in range(count)]
    entries = {f"k{key}": tensor(sizes(1 << 18), sizes(1), base=storage(1 << 18, text(key))) for key in keys}
    pickle = PROTO + b"}(" + b"".join(text(key) + value for key, value in entries.items()) + b"u."
    body = torch_zip(pickle, {})
    end = body.rfind(b"PK\x05\x06")
    start = struct.unpack("<I", body[end + 16 : end + 20])[0]
    first, directory = body[:start], body[start:end]
    local = (
        struct.pack("<4s5H3I2H", b"PK\x03\x04", 20, 0, method, 0, 33, crc, len(raw), len(data), 5, 0) + b"xxxxx" + raw
    )
    for key in keys:
        path = f"archive/data/{key}".encode()
        directory += (
            struct.pack(
                "<4s6H3I5H2I",
                b"PK\x01\x02",
                20,
                20,
                0,
                method,
                0,
                33,
                crc,
                len(raw),
                len(data),
                len(path),
                0,
                0,
                0,
                0,
                0,
                len(first),
            )
            + path
        )
    tail = struct.pack(
        "<4s4H2IH", b"PK\x05\x06", 0, 0, count + 1, count + 1, len(directory), len(first) + len(local), 0
    )
    return first + local + directory + tail


INERT_ZIPS: dict[str, Crafted] = {
    "a member outside of the archive": lambda: torch_zip(state_dict(), _member(b"../../../tmp/evil", b"x")),
    "a member with an absolute name": lambda: torch_zip(state_dict(), _member(b"/etc/cron.d/evil", b"x")),
    "a second pickle that torch never reads": lambda: torch_zip(
        state_dict(), _member(b"more.pkl", PROTO + call("os.system", text("touch PWNED")) + b".")
    ),
    "twenty thousand members": lambda: torch_zip(
        state_dict(), {"data/0": STORAGE, **{f"data/{i}": b"" for i in range(1, 20_000)}}
    ),
    "an encrypted member that nobody needs": lambda: torch_zip(state_dict(), _member(b"x", b"y")),
}

REFUSED_ZIPS: dict[str, Crafted] = {
    "two members data.pkl": _doubled,
    "a directory that is cut off": lambda: torch_zip(state_dict())[:-40],
    "a directory that points after the end": lambda: _patched(
        struct.pack("<I", torch_zip(state_dict()).find(b"PK\x03\x04", 1)), b"\xff\xff\xff\x7f"
    ),
    "a local header that is none": lambda: _patched(b"PK\x03\x04", b"XXXX", which=1),
    "a storage that the directory makes 2^31 long": lambda: _patched(
        struct.pack("<2I", 64, 64), struct.pack("<2I", 1 << 31, 1 << 31)
    ),
    "a name that is 65535 long": lambda: _patched(
        b"\x0e\x00\x00\x00archive/data/0", b"\xff\xff\x00\x00archive/data/0", which=0
    ),
    "a bomb that says so": lambda: _bomb(1 << 10, 0xFFFFFFF0),
    "a bomb that says little": lambda: _bomb(1 << 20, 100),
    "a method of packing that is none": lambda: _packed_by(77),
    "no data.pkl": lambda: torch_zip(state_dict()).replace(b"data.pkl", b"data.txt"),
    "a storage shorter than its tensor": lambda: torch_zip(state_dict(), {"data/0": STORAGE[:-1]}),
    "a thousand storages at one place": lambda: _overlapping(1000, zipfile.ZIP_STORED),
    "a thousand packed storages at one place": lambda: _overlapping(1000, zipfile.ZIP_DEFLATED),
}

LEGACY: dict[str, Crafted] = {
    "another version": lambda: legacy(state_dict()).replace(number(1001), number(1002)),
    "a version of shared tuples": lambda: (
        PROTO + number(0x1950A86A20F9469CFC6C) + b"." + PROTO + pair(b"N", 60, 100) + b"."
    ),
    "no storages": lambda: legacy(state_dict(), tail=b""),
    "a storage cut short": lambda: legacy(state_dict(), tail=struct.pack("<Q", 16) + STORAGE[:-1]),
    "a storage of 2^60 elements": lambda: legacy(state_dict(), tail=struct.pack("<Q", 1 << 60) + STORAGE),
    "a storage of another length": lambda: legacy(state_dict(), tail=struct.pack("<Q", 15) + STORAGE),
    "a storage declared larger than the file": lambda: legacy(state_dict(x=tensor(base=storage(1 << 40, text("1"))))),
    "a list of storages that is a number": lambda: legacy(state_dict(), keys=b"K\x05"),
    "a list of storages that is a text": lambda: legacy(state_dict(), keys=text("0")),
    "a list of storages of shared tuples": lambda: legacy(state_dict(), keys=b"](" + pair(b"N", 60, 100) + b"e"),
    "a storage listed twice": lambda: legacy(
        state_dict(), keys=b"](" + text("0") * 2 + b"e", tail=(struct.pack("<Q", 16) + STORAGE) * 2
    ),
    "a storage listed and never used": lambda: legacy(state_dict(), keys=b"](" + text("9") + b"e"),
    "a storage used and never listed": lambda: legacy(state_dict(), keys=b"]"),
    "a pickle that refers to storages elsewhere": lambda: state_dict(),
}

GOOD = {"w": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}}


def _with(**changes: object) -> bytes:
    return safetensors({"w": {**GOOD["w"], **changes}}, STORAGE)


SAFETENSORS: dict[str, Crafted] = {
    "shorter than its length field": lambda: b"\x10\0\0\0\0\0\0{",
    "a header longer than the file": lambda: safetensors(GOOD, STORAGE, length=1 << 20),
    "a header of 2^63 bytes": lambda: safetensors(GOOD, STORAGE, length=1 << 63),
    "a header over 100 MB": lambda: safetensors(GOOD, STORAGE, length=100_000_001),
    "JSON that is none": lambda: safetensors(b'{"w":', STORAGE),
    "text that is no UTF-8": lambda: safetensors(b'{"\xff":1}', STORAGE),
    "JSON 100,000 lists deep": lambda: safetensors(b'{"w":' + b"[" * 100_000),
    "a key that stands twice": lambda: safetensors(b'{"w":{},"w":{}}'),
    "a hundred thousand keys and the last one twice": lambda: safetensors(
        b"{" + b"".join(b'"%d":0,' % i for i in range(100_000)) + b'"x":0,"x":0}'
    ),
    "a record that is no object": lambda: safetensors({"w": 5}, STORAGE),
    "a record without offsets": lambda: safetensors({"w": {"dtype": "F32", "shape": [16]}}, STORAGE),
    "a dtype that is none": lambda: _with(dtype="F31"),
    "a dtype that is a list": lambda: _with(dtype=["F32"]),
    "a shape that is a number": lambda: _with(shape=16),
    "a shape of texts": lambda: _with(shape=["16"]),
    "a shape of fractions": lambda: _with(shape=[16.0]),
    "a shape of truths": lambda: _with(shape=[True]),
    "a negative shape": lambda: _with(shape=[-16]),
    "a shape of 10^4000": lambda: safetensors(
        json.dumps(GOOD).replace("[16]", f"[{10**4000}, {10**4000}]").encode(), STORAGE
    ),
    "a shape of ten thousand dimensions": lambda: _with(shape=[1] * 10_000),
    "a shape that overflows": lambda: _with(shape=[1 << 40, 1 << 40]),
    "offsets that end before they begin": lambda: _with(data_offsets=[64, 0]),
    "offsets after the end": lambda: _with(shape=[32], data_offsets=[0, 128]),
    "three offsets": lambda: _with(data_offsets=[0, 64, 64]),
    "offsets and shape that disagree": lambda: _with(shape=[15]),
    "half a byte": lambda: safetensors({"w": {"dtype": "F4", "shape": [127], "data_offsets": [0, 64]}}, STORAGE),
    "a hole": lambda: _with(shape=[15], data_offsets=[4, 64]),
    "an overlap": lambda: safetensors({**GOOD, "v": GOOD["w"]}, STORAGE),
    "bytes after the last tensor": lambda: safetensors(GOOD, STORAGE + b"x"),
    "bytes and no tensor": lambda: safetensors({}, STORAGE),
    "no tensor": lambda: safetensors({}),
    "a list for a header": lambda: safetensors(b'[{"w":1}]'),
    "notes that are a list": lambda: safetensors({"__metadata__": ["a"], **GOOD}, STORAGE),
}


def noted(**notes: object) -> bytes:
    """Return a valid safetensors file with ckptfix's notes in its header, written by another program."""
    texts = {f"ckptfix.{name}": note if isinstance(note, str) else json.dumps(note) for name, note in notes.items()}
    return safetensors({"__metadata__": texts, **GOOD}, STORAGE)


CONTRADICTIONS: dict[str, Crafted] = {
    "no JSON": lambda: noted(container="{"),
    "a list": lambda: noted(metadata="[]"),
    "100,000 lists deep": lambda: noted(container='{"root":' + "[" * 100_000),
    "a tie to nothing": lambda: noted(ties={"v": "x"}),
    "a tie of a tensor": lambda: noted(ties={"w": "w"}),
    "a tie to a list": lambda: noted(ties={"v": ["w"]}),
}
HARMLESS_NOTES: dict[str, Crafted] = {
    "a container of the wrong type": lambda: noted(container={"path": 5, "root": 6}),
    "a path into nothing": lambda: noted(container={"path": ["a", "b"], "root": {}}),
    "a path through a text": lambda: noted(container={"path": [0, 0, 0], "root": "abc"}),
    "a path of lists": lambda: noted(container={"path": [["a"]], "root": {}}),
    "a path that is a dict": lambda: noted(container={"path": {"a": 1}, "root": {}}),
    "a path of a hundred steps": lambda: noted(container={"path": ["a"] * 100, "root": {}}),
    "no root": lambda: noted(container={"path": ["a"]}),
    "a tag that is none": lambda: noted(container={"path": ["a"], "root": {"ckptfix": "eval", "value": "1"}}),
    "a tag that is a list": lambda: noted(container={"path": ["a"], "root": {"ckptfix": ["dict"]}}),
    "a dict of unhashable keys": lambda: noted(
        container={"path": ["a"], "root": {"ckptfix": "dict", "value": [[[], 1]]}}
    ),
    "a complex number that is none": lambda: noted(
        entries={}, container={"entries": {"x": {"ckptfix": "complex", "value": "ab"}}}
    ),
    "bytes that are none": lambda: noted(container={"entries": {"x": {"ckptfix": "bytes", "value": "%%%"}}}),
    "entries that are a list": lambda: noted(container={"entries": [1]}),
    "an entry in the place of a tensor": lambda: noted(container={"entries": {"w": 1}}),
    "an order that leaves keys out": lambda: noted(container={"order": []}),
    "an order of lists": lambda: noted(container={"order": [["w"]]}),
    "an order that is a number": lambda: noted(container={"order": 1}),
    "800 lists deep": lambda: noted(
        container={"path": ["a"], "root": json.loads('{"x":' + "[" * 800 + "]" * 800 + "}")}
    ),
    "a metadata of numbers": lambda: noted(metadata={"": 1, "a": [2]}),
    "a metadata of objects": lambda: noted(metadata={"": {"version": {"a": [None]}}}),
    "a metadata of NaN": lambda: noted(metadata='{"": {"version": NaN}}'),
}


def crafted(cases: dict[str, Crafted]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("build", [pytest.param(build, id=case) for case, build in cases.items()])


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Return an empty working folder, in which anything a payload creates shows."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("container", [torch_zip, legacy])
@crafted(INERT)
def test_odd_data_around_the_weights_stays_inert(build, container, place):
    path = place / "odd.pth"
    path.write_bytes(container(build()))
    assert bytes(ckptfix.open_checkpoint(path).read("w").numpy()) == STORAGE
    assert outcome(path) != REFUSED
    assert not list(place.glob("PWNED*"))


@pytest.mark.parametrize("container", [torch_zip, legacy])
@crafted({case: build for case, build in REFUSED_PICKLES.items() if not WEARING.search(case)})
def test_a_hostile_pickle_is_refused(build, container, place):
    path = place / "hostile.pth"
    path.write_bytes(container(build()))
    _refused(path)


@crafted(INERT_ZIPS)
def test_odd_members_of_an_archive_are_never_unpacked(build, place):
    path = place / "odd.pth"
    path.write_bytes(build())
    assert bytes(ckptfix.open_checkpoint(path).read("w").numpy()) == STORAGE
    assert [entry.name for entry in place.iterdir()] == ["odd.pth"]


@crafted({**REFUSED_ZIPS, **LEGACY, **SAFETENSORS})
def test_a_hostile_container_is_refused(build, place):
    path = place / "hostile.bin"
    path.write_bytes(build())
    _refused(path)


@crafted(CONTRADICTIONS)
def test_a_note_that_contradicts_the_weights_is_reported_and_they_are_kept(build, place):
    path = place / "noted.safetensors"
    path.write_bytes(build())
    assert bytes(ckptfix.open_checkpoint(path).read("w").numpy()) == STORAGE
    (told,) = (finding for finding in ckptfix.check(path).findings if finding.code == "FIL203")
    assert told.level is Level.WARNING


@crafted(HARMLESS_NOTES)
def test_the_weights_stand_without_a_note_that_makes_no_sense(build, place):
    path = place / "noted.safetensors"
    path.write_bytes(build())
    assert bytes(ckptfix.open_checkpoint(path).read("w").numpy()) == STORAGE
    assert outcome(path) != REFUSED


def _refused_at_once(path: Path) -> None:
    with pytest.raises((HostileError, UnreadableError)) as caught:
        ckptfix.open_checkpoint(path).state_dict()
    assert str(path) in str(caught.value)
    assert str(caught.value).isprintable()


def _refused(path: Path) -> None:
    _refused_at_once(path)
    assert outcome(path) == REFUSED
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


CALLS = {
    "system": call("os.system", text("touch PWNED")),
    "eval": call("builtins.eval", text("open('PWNED', 'w')")),
    "getattr": call("builtins.getattr", call("builtins.__import__", text("os")), text("system"))
    + text("touch PWNED")
    + b"\x85R",
    "run by BUILD": name("models.A")
    + b")\x81"
    + b"}("
    + text("__setstate__")
    + name("os.system")
    + b"u"
    + text("touch PWNED")
    + b"bb",
    "INST": b"(" + text("touch PWNED") + b"ios\nsystem\n",
    "OBJ": b"(" + name("os.system") + text("touch PWNED") + b"o",
    "STACK_GLOBAL": text("os") + text("system") + b"\x93" + text("touch PWNED") + b"\x85R",
    "NEWOBJ": name("subprocess.Popen") + text("touch PWNED") + b"\x85\x81",
    "runpy": call("runpy._run_code", text("open('PWNED', 'w')"), b"}"),
    "through torch": call("torch.serialization.os.system", text("touch PWNED")),
}


@pytest.mark.parametrize("where", [state_dict, around])
@pytest.mark.parametrize("payload", [pytest.param(payload, id=case) for case, payload in CALLS.items()])
def test_a_payload_is_named_and_never_run(payload, where, place):
    path = place / "payload.pth"
    path.write_bytes(torch_zip(where(x=payload)))
    report = ckptfix.check(path)
    assert "FIL901" in {finding.code for finding in report.findings}
    done = ckptfix.repair(path, output=place / "out.pth").report
    assert done.output is None
    assert done.exit_code != 0
    assert [entry.name for entry in place.iterdir()] == ["payload.pth"]


SYSTEM = call("os.system", text("touch PWNED"))
STOP = b"."

UNREADABLE = {
    "no weights": lambda: PROTO + SYSTEM + STOP,
    "a persistent id": lambda: torch_zip(PROTO + b"}(" + text("w") + tensor() + text("x") + SYSTEM + b"Qu."),
    "the class of a storage": lambda: torch_zip(PROTO + call("torch.FloatStorage", SYSTEM) + b"Q."),
    "a tensor of the result": lambda: torch_zip(PROTO + call("torch._utils._rebuild_tensor", SYSTEM, b"K\0))") + STOP),
    "an end that is cut off": lambda: torch_zip(PROTO + b"}(" + text("x") + SYSTEM),
    "a byte that is no opcode": lambda: torch_zip(PROTO + SYSTEM + b"\xff."),
    "behind other bytes": lambda: b"HTTP/1.1 200 OK\r\n\r\n" + torch_zip(PROTO + SYSTEM + STOP),
    "the magic number": lambda: PROTO + SYSTEM + b"0" + PROTO + SYSTEM + STOP,
    "the list of storages": lambda: legacy(state_dict(), keys=SYSTEM + b"0](e"),
}


@pytest.mark.parametrize("build", [pytest.param(build, id=case) for case, build in UNREADABLE.items()])
def test_a_payload_is_named_where_the_file_cannot_be_read(build, place):
    path = place / "payload.pth"
    path.write_bytes(build())
    for salvage in (False, True):
        with pytest.raises(HostileError, match=r"built to run code.*os\.system \(FIL901\).*do not load it"):
            ckptfix.open_checkpoint(path, salvage=salvage)
    assert outcome(path) == REFUSED
    assert [entry.name for entry in place.iterdir()] == ["payload.pth"]


def test_a_payload_is_named_where_a_folder_cannot_be_read(place):
    for name_, content in {".metadata": PROTO + SYSTEM + STOP, "__0_0.distcp": b"0"}.items():
        (place / name_).write_bytes(content)
    with pytest.raises(HostileError, match=r"os\.system"):
        ckptfix.open_checkpoint(place)


def test_an_object_in_the_place_of_hooks_is_reported_and_not_written(place):
    hooked = tensor(hooks=b"\x89" + call("mylib.make", text("x")))
    path = place / "hooks.pth"
    path.write_bytes(torch_zip(PROTO + b"}(" + text("w") + hooked + b"u."))
    (finding,) = ckptfix.check(path).findings
    assert finding.code == "FIL102"
    assert "mylib.make" in finding.message
    assert ckptfix.repair(path, output=place / "out.pth").report.exit_code == 0
    assert ckptfix.check(place / "out.pth").findings == ()


@pytest.mark.parametrize("hidden", ["after its end", "under a name in capitals"])
def test_a_pickle_that_no_one_reads_is_noticed(hidden, place):
    behind = PROTO + SYSTEM + STOP
    path = place / "hidden.pth"
    in_capitals = hidden == "under a name in capitals"
    whole = {"data/0": STORAGE, "version": b"3\n"}
    members = {**whole, **({"DATA.PKL": behind} if in_capitals else {})}
    path.write_bytes(torch_zip(state_dict() + (b"" if in_capitals else behind), members))
    (finding,) = ckptfix.check(path).findings
    assert (finding.code, finding.level) == ("FIL901", Level.WARNING)
    path.write_bytes(torch_zip(state_dict() + bytes(64), whole))
    assert ckptfix.check(path).findings == ()


def _zipped(build: Crafted) -> bytes:
    return torch_zip(build())


EXHAUSTING: dict[str, Crafted] = {
    "two million empty lists": lambda: torch_zip(around(x=b"](" + b"]" * 2_000_000 + b"e")),
    "a million objects of three bytes each": lambda: torch_zip(
        around(x=name("models.A") + b"q\x050](" + b"h\x05)\x81" * 1_000_000 + b"e")
    ),
    "calls of what calls gave": lambda: torch_zip(around(x=name("models.A") + b")R" * 1_000_000)),
    "five million times the same value": lambda: torch_zip(around(x=b"\x88" * 5_000_000)),
    "sixty million opcodes in sixty thousand bytes": lambda: torch_zip(
        PROTO + b"N0" * 30_000_000, method=zipfile.ZIP_DEFLATED
    ),
    "a header of a million empty objects": lambda: safetensors(b'{"a":[' + b"{}," * 1_000_000 + b"0]}"),
    "five million sets": lambda: torch_zip(around(x=b"](" + b"\x8f" * 5_000_000 + b"e")),
    "five million marks": lambda: torch_zip(PROTO + b"(" * 5_000_000),
    "twenty million sets in twenty thousand bytes": lambda: torch_zip(
        around(x=b"](" + b"\x8f" * 20_000_000 + b"e"), method=zipfile.ZIP_DEFLATED
    ),
    **{case: partial(_zipped, build) for case, build in REFUSED_PICKLES.items() if WEARING.search(case)},
    **REFUSED_ZIPS,
}


def test_files_that_would_take_all_memory_are_refused_within_two_gigabytes(place):
    """They are opened in a process that may have 2 GiB of address space, where an allocation on a mere claim fails.

    Once each: some take a second or two, and every use of a file begins with that."""
    for index, build in enumerate(EXHAUSTING.values()):
        (place / f"{index}.bin").write_bytes(build())
    files = [str(place / f"{index}.bin") for index in range(len(EXHAUSTING))]
    command = [sys.executable, "-m", "tests.attacks.outcomes", str(2 << 30), *files]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert dict(zip(EXHAUSTING, done.stdout.splitlines(), strict=True)) == dict.fromkeys(EXHAUSTING, REFUSED)


def test_an_error_is_one_printable_line():
    error = CkptfixError("a\nb\x1b[2J\ud800" + "x" * 10_000)
    assert str(error).startswith("a\\nb\\x1b[2J\\ud800xxx")
    assert len(str(error)) <= 2100


def test_a_hostile_file_is_distinguished_from_a_damaged_one(place):
    path = place / "hostile.pth"
    path.write_bytes(torch_zip(REFUSED_PICKLES["a hundred thousand keys of one hash"]()))
    with pytest.raises(HostileError, match="do not use this file"):
        ckptfix.open_checkpoint(path)
