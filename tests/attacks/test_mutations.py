"""Real files with random damage: the result is a checkpoint or a ``CkptfixError``, and nothing else."""

import bz2
import gzip
import io
import json
import lzma
import random
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

import ckptfix
from ckptfix.errors import CkptfixError
from tests.attacks.outcomes import bounded

CASES = 500
"""Mutations in each of the four shares. ``campaign`` with another seed and more rounds runs longer."""

ROUNDS = 30
"""Mutations of each archive and folder."""

LARGEST = 60_000
STATE_DICT = {f"layer{number}.weight": torch.arange(24.0).reshape(4, 6) + number for number in range(4)}
SAYING = ("data.pkl", ".metadata", "model.bin.index.json", "model.safetensors.index.json")
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
    """Open, read and sometimes check the file; only errors of the package may be raised."""
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
    """Return one small file of each case and container."""
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


WRAPPED = ("gz", "bz2", "xz", "tar", "tar.gz", "zip")


def wrapped(place: Path) -> list[Path]:
    """Return a checkpoint in each kind of archive and compressed file."""
    inner = place / "inner.pth"
    torch.save(STATE_DICT, inner)
    data = inner.read_bytes()
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.add(inner, "folder/inner.pth")
    contents = {
        "gz": gzip.compress(data),
        "bz2": bz2.compress(data),
        "xz": lzma.compress(data),
        "tar": archive.getvalue(),
        "tar.gz": gzip.compress(archive.getvalue()),
    }
    for suffix, content in contents.items():
        (place / f"wrapped.{suffix}").write_bytes(content)
    with zipfile.ZipFile(place / "wrapped.zip", "w", zipfile.ZIP_DEFLATED) as outer:
        outer.write(inner, "folder/inner.pth")
    return [place / f"wrapped.{suffix}" for suffix in WRAPPED]


def folders(place: Path) -> list[Path]:
    """Return a checkpoint in each folder format."""
    inner = place / "inner.pth"
    torch.save(STATE_DICT, inner)
    exploded, dcp = place / "exploded", place / "dcp"
    with zipfile.ZipFile(inner) as archive:
        archive.extractall(exploded)
    made = [exploded]
    for name, suffix in (("sharded", "bin"), ("safetensors shards", "safetensors")):
        folder = place / name
        folder.mkdir()
        weight_map = {}
        for number, (key, tensor) in enumerate(STATE_DICT.items()):
            file = f"model-{number}.{suffix}"
            weight_map[key] = file
            if suffix == "bin":
                torch.save({key: tensor}, folder / file)
            else:
                save_file({key: tensor}, folder / file)
        (folder / f"model.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        made.append(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that there is only one process
        save_distributed(STATE_DICT, checkpoint_id=dcp, no_dist=True)
    return [*made, dcp]


def folder_campaign(folder: Path, rounds: int, seed: int) -> int:
    """Return how many times a file of a folder was damaged and restored."""
    parts = sorted(path for path in folder.rglob("*") if path.is_file())
    for number in range(rounds):
        rng = random.Random(f"{folder.name} {seed} {number}")
        # The most interesting file is the small one that describes the others.
        part = rng.choice([*parts, *(path for path in parts if path.name in SAYING)])
        content = part.read_bytes()
        part.write_bytes(mutated(content, rng))
        try:
            survive(folder, rng)
        except BaseException as error:
            raise AssertionError(f"{part} seed {seed} round {number}") from error
        part.write_bytes(content)
    return rounds


def test_damage_of_a_wrapper_ends_in_a_checkpoint_or_a_typed_error(tmp_path):
    made = wrapped(tmp_path)
    assert all(len(ckptfix.open_checkpoint(path).specs) == len(STATE_DICT) for path in made)
    campaign(made, ROUNDS, 0, tmp_path)


def test_damage_in_a_folder_ends_in_a_checkpoint_or_a_typed_error(tmp_path):
    for folder in folders(tmp_path):
        assert len(ckptfix.open_checkpoint(folder).specs) == len(STATE_DICT)
        folder_campaign(folder, ROUNDS, 0)


def campaign(chosen: list[Path], rounds: int, seed: int, place: Path) -> int:
    """Return how many files were tried. A failure keeps its file and prints the seed."""
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
