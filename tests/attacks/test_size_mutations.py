"""A small sample of damage that changes the size of a safetensors file: nothing wrong is written without a finding.

What the file was is known here. Each tensor that is written either has its bytes or is named in a finding that stays,
and where all is said to be well, all is there."""

import gzip
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

import ckptfix
from ckptfix.core.finding import Level
from tests.checks import bytes_of

SEEDS = 4


def trained(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return layers with weights, biases, norms and counters, smaller than real ones."""
    generator = torch.Generator().manual_seed(5)
    made: dict[str, torch.Tensor] = {"embed.weight": (torch.randn(40, 24, generator=generator) * 0.02).to(dtype)}
    for number in range(4):
        made[f"{number}.fc.weight"] = (torch.randn(24, 24, generator=generator) * 0.1).to(dtype)
        made[f"{number}.fc.bias"] = torch.zeros(24, dtype=dtype)
        made[f"{number}.norm.weight"] = (1 + torch.randn(24, generator=generator) * 0.1).to(dtype)
        made[f"{number}.norm.steps"] = torch.tensor(900)
    return made


FILES = {
    "float32": trained(torch.float32),
    "bfloat16": trained(torch.bfloat16),
    "alike": {f"{n}.weight": torch.randn(12, 12, generator=torch.Generator().manual_seed(n)) for n in range(6)},
    "adapter": {f"{n}.lora_{ab}": torch.full((16, 4), n / 100.0) * (ab == "A") for n in range(4) for ab in "AB"},
}


def size_of(rng: random.Random) -> int:
    return rng.choice((1, 2, 3, 4, 8, 64, 100, 512, 1024, rng.randrange(1, 3000)))


def header(data: bytes) -> int:
    return 8 + int.from_bytes(data[:8], "little")


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(header(data), len(data))]


def lost(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(header(data), len(data))
    return data[:place] + data[place + size_of(rng) :]


def doubled(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(header(data), len(data))
    return data[: place + size_of(rng)] + data[place:]


def put_in(data: bytes, rng: random.Random) -> bytes:
    place, size = rng.randrange(header(data), len(data)), size_of(rng)
    return data[:place] + rng.choice((bytes(size), rng.randbytes(size), (b"\r\nagain " * size)[:size])) + data[place:]


def hung_on(data: bytes, rng: random.Random) -> bytes:
    size = size_of(rng)
    return data + rng.choice((bytes(size), rng.randbytes(size), b"\r\n", data, data[: len(data) // 2]))


def in_front(data: bytes, rng: random.Random) -> bytes:
    return rng.choice((b"\n", b"\xef\xbb\xbf", data[:8], rng.randbytes(size_of(rng)))) + data


def another_length(data: bytes, rng: random.Random) -> bytes:
    return max(0, header(data) - 8 + rng.choice((-8, -1, 1, 8, 100))).to_bytes(8, "little") + data[8:]


def in_chunks(data: bytes, rng: random.Random) -> bytes:
    size = rng.choice((1000, 4096))
    parts = (data[at : at + size] for at in range(0, len(data), size))
    whole = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    return whole[: rng.choice((len(whole), rng.randrange(header(data) + 20, len(whole))))]


def packed_and_damaged(data: bytes, rng: random.Random) -> bytes:
    packed = bytearray(gzip.compress(data))
    packed[rng.randrange(20, len(packed))] ^= 1 << rng.randrange(8)
    return bytes(packed)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "damage",
    [cut, lost, doubled, put_in, hung_on, in_front, another_length, in_chunks, packed_and_damaged],
    ids=lambda damage: damage.__name__,
)
def test_what_is_not_right_is_named(damage: Callable[[bytes, random.Random], bytes], name: str, tmp_path: Path) -> None:
    state_dict = FILES[name]
    data, path, out = save(state_dict), tmp_path / "model.safetensors", tmp_path / "out.safetensors"
    for seed in range(SEEDS):
        path.write_bytes(damage(data, random.Random(f"{damage.__name__} {name} {seed}")))
        out.unlink(missing_ok=True)
        try:
            report = ckptfix.repair(path, salvage=True, output=out, values=False).report
        except ckptfix.CkptfixError:
            continue
        written = ckptfix.open_checkpoint(out)
        named = {key for finding in report.remaining if finding.level > Level.NOTE for key in finding.keys}
        wrong = {key for key in written.specs if bytes_of(written.read(key)) != bytes_of(state_dict[key])}
        assert wrong <= named, seed
        assert report.exit_code or (not wrong and set(written.specs) == set(state_dict)), seed
