"""Holds every command that a test makes ckptfix print against the real parser of the command line."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable

import click

from ckptfix.core import wording as shell


def parse(words: list[str]) -> None:
    """Parse a command without running it. Raises what the command line raises for a wrong one."""
    from ckptfix.cli.program import PROGRAM  # click comes with it, and most tests print no command

    program, name, *rest = words
    assert program == "ckptfix", words
    command = PROGRAM.get_command(click.Context(PROGRAM), name)
    assert command is not None, words
    command.make_context(name, list(rest))


def watch() -> None:
    """Parse whatever is put together as a command from now on. Call it before anything imports ``typed``."""
    plain = shell.typed

    def typed(words: Iterable[str]) -> str:
        words = tuple(words)
        text = plain(words)
        if words[:1] == ("ckptfix",) and list(words[1:]) != sys.argv[1:]:  # the page repeats its own command line
            parse(list(words))
            assert not text.isprintable() or "$'" in text or tuple(shlex.split(text)) == words, text
        return text

    shell.typed = typed
