"""A claim about a member holds where the bytes have its checksum, and nowhere else."""

from __future__ import annotations

import zipfile
import zlib
from typing import Any

import pytest
from msgspec.structs import replace

from ckptfix.bytes.sources import Content
from ckptfix.reading.archives.zip_recovery import Claim, Proof

DATA = bytes(range(200))
PACKED = zlib.compress(DATA)[2:-4]
CONTENT = Content("f", b"front" + DATA + PACKED + b"behind")
STORED = Claim(5, zipfile.ZIP_STORED, zlib.crc32(DATA), len(DATA), len(DATA), "")
DEFLATED = Claim(5 + len(DATA), zipfile.ZIP_DEFLATED, zlib.crc32(DATA), len(PACKED), len(DATA), "")


@pytest.mark.parametrize("claim", [STORED, DEFLATED], ids=["stored", "deflated"])
def test_a_true_claim_holds(claim: Claim) -> None:
    assert Proof(CONTENT).holds(claim)


@pytest.mark.parametrize("claim", [STORED, DEFLATED], ids=["stored", "deflated"])
@pytest.mark.parametrize(
    "change",
    [
        {"start": 4},
        {"start": -1},
        {"crc": 0},
        {"crc": 7},
        {"packed": 9},
        {"packed": 10**6},
        {"size": 199},
        {"method": 14},
    ],
    ids=str,
)
def test_any_other_claim_does_not(claim: Claim, change: dict[str, Any]) -> None:
    assert not Proof(CONTENT).holds(replace(claim, **change))


def test_claims_without_end_are_not_gone_through() -> None:
    proof, content = Proof(CONTENT), len(CONTENT)
    tries = 1 + (4 * content + (64 << 20)) // len(DATA)
    held = sum(proof.holds(STORED) for _ in range(min(tries, 20_000)))
    assert 0 < held < 10_000
