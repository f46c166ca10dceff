"""Checks every command that ckptfix prints in a test with the real parser of the command line, and every call with the
functions of the library."""

import ast
import inspect
import shlex
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import click

import ckptfix
from ckptfix.core import wording
from ckptfix.core.option import CHECK, REPAIR
from ckptfix.core.options import settings_of
from ckptfix.core.report import Call


def parse(words: list[str]) -> None:
    """Parse a command without running it. Raises click's errors for an invalid one."""
    from ckptfix.cli.program import PROGRAM  # imports click, which most tests do not need

    program, name, *rest = words
    assert program == "ckptfix", words
    command = PROGRAM.get_command(click.Context(PROGRAM), name)
    assert command is not None, words
    command.make_context(name, list(rest))


def watch() -> None:
    """Parse every command that is put together from now on. Call it before anything imports ``shell_join``."""
    plain = wording.shell_join

    def checked_join(words: Iterable[str]) -> str:
        words = tuple(words)
        text = plain(words)
        if words[:1] == ("ckptfix",) and list(words[1:]) != sys.argv[1:]:  # the page shows its own command line
            parse(list(words))
            assert not text.isprintable() or "$'" in text or tuple(shlex.split(text)) == words, text
        return text

    wording.shell_join = checked_join
    from ckptfix.report import advice  # imported late, since it imports ``shell_join``

    call_text = advice.call_text

    def checked_call(call: Call, command: str, choices: Mapping[str, Any]) -> str:
        text = call_text(call, command, choices)
        (statement,) = ast.parse(text).body
        assert isinstance(statement, ast.Expr), text
        assert isinstance(statement.value, ast.Call), text
        name = text.removeprefix("ckptfix.").partition("(")[0]
        known = {
            *inspect.signature(getattr(ckptfix, name)).parameters,
            *settings_of(CHECK if name == CHECK else REPAIR),
        }
        assert {str(each.arg) for each in statement.value.keywords} <= known, text
        return text

    advice.call_text = checked_call
