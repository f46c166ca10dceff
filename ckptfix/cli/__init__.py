"""The command line. This package is the only place of ckptfix that prints or exits."""

from ckptfix.cli.app import main

__all__ = ["main"]
