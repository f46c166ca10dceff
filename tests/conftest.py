"""Where the tests find their files."""

from __future__ import annotations

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

# Three workers of pytest on two cores: with more threads, torch waits for itself. Said before torch is imported, and to
# the programs that are started.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Or each worker and every program that is started compiles the package and the tests anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

ROOT = Path(__file__).resolve().parent.parent

# torchvision beside the CPU build of torch: here, and in the programs that are started.
PEERS = str(ROOT / "tests" / "peers")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (PEERS, os.environ.get("PYTHONPATH"))))
runpy.run_path(str(Path(PEERS, "sitecustomize.py")))

# A run in the background, or under nohup, is deaf to signals. It stays so, and the programs that it starts are not.
for number in (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if os.name == "posix" else [])):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda number, frame: None)

printed.watch()

from ckptfix.smoke import launch  # noqa: E402  both only after the lines above
from ckptfix.zoo import engine  # noqa: E402

for starting in (launch, engine):
    vars(starting)["subprocess"] = children.SUBPROCESS  # copies of a process that has torch

# How long an example takes, and how long one is searched for, says something of the machine and nothing of the code.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


gc.disable()  # until all tests are collected
atexit.register(gc.freeze)  # else each process of pytest goes through all of torch once more when it ends


_modules = 0  # that were imported when the garbage collector was told to leave them alone


def _freeze() -> None:
    """Keep the garbage collector and the handlers of logs from going through libraries: a tenth of the time."""
    global _modules
    gc.collect()
    gc.freeze()
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True  # to those that do not (40 of torch), pytest adds its handlers six times a test
    _modules = len(sys.modules)


def pytest_collection_finish() -> None:
    _freeze()
    gc.enable()


LIBRARIES = "accelerate diffusers lightning open_clip peft segmentation_models_pytorch smp timm torchao"
LIBRARIES += " torchvision transformers"
PEER = re.compile(rf"""(?:import |from |")(?:{"|".join(LIBRARIES.split())})[ .:"\n]""")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests on Ray first, and then those that name a library of models: the first tests go to one worker of
    pytest, so the cluster starts once, and few workers import the libraries."""
    last = {path: PEER.search(path.read_text(encoding="utf-8")) is None for path in {item.path for item in items}}
    items.sort(key=lambda item: (item.path.name != "test_cluster.py", last[item.path]))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Each test draws numbers of its own, and the same ones every time, in whatever order the tests run."""
    import torch

    if len(sys.modules) > _modules + 200:  # a test has imported another library
        _freeze()
    seed = zlib.crc32(item.nodeid.encode("utf-8", "surrogatepass"))
    torch.default_generator.manual_seed(seed)  # torch.manual_seed formats three tracebacks for devices that may come
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


_FOLDERS = count()


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the test's own, as pytest makes it, without its search for a number among thousands of folders."""
    name = re.sub(r"\W", "_", request.node.name)[:30]
    path = tmp_path_factory.getbasetemp() / f"{name}{next(_FOLDERS)}"
    path.mkdir(0o700)
    return path


@pytest.fixture
def real_child() -> Iterator[None]:
    """Start the processes of forward tests and migrations as users do, and not as copies of one with torch."""
    # A patch of its own: with the fixture of that name, a test's patches would be undone after its other fixtures.
    with pytest.MonkeyPatch.context() as patch:
        for starting in (launch, engine):
            patch.setattr(starting, "subprocess", subprocess)
        yield


@pytest.fixture(scope="session")
def corpus() -> Path:
    """Folder of genuine old checkpoints: $CKPTFIX_CORPUS, or ../shared/corpus beside the project."""
    folder = Path(os.environ.get("CKPTFIX_CORPUS") or ROOT.parent / "shared" / "corpus")
    if not (folder / "manifest.jsonl").is_file():
        pytest.skip(f"no corpus in {folder}: set CKPTFIX_CORPUS to the folder that holds manifest.jsonl")
    return folder


@pytest.fixture(scope="session")
def samples() -> Path:
    """The `sample_checkpoints` folder."""
    return ROOT / "sample_checkpoints"
