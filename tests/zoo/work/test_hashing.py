"""The digests are those that sha256sum prints."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfix.zoo.work import hashing
from ckptfix.zoo.work.hashing import BLOCK, sha256_of_file, sha256_of_files, sha256_of_two

WINDOW = 4 << 20
"""As in ``sha256.h``."""


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
def test_a_file(tmp_path: Path, size: int):
    raw = os.urandom(size)
    (tmp_path / "file").write_bytes(raw)
    assert sha256_of_file(tmp_path / "file") == hashlib.sha256(raw).hexdigest()


def two_of(folder: Path, sizes: tuple[int, int]) -> tuple[tuple[Path, Path], tuple[str, str]]:
    """Two files, and the digests that they have."""
    one, other = os.urandom(sizes[0]), os.urandom(sizes[1])
    (folder / "one").write_bytes(one)
    (folder / "other").write_bytes(other)
    return (folder / "one", folder / "other"), (hashlib.sha256(one).hexdigest(), hashlib.sha256(other).hexdigest())


@pytest.fixture(params=[True, False], ids=["as this processor can", "one after the other"])
def means(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once more as on a processor that cannot hash."""
    if not request.param:
        monkeypatch.setattr(hashing, "can_hash", lambda: False)


SIZES = [0, 1, 55, 56, 63, 64, 65, 119, 120, 128, 100_003]


@pytest.mark.usefixtures("means")
@pytest.mark.parametrize("one", SIZES)
@pytest.mark.parametrize("other", SIZES)
def test_two_files_have_the_digests_of_each(tmp_path: Path, one: int, other: int):
    files, digests = two_of(tmp_path, (one, other))
    assert sha256_of_two(*files) == digests


@pytest.mark.parametrize(
    "sizes",
    [
        (WINDOW - 1, WINDOW),
        (WINDOW, WINDOW + 1),
        (WINDOW - 60, 2 * WINDOW - 60),
        (3 * WINDOW + 5, 64),
        (2 * WINDOW, 2 * WINDOW),
    ],
)
def test_two_files_of_several_windows(tmp_path: Path, sizes: tuple[int, int]):
    files, digests = two_of(tmp_path, sizes)
    assert sha256_of_two(*files) == digests
    assert sha256_of_two(*files[::-1]) == digests[::-1]


@given(st.integers(0, 1 << 12), st.integers(0, 1 << 12))
def test_whatever_the_lengths(tmp_path_factory: pytest.TempPathFactory, one: int, other: int):
    files, digests = two_of(tmp_path_factory.mktemp("two"), (one, other))
    assert sha256_of_two(*files) == digests


def test_a_file_twice(tmp_path: Path):
    (file, _), (digest, _) = two_of(tmp_path, (5000, 1))
    assert sha256_of_two(file, file) == (digest, digest)


def test_what_cannot_be_mapped_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files, digests = two_of(tmp_path, (5000, 70))
    monkeypatch.setattr(hashing, "_mapped", lambda path: (_ for _ in ()).throw(OSError("no device that maps")))
    assert sha256_of_two(*files) == digests


def test_a_file_that_is_not_there(tmp_path: Path):
    (file, _), _ = two_of(tmp_path, (10, 10))
    with pytest.raises(FileNotFoundError):
        sha256_of_two(file, tmp_path / "none")


def test_several_files_are_one_digest_of_names_and_contents(tmp_path: Path):
    names = ["a/x", "b", os.fsdecode(b"\xe9")]
    (tmp_path / "a").mkdir()
    for name in names:
        (tmp_path / name).write_bytes(os.fsencode(name) * 3)
    lines = b"".join(
        hashlib.sha256(os.fsencode(name) * 3).hexdigest().encode() + b"  " + os.fsencode(name) + b"\n" for name in names
    )
    assert sha256_of_files(tmp_path, names) == hashlib.sha256(lines).hexdigest()
    assert sha256_of_files(tmp_path, names[::-1]) != sha256_of_files(tmp_path, names)
    (tmp_path / "b").rename(tmp_path / "c")
    assert sha256_of_files(tmp_path, ["a/x", "c", names[2]]) != hashlib.sha256(lines).hexdigest()
