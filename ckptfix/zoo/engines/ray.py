"""The engine of a cluster: each job is a Ray task.

A task reads its source and writes its output by itself: URLs from wherever it runs, folders where every node has them
under the same path. The driver sends jobs and gets records, a bounded number at a time, and writes the manifest alone.
A job is declared with the memory that its file may take, so that Ray puts no more of them on a node than it holds."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptfix.errors import CkptfixError, UsageError
from ckptfix.zoo.books.versions import version
from ckptfix.zoo.engines.budget import cost_of
from ckptfix.zoo.engines.local import patience
from ckptfix.zoo.work.job import Done, Job, failed

if TYPE_CHECKING:
    from ray import ObjectRef  # type: ignore[import-not-found, unused-ignore]  # an optional extra

_TICK = 0.25
"""Seconds between two calls of ``on_wait``."""

_PATIENCE = 10.0
"""Seconds that a cluster has to answer."""

_RECOUNT = 10.0
"""Seconds after which the cluster is looked at again: nodes come and go."""

_AHEAD = 2
"""Jobs in flight for each processor: one runs, and one is there when it ends."""

_CRASHES, _LOSSES = 2, 5
"""How often a job is tried whose process dies, which may be its own fault, and one whose node does, which is not."""


@dataclass
class RayEngine:
    """Runs jobs on the Ray cluster at ``address``, or on one of this machine that ends with the run.

    ``workers`` is the most that run at the same time, None for as many as the cluster has processors. ``scratch`` is
    for temporary files of destinations that are folders; those of URLs lie where each node has its own."""

    scratch: Path
    address: str | None = None
    workers: int | None = None
    patience: Callable[[Job], float] = patience
    is_grouped: bool = False
    _again: list[Job] = field(default_factory=list)

    def run_jobs(
        self, jobs: Iterable[Job], on_done: Callable[[Done], None], on_wait: Callable[[int], None] = lambda count: None
    ) -> None:
        """Do all jobs; see ``Engine``."""
        self._again = []
        ray = _imported()
        is_ours = not ray.is_initialized()
        if is_ours:
            self._connect(ray)
        flight = _Flight(ray, self, _Cluster(ray))
        try:
            flight.carry_out(iter(jobs), on_done, on_wait)
            for job in self._again:
                # What took a process with it is tried again with twice the memory, and with no other job beside it.
                flight.carry_out(iter([job]), on_done, on_wait)
        finally:
            flight.end()
            if is_ours:
                ray.shutdown()

    def _connect(self, ray: Any) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anybody
        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        try:
            if self.address is None:
                ray.init(address="local", include_dashboard=False, num_cpus=self.workers, **quiet)
            else:
                _knock(self.address)
                ray.init(address=self.address, **quiet)
        except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
            at = "on this machine" if self.address is None else f"at {self.address}"
            raise UsageError(f"--engine ray: there is no Ray {at} ({error}); see `ray status`") from error


def _knock(address: str) -> None:
    """Raise ``OSError`` at once where nobody listens: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), _PATIENCE).close()


def _imported() -> Any:
    try:
        import ray  # type: ignore[import-not-found, unused-ignore]  # as above
    except ImportError as error:
        raise UsageError(f"--engine ray: ray is not installed ({error}); pip install 'ckptfix[ray]'") from error
    return ray


def label_of(job: Job) -> str:
    """What Ray calls the task of a job: the end of the file's name, as text, which not every name is."""
    return job.item.name[-100:].encode(errors="replace").decode()


class _Cluster:
    """What the cluster has room for."""

    def __init__(self, ray: Any) -> None:
        self._ray, self._looked = ray, 0.0
        self.processors, self.memory = 1, 0

    def look(self) -> None:
        """Count its nodes again, if it is time."""
        if (now := time.monotonic()) - self._looked < _RECOUNT and self._looked:
            return
        self._looked = now
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        self.processors = max(int(sum(node.get("CPU", 0) for node in nodes)), 1)
        self.memory = int(max((node.get("memory", 0) for node in nodes), default=0))

    def declared(self, job: Job) -> int:
        """The memory of a job: not more than the largest node has, or nobody would ever do it."""
        wanted = cost_of(job.item.size, job.runs_model, job.fetches).memory * min(job.attempt, 2)
        return min(wanted, self.memory)


class _Flight:
    """The tasks under way."""

    def __init__(self, ray: Any, engine: RayEngine, cluster: _Cluster) -> None:
        self._ray, self._engine, self._cluster = ray, engine, cluster
        self._task = ray.remote(max_retries=0)(perform_on_node)
        self._run = f"ckptfix-{os.getpid()}-{time.time_ns():x}"
        self._flying: dict[ObjectRef[Done], tuple[Job, float]] = {}
        self._lost: list[Job] = []

    def carry_out(self, jobs: Iterator[Job], on_done: Callable[[Done], None], on_wait: Callable[[int], None]) -> None:
        """Do jobs, no more of them at a time than the cluster can use."""
        told = 0.0
        job = next(jobs, None)
        while job is not None or self._flying or self._lost:
            self._cluster.look()
            most = self._engine.workers or _AHEAD * self._cluster.processors
            while (job is not None or self._lost) and len(self._flying) < most:
                if self._lost:
                    self._send(self._lost.pop())
                elif job is not None:
                    self._send(job)
                    job = next(jobs, None)
            flying = list(self._flying)
            ready, _ = self._ray.wait(flying, num_returns=1, timeout=_TICK)
            if ready:
                ready, _ = self._ray.wait(flying, num_returns=len(flying), timeout=0)
            for task in ready:
                self._collect(task, on_done)
            self._end_endless(on_done)
            if (now := time.monotonic()) - told >= _TICK:
                told = now
                on_wait(len(self._flying))

    def _send(self, job: Job) -> None:
        # A rename puts outputs in place where the destination is a folder: then temporary files have to lie in it.
        scratch = str(self._engine.scratch.absolute()) if "://" not in job.destination else self._run
        options = {"num_cpus": 1, "memory": self._cluster.declared(job), "name": label_of(job)}
        task = self._task.options(**options).remote(job, scratch, str(Path.cwd()), version())
        self._flying[task] = job, time.monotonic()

    def _collect(self, task: ObjectRef[Done], on_done: Callable[[Done], None]) -> None:
        from ray import exceptions

        job, _ = self._flying.pop(task)
        try:
            done = self._ray.get(task)
        except exceptions.RayTaskError as error:
            done = failed(job, f"{job.item.name}: the node that had it could not do it: {_last_line(error)}")
        except (exceptions.NodeDiedError, exceptions.ObjectLostError, exceptions.OwnerDiedError) as error:
            done = self._retried(job, "the node that worked on it was lost", error, self._lost, _LOSSES)
        except exceptions.OutOfMemoryError as error:
            done = self._retried(job, "the node that worked on it ran out of memory", error, self._engine._again)
        except exceptions.WorkerCrashedError as error:
            done = self._retried(
                job, "the process that worked on it was killed, or crashed", error, self._engine._again
            )
        except exceptions.RayError as error:
            done = self._retried(job, "Ray could not do it", error, self._engine._again)
        if done is not None:
            on_done(done)

    def _retried(self, job: Job, cause: str, error: Exception, again: list[Job], most: int = _CRASHES) -> Done | None:
        """What came of a job whose worker is gone: nothing yet, where it is tried again."""
        shutil.rmtree(self._engine.scratch / str(job.number), ignore_errors=True)
        if job.attempt < most:
            again.append(replace(job, attempt=job.attempt + 1))
            return None
        return failed(job, f"{job.item.name}: {cause} ({_last_line(error)})")

    def _end_endless(self, on_done: Callable[[Done], None]) -> None:
        """A job that never ends is ended; that it waited for a place counts for it too, hence twice the time."""
        for task, (job, begun) in list(self._flying.items()):
            limit = 2 * self._engine.patience(job)
            if time.monotonic() - begun > limit:
                self._ray.cancel(task, force=True)
                del self._flying[task]
                on_done(failed(job, f"{job.item.name}: it took longer than {limit:.0f} s"))

    def end(self) -> None:
        """End the tasks under way, and remove what they left on the nodes."""
        for task in self._flying:
            self._ray.cancel(task, force=True)
        if self._flying:
            self._ray.wait(list(self._flying), num_returns=len(self._flying), timeout=30)
        self._flying.clear()
        self._sweep()

    def _sweep(self) -> None:
        from ray.exceptions import RayError
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        sweeper = self._ray.remote(num_cpus=0, max_retries=0)(sweep_node)
        try:
            nodes = [node["NodeID"] for node in self._ray.nodes() if node["Alive"]]
            tasks = [
                sweeper.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(self._run)
                for node in nodes
            ]
            self._ray.wait(tasks, num_returns=len(tasks), timeout=30)
        except RayError:
            return  # the cluster is going: its nodes' temporary folders are its own business


def perform_on_node(job: Job, scratch: str, folder: str, expected: str) -> Done:
    """A job, on whatever node this runs. ``scratch`` is a path, or the name of a temporary folder of the node."""
    from ckptfix.zoo.places import open_place
    from ckptfix.zoo.work.performing import perform

    if version() != expected:
        return failed(
            job, f"{job.item.name}: a node has ckptfix {version()} and the driver {expected}; install one for all"
        )
    if Path(folder).is_dir():
        os.chdir(folder)  # what paths are relative to, and where the user's own modules lie
    for name in (job.source, job.destination):
        root = open_place(name).root
        if root is not None and not root.is_dir():
            return failed(job, f"{name}: is no folder on the node {os.uname().nodename}; share it, or name a URL")
    for name, file in job.treatment.files():
        if not Path(file).exists():
            return failed(job, f"{file}: is to be read ({name}) and is not on the node {os.uname().nodename}; share it")
    place = Path(tempfile.gettempdir(), scratch)  # which is the second alone where that is absolute
    shutil.rmtree(place / str(job.number), ignore_errors=True)  # of an attempt that was killed here
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


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__
