"""The processes of forward tests as copies of one that has imported torch, which takes most of their time.

Tests with the fixture ``real_child`` start them as users do. Run as a program, this module is what
is copied."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_ONE_AT_A_TIME = threading.Lock()


@cache
def _original() -> socket.socket:
    ours, theirs = socket.socketpair()
    end, null = theirs.fileno(), subprocess.DEVNULL
    subprocess.Popen([sys.executable, __file__, str(end)], pass_fds=[end], stdin=null, stdout=null)
    theirs.close()
    return ours


class Copy:
    """What ``subprocess.Popen`` is for the parent of a forward test."""

    def __init__(self, _words: list[str], *, cwd: Path, env: dict[str, str], **_: Any) -> None:
        (stdin, written), (read, stdout), (told, status) = os.pipe(), os.pipe(), os.pipe()
        with _ONE_AT_A_TIME:
            order = json.dumps({"cwd": str(cwd), "env": env}).encode()
            socket.send_fds(_original(), [order], [stdin, stdout, status])
            for end in (stdin, stdout, status):
                os.close(end)
            self.stdin, self.stdout = os.fdopen(written, "wb"), os.fdopen(read, "rb")
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
        os.kill(self.pid, number)


# For `ckptfix.smoke.launch`, in the place of the module of this name.
SUBPROCESS = SimpleNamespace(
    Popen=Copy, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT, TimeoutExpired=subprocess.TimeoutExpired
)


def serve(channel: socket.socket) -> None:
    """Make a copy for each order, until nobody is left to give one."""
    import torch  # noqa: F401  what all this is for

    from ckptfix.smoke import child, equivalence, exam  # noqa: F401

    own = [entry for entry in sys.path[1:] if entry not in os.environ["PYTHONPATH"].split(os.pathsep)]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the minders are not waited for
    while True:
        order, ends, _, _ = socket.recv_fds(channel, 1 << 20, 3)
        if not order:
            return
        if os.fork() == 0:
            channel.close()
            _mind(json.loads(order), own, *ends)
        for end in ends:
            os.close(end)


def _mind(order: dict[str, Any], own: list[str], stdin: int, stdout: int, status: int) -> None:
    """Tell the number of the copy, and how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    copy = os.fork()
    if copy == 0:
        os.close(status)
        _become(order, own, stdin, stdout)
    os.close(stdin)
    os.close(stdout)
    os.write(status, b"%d\n" % copy)
    os.write(status, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]))
    os._exit(0)


def _become(order: dict[str, Any], own: list[str], stdin: int, stdout: int) -> None:
    """Do what ``python -m ckptfix.smoke.child`` does."""
    from ckptfix.smoke import child

    os.setsid()
    for number, end in enumerate((stdin, stdout, stdout)):
        os.dup2(end, number)
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    sys.path[:] = [order["cwd"], *order["env"]["PYTHONPATH"].split(os.pathsep), *own]
    sys.stdin, sys.stdout = os.fdopen(0, encoding="utf-8"), os.fdopen(1, "w", encoding="utf-8", buffering=1)
    sys.stderr = sys.stdout
    vars(child)["die_with"] = lambda parent: None  # its parent is the minder
    code = 0
    try:
        child.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001  Python would print it too
        traceback.print_exc()
        code = 1
    os._exit(code)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
