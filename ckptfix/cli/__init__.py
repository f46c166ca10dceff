"""The command line. This package is the only place of ckptfix that prints or exits."""

import atexit
import gc
import os
import sys

__all__ = ["main"]

# Objects after which Python looks for garbage among them, 700 by default. A start and a parsed file make many, and none
# of them is garbage.
_NEW_OBJECTS = 50_000


# Bytes of address space without which an import does not work.
_ADDRESSES = {"ckptfix.cli.program": 120_000_000, "numpy": 120_000_000, "torch": 560_000_000}


class _LimitedAddresses:
    """Refuses imports for which `ulimit -v` leaves too little: numpy's OpenBLAS would end the process with 1, the code
    for findings, and Python itself calls a file that it has no memory to parse a syntax error."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name in _ADDRESSES:
            from mmap import mmap

            try:
                mmap(-1, _ADDRESSES[name]).close()
            except OSError:
                raise MemoryError(f"{name} needs {_ADDRESSES[name]} bytes of address space") from None


def _respect_memory_limit() -> None:
    if sys.platform == "win32":
        return
    import resource

    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its buffers for each core count too
        sys.meta_path.insert(0, _LimitedAddresses)


def main() -> None:
    """Run the program and exit."""
    gc.set_threshold(_NEW_OBJECTS)
    # Else Python goes through all objects again when it ends: a fifth of a look at names. Triton, which newer releases
    # of torch import, would then list on stderr what it calls leaked.
    atexit.register(lambda: None if "triton" in sys.modules else gc.freeze())
    _respect_memory_limit()
    try:
        from ckptfix.cli.program import run
    except MemoryError:
        sys.stderr.write("ckptfix: error: too little memory: the limit of the address space (ulimit -v) is too low\n")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        sys.stderr.write("ckptfix: error: stopped (Interrupt): nothing was started\n")
        raise SystemExit(130) from None
    run()
