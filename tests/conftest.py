"""Settings and fixtures for all tests."""

import atexit
import gc
import logging
import os
import re
import runpy
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import children, printed

# Several workers of pytest run at once: with more threads, torch waits for itself. Set before torch is imported, also
# for child processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Otherwise each worker and child process compiles the package and the tests again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

ROOT = Path(__file__).resolve().parent.parent

# Lets torchvision import with the CPU build of torch, here and in child processes.
PEERS = str(ROOT / "tests" / "peers")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (PEERS, os.environ.get("PYTHONPATH"))))
runpy.run_path(str(Path(PEERS, "sitecustomize.py")))

# A run in the background or under nohup ignores signals, but its child processes should not.
for number in (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if os.name == "posix" else [])):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda number, frame: None)

printed.watch()

from ckptfix.smoke import launch  # noqa: E402  only after the lines above
from ckptfix.zoo import engine  # noqa: E402

for starting in (launch, engine):
    vars(starting)["subprocess"] = children.SUBPROCESS  # forks a process that has imported torch

# The time for an example depends on the machine, not on the code.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


gc.disable()  # until all tests are collected
atexit.register(gc.freeze)  # otherwise each process collects garbage in all of torch at exit


_modules = 0  # imported at the last freeze


def _freeze() -> None:
    """Keep garbage collection and log handlers from walking imported libraries, which takes a tenth of the time."""
    global _modules
    gc.collect()
    gc.freeze()
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True  # pytest adds its handlers to others, 40 of them torch's, six times per test
    _modules = len(sys.modules)


def pytest_collection_finish() -> None:
    _freeze()
    gc.enable()


LIBRARIES = "accelerate diffusers lightning open_clip peft segmentation_models_pytorch smp timm torchao"
LIBRARIES += " torchvision transformers"
PEER = re.compile(rf"""(?:import |from |")(?:{"|".join(LIBRARIES.split())})[ .:"\n]""")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests: on Ray first, then those that import model libraries. The first tests go to the same worker, so
    the cluster starts once and few workers import the libraries."""
    last = {path: PEER.search(path.read_text(encoding="utf-8")) is None for path in {item.path for item in items}}
    items.sort(key=lambda item: (item.path.name != "test_cluster.py", last[item.path]))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed torch by the name of the test, so that its random numbers do not depend on the order of tests."""
    import torch

    if len(sys.modules) > _modules + 200:  # a test has imported another library
        _freeze()
    seed = zlib.crc32(item.nodeid.encode("utf-8", "surrogatepass"))
    torch.default_generator.manual_seed(seed)  # torch.manual_seed is slower, for devices not initialised yet
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


_FOLDERS = count()


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder for the test, faster than pytest, which searches thousands of folders for a free number."""
    name = re.sub(r"\W", "_", request.node.name)[:30]
    path = tmp_path_factory.getbasetemp() / f"{name}{next(_FOLDERS)}"
    path.mkdir(0o700)
    return path


@pytest.fixture
def real_child() -> Iterator[None]:
    """Start the processes of forward tests and migrations as for users, not by forking one with torch."""
    # Not the fixture monkeypatch: a test's own patches would then be undone after its other fixtures.
    with pytest.MonkeyPatch.context() as patch:
        for starting in (launch, engine):
            patch.setattr(starting, "subprocess", subprocess)
        yield


@pytest.fixture(scope="session")
def corpus() -> Path:
    """Return the folder of genuine old checkpoints: $CKPTFIX_CORPUS, or ../shared/corpus next to the project."""
    folder = Path(os.environ.get("CKPTFIX_CORPUS") or ROOT.parent / "shared" / "corpus")
    if not (folder / "manifest.jsonl").is_file():
        pytest.skip(f"no corpus in {folder}: set CKPTFIX_CORPUS to the folder that holds manifest.jsonl")
    return folder


@pytest.fixture(scope="session")
def samples() -> Path:
    """Return the folder `sample_checkpoints`."""
    return ROOT / "sample_checkpoints"
