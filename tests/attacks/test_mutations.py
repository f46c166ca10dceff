"""Real files with random damage: what comes out is a checkpoint or a ``CkptfixError``, and nothing else."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptfix
from ckptfix.errors import CkptfixError
from tests.attacks.outcomes import bounded

CASES = 500
"""Mutations in each of the four shares. ``campaign`` with another seed and more rounds runs longer."""

LARGEST = 60_000
OPCODES = b"(.01234FIJKLMNPQRSTUVX]abcdeghijlopqrstu}" + bytes(
    (*range(0x80, 0x83), *range(0x85, 0x8D), *range(0x8E, 0x97))
)


def flip(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 1, 4, 20))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def cut(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def take_out(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    del data[start : start + rng.choice((1, 2, 8, 100))]


def put_in(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    data[start:start] = rng.randbytes(rng.choice((1, 2, 8, 100)))


def swap_opcode(data: bytearray, rng: random.Random) -> None:
    places = [place for place in range(min(len(data), 5000)) if data[place] in OPCODES]
    for _ in range(rng.choice((1, 1, 3))):
        data[rng.choice(places or [0])] = rng.choice(OPCODES)


def copy_over(data: bytearray, rng: random.Random) -> None:
    size = rng.choice((4, 16, 64))
    source, goal = rng.randrange(len(data)), rng.randrange(len(data))
    data[goal : goal + size] = data[source : source + size]


def extreme_number(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    value = rng.choice((0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, (1 << 63) - 1, 1 << 63, (1 << 64) - 1))
    width = rng.choice((2, 4, 8))
    data[start : start + width] = value.to_bytes(8, "little")[:width]


MUTATIONS: tuple[Callable[[bytearray, random.Random], None], ...] = (
    flip,
    cut,
    take_out,
    put_in,
    swap_opcode,
    copy_over,
    extreme_number,
)


def mutated(content: bytes, rng: random.Random) -> bytes:
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2))):
        rng.choice(MUTATIONS)(data, rng)
        if not data:
            return b"\0"
    return bytes(data)


def survive(path: Path, rng: random.Random) -> None:
    """Open, read and now and then check the file; only errors of the package may come out."""
    try:
        with bounded():
            salvage = rng.random() < 0.2
            checkpoint = ckptfix.open_checkpoint(path, salvage=salvage)
            checkpoint.state_dict()
            if rng.random() < 0.3:
                ckptfix.check(path, salvage=salvage)
    except CkptfixError as error:
        message = str(error)
    else:
        return
    assert message.isprintable()


def files(corpus: Path) -> list[Path]:
    """One file of each case and container, small enough."""
    chosen: dict[tuple[str, str], Path] = {}
    for line in (corpus / "manifest.jsonl").read_text().splitlines():
        row = json.loads(line)
        path = corpus / row["path"]
        if path.is_file() and path.stat().st_size <= LARGEST and row["expect"] != "diagnose":
            chosen.setdefault((row["case"], row["path"].split("/")[0]), path)
    return list(chosen.values())


@pytest.mark.parametrize("share", range(4))
def test_damage_ends_in_a_checkpoint_or_a_typed_error(share, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chosen = files(corpus)[share::4]
    assert len(chosen) > 10
    campaign(chosen, -(-CASES // len(chosen)), share, tmp_path)
    assert not list(tmp_path.glob("PWNED*"))


def campaign(chosen: list[Path], rounds: int, seed: int, place: Path) -> int:
    """How many files were tried. A failure leaves its file behind and names the seed."""
    tried = 0
    for path in chosen:
        content = path.read_bytes()
        goal = place / f"mutated{path.suffix}"
        for number in range(rounds):
            rng = random.Random(f"{path.name} {seed} {number}")
            goal.write_bytes(mutated(content, rng))
            try:
                survive(goal, rng)
            except BaseException as error:
                raise AssertionError(f"{path} seed {seed} round {number}") from error
            tried += 1
    return tried
