"""Worker processes: one that dies takes one job with it, and no other."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from ckptfix.errors import UsageError
from ckptfix.zoo import engine as local
from ckptfix.zoo.engine import LocalEngine, Worker, check_models
from ckptfix.zoo.items import list_zoo
from ckptfix.zoo.job import Done, Job
from ckptfix.zoo.manifest import Outcome
from ckptfix.zoo.places import open_place
from ckptfix.zoo.planning import MigrationPlan
from ckptfix.zoo.resources import Budget, cost_of
from ckptfix.zoo.zoo_toml import Table, treatment_of_choices

ROOM = Budget(1 << 40)


def jobs_for(folder: Path, count: int, **models: dict[str, Any]) -> list[Job]:
    """Jobs for small files; those that ``models`` names have a model."""
    (folder / "old").mkdir()
    for number in range(count):
        torch.save(nn.Linear(2, 2).state_dict(), folder / f"old/f{number}.pth")
    treatments = tuple(treatment_of_choices((f"{name}.pth",), choices, None, "") for name, choices in models.items())
    items = list_zoo(open_place(str(folder / "old")))
    plan = MigrationPlan(items, {}, Table(treatments), str(folder / "old"), str(folder / "new"), is_grouped=True)
    (folder / "scratch").mkdir()
    return list(plan.todo(None, lambda name: None, lambda item, known: None))


def run(folder: Path, jobs: list[Job], workers: int = 2, budget: Budget = ROOM, **options: Any) -> dict[str, Done]:
    done: list[Done] = []
    engine = LocalEngine(folder / "scratch", count=workers, budget=budget, **options)
    engine.run_jobs(jobs, done.append)
    assert len(done) == len(jobs)
    return {each.record.source: each for each in done}


def test_many_jobs_in_few_processes(tmp_path):
    done = run(tmp_path, jobs_for(tmp_path, 30))
    assert {each.record.outcome for each in done.values()} == {Outcome.FINE}
    assert all(Path(each.staged[0].path).is_file() for each in done.values())


@pytest.mark.slow
def test_a_crash_ends_one_job_alone_once_it_was_tried_again(tmp_path):
    crash = {"model": "tests.zoo.factories:crash", "model_args": {"number": int(signal.SIGSEGV)}}
    crash_once = {"model": "tests.zoo.factories:crash_once", "model_args": [str(tmp_path / "marker")], "smoke": False}
    jobs = jobs_for(tmp_path, 6, f1=crash_once, f3=crash)
    # One model at a time, for the retries to come in this order: the last process can then do both.
    one_model = Budget(max(cost_of(job.item.size, job.runs_model, False).memory for job in jobs) * 3 // 2)
    done = run(tmp_path, jobs, budget=one_model)
    again, failed = done.pop("f1.pth").record, done.pop("f3.pth").record
    assert (again.outcome, again.attempts) == (Outcome.FINE, 2)
    assert (failed.outcome, failed.attempts) == (Outcome.FAILED, 2)
    assert "crashed with SIGSEGV" in str(failed.error)
    assert {each.record.outcome for each in done.values()} == {Outcome.FINE}
    assert {each.record.attempts for each in done.values()} == {1}


def test_a_worker_whose_memory_ran_out_is_replaced_and_its_outcome_kept(tmp_path):
    jobs = jobs_for(tmp_path, 6, f0={"model": "tests.zoo.factories:exhausted"})
    engine, done, workers = LocalEngine(tmp_path / "scratch", count=1, budget=ROOM), [], []

    def note(each: Done) -> None:
        done.append(each)
        workers.append([worker.process.pid for worker in engine._workers.values()])

    engine.run_jobs(jobs, note)
    found = {each.record.source: each.record for each in done}
    assert (found["f0.pth"].outcome, found["f0.pth"].attempts) == (Outcome.FAILED, 1)
    assert "MemoryError" in str(found["f0.pth"].error)
    assert [(name, record.outcome) for name, record in sorted(found.items())[1:]] == [
        (f"f{number}.pth", Outcome.FINE) for number in range(1, 6)
    ]
    assert {record.attempts for record in found.values()} == {1}
    assert [] in workers  # it was gone as soon as it had answered


@pytest.mark.slow
def test_what_never_ends_is_ended(tmp_path):
    model = {"model": "tests.zoo.factories:hang"}
    jobs = jobs_for(tmp_path, 3, f1=model)
    done = run(tmp_path, jobs, patience=lambda job: 1.0 if job.runs_model else 600.0)
    assert done["f1.pth"].record.outcome is Outcome.FAILED
    assert "longer than 1 s" in str(done["f1.pth"].record.error)
    assert done["f0.pth"].record.outcome is Outcome.FINE


def test_a_job_larger_than_the_budget_goes_through(tmp_path, real_child):
    done = run(tmp_path, jobs_for(tmp_path, 3), budget=Budget(1))
    assert {each.record.outcome for each in done.values()} == {Outcome.FINE}


def test_an_exception_of_the_driver_leaves_no_process(tmp_path):
    engine = LocalEngine(tmp_path / "scratch", count=2, budget=ROOM)
    workers: list[Worker] = []

    def stop(done: Done) -> None:
        workers.extend(engine._workers.values())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.run_jobs(jobs_for(tmp_path, 5), stop)
    assert workers
    assert all(worker.process.returncode is not None for worker in workers)


ORPHAN = """
import os, subprocess, sys
ours, theirs = os.pipe()
command = [sys.executable, "-m", "ckptfix.zoo.engine", str(os.getpid()), str(ours)]
child = subprocess.Popen(command, pass_fds=[ours])
print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""


class Leaving:
    """What a job runs may end the process."""

    def __reduce__(self) -> Any:
        return exec, ("import os; os.write(2, b'cannot go on\\n'); os._exit(3)",)


def test_a_worker_without_jobs_ends_when_its_pipe_does(tmp_path, real_child):
    worker = Worker(tmp_path, 1)
    worker.end()
    assert worker.process.returncode == 0


def test_a_worker_dies_with_its_driver():
    # Its stdout is inherited: it reads as closed when the last of the two is gone.
    driver = subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE)
    assert driver.stdout is not None
    printed = driver.stdout.read()
    assert driver.wait() == -signal.SIGKILL
    assert int(printed) != os.getpid()


def test_how_it_ended_is_reported(tmp_path):
    for number, told in ((signal.SIGKILL, "memory"), (signal.SIGSEGV, "crashed with SIGSEGV")):
        worker = Worker(tmp_path, 1)
        worker.process.send_signal(number)
        assert worker.take() is None
        assert told in worker.cause_of_death()
        worker.kill()


def test_the_last_words_of_one_that_leaves_are_reported(tmp_path):
    worker = Worker(tmp_path, 1)
    worker.give(cast(Job, Leaving()))
    assert worker.take() is None
    assert "exited with status 3 (cannot go on)" in worker.cause_of_death()
    worker.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what a process was started with")
def test_its_temporary_files_go_with_the_scratch_folder(tmp_path, monkeypatch, real_child):
    monkeypatch.chdir(tmp_path)
    Path("scratch").mkdir()
    worker = Worker(Path("scratch"), 1)
    environ = b""
    while not environ and worker.process.poll() is None:  # the kernel shows it a little later than it starts
        environ = Path(f"/proc/{worker.process.pid}/environ").read_bytes()
    worker.end()
    assert f"TMPDIR={tmp_path}/scratch".encode() in environ.split(b"\0")


def test_noop_a_job_within_the_budget_is_left_unchanged(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "TICK", 0.0)
    monkeypatch.setattr(local, "memory_of", lambda pid: 1 << 20)
    done = run(tmp_path, jobs_for(tmp_path, 4), budget=Budget(1 << 30))
    assert {each.record.outcome for each in done.values()} == {Outcome.FINE}


@pytest.mark.skipif(sys.platform != "linux", reason="/proc says how much memory a process has")
def test_a_job_that_takes_more_than_the_budget_is_ended(tmp_path, real_child):
    model = {"model": "tests.zoo.factories:greedy", "smoke": False}
    jobs = jobs_for(tmp_path, 3, f1=model)
    most = cost_of(jobs[0].item.size, True, False).memory
    done = run(tmp_path, jobs, budget=Budget(most))
    assert done["f1.pth"].record.outcome is Outcome.FAILED
    assert "MiB of memory, more than --memory allows" in str(done["f1.pth"].record.error)
    assert done["f0.pth"].record.outcome is done["f2.pth"].record.outcome is Outcome.FINE


def test_jobs_larger_than_any_pipe_go_through(tmp_path):
    jobs = jobs_for(tmp_path, 40)
    long = [replace(job, again=("x" * 200_000,)) for job in jobs]
    assert {each.record.outcome for each in run(tmp_path, long, workers=1).values()} == {Outcome.FINE}


def test_noop_models_that_are_there_are_left_unchanged():
    check_models({})
    check_models({"tests.zoo.factories:linear": "[[files]] 1 (a)"})


def test_models_that_name_nothing_are_one_error(real_child):
    places = {"tests.zoo.factories:linera": "[[files]] 1 (a)", "tests.zoo.factories:linear": "[[files]] 2 (b)"}
    with pytest.raises(UsageError) as caught:
        check_models({**places, "no_such_module_here:f": "[[files]] 3 (c)"})
    assert "[[files]] 1 (a)" in str(caught.value)
    assert "did you mean linear?" in str(caught.value)
    assert "[[files]] 3 (c)" in str(caught.value)
    assert "[[files]] 2" not in str(caught.value)


def test_a_module_that_ends_the_process_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "leaving.py").write_text("import os; os._exit(4)")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="leaving:f: its process exited with status 4"):
        check_models({"leaving:f": ""})
