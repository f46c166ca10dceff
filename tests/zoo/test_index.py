"""Tables on disk: any name in them, in Python's order, and nothing of them left behind."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from ckptfix.errors import WriteError
from ckptfix.zoo.index import BLOCK, Index, explaining, packed, unpacked

NAMES = [
    "",
    "a",
    "a/b",
    "a0",
    "caf\xe9",
    os.fsdecode(b"caf\xe9"),
    "\ue000",
    "\uffff",
    "\U0001f600",
    "\ud83d\ude00",
    "\0",
]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_every_text_comes_back(name):
    assert unpacked(packed(name)) == name


def test_the_order_is_that_of_python():
    shuffled = random.Random(0).sample(NAMES, len(NAMES))
    with Index("CREATE TABLE names (name BLOB)") as index:
        index.run_many("INSERT INTO names VALUES (?)", ((packed(name),) for name in shuffled))
        found = [unpacked(name) for (name,) in index.rows("SELECT name FROM names ORDER BY name")]
    assert found == sorted(NAMES)


def test_what_is_no_text_is_refused():
    with pytest.raises(TypeError):
        packed(None)  # type: ignore[arg-type]  # a damaged line of a book may have anything


def test_rows_come_block_by_block():
    with Index("CREATE TABLE numbers (number INTEGER PRIMARY KEY)") as index:
        index.run_many("INSERT INTO numbers VALUES (?)", ((number,) for number in range(2 * BLOCK + 1)))
        assert [number for (number,) in index.rows("SELECT number FROM numbers")] == list(range(2 * BLOCK + 1))
        assert index.run("DELETE FROM numbers WHERE number > ?", BLOCK) == BLOCK
        assert index.one("SELECT count(*) FROM numbers") == (BLOCK + 1,)
        assert index.one("SELECT 1 FROM numbers WHERE number > ?", BLOCK) is None


def test_an_exception_of_the_one_who_makes_rows_goes_through():
    def rows():
        yield (1,)
        raise KeyboardInterrupt

    with Index("CREATE TABLE numbers (number INTEGER)") as index:
        with pytest.raises(KeyboardInterrupt):
            index.run_many("INSERT INTO numbers VALUES (?)", rows())
        index.run_many("INSERT INTO numbers VALUES (?)", [(2,)])
        assert list(index.rows("SELECT number FROM numbers")) == [(1,), (2,)]


def test_no_room_is_said_in_one_line():
    with pytest.raises(WriteError, match=r"disk is full; name a folder with room in SQLITE_TMPDIR"), explaining():
        raise sqlite3.OperationalError("database or disk is full")


LARGE = """
import os, signal
from pathlib import Path
from ckptfix.zoo.index import Index
index = Index("CREATE TABLE rows (number INTEGER PRIMARY KEY, text BLOB)")
index.run_many("INSERT INTO rows VALUES (?, ?)", ((number, b"x" * 1000) for number in range(30_000)))
links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
assert any("deleted" in link for link in links), links
anonymous = next(line for line in Path("/proc/self/status").open() if line.startswith("RssAnon"))
print(anonymous.split()[1], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells")
def test_what_memory_has_no_room_for_is_in_a_file_without_a_name(tmp_path: Path):
    script = [sys.executable, "-c", LARGE]
    folder = {"SQLITE_TMPDIR": str(tmp_path)}
    killed = subprocess.run(script, env={**os.environ, **folder}, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert int(killed.stdout) < 24_000, "30 MB of rows are not in memory"
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_the_error_that_is_told():
    with Index("CREATE TABLE names (name BLOB)") as index:
        index.run("PRAGMA max_page_count = 4")
        with pytest.raises(WriteError, match="full"), explaining():
            index.run_many("INSERT INTO names VALUES (?)", ((b"x" * 1000,) for _ in range(100)))
