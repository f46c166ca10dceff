import io
import pickle
import struct
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfix
from ckptfix.core.facts import clause
from ckptfix.errors import CkptfixError, HostileError, UnreadableError
from tests.checks import assert_same

WEIGHT, TAIL, COUNT = torch.arange(6.0).reshape(2, 3), torch.tensor([4.0, 5.0]), torch.tensor([1, 2**40])


def pickled(value: Any, protocol: int = 2) -> bytes:
    return pickle.dumps(value, protocol=protocol)


class Saver(pickle.Pickler):
    """Writes an integer of the object as the persistent id of a tensor, as torch 0.1 did."""

    def persistent_id(self, value: Any) -> str | None:
        return str(value.key) if isinstance(value, Key) else None


class Key:
    def __init__(self, key: int) -> None:
        self.key = key


def triple(key: int, second: Any, cls: str) -> bytes:
    """The pickle of ``(key, second, torch.<cls>)``; the class is named and need not exist."""
    text = f"(I{key}\n".encode()
    text += f"S'{second}'\n".encode() if isinstance(second, str) else f"I{second}\n".encode()
    return text + f"ctorch\n{cls}\nt.".encode()


def tensor(key: int, storage: int, cls: str, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> bytes:
    numbers = (*shape, *strides, offset)
    return triple(key, storage, cls) + struct.pack(f"<i4x{len(numbers)}q", len(shape), *numbers)


def made(**parts: bytes) -> bytes:
    root = io.BytesIO()
    Saver(root, protocol=2).dump({"fc.weight": Key(11), "tied": Key(11), "fc.tail": Key(12), "n": Key(13)})
    big = 5_000_000_000  # the keys were addresses: Python 2 wrote them as INT with more than 32 bits
    members = {
        "sys_info": pickled({"little_endian": True, "protocol_version": 1000}),
        "pickle": root.getvalue(),
        "tensors": pickled(3)
        + tensor(11, 1, "FloatTensor", (2, 3), (3, 1), 0)
        + tensor(12, 3, "FloatTensor", (2,), (1,), 0)
        + tensor(13, big, "LongTensor", (2,), (1,), 0),
        "storages": pickled(2)
        + triple(1, "cpu", "FloatStorage")
        + struct.pack("<q6f", 6, *range(6))
        + triple(big, "cuda:0", "LongStorage")
        + struct.pack("<q2q", 2, 1, 2**40)
        + pickled([(3, 1, 4, 2)]),
    }
    members |= parts
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for part, data in members.items():
            info = tarfile.TarInfo(part)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.pth"


def test_tensors_views_and_ties_are_read(file: Path) -> None:
    file.write_bytes(made())
    opened = ckptfix.open_checkpoint(file)
    assert (opened.format, opened.devices) == ("torch-tar", ("cuda:0",))
    state_dict = opened.state_dict()
    assert_same(dict(state_dict), {"fc.weight": WEIGHT, "tied": WEIGHT, "fc.tail": TAIL, "n": COUNT})
    assert state_dict["fc.weight"].data_ptr() == state_dict["tied"].data_ptr()


def test_torch_itself_reads_the_same(file: Path) -> None:
    file.write_bytes(made())
    assert_same(dict(ckptfix.open_checkpoint(file).state_dict()), torch.load(file, "cpu", weights_only=False))


def test_it_is_repaired_into_a_file_of_today(file: Path) -> None:
    file.write_bytes(made())
    done = ckptfix.repair(file, output=file.with_name("out.pth"))
    assert [finding.code for finding in done.report.fixed] == ["FIL102", "FIL103"]
    assert set(torch.load(file.with_name("out.pth"), weights_only=True)) == {"fc.weight", "tied", "fc.tail", "n"}


BROKEN = {
    "a storage of more than its file": (
        {"storages": pickled(1) + triple(1, "cpu", "FloatStorage") + struct.pack("<q", 1 << 40)},
        UnreadableError,
        "ends after the end of its file",
    ),
    "a tensor of more than its storage": (
        {"tensors": pickled(1) + tensor(11, 1, "FloatTensor", (9, 9), (9, 1), 0)},
        HostileError,
        "claims 324 bytes of a storage of 24",
    ),
    "a tensor of a tensor": (
        {"tensors": pickled(2) + tensor(11, 1, "FloatTensor", (2,), (1,), 0) + tensor(12, 11, "x", (2,), (1,), 0)},
        UnreadableError,
        "tensor 12 has no storage",
    ),
    "a negative stride": (
        {"tensors": pickled(1) + tensor(11, 1, "FloatTensor", (2,), (-1,), 1)},
        UnreadableError,
        "negative size",
    ),
    "dimensions without end": (
        {"tensors": pickled(1) + triple(11, 1, "FloatTensor") + struct.pack("<i4x", 2**30)},
        UnreadableError,
        "has 1073741824 dimensions",
    ),
    "a view beyond its storage": (
        {
            "storages": pickled(1)
            + triple(1, "cpu", "FloatStorage")
            + struct.pack("<q6f", 6, *range(6))
            + pickled([(3, 1, 4, 9)])
        },
        HostileError,
        "a view claims more",
    ),
    "a tensor of a storage that is not there": (
        {"tensors": pickled(1) + tensor(11, 99, "FloatTensor", (2,), (1,), 0)},
        UnreadableError,
        "damaged",
    ),
    "an object of a tensor that is not there": ({"tensors": pickled(0)}, UnreadableError, "malformed"),
    "numbers that are none": ({"storages": pickled("many")}, UnreadableError, "damaged"),
    "text for a list of views": (
        {"storages": pickled(0) + pickled(7)},
        UnreadableError,
        "damaged",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_impossible_descriptions_are_named(file: Path, case: str) -> None:
    parts, error, message = BROKEN[case]
    file.write_bytes(made(**parts))
    with pytest.raises(error, match=message):
        ckptfix.open_checkpoint(file)


def test_every_cut_ends_in_a_typed_error(file: Path) -> None:
    data = made()
    end = len(data.rstrip(b"\0"))
    for stop in range(1, end, 61):
        file.write_bytes(data[:stop])
        with pytest.raises(CkptfixError):
            ckptfix.open_checkpoint(file)


def test_a_payload_is_found_and_does_not_run(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr("posix.system", ran.append)
    weight = b"X\x01\0\0\0wX\x02\0\0\x0011Q"
    file.write_bytes(made(pickle=b"\x80\x02}(" + weight + b"X\x01\0\0\0xcposix\nsystem\nX\x04\0\0\0true\x85Ru."))
    assert "FIL901" in [finding.code for finding in ckptfix.check(file).findings]
    assert ran == []


def test_a_file_cut_in_its_storages_gives_complete_tensors(file: Path) -> None:
    data = made()
    want = {"fc.weight": WEIGHT, "tied": WEIGHT, "fc.tail": TAIL, "n": COUNT}
    starts = {"fc.weight": data.index(struct.pack("<6f", *range(6))), "n": data.index(struct.pack("<2q", 1, 2**40))}
    for cut in range(1024, len(data.rstrip(b"\0")), 17):
        file.write_bytes(data[:cut])
        with pytest.raises(UnreadableError):
            ckptfix.open_checkpoint(file)
        try:
            checkpoint = ckptfix.open_checkpoint(file, salvage=True)
        except UnreadableError:
            assert cut < starts["fc.weight"] + 24
            continue
        got = set(checkpoint.keys())
        assert {*got, *checkpoint.lost} == set(want), cut
        assert ("n" in got) == (cut >= starts["n"] + 16), cut
        assert_same({key: checkpoint.read(key) for key in got}, {key: want[key] for key in got})
        assert "the tar archive has" in clause(checkpoint.damage[0])
