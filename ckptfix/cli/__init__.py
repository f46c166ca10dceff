"""The command line: the only room of ckptfix that prints or exits."""

import atexit
import gc
import os
import sys

__all__ = ["main"]

# Allocations between two garbage collections; Python's default is 700. Starting up and parsing a file allocate many
# objects, almost none of which is garbage.
_GC_THRESHOLD = 50_000

# Bytes of address space that an import needs.
_ADDRESSES = {"ckptfix.cli.program": 120_000_000, "numpy": 120_000_000, "torch": 560_000_000}


class _LimitedAddresses:
    """An import hook that raises ``MemoryError`` if `ulimit -v` leaves too little. Without it, numpy's OpenBLAS exits
    with 1, the code for findings, and Python reports a module that it has no memory to parse as a syntax error."""

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
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # it allocates buffers for each core
        sys.meta_path.insert(0, _LimitedAddresses)


def main() -> None:
    """Run the program and exit."""
    gc.set_threshold(_GC_THRESHOLD)
    # Without this, Python collects garbage once more at exit, which takes a fifth of a check of names. With it, Triton,
    # which newer releases of torch import, would report leaks on stderr.
    atexit.register(lambda: None if "triton" in sys.modules else gc.freeze())
    _respect_memory_limit()
    try:
        try:
            from ckptfix.cli.program import run
        except KeyboardInterrupt:
            sys.stderr.write("ckptfix: error: stopped (Interrupt): nothing was started\n")
            raise SystemExit(130) from None
        run()
    except MemoryError:  # during the imports, or outside any command
        sys.stderr.write("ckptfix: error: not enough memory; is the limit of the address space (ulimit -v) too low?\n")
        raise SystemExit(2) from None
