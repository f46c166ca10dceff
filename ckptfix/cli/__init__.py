"""The command line. This package is the only place of ckptfix that prints or exits."""

import atexit
import gc
import os
import sys

__all__ = ["main"]

# Objects after which Python looks for garbage among them, 700 by default. A start and a parsed file make many, and none
# of them is garbage.
_NEW_OBJECTS = 50_000


_ADDRESSES = 120_000_000  # bytes of address space without which not even the imports work


def _refuse_little_memory() -> None:
    """End with exit code 2 if `ulimit -v` leaves too little: numpy's OpenBLAS would end the process with 1, the code
    for findings, and Python itself calls a file that it has no memory to parse a syntax error."""
    if sys.platform == "win32":
        return
    import resource

    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        return
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its buffers for each core count too
    import mmap

    try:
        mmap.mmap(-1, _ADDRESSES).close()
    except OSError:
        sys.stderr.write("ckptfix: error: too little memory: the limit of the address space (ulimit -v) is too low\n")
        raise SystemExit(2) from None


def main() -> None:
    """Run the program and exit."""
    gc.set_threshold(_NEW_OBJECTS)
    # Else Python goes through all objects again when it ends: a fifth of a look at names. Triton, which newer releases
    # of torch import, would then list on stderr what it calls leaked.
    atexit.register(lambda: None if "triton" in sys.modules else gc.freeze())
    _refuse_little_memory()
    try:
        from ckptfix.cli.program import run
    except KeyboardInterrupt:
        sys.stderr.write("ckptfix: error: stopped (Interrupt): nothing was begun\n")
        raise SystemExit(130) from None
    run()
