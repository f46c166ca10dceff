"""Archives and compressed files that are built to exhaust whoever looks into them, or to reach outside of themselves.

Each is refused in one line, or read as if the attack were not there, in a process that may take some 200 MB."""

import bz2
import gzip
import io
import json
import lzma
import os
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptfix.errors import HostileError, UnreadableError
from tests.attacks.crafted import state_dict, torch_zip
from tests.reading.files import opened

Crafted = Callable[[], bytes]

GOOD = torch_zip(state_dict())
EXABYTES = struct.pack("<2H3Q", 1, 24, 1 << 60, 1 << 60, 0)
"""The extra field of zip64: both sizes and a place."""

UNKNOWN = 0xFFFFFFFF


def local(
    name: bytes, raw: bytes, method: int = 0, packed: int | None = None, size: int = 0, extra: bytes = b"", crc: int = 0
) -> bytes:
    """Return a member with its header."""
    shown = len(raw) if packed is None else packed
    fields = (20, 0, method, 0, 33, crc, shown, size or len(raw), len(name), len(extra))
    return struct.pack("<4s5H3I2H", b"PK\x03\x04", *fields) + name + extra + raw


def entry(name: bytes, place: int, packed: int, size: int, method: int = 0, extra: bytes = b"", crc: int = 0) -> bytes:
    """Return a directory entry."""
    fields = (20, 20, 0, method, 0, 33, crc, packed, size, len(name), len(extra), 0, 0, 0, 0, place)
    return struct.pack("<4s6H3I5H2I", b"PK\x01\x02", *fields) + name + extra


def zipped(members: bytes, entries: list[bytes]) -> bytes:
    """Return an archive of members and a directory."""
    directory = b"".join(entries)
    count = min(len(entries), 0xFFFF)
    return (
        members
        + directory
        + struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, count, count, len(directory), len(members), 0)
    )


def at_one_place(count: int, raw: bytes, method: int = 0, size: int = 0) -> bytes:
    """Return an archive whose members all share the same bytes."""
    crc = zlib.crc32(raw)
    names = (b"%d.pth" % index for index in range(count))
    entries = [entry(name, 0, len(raw), size or len(raw), method, crc=crc) for name in names]
    return zipped(local(b"a.bin", raw, method, size=size, crc=crc), entries)


def quoting(count: int) -> bytes:
    """Members that each hold all that follow, whose headers are quoted in a stored block of deflate, around a kernel of
    zeros (David Fifield, A better zip bomb, 2019)."""
    size = 1 << 22
    kernel = zlib.compress(bytes(size), 9)[2:-4]
    made, found = local(b"kernel.pth", kernel, 8, size=size), [(b"kernel.pth", 0, len(kernel))]
    for index in range(count):
        quote = b"\0" + struct.pack("<2H", 40, 0xFFFF ^ 40)
        name = b"%05d.pth" % index
        head = local(name, b"", 8, packed=len(quote) + len(made), size=size) + quote
        found = [(name, 0, len(quote) + len(made)), *((other, at + len(head), packed) for other, at, packed in found)]
        made = head + made
    return zipped(made, [entry(name, at, packed, size, 8) for name, at, packed in found])


def differing(count: int, raw: bytes, method: int) -> bytes:
    """Return members whose headers and directory contradict each other and are both wrong."""
    members, entries, place = b"", [], 0
    parts = [local(b"%d.pth" % index, raw, method, size=9, crc=7) for index in range(count)]
    for index, part in enumerate(parts):
        entries.append(entry(b"%d.pth" % index, place, len(raw), 5, method, crc=8))
        place += len(part)
    members = b"".join(parts)
    return zipped(members, entries)


def claiming(name: bytes, method: int, is_listed: bool = True) -> bytes:
    """Return a member of an exabyte, declared by zip64."""
    members = local(name, bytes(50), method, UNKNOWN, UNKNOWN, EXABYTES)
    return zipped(members, [entry(name, 0, UNKNOWN, UNKNOWN, method, EXABYTES)]) if is_listed else members


def in_zips(data: bytes, levels: int, name: str = "x.zip") -> bytes:
    """Return nested zip archives."""
    for _ in range(levels):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(name, data)
        data = buffer.getvalue()
    return data


def in_gzips(data: bytes, levels: int) -> bytes:
    """Return nested gzip streams."""
    for _ in range(levels):
        data = gzip.compress(data, mtime=0)
    return data


def file(name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"", size: int | None = None, link: str = "") -> bytes:
    """Return a file in a tar archive, with its header."""
    header = tarfile.TarInfo(name)
    header.type, header.size, header.linkname = kind, len(data) if size is None else size, link
    return header.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512)


def tar(*files: bytes) -> bytes:
    """Return a tar archive."""
    return b"".join(files) + bytes(1024)


MODEL = file("model.pth", data=GOOD)
LINKS = (
    file("hard.pth", tarfile.LNKTYPE, link="/etc/passwd"),
    file("soft.pth", tarfile.SYMTYPE, link="../../../etc/passwd"),
    file("device.pth", tarfile.CHRTYPE),
    file("disk.pth", tarfile.BLKTYPE),
    file("pipe.pth", tarfile.FIFOTYPE),
)
FAR = "../" * 20 + "tmp/evil.pth"

READ: dict[str, Crafted] = {
    "a zip member outside of the archive": lambda: in_zips(GOOD, 1, FAR),
    "a zip member with an absolute name": lambda: in_zips(GOOD, 1, "/etc/evil.pth"),
    "three zips around a checkpoint": lambda: in_zips(GOOD, 3),
    "four gzips around a checkpoint": lambda: in_gzips(GOOD, 4),
    "a file of a tar outside of it": lambda: tar(file(FAR, data=GOOD)),
    "links, devices and a pipe beside a checkpoint": lambda: tar(*LINKS, MODEL),
    "a pax header that claims any size": lambda: tar(
        file("pax", tarfile.XHDTYPE, b"30 size=99999999999999999999\n"), MODEL
    ),
    "a pax header of a sparse file of an exabyte": lambda: tar(
        file("pax", tarfile.XHDTYPE, b"22 GNU.sparse.major=1\n99 GNU.sparse.realsize=999999999999999999\n"), MODEL
    ),
    "a thousand short streams of gzip": lambda: b"".join(
        gzip.compress(GOOD[start : start + 2], mtime=0) for start in range(0, len(GOOD), 2)
    ),
}

REFUSED: dict[str, Crafted] = {
    "a hundred thousand members at one place": lambda: at_one_place(100_000, b"x"),
    "a thousand bombs at one place": lambda: at_one_place(1000, zlib.compress(bytes(1 << 22), 9)[2:-4], 8, 1 << 22),
    "a thousand members of empty blocks at one place": lambda: at_one_place(
        1000, b"\0\0\0\xff\xff" * 50_000 + b"\1\0\0\xff\xff", 8, 100
    ),
    "a thousand of bzip2 at one place": lambda: at_one_place(1000, bz2.compress(bytes(1 << 20)), 12, 1 << 20),
    "members that quote each other": lambda: quoting(1000),
    "members that quote each other, without a directory": lambda: quoting(1000)[:-100],
    "seventy thousand headers without a directory": lambda: local(b"a", b"") * 70_000,
    "seventy thousand descriptors": lambda: local(b"a/data.pkl", b"") + b"PK\x07\x08" * 70_000,
    "headers and a directory that contradict each other": lambda: differing(3000, zlib.compress(bytes(9))[2:-4], 8),
    "the same with blocks of nothing": lambda: differing(300, b"\0\0\0\xff\xff" * 1000, 8),
    "a hundred names of 64 kB": lambda: b"".join(local(b"n" * 65_530 + b"%05d" % index, b"") for index in range(100)),
    "an exabyte in a stored member": lambda: claiming(b"a.pth", 0),
    "an exabyte in a deflated member": lambda: claiming(b"a.pth", 8),
    "an exabyte of data.pkl": lambda: claiming(b"a/data.pkl", 0),
    "an exabyte of data.pkl, packed": lambda: claiming(b"a/data.pkl", 8),
    "an exabyte without a directory": lambda: claiming(b"a/data.pkl", 8, is_listed=False),
    "an lzma member with a dictionary of 2 GB": lambda: at_one_place(
        1, b"\x09\x14\x05\0\x5d\xff\xff\xff\x7f" + bytes(50), 14, 0x7FFFFFFF
    ),
    "seven zips in each other": lambda: in_zips(GOOD, 7),
    "five gzips in each other": lambda: in_gzips(GOOD, 5),
    "a bomb in four gzips": lambda: in_gzips(bytes(80 << 20), 4),
    "a bomb of bzip2": lambda: bz2.compress(bytes(4 << 20)) * 20,
    "a bomb of xz": lambda: lzma.compress(bytes(8 << 20), preset=0) * 10,
    "a dictionary of a gigabyte": lambda: lzma.compress(
        GOOD, filters=[{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 30}]
    ),
    "twenty thousand empty streams of gzip": lambda: gzip.compress(b"", mtime=0) * 20_000,
    "twenty thousand empty streams of bzip2": lambda: bz2.compress(b"") * 20_000,
    "twenty thousand empty streams of xz": lambda: lzma.compress(b"") * 20_000,
    "a million empty blocks in a stream": lambda: gzip.compress(b"", mtime=0)[:10] + b"\0\0\0\xff\xff" * 1_000_000,
    "a tar of thirty-one thousand files": lambda: gzip.compress(file("x") * 31_000, mtime=0),
    "nothing but links, devices and a pipe": lambda: tar(*LINKS),
    "a file of an exabyte": lambda: tar(file("x.pth", size=1 << 60)),
    "a hard link of a terabyte": lambda: tar(file("x.pth", tarfile.LNKTYPE, size=1 << 40), MODEL),
    "a sparse file of a petabyte": lambda: tar(file("x.pth", b"S", size=1 << 50), MODEL),
    "a pax header of a terabyte": lambda: tar(file("pax", tarfile.XHDTYPE, size=1 << 40), MODEL),
    "a long name of 8 GB": lambda: tar(file("name", tarfile.GNUTYPE_LONGNAME, b"a" * 512, 1 << 33), MODEL),
}


@pytest.mark.parametrize("build", [pytest.param(build, id=case) for case, build in READ.items()])
def test_what_reaches_outside_is_only_a_name(build: Crafted, tmp_path: Path) -> None:
    path = tmp_path / "archive.bin"
    path.write_bytes(build())
    assert list(opened(path).specs) == ["w"]
    assert list(tmp_path.iterdir()) == [path]
    assert not Path(tempfile.gettempdir(), "evil.pth").exists()


CHILD = """
import json, re, sys
from pathlib import Path
from ckptfix import open_checkpoint
from ckptfix.errors import HostileError, UnreadableError
def peak():  # ru_maxrss begins with what the program that started this one has
    return int(re.search(r"VmHWM:\\s+([0-9]+) kB", Path("/proc/self/status").read_text())[1])
start, said = peak() if sys.platform == "linux" else 0, []
for path in sys.argv[1:]:
    try:
        said.append("opened: " + open_checkpoint(path).format)
    except (HostileError, UnreadableError) as error:
        said.append(str(error))
print(json.dumps([said, peak() - start if start else 0]))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], Path, int]:
    """The message for each file that is refused, all in one process; the folder for temporary files; and
    the kilobytes that the process had in addition."""
    folder = tmp_path_factory.mktemp("refused")
    (folder / "scratch").mkdir()
    paths = {case: folder / f"{index}.bin" for index, case in enumerate(REFUSED)}
    for case, path in paths.items():
        path.write_bytes(REFUSED[case]())
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *map(str, paths.values())],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "TMPDIR": str(folder / "scratch")},
        capture_output=True,
        text=True,
        timeout=300,  # they take milliseconds; what they claim to hold would take hours
        check=True,
    )
    said, grown = json.loads(done.stdout)
    shown = [text.replace(str(path), "FILE") for text, path in zip(said, paths.values(), strict=True)]
    return dict(zip(REFUSED, shown, strict=True)), folder / "scratch", grown


@pytest.mark.parametrize("case", REFUSED)
def test_an_archive_without_end_is_refused(case: str, told: tuple[dict[str, str], Path, int]) -> None:
    said, scratch, _ = told
    assert said[case].startswith("FILE")
    assert said[case].isprintable()
    assert not list(scratch.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_their_memory_is_bounded(told: tuple[dict[str, str], Path, int]) -> None:
    assert 0 < told[2] * 1024 < (200 << 20)


def test_the_way_out_of_a_large_dictionary_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.pth.xz"
    path.write_bytes(REFUSED["a dictionary of a gigabyte"]())
    with pytest.raises(
        (HostileError, UnreadableError), match=r"takes more than 128 MB of memory; .* unpack it yourself \(xz -d\)"
    ):
        opened(path)
