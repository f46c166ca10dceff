"""The engine of a cluster: each job is a Ray task.

A task reads its source and writes its output itself: URLs from anywhere, folders if every node has them under the same
path. The driver submits a bounded number of jobs at a time, and writes the manifest. Each job declares the memory that
it may take, so that Ray schedules no more on a node than fit."""

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import field
from msgspec.structs import replace

from ckptfix.errors import CkptfixError, UsageError
from ckptfix.zoo.engine import Engine
from ckptfix.zoo.job import Done, Job, JobFiles, failed
from ckptfix.zoo.manifest import version
from ckptfix.zoo.places import open_place
from ckptfix.zoo.resources import cost_of

_PATIENCE, _RECOUNT = 10.0, 10.0  # seconds to wait for a cluster's answer, and between two counts of its nodes
_AHEAD = 2  # submitted jobs per processor: one runs, and the next is ready when it ends

_LOSSES = 5  # attempts at a job whose node dies


class RayEngine(Engine):
    """Runs jobs on the Ray cluster at ``address``, or on one started on this machine for the run.

    At most ``workers`` run at the same time, None for as many as the cluster has processors. ``scratch`` is for the
    temporary files of local destinations; for URLs, each node uses its own temporary folder."""

    address: str | None = None
    workers: int | None = None
    processors: int = 1
    memory: int = 0  # of the largest node
    _ray: Any = None
    _task: Any = None
    _lost: list[Job] = field(default_factory=list)
    _counted: float = 0.0
    _name: str = field(default_factory=lambda: f"ckptfix-{os.getpid()}-{time.time_ns():x}")

    @contextmanager
    def _opened(self) -> Iterator[None]:
        is_ours = self.connect()
        self._task = self._ray.remote(max_retries=0)(perform_on_node)
        try:
            yield
        finally:
            self._sweep()
            if is_ours:
                self._ray.shutdown()

    def connect(self) -> bool:
        """Connect to the cluster. Return whether this started the cluster or the connection."""
        try:
            import ray  # type: ignore[import-not-found, unused-ignore]  # an optional extra
        except ImportError as error:
            raise UsageError(f"--engine ray: ray is not installed ({error}); pip install 'ckptfix[ray]'") from error
        self._ray = ray
        if ray.is_initialized():
            return False
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anyone
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        try:
            if self.address is None:
                ray.init(address="local", include_dashboard=False, num_cpus=self.workers, **quiet)
            else:
                host, _, port = self.address.rpartition(":")
                if host and port.isdigit() and "/" not in host:  # Ray itself would try for minutes
                    socket.create_connection((host.strip("[]"), int(port)), _PATIENCE).close()
                ray.init(address=self.address, **quiet)
        except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
            at = "on this machine" if self.address is None else f"at {self.address}"
            raise UsageError(f"--engine ray: there is no Ray {at} ({error}); see `ray status`") from error
        return True

    def count_nodes(self) -> None:
        """Count the processors and memory of the cluster, if it is time to: nodes come and go."""
        if (now := time.monotonic()) - self._counted < _RECOUNT and self._counted:
            return
        self._counted = now
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        self.processors = max(int(sum(node.get("CPU", 0) for node in nodes)), 1)
        self.memory = int(max((node.get("memory", 0) for node in nodes), default=0))

    def declared(self, job: Job) -> int:
        """Return the bytes of memory that a job declares: at most those of the largest node, or it would never run."""
        wanted = cost_of(job.item.size, job.runs_model, job.fetches).memory * min(job.attempt, 2)
        return min(wanted, self.memory)

    def _begin(self, jobs: Iterator[Job]) -> None:
        self.count_nodes()
        while len(self._under_way) < (self.workers or _AHEAD * self.processors):
            job = self._lost.pop() if self._lost else next(jobs, None)
            if job is None:
                return
            # A local destination needs temporary files on the same disk, since a rename puts them in place.
            scratch = str(self.scratch.absolute()) if "://" not in job.destination else self._name
            task = self._task.options(num_cpus=1, memory=self.declared(job), name=label_of(job))
            # twice the time, since waiting to be scheduled counts too
            begun = task.remote(job, scratch, str(Path.cwd()), version())
            self._under_way[begun] = job, time.monotonic() + self.patience(job)

    def _wait(self, seconds: float) -> Iterable[Any]:
        tasks = list(self._under_way)
        ready, _ = self._ray.wait(tasks, num_returns=1, timeout=seconds)
        return self._ray.wait(tasks, num_returns=len(tasks), timeout=0)[0] if ready else ()

    def _take(self, ended: Any, job: Job) -> Done | str | None:
        from ray import exceptions

        try:
            done: Done = self._ray.get(ended)
        except exceptions.RayTaskError as error:
            return failed(job, f"{job.item.name}: its node failed: {_last_line(error)}")
        except (exceptions.NodeDiedError, exceptions.ObjectLostError, exceptions.OwnerDiedError) as error:
            if job.attempt < _LOSSES:  # not the fault of the job
                self._lost.append(replace(job, attempt=job.attempt + 1))
                return None
            return f"its node was lost ({_last_line(error)})"
        except exceptions.RayError as error:
            cause = "Ray could not run it"
            if isinstance(error, exceptions.OutOfMemoryError):
                cause = "its node ran out of memory"
            elif isinstance(error, exceptions.WorkerCrashedError):
                cause = "its process was killed or crashed"
            return f"{cause} ({_last_line(error)})"
        return done

    def _end(self, running: Any, job: Job) -> None:
        self._ray.cancel(running, force=True)

    def _sweep(self) -> None:
        """Cancel running tasks, and remove their temporary files on the nodes."""
        from ray.exceptions import RayError
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        for task in self._under_way:
            self._ray.cancel(task, force=True)
        if self._under_way:
            self._ray.wait(list(self._under_way), num_returns=len(self._under_way), timeout=30)
        self._under_way.clear()
        sweeper = self._ray.remote(num_cpus=0, max_retries=0)(sweep_node)
        try:
            nodes = [node["NodeID"] for node in self._ray.nodes() if node["Alive"]]
            strategies = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
            tasks = [sweeper.options(scheduling_strategy=each).remote(self._name) for each in strategies]
            self._ray.wait(tasks, num_returns=len(tasks), timeout=30)
        except RayError:
            return  # the cluster is shutting down, and its nodes with it


def perform_on_node(job: Job, scratch: str, folder: str, expected: str) -> Done:
    """Perform a job on a node. ``scratch`` is an absolute path, or a name in the temporary folder of the node."""
    from ckptfix.zoo.performing import perform

    if version() != expected:
        return failed(
            job,
            f"{job.item.name}: a node has ckptfix {version()} and the driver {expected}; install one version on all",
        )
    if Path(folder).is_dir():
        os.chdir(folder)  # for relative paths, and for the user's own modules
    node = os.uname().nodename
    for name in (job.source, job.destination):
        root = open_place(name).root
        if root is not None and not root.is_dir():
            return failed(job, f"{name}: is not a folder on the node {node}; share it, or use a URL")
    for name, file in job.treatment.files():
        if not Path(file).exists():
            return failed(job, f"{file}: is needed ({name}) and is not on the node {node}; share it")
    place = Path(tempfile.gettempdir(), scratch)  # an absolute `scratch` stays itself
    place.mkdir(parents=True, exist_ok=True)
    JobFiles(place, job.number).clear()  # from an attempt that was killed here
    try:
        done = perform(job, place)
    except CkptfixError as error:
        return failed(job, str(error))
    if done.is_exhausted and job.attempt == 1:
        # Ray would reuse this process. So it exits, and the driver, which sees a crash, tries once more on its own.
        os._exit(1)
    return done


def sweep_node(run: str) -> None:
    """Remove the temporary folder of a run from the node."""
    shutil.rmtree(Path(tempfile.gettempdir(), run), ignore_errors=True)


def label_of(job: Job) -> str:
    """Return the name of a job's task: the end of the file's name, as valid text."""
    return job.item.name[-100:].encode(errors="replace").decode()


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__
