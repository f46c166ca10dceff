"""The same zoo on Ray as on this machine, to the byte, even if workers die."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from ckptfix.errors import UsageError
from ckptfix.zoo.cluster import RayEngine, label_of
from ckptfix.zoo.manifest import MANIFEST, WEIGHTS
from ckptfix.zoo.migrating import migrate
from ckptfix.zoo.resources import cost_of
from ckptfix.zoo.zoo_toml import Table, Treatment, read_table
from tests.zoo.bucket import Bucket
from tests.zoo.zoos import Alone

ray = pytest.importorskip("ray", reason="pip install 'ckptfix[ray]'")
pytestmark = pytest.mark.slow

OF_THE_RUN = ("seconds", "peak_memory", "attempts", "finished", "stamp", "settings")
"""Fields of a record that two runs of the same zoo differ in."""

MODELS = """\
import os, pathlib, torch

def build():
    return torch.nn.Linear(4, 3)

def stopping():
    # The first time it says who works on the file, and waits for its end.
    first = pathlib.Path(os.environ["STOPPING"])
    if not (first / "seen").exists():
        (first / "seen").touch()
        with open(first / "pid", "w") as pipe:
            pipe.write(str(os.getpid()))
        open(first / "never").read()
    return build()

def dying():
    os._exit(3)

def exhausted():
    with open(os.environ["PROCESSES"], "a") as file:
        file.write(f"{os.getpid()}\\n")
    raise MemoryError
"""


@pytest.fixture(scope="module", autouse=True)
def token() -> Iterator[None]:
    """Without one, Ray makes one and keeps it in the home of the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN", "0" * 32)
        yield


@pytest.fixture(scope="module")
def stopping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder where the model ``stopping`` leaves word: the workers of Ray have the environment of their start."""
    folder = tmp_path_factory.mktemp("stopping")
    os.mkfifo(folder / "pid")
    os.mkfifo(folder / "never")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOPPING", str(folder))
        patch.setenv("PROCESSES", str(folder / "processes"))
        yield folder


@pytest.fixture(scope="module")
def cluster(s3_server: Bucket, stopping: Path) -> Iterator[None]:
    """Ray with two workers on this machine: the cluster that a run without an address gets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)  # or every worker compiles all of torch anew
        assert RayEngine(stopping, workers=2).connect()
    yield
    ray.shutdown()


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A zoo with files of every outcome, and the models for them in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.py").write_text(MODELS)
    old = tmp_path / "old"
    (old / "deep").mkdir(parents=True)
    state = {"weight": torch.randn(3, 4), "bias": torch.zeros(3)}
    torch.save(state, old / "fine.pth")
    torch.save({f"module.{key}": value for key, value in state.items()}, old / "deep" / "wrapped.pth")
    torch.save({"module.weight": torch.randn(3, 4), "module.bias": torch.ones(3)}, old / "stopping.pth")
    torch.save({"weight": torch.randn(2, 2)}, old / "misfit.pth")
    (old / "cut.pth").write_bytes((old / "fine.pth").read_bytes()[:300])
    (old / "notes.txt").write_text("trained on a Tuesday")
    yield old
    sys.modules.pop("models", None)


def table_of(folder: Path, **models: str) -> Table:
    path = folder / "zoo.toml"
    tables = [
        f'[[files]]\nmatch = "{name}.pth"\nmodel = "models:{model}"\nsmoke = false\n' for name, model in models.items()
    ]
    path.write_text("".join(tables))
    return read_table(path)


def on_ray(scratch: Path) -> RayEngine:
    return RayEngine(scratch)


def migrated(source: str, destination: str, table: Table, engine) -> dict[str, dict[str, Any]]:
    """The records of a migration by source, without the fields that differ between runs."""
    with migrate(source, destination, table, engine=engine, again=["ckptfix"]) as migration:
        return {
            line["source"]: {name: value for name, value in line.items() if name not in OF_THE_RUN}
            for line in migration.records()
        }


def tree(folder: Path) -> dict[str, bytes]:
    """The files of a destination by name, without the manifest, which has times."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }


def test_a_worker_that_is_killed_in_the_middle_of_a_file_changes_nothing(cluster, stopping, zoo, tmp_path):
    (stopping / "seen").unlink(missing_ok=True)
    table = table_of(tmp_path, stopping="stopping", misfit="build")
    killed: list[int] = []

    def kill() -> None:
        killed.append(int((stopping / "pid").read_text()))  # waits until a worker has the file
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    told = migrated("old", "on_ray", table, on_ray)
    killer.join(0)  # a migration that ended without it does not wait
    expected = migrated("old", "here", table, Alone)
    assert killed
    assert told == expected
    assert {name: record["outcome"] for name, record in told.items()} == {
        "cut.pth": "unreadable",
        "deep/wrapped.pth": "repaired",
        "fine.pth": "already fine",
        "misfit.pth": "needs a decision",
        "notes.txt": "other",
        "stopping.pth": "repaired",
    }
    assert tree(tmp_path / "on_ray") == tree(tmp_path / "here")
    lines = [json.loads(line) for line in (tmp_path / "on_ray" / MANIFEST).read_text().splitlines()]
    assert {line["source"]: line["attempts"] for line in lines}["stopping.pth"] == 2


def test_from_s3_to_s3(cluster, bucket, zoo, tmp_path):
    import s3fs

    server, url = bucket
    files = s3fs.S3FileSystem()
    files.put(str(zoo), f"{url}/old", recursive=True)
    table = table_of(tmp_path, misfit="build")
    told = migrated(f"{url}/old", f"{url}/new", table, on_ray)
    assert told == migrated("old", "here", table, Alone)
    files.invalidate_cache()
    files.get(f"{url}/new", str(tmp_path / "back"), recursive=True)
    assert tree(tmp_path / "back") == tree(tmp_path / "here")
    assert not list(Path(os.environ.get("TMPDIR", "/tmp")).glob(f"ckptfix-{os.getpid()}-*"))
    assert server.count("PUT", MANIFEST) >= 1


def test_what_stops_the_driver_stops_the_tasks(cluster, stopping, zoo, tmp_path):
    (stopping / "seen").unlink(missing_ok=True)
    table = table_of(tmp_path, stopping="stopping")

    class Stop(Exception):
        pass

    def watch(summary) -> None:
        # Called while the task is suspended: it has the file, and waits.
        if (stopping / "seen").exists():
            raise Stop

    reader = threading.Thread(target=lambda: (stopping / "pid").read_text(), daemon=True)
    reader.start()
    with (
        pytest.raises(Stop),
        migrate("old", "new", table, engine=on_ray, again=["ckptfix"], watch=watch),
    ):
        pass
    assert not (tmp_path / "new" / ".ckptfix-tmp").exists()
    assert not (tmp_path / "new" / "stopping.pth").exists()
    told = migrated("old", "new", table, on_ray)
    assert told == migrated("old", "here", table, Alone)
    assert tree(tmp_path / "new") == tree(tmp_path / "here")


def test_no_more_tasks_at_a_time_than_the_cluster_can_use(cluster, zoo, tmp_path):
    for number in range(20):
        (zoo / f"note{number}.txt").write_text(str(number))
    running: list[int] = []
    taken: list[int] = []

    class Counting(RayEngine):
        def run_jobs(self, jobs, on_done, on_wait=lambda count: None):
            ended: list[int] = []

            def counted():
                for job in jobs:
                    running.append(len(taken) - len(ended))
                    taken.append(job.number)
                    yield job

            def done(what):
                ended.append(what.number)
                on_done(what)

            super().run_jobs(counted(), done, on_wait)

    migrated("old", "new", Table(), Counting)
    assert len(taken) == 26
    assert max(running) <= 4  # two processors, and twice as many tasks, the next of which is at hand


def test_a_job_is_declared_with_its_memory_and_never_with_more_than_a_node_has(cluster, zoo, tmp_path):
    jobs: list[Any] = []

    class Recorder(RayEngine):
        def run_jobs(self, these, on_done, on_wait=lambda count: None):
            jobs.extend(these)

    migrated("old", "new", Table(), Recorder)
    room = RayEngine(tmp_path)
    room.connect()
    room.count_nodes()
    assert room.processors == 2
    small = max(jobs, key=lambda job: job.item.size)
    large = replace(small, item=replace(small.item, size=10**15), treatment=Treatment(choices={"model": "m:f"}))
    assert room.declared(small) == cost_of(small.item.size, False, False).memory
    assert room.declared(replace(small, attempt=2)) == 2 * room.declared(small)
    assert room.declared(large) == room.memory > room.declared(small)


def test_a_name_that_is_not_text_can_be_sent(cluster, zoo, tmp_path):
    (zoo / os.fsdecode(b"\xff.pth")).write_bytes((zoo / "fine.pth").read_bytes())
    jobs: list[Any] = []

    class Recorder(RayEngine):
        def run_jobs(self, these, on_done, on_wait=lambda count: None):
            jobs.extend(these)

    migrated("old", "new", Table(), Recorder)
    assert {"?.pth", "fine.pth"} <= {label_of(job) for job in jobs}
    label = ray.remote(lambda: ray.get_runtime_context().get_task_name()).options
    for job in jobs:
        assert ray.get(label(name=label_of(job)).remote()) == label_of(job)


def test_a_folder_that_a_node_does_not_have(cluster, zoo, tmp_path):
    from ckptfix.zoo.cluster import perform_on_node
    from ckptfix.zoo.manifest import version

    jobs: list[Any] = []

    class Recorder(RayEngine):
        def run_jobs(self, these, on_done, on_wait=lambda count: None):
            jobs.extend(these)

    migrated("old", "new", Table(), Recorder)
    done = perform_on_node(jobs[0], str(tmp_path / "scratch"), "/", version())
    assert "old: is not a folder on the node" in str(done.record.error)
    assert done.record.outcome.value == "failed"
    done = perform_on_node(jobs[0], str(tmp_path / "scratch"), str(tmp_path), "0.0.0")
    assert "and the driver 0.0.0" in str(done.record.error)


def test_what_a_killed_attempt_left_on_the_node_is_not_a_hindrance(zoo, tmp_path):
    from ckptfix.zoo.cluster import perform_on_node
    from ckptfix.zoo.manifest import version

    jobs: list[Any] = []

    class Recorder(Alone):
        def run_jobs(self, these, on_done, on_wait=lambda count: None):
            jobs.extend(these)

    migrated("old", "new", Table(), Recorder)
    (tmp_path / "scratch").mkdir()
    for job in jobs:
        for name in ("copy-0", "draft.pth"):
            (tmp_path / f"scratch/{job.number}.{name}").write_bytes(b"half")
        done = perform_on_node(job, str(tmp_path / "scratch"), str(tmp_path), version())
        assert "exists" not in str(done.record.error)
    assert (tmp_path / "new/fine.pth").read_bytes() == (zoo / "fine.pth").read_bytes()
    assert list((tmp_path / "scratch").iterdir()) == []


def test_the_command_line_and_files_that_take_their_worker_with_them(cluster, stopping, zoo, tmp_path):
    address = ray.get_runtime_context().gcs_address
    table_of(tmp_path, fine="dying", misfit="exhausted")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "ckptfix",
            "migrate",
            "old",
            "new",
            "--engine",
            "ray",
            "--address",
            address,
            "--jobs",
            "1",
        ],
        cwd=tmp_path,
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "new" / "deep" / "wrapped.pth").exists()
    told = {line["source"]: line for line in map(json.loads, (tmp_path / "new" / MANIFEST).open())}
    assert told.keys() == {path.relative_to(zoo).as_posix() for path in zoo.rglob("*.*")}
    assert told["fine.pth"]["outcome"] == "failed"
    assert "its process was killed or crashed" in told["fine.pth"]["error"]
    assert (told["misfit.pth"]["outcome"], told["misfit.pth"]["attempts"]) == ("failed", 2)
    assert "MemoryError" in told["misfit.pth"]["error"]
    assert len(set((stopping / "processes").read_text().split())) == 2  # the first did nothing more
    assert told["deep/wrapped.pth"]["outcome"] == "repaired"
    assert (tmp_path / "new" / WEIGHTS).exists()
    assert not (tmp_path / "new" / ".ckptfix-tmp").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--address", "auto"], "--address names a Ray cluster; add --engine ray"),
        (["--engine", "ray", "--memory", "1GB"], "--memory is a limit for one machine"),
    ],
)
def test_flags_that_do_not_go_together(zoo, tmp_path, capsys, arguments, said):
    from ckptfix.cli import main

    with contextlib.suppress(SystemExit), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ckptfix", "migrate", "old", "new", *arguments])
        main()
    assert said in capsys.readouterr().err


def test_no_cluster_at_that_address(zoo, tmp_path):
    if ray.is_initialized():
        ray.shutdown()
    with pytest.raises(UsageError, match=r"there is no Ray at 127\.0\.0\.1:1 "):
        migrated("old", "new", Table(), lambda scratch: RayEngine(scratch, address="127.0.0.1:1"))
