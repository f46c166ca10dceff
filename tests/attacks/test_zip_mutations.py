"""Zip checkpoints whose structure is damaged at random: torch.load and ckptfix compared.

Two laws hold for all of them. What ckptfix calls clean, torch reads, and as it was. What ckptfix gives back of the rest
is as it was, where no finding names or doubts it."""

import io
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfix
from ckptfix.core.finding import Level
from ckptfix.errors import CkptfixError
from tests.checks import bytes_of
from tests.reading.archives.test_wrapped import zipped
from tests.reading.archives.zips import CENTRAL, LOCAL, Zip, saved

ROUNDS = 6
"""Mutations of each kind and file."""

WEIGHTS = {f"layer{n}.weight": torch.arange(1.0 + n, 36 + n).reshape(5, 7) for n in range(4)}
MANY = {f"norms.{n}.bias": torch.arange(9.0) + n for n in range(30)}


def packed(data: bytes) -> bytes:
    archive = Zip(data)
    return zipped({name: bytes(archive.data[at : at + archive.sizes[name]]) for name, at in archive.starts.items()})


FILES = {"equal": saved(WEIGHTS), "many": saved(MANY), "packed": packed(saved(WEIGHTS))}


def wrong_place(archive: Zip, rng: random.Random) -> None:
    for name in rng.sample(archive.names, rng.choice((1, 1, 2, 3))):
        other = rng.choice(archive.names)
        places = (archive.headers[other], archive.starts[other], len(archive.data) + 7, archive.directory, 0xFFFFFFF0)
        archive.put(archive.entries[name], CENTRAL["place"], rng.choice(places))


def wrong_field(archive: Zip, rng: random.Random) -> None:
    records = [(archive.entries, CENTRAL), (archive.headers, LOCAL)]
    places, fields = rng.choice(records)
    base, (at, width) = places[rng.choice(archive.names)], rng.choice(list(fields.values()))
    archive.data[base + at + rng.randrange(width)] ^= 1 << rng.randrange(8)


def wrong_end(archive: Zip, rng: random.Random) -> None:
    at = rng.randrange(archive.end - 76, len(archive.data))
    archive.data[at] ^= 1 << rng.randrange(8)


def swapped(archive: Zip, rng: random.Random) -> None:
    one, other = rng.sample([name for name in archive.names if name[-2] in "/12"], 2)
    kind = rng.randrange(3)
    if kind == 0:
        archive.swap(archive.entries[one] + CENTRAL["place"][0], archive.entries[other] + CENTRAL["place"][0], 4)
    elif len(one) == len(other):
        places, offset = [(archive.entries, 46), (archive.headers, 30)][kind - 1]
        archive.swap(places[one] + offset, places[other] + offset, len(one))


def lost(archive: Zip, rng: random.Random) -> None:
    start = rng.choice((rng.randrange(len(archive.data)), *rng.sample(list(archive.starts.values()), 3)))
    del archive.data[start : start + rng.choice((1, 8, 64, 512))]


def gained(archive: Zip, rng: random.Random) -> None:
    start = rng.choice((rng.randrange(len(archive.data)), *rng.sample(list(archive.headers.values()), 3)))
    archive.data[start:start] = rng.choice((bytes(64), archive.data[start : start + 512]))


def overwritten(archive: Zip, rng: random.Random) -> None:
    size = rng.choice((64, 512))
    start = rng.randrange(len(archive.data) // size) * size
    archive.data[start : start + size] = rng.choice((bytes(size), rng.randbytes(size)))


def cut(archive: Zip, rng: random.Random) -> None:
    del archive.data[rng.randrange(archive.starts[archive.names[1]], len(archive.data)) :]


def wrong_byte(archive: Zip, rng: random.Random) -> None:
    name = rng.choice([name for name in archive.names if archive.sizes[name]])
    archive.data[archive.starts[name] + rng.randrange(archive.sizes[name])] ^= 1 << rng.randrange(8)


KINDS: tuple[Callable[[Zip, random.Random], None], ...] = (
    wrong_place,
    wrong_field,
    wrong_end,
    swapped,
    lost,
    gained,
    overwritten,
    cut,
    wrong_byte,
)


def by_torch(data: bytes) -> dict[str, Any] | None:
    """Return what torch reads; None if it fails in any way."""
    try:
        found = torch.load(io.BytesIO(data))
    except Exception:  # noqa: BLE001 - damage ends there in errors of many kinds
        return None
    return found if isinstance(found, dict) else None


def is_same(found: dict[str, Any] | None, weights: dict[str, torch.Tensor]) -> bool:
    return found is not None and {key: bytes_of(value) for key, value in found.items()} == {
        key: bytes_of(value) for key, value in weights.items()
    }


def assert_lawful(path: Path, weights: dict[str, torch.Tensor]) -> None:
    try:
        if ckptfix.check(path, select=("FIL",)).exit_code == 0:
            assert is_same(by_torch(path.read_bytes()), weights), "clean, and torch does not read it"
        report = ckptfix.check(path, select=("FIL",), salvage=True)
        checkpoint = ckptfix.open_checkpoint(path, salvage=True)
    except CkptfixError:
        return
    if any("may differ from what was saved" in finding.message for finding in report.findings):
        return
    named = {key for finding in report.findings if finding.code == "FIL201" for key in finding.keys}
    assert set(weights) == {*checkpoint.keys(), *checkpoint.lost}
    for key in set(checkpoint.keys()) - named:
        assert bytes_of(checkpoint.read(key)) == bytes_of(weights[key]), key


def test_the_files_are_healthy(tmp_path: Path) -> None:
    for name, data in FILES.items():
        path = tmp_path / f"{name}.pth"
        path.write_bytes(data)
        assert all(finding.level == Level.NOTE for finding in ckptfix.check(path, select=("FIL",)).findings)
        assert is_same(by_torch(data), MANY if name == "many" else WEIGHTS)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_is_clean_loads_and_what_is_salvaged_is_right(
    kind: Callable[[Zip, random.Random], None], tmp_path: Path
) -> None:
    path = tmp_path / "mutated.pth"
    for name, data in FILES.items():
        for number in range(ROUNDS):
            archive = Zip(data)
            kind(archive, random.Random(f"{name} {kind.__name__} {number}"))
            path.write_bytes(archive.data)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    assert_lawful(path, MANY if name == "many" else WEIGHTS)
                except BaseException as error:
                    raise AssertionError(f"{name}, {kind.__name__}, round {number}") from error
