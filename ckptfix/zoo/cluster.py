"""The engine of a cluster: each job is a Ray task.

A task reads its source and writes its output by itself: URLs from wherever it runs, folders if every node has them
under the same path. The driver sends a bounded number of jobs at a time, and writes the manifest. A job is declared
with the memory that its file may take, so that Ray puts no more of them on a node than it can hold."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.errors import CkptfixError, UsageError
from ckptfix.zoo.engine import TICK, patience
from ckptfix.zoo.job import Done, Job, Workplace, failed
from ckptfix.zoo.manifest import version
from ckptfix.zoo.places import open_place
from ckptfix.zoo.resources import cost_of

_PATIENCE, _RECOUNT = 10.0, 10.0  # seconds that a cluster has to answer, and after which its nodes are counted again
_AHEAD = 2  # jobs in flight for each processor: one runs, and one is there when it ends

# How often a job is tried whose process dies, which may be its own fault, and one whose node does, which is not.
_CRASHES, _LOSSES = 2, 5


class RayEngine(Struct):
    """Runs jobs on the Ray cluster at ``address``, or on one of this machine that ends with the run.

    ``workers`` is the most that run at the same time, None for as many as the cluster has processors. ``scratch`` is
    for temporary files of destinations that are folders; those of URLs are where each node has its own."""

    scratch: Path
    address: str | None = None
    workers: int | None = None
    patience: Callable[[Job], float] = patience
    is_grouped: bool = False
    processors: int = 1
    memory: int = 0  # of the largest node
    _ray: Any = None
    _task: Any = None
    _flying: dict[Any, tuple[Job, float]] = field(default_factory=dict)
    _lost: list[Job] = field(default_factory=list)
    _again: list[Job] = field(default_factory=list)
    _counted: float = 0.0
    _run: str = field(default_factory=lambda: f"ckptfix-{os.getpid()}-{time.time_ns():x}")

    def run_jobs(
        self, jobs: Iterable[Job], on_done: Callable[[Done], None], on_wait: Callable[[int], None] = lambda count: None
    ) -> None:
        """Do all jobs; see ``Engine``."""
        is_ours = self.connect()
        self._task = self._ray.remote(max_retries=0)(perform_on_node)
        try:
            self._carry_out(iter(jobs), on_done, on_wait)
            for job in self._again:
                # What took a process with it is tried again with twice the memory, and with no other job beside it.
                self._carry_out(iter([job]), on_done, on_wait)
        finally:
            self._end()
            if is_ours:
                self._ray.shutdown()

    def connect(self) -> bool:
        """Find the cluster. Returns whether it is one of our own, or a connection of our own."""
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
        """Count what the cluster has, if it is time: nodes come and go."""
        if (now := time.monotonic()) - self._counted < _RECOUNT and self._counted:
            return
        self._counted = now
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        self.processors = max(int(sum(node.get("CPU", 0) for node in nodes)), 1)
        self.memory = int(max((node.get("memory", 0) for node in nodes), default=0))

    def declared(self, job: Job) -> int:
        """Return the memory that a job asks for: at most what the largest node has, or it would never run."""
        wanted = cost_of(job.item.size, job.runs_model, job.fetches).memory * min(job.attempt, 2)
        return min(wanted, self.memory)

    def _carry_out(self, jobs: Iterator[Job], on_done: Callable[[Done], None], on_wait: Callable[[int], None]) -> None:
        """Do jobs, no more of them at a time than the cluster can use."""
        last = 0.0
        job = next(jobs, None)
        while job is not None or self._flying or self._lost:
            self.count_nodes()
            most = self.workers or _AHEAD * self.processors
            while (job is not None or self._lost) and len(self._flying) < most:
                if self._lost:
                    self._send(self._lost.pop())
                elif job is not None:
                    self._send(job)
                    job = next(jobs, None)
            flying = list(self._flying)
            ready, _ = self._ray.wait(flying, num_returns=1, timeout=TICK)
            if ready:
                ready, _ = self._ray.wait(flying, num_returns=len(flying), timeout=0)
            for task in ready:
                self._collect(task, on_done)
            self._end_endless(on_done)
            if (now := time.monotonic()) - last >= TICK:
                last = now
                on_wait(len(self._flying))

    def _send(self, job: Job) -> None:
        # A rename puts outputs in place if the destination is a folder: then temporary files have to be in it.
        scratch = str(self.scratch.absolute()) if "://" not in job.destination else self._run
        task = self._task.options(num_cpus=1, memory=self.declared(job), name=label_of(job))
        self._flying[task.remote(job, scratch, str(Path.cwd()), version())] = job, time.monotonic()

    def _collect(self, task: Any, on_done: Callable[[Done], None]) -> None:
        from ray import exceptions

        job, _ = self._flying.pop(task)
        node_is_lost = (exceptions.NodeDiedError, exceptions.ObjectLostError, exceptions.OwnerDiedError)
        try:
            done = self._ray.get(task)
        except exceptions.RayTaskError as error:
            done = failed(job, f"{job.item.name}: the node that had it could not do it: {_last_line(error)}")
        except exceptions.RayError as error:
            again, most, cause = self._again, _CRASHES, "Ray could not do it"
            if isinstance(error, node_is_lost):
                again, most, cause = self._lost, _LOSSES, "the node that worked on it was lost"
            elif isinstance(error, exceptions.OutOfMemoryError):
                cause = "the node that worked on it ran out of memory"
            elif isinstance(error, exceptions.WorkerCrashedError):
                cause = "the process that worked on it was killed, or crashed"
            Workplace(self.scratch, job.number).clear()
            if job.attempt < most:
                again.append(replace(job, attempt=job.attempt + 1))
                return
            done = failed(job, f"{job.item.name}: {cause} ({_last_line(error)})")
        on_done(done)

    def _end_endless(self, on_done: Callable[[Done], None]) -> None:
        """End jobs that take too long. Waiting for a place counts too, hence twice the time."""
        for task, (job, begun) in list(self._flying.items()):
            limit = 2 * self.patience(job)
            if time.monotonic() - begun > limit:
                self._ray.cancel(task, force=True)
                del self._flying[task]
                on_done(failed(job, f"{job.item.name}: it took longer than {limit:.0f} s"))

    def _end(self) -> None:
        """End the tasks under way, and remove what they left on the nodes."""
        from ray.exceptions import RayError
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        for task in self._flying:
            self._ray.cancel(task, force=True)
        if self._flying:
            self._ray.wait(list(self._flying), num_returns=len(self._flying), timeout=30)
        self._flying.clear()
        sweeper = self._ray.remote(num_cpus=0, max_retries=0)(sweep_node)
        try:
            nodes = [node["NodeID"] for node in self._ray.nodes() if node["Alive"]]
            strategies = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
            tasks = [sweeper.options(scheduling_strategy=each).remote(self._run) for each in strategies]
            self._ray.wait(tasks, num_returns=len(tasks), timeout=30)
        except RayError:
            return  # the cluster is going, and the temporary folders of its nodes with it


def perform_on_node(job: Job, scratch: str, folder: str, expected: str) -> Done:
    """Do a job on a node. ``scratch`` is a path, or the name of a temporary folder of the node."""
    from ckptfix.zoo.performing import perform

    if version() != expected:
        return failed(
            job, f"{job.item.name}: a node has ckptfix {version()} and the driver {expected}; install one for all"
        )
    if Path(folder).is_dir():
        os.chdir(folder)  # what paths are relative to, and the place of the user's own modules
    node = os.uname().nodename
    for name in (job.source, job.destination):
        root = open_place(name).root
        if root is not None and not root.is_dir():
            return failed(job, f"{name}: is not a folder on the node {node}; share it, or name a URL")
    for name, file in job.treatment.files():
        if not Path(file).exists():
            return failed(job, f"{file}: is needed ({name}) and is not on the node {node}; share it")
    place = Path(tempfile.gettempdir(), scratch)  # which is the second only if that is absolute
    place.mkdir(parents=True, exist_ok=True)
    Workplace(place, job.number).clear()  # of an attempt that was killed here
    try:
        done = perform(job, place)
    except CkptfixError as error:
        return failed(job, str(error))
    if done.is_exhausted and job.attempt < _CRASHES:
        # Ray would give this process the next job. The driver takes it for crashed, and tries again beside no other.
        os._exit(1)
    return done


def sweep_node(run: str) -> None:
    """Remove the temporary folder of a run from the node."""
    shutil.rmtree(Path(tempfile.gettempdir(), run), ignore_errors=True)


def label_of(job: Job) -> str:
    """Return what Ray calls the task of a job: the end of the file's name, as text, which not every name is."""
    return job.item.name[-100:].encode(errors="replace").decode()


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__
