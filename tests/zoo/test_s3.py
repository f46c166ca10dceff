"""A migration from a bucket to a bucket: the same result as on this machine, also after failures on the way."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfix
from ckptfix.zoo.manifest import OWN_NAMES
from ckptfix.zoo.migrating import migrate
from ckptfix.zoo.places import Place, open_place
from tests.zoo import zoos
from tests.zoo.bucket import Bucket, Trouble

S3 = tuple[Bucket, str]

SAME = (
    "source",
    "size",
    "outcome",
    "sha256",
    "output",
    "output_size",
    "output_sha256",
    "output_parts",
    "format",
    "edits",
)
"""What a record says, however the files came."""


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoos.build(tmp_path_factory.mktemp("zoos") / "zoo", samples=tmp_path_factory.mktemp("none"))


@pytest.fixture(scope="module")
def expected(zoo: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The tree of the same migration on this machine."""
    goal = tmp_path_factory.mktemp("expected") / "new"
    with migrate(str(zoo), str(goal), engine=zoos.Alone):
        pass
    return comparable(open_place(str(goal)), tmp_path_factory.mktemp("read"))


@pytest.fixture(scope="module")
def old(zoo: Path, s3_server: Bucket) -> str:
    """The zoo in a bucket, which is never written to."""
    import s3fs

    s3fs.S3FileSystem().mkdir("old-zoo")
    place = open_place("s3://old-zoo/old")
    for path in sorted(zoo.rglob("*")):
        if path.is_file():
            place.put(path, path.relative_to(zoo).as_posix())
    return place.name


def comparable_files(place: Place, folder: Path) -> dict[str, bytes]:
    """Every file of a place."""
    found = {}
    for entry in place.walk():
        place.fetch(entry.name, folder / "file")
        found[entry.name] = (folder / "file").read_bytes()
    return found


def comparable(place: Place, folder: Path) -> dict[str, Any]:
    """Every file of a migrated zoo, and what its manifest says."""
    found: dict[str, Any] = comparable_files(place, folder)
    lines = [json.loads(line) for line in found.pop("manifest.jsonl").splitlines()]
    found.pop("weights.jsonl")
    return found | {"records": [{name: line[name] for name in SAME} for line in lines]}


def test_it_is_the_same_as_on_this_machine(old: str, bucket: S3, expected: dict[str, Any], tmp_path: Path):
    server, url = bucket
    with migrate(old, f"{url}/new", engine=zoos.Alone) as first:
        assert first.summary.exit_code == 2
    assert comparable(open_place(f"{url}/new"), tmp_path) == expected
    server.requests.clear()
    with migrate(old, f"{url}/new", engine=zoos.Alone) as second:
        assert second.summary.earlier_files == second.summary.files
    read = [request for request in server.requests if request.startswith("GET") and "/old/" in request]
    assert [request.rpartition("/")[2] for request in read] == ["model.safetensors.index.json"]
    written = {request.rpartition("/")[2] for request in server.requests if request.startswith("PUT")}
    assert written <= set(OWN_NAMES)


def test_trouble_on_the_way_changes_nothing(old: str, bucket: S3, expected: dict[str, Any], tmp_path: Path):
    server, url = bucket
    for number, trouble in enumerate((Trouble.THROTTLED, Trouble.BROKEN, Trouble.RESET)):
        server.plan(trouble, "GET", f"old/fine/model{number}.pth", times=2)
        server.plan(trouble, "PUT", f"new/old/deep/run{number}.pth", times=2)
    server.plan(Trouble.CUT, "GET", "old/old/deep/run3.pth", times=2)
    server.plan(Trouble.SHORT, "GET", "old/fine/model3.pth", times=2)
    server.plan(Trouble.HALF_STORED, "PUT", "new/old/deep/run3.pth", times=2)
    server.plan(Trouble.THROTTLED, "PUT", "new/manifest.jsonl", times=2)
    with migrate(old, f"{url}/new", engine=zoos.Alone):
        pass
    assert all(plan.times == 0 for plan in server.planned)
    assert comparable(open_place(f"{url}/new"), tmp_path) == expected


def test_what_never_comes_through_fails_alone_and_is_done_by_the_next_run(
    old: str, bucket: S3, expected: dict[str, Any], tmp_path: Path
):
    server, url = bucket
    server.plan(Trouble.SHORT, "GET", "old/fine/model0.pth", times=1000)
    server.plan(Trouble.HALF_STORED, "PUT", "new/old/deep/run0.pth", times=1000)
    server.plan(Trouble.FORBIDDEN, "GET", "old/fine/model1.pth", times=1000)
    with migrate(old, f"{url}/new", engine=zoos.Alone) as migration:
        records = {record["source"]: record for record in migration.records()}
    failed = {source: record["error"] for source, record in records.items() if record["outcome"] == "failed"}
    assert failed.keys() == {"fine/model0.pth", "fine/model1.pth", "old/deep/run0.pth"}
    assert "(4 tries); run it again later" in failed["fine/model0.pth"]  # by size, or by the checksum of the store
    assert "Access Denied; get permission" in failed["fine/model1.pth"]
    assert "bytes arrived (4 tries)" in failed["old/deep/run0.pth"]
    there = {entry.name for entry in open_place(f"{url}/new").walk()}
    assert not there & failed.keys()
    server.planned.clear()
    with migrate(old, f"{url}/new", engine=zoos.Alone) as migration:
        assert migration.summary.files - migration.summary.earlier_files == 3
    assert comparable(open_place(f"{url}/new"), tmp_path) == expected


@pytest.mark.slow
def test_killed_and_resumed(old: str, bucket: S3, expected: dict[str, Any], tmp_path: Path):
    """The driver and its workers are killed when some outputs are in the bucket; the next run makes the rest."""
    server, url = bucket
    # Or a driver that is faster than this test is done before it is killed.
    server.plan(Trouble.HELD, "PUT", "new/old/deep/run3.pth", times=1000)
    words = [sys.executable, "-m", "ckptfix", "migrate", old, f"{url}/new", "--jobs", "2"]
    with subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as driver:
        server.wait_for("PUT", "/new/old/", 4)
        os.killpg(driver.pid, signal.SIGKILL)
    assert driver.returncode == -signal.SIGKILL
    server.end_trouble()
    there = comparable_files(open_place(f"{url}/new"), tmp_path)
    assert {name: raw for name, raw in there.items() if name not in OWN_NAMES}.items() <= expected.items()
    with migrate(old, f"{url}/new", engine=zoos.Alone):
        pass
    assert comparable(open_place(f"{url}/new"), tmp_path) == expected


def test_a_zoo_in_memory_comes_to_this_machine(zoo: Path, memory: str, expected: dict[str, Any], tmp_path: Path):
    place = open_place(memory)
    for path in sorted(zoo.rglob("*")):
        if path.is_file():
            place.put(path, path.relative_to(zoo).as_posix())
    with migrate(memory, str(tmp_path / "new"), engine=zoos.Alone):
        pass
    (tmp_path / "read").mkdir()
    assert comparable(open_place(str(tmp_path / "new")), tmp_path / "read") == expected


def test_a_checkpoint_in_a_bucket_is_checked_without_a_download(bucket: S3, tmp_path: Path):
    server, url = bucket
    torch.save({f"module.{n}.weight": torch.randn(256, 256) for n in range(8)}, tmp_path / "a.pth")
    open_place(url).put(tmp_path / "a.pth", "runs/a.pth")
    server.plan(Trouble.THROTTLED, "GET", "a.pth", times=2)
    assert [finding.code for finding in ckptfix.check(f"{url}/runs/a.pth").findings] == ["KEY102"]
    assert ckptfix.check(f"{url}/runs").source == f"{url}/runs/a.pth"
    assert server.count("GET", "a.pth") <= 8
