"""The commands of the program, each imported when it is asked for: ``ckptfix --version`` needs none of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from ckptfix.cli.command import Command, take_texts_as_they_are
from ckptfix.cli.console import Console

COMMANDS = ("check", "repair", "migrate", "inspect", "diff", "rule", "explain")
"""The commands in the order of ``--help``. Each is the function of its name in the module of its name."""


class Commands(Mapping[str, Any]):
    """The commands by name, made when they are asked for."""

    def __getitem__(self, name: str) -> Any:
        if name not in COMMANDS:
            raise KeyError(name)
        return _command(name)

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class Program(TyperGroup):
    """The words in front of the command: its name, ``--version``, ``--help``."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = Commands()  # type: ignore[assignment]  # typer would let one add to them; nobody does

    def make_context(self, *args: Any, **settings: Any) -> Any:
        """Begin with the command line."""
        with _telling_signals():
            return super().make_context(*args, **settings)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with _telling_signals():
            return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line up to the command's name."""
        take_texts_as_they_are(self.get_params(ctx))
        return super().parse_args(ctx, args)


@contextmanager
def _telling_signals() -> Iterator[None]:
    """Before a command minds signals itself, and after that, typer would end all of them as Ctrl-C, without a word."""
    try:
        yield
    except KeyboardInterrupt as stop:
        raise typer.Exit(Console().tell_stop(stop)) from None


@cache
def _command(name: str) -> Any:
    alone = typer.Typer(rich_markup_mode=None, add_completion=False)
    alone.command(cls=Command)(getattr(import_module(f"ckptfix.cli.{name}"), name))
    return typer.main.get_command(alone)
