"""The click program: its commands, generated from the table of options, and ``--version``."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from msgspec import Struct

from ckptfix.cli.console import Console, handle_signals, open_streams, write_output
from ckptfix.core.config import Configuration, load_configuration
from ckptfix.errors import Opt, UsageError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from ckptfix.core.option import Option

# The commands in the order of `--help`. Each is the function of its name in this module.
COMMANDS = {
    **{name: name for name in ("check", "repair", "migrate")},
    **dict.fromkeys(("inspect", "diff", "map", "rule"), "showing"),
    "explain": "explain",
}

_SETTINGS = {"max_content_width": 100}


def _help_option() -> click.Option:
    """Return the option ``--help``. Click's own looks for a translation of its text, which takes 3 % of a check of
    names, and its parameter's name differs between releases."""

    def show(context: click.Context, _option: click.Parameter, is_given: bool) -> None:
        if is_given and not context.resilient_parsing:
            click.echo(context.get_help(), color=context.color)
            context.exit()

    return click.Option(
        ["help", "-h", "--help"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help="Show this message and exit.",
    )


class Run(Struct, frozen=True):
    """The console and the options of a command by name, from the command line or the configuration file.

    ``given`` has only those from the command line."""

    console: Console
    choices: Mapping[str, Any]
    given: Mapping[str, Any]


class Program(click.Group):
    """The group of all commands. Imports a command only when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _command(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that ``args`` start with. Raises click's ``UsageError``, with a suggestion, if unknown."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from ckptfix.core.wording import nearest

            close = nearest(args[0], COMMANDS)
            hint = f"; did you mean {close}?" if close else ""
            ctx.fail(f"there is no command {args[0]}{hint}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, or print the version."""
        if ctx.params["version"]:
            with Console().exiting_on_error():
                write_output("".join(f"{line}\n" for line in _version_lines(ctx.params["verbose"])))
            return 0
        return super().invoke(ctx)


PROGRAM = Program(
    "ckptfix",
    params=[
        click.Option(["--version"], is_flag=True, help="Print the version and exit; -v adds what a bug report needs."),
        click.Option(["-v", "--verbose"], is_flag=True, hidden=True),
        _help_option(),
    ],
    context_settings=_SETTINGS,
    add_help_option=False,
    help="""Make PyTorch checkpoints load again.

    ckptfix reads a checkpoint without running any of its code, finds what keeps it from loading or from working,
    repairs that by named rules, and proves the result.

    Exit codes: 0 nothing found, or all fixed and verified; 1 findings remain; 2 a file cannot be read, or the command
    is wrong.

    Shell completion: eval "$(_CKPTFIX_COMPLETE=bash_source ckptfix)", or zsh_source, fish_source.
    """,
)


class Argument(click.Argument):
    """A positional argument with a help text."""

    def __init__(self, name: str, metavar: str, text: str, *, required: bool = True, many: bool = False) -> None:
        super().__init__([name], metavar=metavar, required=required, nargs=-1 if many else 1)
        self.text = text

    def make_metavar(self, ctx: click.Context | None = None) -> str:
        """Return the argument as the usage line shows it: ``PATH...`` or ``[CODE]``."""
        word = self.metavar if self.required else f"[{self.metavar}]"
        return f"{word}{'...' if self.nargs == -1 else ''}"


class Command(click.Command):
    """A command whose help shows the arguments and the groups of options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; what begins with a dash and has a space is no option of ``explain``, but a pasted text.
        Raises click's ``UsageError`` for a second file of ``repair``, and for an option of other commands."""
        if self.name == "explain":
            args = [f"\n{each}" if re.match(r"-[^\s=]*\s|-{3,}$", each) else each for each in args]
        ctx.allow_extra_args = self.name == "repair"
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if homes := _commands_with(error.option_name):
                ctx.fail(f"{error.option_name} is an option of {', '.join(homes)}, not of {self.name}")
            raise
        if rest and self.name == "repair":
            ctx.fail("repair takes one file; for many: ckptfix migrate SRC DST")
        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the arguments, then the options by group."""
        from ckptfix.core.options import GROUPS

        arguments = [(str(each.metavar), each.text) for each in self.params if isinstance(each, Argument)]
        with formatter.section("Arguments"):
            formatter.write_dl(arguments)
        shown = {each.name: each.get_help_record(ctx) for each in self.get_params(ctx)}
        groups = {title: [option.name for option in group] for title, group in GROUPS.items()}
        groups[[*groups][-1]].append("help")
        for title, names in groups.items():
            if rows := [row for name in dict.fromkeys(names) if (row := shown.get(name)) is not None]:
                with formatter.section(title):
                    formatter.write_dl(rows)


def _commands_with(flag: str) -> list[str]:
    """Return the commands that have an option."""
    from ckptfix.core.options import options_of

    return [name for name in COMMANDS if any(flag in (each.long, each.no) for each in options_of(name))]


def run(words: Sequence[str] | None = None) -> None:
    """Run the program and exit."""
    open_streams()
    handle_signals()
    if instruction := os.environ.get("_CKPTFIX_COMPLETE"):
        from click.shell_completion import add_completion_class, shell_complete

        from ckptfix.cli.completion import WholeWords

        add_completion_class(WholeWords)
        raise SystemExit(shell_complete(PROGRAM, {}, "ckptfix", "_CKPTFIX_COMPLETE", instruction))
    raise SystemExit(exit_code(sys.argv[1:] if words is None else words))


def exit_code(words: Sequence[str]) -> int:
    """Run a command line; return its exit code."""
    console = Console()
    try:
        with PROGRAM.make_context("ckptfix", list(words) or ["--help"]) as context:
            return int(PROGRAM.invoke(context))
    except click.exceptions.Exit as end:
        return end.exit_code if words else 2  # no command at all is a wrong command line
    except click.ClickException as error:
        console.usage(error)
        return error.exit_code
    except KeyboardInterrupt as stop:
        return console.report_stop(stop)


@cache
def _command(name: str) -> click.Command:
    from ckptfix.core.options import options_of

    module = import_module(f"ckptfix.cli.{COMMANDS[name]}")
    function = getattr(module, name)
    return Command(
        name,
        params=[*module.ARGUMENTS[name], *map(_click_option, options_of(name)), _help_option()],
        callback=partial(_call, function),
        help=function.__doc__,
        context_settings=_SETTINGS,
        add_help_option=False,
    )


def _call(function: Callable[..., int], **parameters: Any) -> int:
    context = click.get_current_context()
    arguments = {
        each.name: parameters.pop(str(each.name)) for each in context.command.params if isinstance(each, Argument)
    }
    given = {
        name: value
        for name, value in parameters.items()
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    console = Console(quiet=bool(given.get("quiet")), verbose=bool(given.get("verbose")))
    with console.exiting_on_error():
        configuration = load_configuration()
        choices = choose(function.__name__, given, configuration)
        console.quiet, console.verbose = bool(choices.get("quiet")), bool(choices.get("verbose"))
        runs_model = "model" in choices and (function.__name__ != "explain" or "file" in choices)
        if runs_model and "model" not in given:
            # The configuration file may be someone else's, so say that code runs.
            console.note(f"the model {choices['model']} comes from {configuration.path}; its code runs")
        return function(Run(console, choices, given), **arguments)


def choose(command: str, given: Mapping[str, Any], configuration: Configuration) -> dict[str, Any]:
    """Return the options of a command by name: those given, and those of the configuration file that they leave open.

    Raises ``UsageError`` for given options that exclude each other, or that have no meaning without a model."""
    from ckptfix.core.option import MAP
    from ckptfix.core.options import BY_NAME, idle_options, options_of, without_rivals

    configured = {}
    for option in options_of(command) if configuration.values else ():
        if option.name in configuration.values and option.name not in given:
            configured[option.name] = value = configuration.values[option.name]
            if option.choices and value not in option.choices:
                raise UsageError(
                    f"{configuration.path}: {command} has no {option.name.replace('_', ' ')} {value}; give it ",
                    *(Opt(option.name), f" with one of {', '.join(option.choices)}"),
                )
    configured = without_rivals(configured, given)
    needed = Opt("prove", True) if command == MAP else Opt("model", "PKG.MOD:FACTORY")
    for name in idle_options({**configured, **given}, needed.name):
        if name not in given:  # meant for the commands and files that have a model or a target
            del configured[name]
        elif BY_NAME[name].needs_model and given[name] is not False and name != "recalibrate":
            # For the others, the library's own message is better.
            raise UsageError(*(Opt(name), " has no meaning without a model; add ", needed, ", or leave it out"))
    if given.get("smoke") is False:
        configured.pop("compare", None)
    if {"quiet", "verbose"} <= given.keys():
        raise UsageError(Opt("quiet"), " and ", Opt("verbose"), " exclude each other")
    return {**configured, **given}


def _click_option(option: Option) -> click.Option:
    from ckptfix.core.option import LISTS, Type

    flags = [f"{option.long}/{option.no}" if option.no else option.long, *([option.short] if option.short else [])]
    kinds: Mapping[Type, Any] = {Type.WHOLE: click.INT, Type.NUMBER: click.FLOAT}
    is_list = option.kind in LISTS
    return click.Option(
        [option.name, *flags],
        is_flag=option.kind is Type.SWITCH,
        default=None,
        multiple=is_list,
        type=click.Choice(option.choices) if option.choices else kinds.get(option.kind),
        metavar=option.metavar or None,
        help=f"{option.help}{f'  [default: {option.default}]' if option.default else ''}",
        shell_complete=None if option.choices else partial(_completions, option),
    )


def _completions(option: Option, _context: object, _parameter: object, begun: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    from ckptfix.core.adaptations import RECIPES
    from ckptfix.core.likeness import KNOWN
    from ckptfix.core.option import Type

    if option.name in ("select", "ignore", "accept", "replace"):
        before, comma, code = begun.rpartition(",")
        return [CompletionItem(f"{before}{comma}{known}") for known in rule_codes(code)]
    if option.kind is Type.PAIRS:
        recipes = (f"{name}={recipe}" for name, recipes in RECIPES.items() for recipe in recipes or ("",))
        return [CompletionItem(text) for text in recipes if text.startswith(begun)]
    if KNOWN in option.prefixes and begun.startswith(KNOWN):
        from ckptfix.known.table import table

        return [CompletionItem(f"{KNOWN}{name}") for name in table().names() if name.startswith(begun[len(KNOWN) :])]
    # Files come first: bash discards suggestions that come before them.
    files = [CompletionItem(begun, type="file")] if option.kind in (Type.FILE, Type.FILES, Type.INPUTS) else []
    return [*files, *(CompletionItem(word) for word in (*option.words, *option.prefixes) if word.startswith(begun))]


def rule_codes(begun: str) -> Iterator[str]:
    """Yield the codes of the rules that start with this text, in any case."""
    from ckptfix.rules import RULES

    return (rule.code for rule in RULES if rule.code.startswith(begun.upper()))


def _version_lines(verbose: bool) -> Iterator[str]:
    from ckptfix import __version__

    yield f"ckptfix {__version__}"
    if verbose:
        from ckptfix.cli.output import environment

        yield from (f"{name}: {text}" for name, text in environment().items() if name != "ckptfix")
