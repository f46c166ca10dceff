"""The command line. This package is the only place of ckptfix that prints or exits."""

import gc
import sys

__all__ = ["main"]

_NEW_OBJECTS = 50_000
"""Objects after which Python looks for garbage among them, 700 by default. A start and a parsed file make many, and
none of them is garbage."""


def main() -> None:
    """Run the program and exit."""
    gc.set_threshold(_NEW_OBJECTS)
    try:
        from ckptfix.cli.program import run
    except KeyboardInterrupt:
        sys.stderr.write("ckptfix: error: stopped (Interrupt): nothing was begun\n")
        raise SystemExit(130) from None
    run()
