"""Forks the processes of forward tests and migrations from one that has imported torch, which takes most of their time.

Tests with the fixture ``real_child`` start real processes. Run as a program, this module is the process that is
forked."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_ONE_AT_A_TIME = threading.Lock()
_TESTS = Path(__file__).resolve().parent


@cache
def _original() -> socket.socket:
    ours, theirs = socket.socketpair()
    end, null = theirs.fileno(), subprocess.DEVNULL
    # The first test that needs it may have set a path without the folder that lets torchvision import.
    path = os.pathsep.join(str(_TESTS / folder) for folder in ("peers", ".."))
    environment = {**os.environ, "PYTHONPATH": path}
    subprocess.Popen([sys.executable, __file__, str(end)], pass_fds=[end], stdin=null, stdout=null, env=environment)
    theirs.close()
    return ours


class Copy:
    """A stand-in for ``subprocess.Popen`` in the parent of a forward test and in the driver of a migration."""

    def __init__(
        self, words: list[str], *, stdin: int, stdout: Any, env: dict[str, str], cwd: Path | None = None,
        pass_fds: Sequence[int] = (), **_: Any,
    ) -> None:  # fmt: skip
        told, status = os.pipe()
        if stdin == subprocess.PIPE:
            (taken, written), (read, given) = os.pipe(), os.pipe()
            self.stdin, self.stdout = os.fdopen(written, "wb"), os.fdopen(read, "rb")
        else:
            taken, given = os.open(os.devnull, os.O_RDONLY), os.dup(stdout.fileno())
        order = {"words": words[2:], "cwd": str(cwd or Path.cwd()), "env": env, "numbers": list(pass_fds)}
        with _ONE_AT_A_TIME:
            socket.send_fds(_original(), [json.dumps(order).encode()], [taken, given, status, *pass_fds])
            for end in (taken, given, status):
                os.close(end)
            self._told = os.fdopen(told, "rb")
            self.pid = int(self._told.readline())
        self.returncode: int | None = None
        self._waiting = threading.Thread(target=self._wait, daemon=True)
        self._waiting.start()

    def _wait(self) -> None:
        with self._told:
            self.returncode = int(self._told.readline())

    def wait(self, timeout: float | None = None) -> int | None:
        self._waiting.join(timeout)
        if self._waiting.is_alive():
            raise subprocess.TimeoutExpired("a copy", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


# Replaces the module `subprocess` in `ckptfix.smoke.launch` and `ckptfix.zoo.engine`.
SUBPROCESS = SimpleNamespace(**{**vars(subprocess), "Popen": Copy})


def serve(channel: socket.socket) -> None:
    """Fork a copy for each order, until the channel is closed."""
    import torch  # noqa: F401  the slow import that copies share

    from ckptfix.smoke import child, equivalence, exam  # noqa: F401
    from ckptfix.zoo import engine, performing  # noqa: F401

    own = [entry for entry in sys.path[1:] if entry not in os.environ["PYTHONPATH"].split(os.pathsep)]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits for the supervising processes
    while True:
        order, ends, _, _ = socket.recv_fds(channel, 1 << 20, 8)
        if not order:
            return
        if os.fork() == 0:
            channel.close()
            _mind(json.loads(order), own, *ends)
        for end in ends:
            os.close(end)


def _mind(order: dict[str, Any], own: list[str], stdin: int, stdout: int, status: int, *more: int) -> None:
    """Fork the copy, and report its process id and exit status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    copy = os.fork()
    if copy == 0:
        os.close(status)
        _become(order, own, stdin, stdout, *more)
    for end in (stdin, stdout, *more):
        os.close(end)
    os.write(status, b"%d\n" % copy)
    os.write(status, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]))
    os._exit(0)


def _become(order: dict[str, Any], own: list[str], stdin: int, stdout: int, *more: int) -> None:
    """Run the ``main`` of a module as ``python -m`` would."""
    os.setsid()
    for number, end in enumerate((stdin, stdout, stdout)):
        os.dup2(end, number)
    numbers = dict(zip(map(str, order["numbers"]), map(str, more), strict=True))
    sys.argv[:] = [numbers.get(word, word) for word in order["words"]]
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    sys.path[:] = [order["cwd"], *order["env"]["PYTHONPATH"].split(os.pathsep), *own]
    sys.stdin, sys.stdout = os.fdopen(0, encoding="utf-8"), os.fdopen(1, "w", encoding="utf-8", buffering=1)
    sys.stderr = sys.stdout
    program = sys.modules[sys.argv[0]]
    vars(program)["die_with"] = lambda parent: None  # its parent is the supervising process
    code = 0
    try:
        program.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001  Python would print it as well
        traceback.print_exc()
        code = 1
    os._exit(code)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
