"""The table of all options.

The command line, the settings of the library, ``ckptfix.toml``, ``zoo.toml`` and every printed command are derived from
it. Options that the library takes too are fields of ``core.settings.Settings``, all others are rows here."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from ckptfix.core.adaptations import below
from ckptfix.core.likeness import KNOWN
from ckptfix.core.option import (
    ALL,
    CHECK,
    DIFF,
    EXPLAIN,
    FITS,
    INSPECT,
    LISTS,
    LOAD,
    MAP,
    MIGRATE,
    REPAIR,
    REPAIRS,
    RULE,
    WRITES,
    Option,
    Scope,
    Type,
)
from ckptfix.core.settings import SETTINGS
from ckptfix.core.wording import nearest, no_option, shell_join
from ckptfix.errors import Opt, UsageError

# fmt: off
# The options that the library does not take as settings, grouped as in the help.
_OTHERS: Mapping[str, tuple[Option, ...]] = {
    "Zoo": (
        Option("init", Type.SWITCH, (MIGRATE,), help="Survey the files in SRC, draft zoo.toml, and stop."),
        Option("table", Type.FILE, (MIGRATE,), metavar="FILE", default="zoo.toml in the working directory, if any",
            help="The table of the zoo."),
        Option("only", Type.INPUTS, (MIGRATE,), metavar="NAME",
            help="Only this file, by its path in SRC. Repair options given with it are a decision about this file "
            "that later runs remember."),
        Option("listed", Type.FILE, (MIGRATE,), metavar="FILE", flag="--list",
            help="Only the files named in this file, one per line."),
        Option("others", Type.TEXT, (MIGRATE,), default="copy", choices=("copy", "skip"),
            help="What to do with files that are not checkpoints."),
        Option("resume", Type.SWITCH, (MIGRATE,), default="resume", no="--no-resume",
            help="Skip what an earlier run has done."),
        Option("verify", Type.SWITCH, (MIGRATE,),
            help="Hash the sources and outputs of earlier runs, and redo what differs."),
        Option("jobs", Type.WHOLE, (MIGRATE,), metavar="N", default="one per core", short="-j",
            help="How many files to process at the same time."),
        Option("jobs", Type.WHOLE, (CHECK,), metavar="N", default="1", short="-j", is_for_once=True,
            help="How many files to process at the same time."),
        Option("memory", Type.TEXT, (MIGRATE,), metavar="SIZE", default="80 % of what is free",
            help="Memory limit for all jobs together, for example 4GB."),
        Option("temporary", Type.TEXT, (MIGRATE,), metavar="SIZE", default="80 % of what is free", flag="--temp-space",
            help="Disk space for temporary files, needed only for URLs."),
        Option("engine", Type.TEXT, (MIGRATE,), default="local", choices=("local", "ray"),
            help="Where to run the jobs: in local processes, or as tasks on a Ray cluster."),
        Option("address", Type.TEXT, (MIGRATE,), metavar="ADDRESS", default="one on this machine",
            help="With --engine ray: the cluster, for example host:6379 or auto."),
    ),
    "Model to fit": (
        Option("model", Type.TEXT, FITS, metavar="LIBRARY:NAME|PKG.MOD:FACTORY", scope=Scope.REPAIR,
            words=("timm:", "torchvision:", "transformers:", "diffusers:", "open_clip:", "smp:", "lightning:",
                "torchaudio:", "ultralytics:", "detectron2:"),
            help="The model that the checkpoint has to fit: a library's (timm:resnet50[num_classes=10], "
            "torchvision:NAME, transformers:FOLDER, …), built without weights, or your own factory, which runs your "
            "code. The current directory is importable."),
        Option("model_args", Type.ARGUMENTS, FITS, metavar="JSON", scope=Scope.REPAIR, needs_model=True,
            help="Arguments of the model: an object of keyword arguments or, for a factory, an array."),
        Option("like", Type.FILE, FITS, metavar="FILE|known:NAME", scope=Scope.REPAIR, prefixes=(KNOWN,),
            help="Another checkpoint that this one has to fit, or a known architecture (known:timm/resnet50, or"
            " known:timm/resnet50[num_classes=10]). This runs no code."),
    ),
    "Reading": (
        Option("other_weights", Type.TEXT, (DIFF, MAP), metavar="NAME",
            help="The state_dict of B, if its name differs from A's."),
        Option("file", Type.FILE, (EXPLAIN,), metavar="PATH",
            help="The checkpoint that the message is about, which is then checked too."),
        Option("atol", Type.NUMBER, (DIFF,), metavar="X", default="0", help="Ignore differences up to X + rtol * |b|."),
        Option("rtol", Type.NUMBER, (DIFF,), metavar="X", default="0", help="See --atol."),
    ),
    "Rules": (
        Option("all", Type.SWITCH, (RULE,), help="List every rule, one line each."),
    ),
    "Repairs": (
    ),
    "Forward test": (
        Option("prove", Type.SWITCH, (MAP,),
            help="Run both models with the same random weights and input; a map that gives equal outputs is verified. "
            "A and B have to be models."),
    ),
    "Output": (
        Option("output", Type.FILE, (REPAIR,), metavar="OUT", default="<stem>.fixed<suffix>", short="-o",
            help="The file to write."),
        Option("in_place", Type.SWITCH, (REPAIR,), help="Replace the file itself."),
        Option("backup", Type.SWITCH, (REPAIR,), scope=Scope.CONFIG,
            help="With --in-place: keep the old file as <name>.bak."),
        Option("dry_run", Type.SWITCH, WRITES, short="-n", is_for_once=True,
            help="Show what would be done, and write nothing."),
        Option("plan", Type.FILE, (REPAIR,), metavar="FILE", is_for_once=True,
            help="Write the edits to this file as JSON, to read or --apply later."),
        Option("apply", Type.FILE, (REPAIR,), metavar="FILE", is_for_once=True,
            help="Apply exactly the edits of a saved plan."),
    ),
    "Report": (
        Option("output_format", Type.TEXT, (CHECK, REPAIR), default="full",
            choices=("full", "concise", "json", "github", "sarif", "junit"), scope=Scope.CONFIG, is_for_once=True,
            help="The format of the report."),
        Option("output_format", Type.TEXT, (INSPECT, EXPLAIN), default="full", choices=("full", "concise", "json"),
            scope=Scope.CONFIG, is_for_once=True,
            help="The format of the answer."),
        Option("output_format", Type.TEXT, (DIFF, MIGRATE), default="full", choices=("full", "json"),
            scope=Scope.CONFIG, is_for_once=True,
            help="The format of the result on stdout."),
        Option("output_format", Type.TEXT, (MAP,), default="full", choices=("full", "json", "python"), is_for_once=True,
            help="The format of the map: text, a file for --rename-map, or a Python function."),
        Option("report", Type.FILE, REPAIRS, metavar="FILE", is_for_once=True,
            help="Also write the report as a self-contained HTML page."),
        Option("quiet", Type.SWITCH, ALL, short="-q", scope=Scope.CONFIG, is_for_once=True,
            help="Do not print notes, progress, or files without defects."),
        Option("verbose", Type.SWITCH, ALL, short="-v", scope=Scope.CONFIG, is_for_once=True,
            help="Print every key and all evidence, and the traceback of an internal error."),
    ),
}
# fmt: on
# Every option, grouped as in the help.
GROUPS: Mapping[str, tuple[Option, ...]] = {
    title: (*others, *(option for group, option in SETTINGS if group == title)) for title, others in _OTHERS.items()
}
OPTIONS = tuple(option for group in GROUPS.values() for option in group)

# Each option by its name. The first of several wins: of the output formats, it is the one with most choices.
BY_NAME: dict[str, Option] = {}
for _option in OPTIONS:
    BY_NAME.setdefault(_option.name, _option)


def options_of(command: str) -> list[Option]:
    """Return the options of a command, in the order of its help."""
    return [option for option in OPTIONS if command in option.commands]


def settings_of(command: str) -> frozenset[str]:
    """Return the names of the settings that the library function for a command takes."""
    if command == LOAD:  # it tests nothing and writes no file
        writing = {option.name for title in ("Forward test", "Output") for option in GROUPS[title]}
        return settings_of(CHECK) | (settings_of(REPAIR) - writing)
    return frozenset(option.name for option in OPTIONS if option.is_setting and command in option.commands)


# ---- words: an option in messages and commands


def flag_text(option: Opt) -> str:
    """Format an option for the command line: ``--fill target``, ``--no-values``."""
    return shell_join(_words(option.name, option.value)) or f"--{option.name.replace('_', '-')}"


def key_text(option: Opt) -> str:
    """Format an option for a TOML file: ``fill = "target"``."""
    key = BY_NAME[option.name].long.removeprefix("--") if option.name in BY_NAME else option.name
    if option.name in BY_NAME and BY_NAME[option.name].kind is Type.PAIRS and option.value is not None:
        pairs = (text.partition("=") for text in _pairs(option.value))
        return f"{key} = {{ {', '.join(f'{json.dumps(name)} = {json.dumps(text)}' for name, _, text in pairs)} }}"
    return key if option.value is None else f"{key} = {json.dumps(option.value)}"


def command_words(command: str, source: str, choices: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the words of the command for one file, with those of ``choices`` that it takes and that are not
    ``is_for_once``."""
    lasting = [option.name for option in options_of(command) if not option.is_for_once]
    named = [(name, choices[name]) for name in lasting if name in choices]
    return ("ckptfix", command, no_option(source), *(word for name, value in named for word in _words(name, value)))


def option_words(choices: Mapping[str, Any]) -> tuple[str, ...]:
    """Return options as words of a command, in the order of the table."""
    return tuple(word for name in BY_NAME if name in choices for word in _words(name, choices[name]))


def _words(name: str, value: object) -> list[str]:
    option = BY_NAME.get(name)
    if option is None or value is None:
        return [option.long] if option is not None else []
    if option.kind is Type.SWITCH:
        return [option.long] if value else [option.no] if option.no else []
    if option.kind is Type.PAIRS:
        value = _pairs(value)
    if isinstance(value, (list, tuple)) and option.kind in LISTS:
        joined = [",".join(map(str, value))] if option.kind is Type.NAMES and value else map(str, value)
        return [word for item in joined for word in (option.long, item)]
    return [
        option.long,
        json.dumps(value) if option.kind is Type.ARGUMENTS and not isinstance(value, str) else str(value),
    ]


# ---- values


def library_settings(choices: Mapping[str, Any], command: str = REPAIR) -> dict[str, Any]:
    """Return those of ``choices`` that the library function for a command takes, in the library's form."""
    names = {option.name for option in options_of(command) if option.is_setting or not option.is_for_once}
    return {name: _library_form(BY_NAME[name], value) for name, value in choices.items() if name in names}


def _pairs(value: Any) -> tuple[str, ...]:
    """Return a table of texts as ``NAME=TEXT``, each a text of its own; a list stays, and one value becomes a list."""
    if isinstance(value, Mapping):
        return tuple(f"{name}={text}" for name, text in value.items())
    return tuple(value) if isinstance(value, (list, tuple)) else (str(value),)


def texts_of(option: Option, value: object) -> tuple[str, ...]:
    """Return the value of a list option as texts. It is a text or path, a sequence of these, or a table of texts; of
    NAMES, a text may hold several or none. Raises ``UsageError`` for anything else."""
    if isinstance(value, Mapping):
        return _pairs(value)
    items: Iterable[Any] = value if isinstance(value, Iterable) and not isinstance(value, str) else [value]
    texts = tuple(os.fspath(item) if isinstance(item, os.PathLike) else item for item in items)
    if not all(isinstance(text, str) for text in texts):
        raise UsageError(Opt(option.name, value), ": give a string, or a list of strings")
    if option.kind is Type.NAMES:
        return tuple(name for text in texts for name in text.replace(",", " ").split())
    return texts


def typed_value(option: Option, value: Any) -> Any:
    """Return the value of a setting in the form that the code reads. Raises ``UsageError`` if it has another type."""
    if option.kind in LISTS:
        return texts_of(option, value)
    value = os.fspath(value) if option.kind is Type.FILE and isinstance(value, os.PathLike) else value
    words, fits = _TOML[option.kind]
    if not fits(value):
        raise UsageError(Opt(option.name, value), f": give {words}")
    return value


def _library_form(option: Option, value: Any) -> Any:
    if option.kind in LISTS:
        return texts_of(option, value)
    if option.kind is Type.ARGUMENTS and isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise UsageError(Opt(option.name, value), f": invalid JSON ({error}); write '{{\"depth\": 18}}'") from error
        if not isinstance(value, dict | list):
            raise UsageError(
                Opt(option.name), ": give an object of keyword arguments or an array of positional arguments"
            )
    return value


def is_texts(value: object) -> bool:
    """Return whether a value of a TOML file is a list of strings."""
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


_TOML: Mapping[Type, tuple[str, Callable[[Any], bool]]] = {
    Type.SWITCH: ("a boolean", lambda value: isinstance(value, bool)),
    Type.TEXT: ("a string", lambda value: isinstance(value, str)),
    Type.FILE: ("a string", lambda value: isinstance(value, str)),
    Type.NAMES: ("a list of strings", is_texts),
    Type.INPUTS: ("a list of strings", is_texts),
    Type.FILES: ("a string or a list of strings", lambda value: isinstance(value, str) or is_texts(value)),
    Type.PAIRS: ("a table of strings", lambda value: isinstance(value, dict) and is_texts([*value.values()])),
    # Without bool, which is an Integral: `seed = true` is a mistake.
    Type.WHOLE: ("an integer", lambda value: isinstance(value, Integral) and not isinstance(value, bool)),
    Type.NUMBER: ("a number", lambda value: isinstance(value, Real) and not isinstance(value, bool)),
    Type.ARGUMENTS: ("a table or a list", lambda value: isinstance(value, dict | list)),
}


def toml_keys(*scopes: Scope) -> dict[str, tuple[Option, bool]]:
    """Return the TOML keys of options with these scopes, with True for those that turn a switch off."""
    known = (option for option in BY_NAME.values() if option.scope in scopes)
    return {key: (option, is_off) for option in known for key, is_off in option.keys}


def from_toml(
    where: str, folder: Path, table: Mapping[str, Any], keys: Mapping[str, tuple[Option, bool]], *others: str
) -> dict[str, Any]:
    """Return the options of a TOML table by name.

    ``where`` names the table in errors, and paths are relative to ``folder``; ``others`` are keys that the caller
    handles. Raises ``UsageError`` for an unknown key or an invalid value."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if key in others:
            continue
        if key not in keys:
            close = nearest(key, [*keys, *others])
            hint = f"did you mean {close}?" if close else f"the keys are {', '.join([*keys, *others])}"
            raise UsageError(f"{where}: there is no key {key}; {hint}")
        option, is_off = keys[key]
        words, fits = _TOML[option.kind]
        if not fits(value):
            raise UsageError(f"{where}: {key} has to be {words}, not {value!r:.60}")
        if option.choices and value not in option.choices:
            raise UsageError(f"{where}: {key} has to be one of {', '.join(option.choices)}, not {value!r:.60}")
        found[option.name] = not value if is_off else _below(folder, option, value)
    return found


def _below(folder: Path, option: Option, value: Any) -> Any:
    """Return the value with its paths relative to ``folder``, that of the configuration file."""
    if option.kind is Type.FILE and not option.is_word(value) and "://" not in value:
        return str(folder / value)
    if option.kind is Type.FILES:
        return [str(folder / text) for text in ([value] if isinstance(value, str) else value)]
    if option.kind is Type.INPUTS:
        return [_input_below(folder, text) for text in value]
    if option.kind is Type.PAIRS:
        return [below(folder, text) for text in _pairs(value)]
    return value


def _input_below(folder: Path, text: str) -> str:
    name, equals, file = text.partition("=") if text.partition("=")[0].isidentifier() else ("", "", text)
    return f"{name}{equals}{folder / file}" if file.endswith(INPUT_SUFFIXES) else text


# Suffixes that mark an input of the forward test as a file instead of a shape.
INPUT_SUFFIXES = (".npy", ".pt", ".pth", ".safetensors")


# Options that exclude each other: each one overrides its whole group in a configuration of lower precedence.
_QUESTIONS = (("model", "model_args", "like"), ("quiet", "verbose"))


def without_rivals(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a configuration without those that ``own`` overrides: ``like`` overrides ``model``."""
    answers = own.keys() - {"model_args"}
    rivals = {name for question in _QUESTIONS if answers & {*question} for name in question}
    return {name: value for name, value in common.items() if name not in rivals}


def idle_options(choices: Mapping[str, Any], model: str = "model") -> list[str]:
    """Return the options without effect, because no model or target is given for them. ``model`` is the name of the
    option that gives the model."""
    idle = [] if model in choices else [name for name in choices if BY_NAME[name].needs_model]
    if not {"model", "like"} & choices.keys():
        other_uses = {"replace", "salvage"} if choices.get("fill") != "target" else set()
        idle += [
            name for name in ("adapt", "fill") if name in choices and not (name == "fill" and other_uses & {*choices})
        ]
    return idle
