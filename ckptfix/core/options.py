"""The table of options: the only place that knows which options there are.

The command line, the settings of the library, ``ckptfix.toml``, ``zoo.toml`` and every printed command come from it. To
add an option, add a row here and, for a setting of the library, a field in ``core/settings.py``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum, auto
from pathlib import Path
from typing import Any

from msgspec import Struct

from ckptfix.core.adaptations import below
from ckptfix.core.likeness import KNOWN
from ckptfix.core.wording import nearest, no_option, typed
from ckptfix.errors import Opt, UsageError

CHECK, REPAIR, MIGRATE, INSPECT, DIFF, MAP, RULE, EXPLAIN = "check repair migrate inspect diff map rule explain".split()

_WRITES = (REPAIR, MIGRATE)
_REPAIRS = (CHECK, *_WRITES)
_READS = (*_REPAIRS, INSPECT, DIFF)
_FITS = (*_REPAIRS, EXPLAIN)
_ALL = (*_READS, MAP, RULE, EXPLAIN)


class Kind(Enum):
    """What an option takes."""

    SWITCH = auto()
    TEXT = auto()
    FILE = auto()
    NAMES = auto()  # a list of names; one text may hold several, separated by commas or spaces
    INPUTS = auto()  # a list of shapes and files
    FILES = auto()  # a list of files, each perhaps with `=NUMBER` after it
    PAIRS = auto()  # a table of texts; on the command line NAME=TEXT, once for each
    WHOLE = auto()
    NUMBER = auto()
    ARGUMENTS = auto()  # the arguments of a function: a mapping or a list


LISTS = (Kind.NAMES, Kind.INPUTS, Kind.FILES, Kind.PAIRS)  # kinds of options that can be given several times


class Scope(Enum):
    """Where an option may be written down."""

    RUN = auto()  # on the command line only
    CONFIG = auto()  # in `ckptfix.toml` too
    REPAIR = auto()  # in `ckptfix.toml`, and in any table of `zoo.toml`
    # In `[[files]]` of `zoo.toml`: it gives something of a file up, so it is decided for files by name.
    ONE_FILE = auto()


class Option(Struct, frozen=True):
    """An option of one or more commands.

    ``name`` is the name of the library's argument; the long flag is the same with dashes, unless ``flag`` has another.
    ``no`` is the long flag that turns a switch off. ``words`` are completed; of a FILE they name no file, and
    ``prefixes`` begin such values. ``default`` describes the default value in the help. ``is_setting``: the library
    takes it as a setting. ``is_for_once``: the commands that ckptfix prints leave it out."""

    name: str
    kind: Kind
    commands: tuple[str, ...]
    help: str
    metavar: str = ""
    default: str = ""
    choices: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    flag: str = ""
    no: str = ""
    short: str = ""
    scope: Scope = Scope.RUN
    is_setting: bool = False
    needs_model: bool = False
    is_for_once: bool = False

    @property
    def long(self) -> str:
        """The long flag: ``--unsafe-fixes``."""
        return self.flag or f"--{self.name.replace('_', '-')}"

    def is_word(self, value: str) -> bool:
        """Return whether a value of a FILE is not the name of a file."""
        return value in self.words or value.startswith(self.prefixes)

    @property
    def keys(self) -> Iterator[tuple[str, bool]]:
        """The keys of a configuration file for this option, and whether each turns a switch off."""
        yield self.long.removeprefix("--"), False
        if self.no:
            yield self.no.removeprefix("--"), True


def _setting(name: str, kind: Kind, commands: tuple[str, ...], help: str, **more: Any) -> Option:
    """Return an option that the library takes as a setting of a repair."""
    return Option(name, kind, commands, help, **{"scope": Scope.REPAIR, "is_setting": True, **more})


# fmt: off
# Every option, grouped as in the help.
GROUPS: Mapping[str, tuple[Option, ...]] = {
    "Zoo": (
        Option("init", Kind.SWITCH, (MIGRATE,), help="Look at the files of SRC, draft zoo.toml, and stop."),
        Option("table", Kind.FILE, (MIGRATE,), metavar="FILE", default="zoo.toml in the working directory, if any",
            help="The table of the zoo."),
        Option("only", Kind.INPUTS, (MIGRATE,), metavar="NAME",
            help="Only this file, by its path below SRC. Repair options given with it are a decision about this"
            " file, and later runs remember it."),
        Option("listed", Kind.FILE, (MIGRATE,), metavar="FILE", flag="--list",
            help="Only the files named in this file, one per line."),
        Option("others", Kind.TEXT, (MIGRATE,), default="copy", choices=("copy", "skip"),
            help="What to do with files that are not checkpoints."),
        Option("resume", Kind.SWITCH, (MIGRATE,), default="resume", no="--no-resume",
            help="Skip what an earlier run has done."),
        Option("verify", Kind.SWITCH, (MIGRATE,),
            help="Hash the sources and outputs of earlier runs, and redo what differs."),
        Option("jobs", Kind.WHOLE, (MIGRATE,), metavar="N", default="one per core", short="-j",
            help="How many files to process at the same time."),
        Option("jobs", Kind.WHOLE, (CHECK,), metavar="N", default="1", short="-j", is_for_once=True,
            help="How many files to process at the same time."),
        Option("memory", Kind.TEXT, (MIGRATE,), metavar="SIZE", default="80 % of what is free",
            help="Memory that all jobs together may use, such as 4GB."),
        Option("temporary", Kind.TEXT, (MIGRATE,), metavar="SIZE", default="80 % of what is free", flag="--temp-space",
            help="Disk space for temporary files, which only URLs need."),
        Option("engine", Kind.TEXT, (MIGRATE,), default="local", choices=("local", "ray"),
            help="What runs the jobs: processes of this machine, or tasks of a Ray cluster."),
        Option("address", Kind.TEXT, (MIGRATE,), metavar="ADDRESS", default="one on this machine",
            help="With --engine ray: the cluster, such as host:6379 or auto."),
    ),
    "Model to fit": (
        Option("model", Kind.TEXT, _FITS, metavar="LIBRARY:NAME|PKG.MOD:FACTORY", scope=Scope.REPAIR,
            words=("timm:", "torchvision:", "transformers:", "diffusers:", "open_clip:", "smp:", "lightning:",
                "torchaudio:", "ultralytics:", "detectron2:"),
            help="The model that the checkpoint has to fit: one of a library (timm:resnet50[num_classes=10],"
            " torchvision:NAME, transformers:FOLDER, …), built without its weights; or a factory of yours, which runs"
            " your code. The current directory is importable."),
        Option("model_args", Kind.ARGUMENTS, _FITS, metavar="JSON", scope=Scope.REPAIR, needs_model=True,
            help="Arguments of the model: an object of keyword arguments; for a factory, an array too."),
        Option("like", Kind.FILE, _FITS, metavar="FILE|known:NAME", scope=Scope.REPAIR, prefixes=(KNOWN,),
            help="Another checkpoint that this one has to fit, or a known architecture (known:timm/resnet50, or"
            " known:timm/resnet50[num_classes=10]). This runs no code."),
    ),
    "Reading": (
        _setting("weights", Kind.TEXT, (*_READS, MAP, EXPLAIN), metavar="NAME",
            help="Which state_dict of the file, by the name that `ckptfix inspect` shows; or the prefix of one of"
            " several sets of keys (teacher)."),
        Option("other_weights", Kind.TEXT, (DIFF, MAP), metavar="NAME",
            help="The state_dict of B, if it has another name than that of A."),
        _setting("member", Kind.TEXT, (*_REPAIRS, INSPECT, EXPLAIN), metavar="NAME", scope=Scope.ONE_FILE,
            help="Which checkpoint to read from an archive (.zip, .tar.gz) with several."),
        _setting("salvage", Kind.SWITCH, _READS, scope=Scope.ONE_FILE,
            help="Open a damaged file, and use the tensors that are complete."),
        _setting("values", Kind.SWITCH, (*_REPAIRS, DIFF, EXPLAIN), default="values", no="--no-values",
            help="Read the tensors' values; --no-values looks at names and shapes only."),
        Option("file", Kind.FILE, (EXPLAIN,), metavar="PATH",
            help="The checkpoint that the message is about, which is then checked too."),
        Option("atol", Kind.NUMBER, (DIFF,), metavar="X", default="0", help="Ignore differences up to X + rtol * |b|."),
        Option("rtol", Kind.NUMBER, (DIFF,), metavar="X", default="0", help="See --atol."),
    ),
    "Rules": (
        _setting("select", Kind.NAMES, _REPAIRS, metavar="CODES",
            help="Run only these rules: codes or their beginnings, such as KEY,BUF101."),
        _setting("ignore", Kind.NAMES, _REPAIRS, metavar="CODES", help="Skip these rules."),
        _setting("accept", Kind.NAMES, _WRITES, metavar="CODES", scope=Scope.ONE_FILE,
            help="Accept the findings of these rules as they are; they stay in the report."),
        Option("all", Kind.SWITCH, (RULE,), help="List every rule, one line each."),
    ),
    "Repairs": (
        _setting("unsafe_fixes", Kind.SWITCH, _REPAIRS, no="--no-unsafe-fixes",
            help="Also apply the fixes that invent, drop or change a value, or that nothing confirms."),
        _setting("rename_layers", Kind.SWITCH, _REPAIRS,
            help="Rename the layers of another implementation by the inferred map, even if it is not certain."),
        _setting("source_model", Kind.TEXT, _REPAIRS, metavar="LIBRARY:NAME|PKG.MOD:FACTORY", needs_model=True,
            help="The model that the file was saved from. Copies of it and of --model run with the same random weights,"
            " and a map of layers that gives equal outputs is applied."),
        _setting("rename_map", Kind.FILE, _REPAIRS, metavar="FILE",
            help="Rename, split and fuse tensors as this map says; `ckptfix map A B` infers one."),
        _setting("rename", Kind.INPUTS, _REPAIRS, metavar="OLD=NEW",
            help="Rename keys by patterns: 'encoder.*=backbone.*', 'blocks.{n}.ln.*=layer.{n}.norm.*'."),
        _setting("fill", Kind.FILE, _REPAIRS, metavar="target|FILE|twin", words=("target", "twin"),
            help="Fill missing tensors from the model's initial values (untrained), or from another checkpoint; with"
            " --replace broken ones too, also from the file's other set of weights (twin)."),
        _setting("adapter", Kind.FILES, _REPAIRS, metavar="PATH[=WEIGHT]",
            help="Merge an adapter (LoRA, DoRA, IA3) into the weights, as peft's merge_and_unload() does: its folder,"
            " its file, or the adapter_config.json of one inside of the checkpoint. Several are merged in order."),
        _setting("unmerge", Kind.SWITCH, _REPAIRS, no="--no-unmerge",
            help="Remove an adapter that was merged before, up to the rounding of the stored sum."),
        _setting("drop_mismatched", Kind.SWITCH, _REPAIRS, no="--keep-mismatched",
            help="Treat tensors of the wrong shape as missing, so that --fill fills them."),
        _setting("adapt", Kind.PAIRS, _REPAIRS, metavar="NAME=RECIPE",
            help="Make tensors of another shape from the file's, by the formula of a library: pos_embed=timm,"
            " window_bias=swin, patch_embed=timm, in_chans=timm, vocab=pad:mean, inflate=mean, head=MAP.txt,"
            " depth=0-5. FIT103 names those that fit."),
        _setting("allow_untrained", Kind.SWITCH, _WRITES, scope=Scope.ONE_FILE,
            help="Write the result even if most parameters were filled and are untrained."),
        _setting("replace", Kind.NAMES, _REPAIRS, metavar="CODES|KEYS",
            help="Replace broken values by those of --fill: the findings of these rules, or these keys (layer4.*)."),
        _setting("reset_running_stats", Kind.SWITCH, _REPAIRS, no="--keep-running-stats",
            help="Set broken running statistics of norms to those of a fresh layer."),
        _setting("recalibrate", Kind.FILE, _WRITES, metavar="FILE", needs_model=True,
            help="Measure broken running statistics again on this data (.npy, .pt, .safetensors; samples first)."),
        _setting("zero_non_finite", Kind.SWITCH, _REPAIRS, no="--keep-non-finite",
            help="Set NaN and infinite weights to zero. A last resort."),
        _setting("flush_subnormals", Kind.SWITCH, _REPAIRS, no="--keep-subnormals",
            help="Set subnormal values, which are slow, to zero."),
        _setting("optimizer_positions", Kind.SWITCH, (CHECK, REPAIR), flag="--optimizer", scope=Scope.RUN,
            is_for_once=True,
            help="Show which state of the optimizer belongs to which parameter, and how sure that is."),
        _setting("drop_optimizer", Kind.SWITCH, _WRITES,
            help="Leave the optimizer out: training continues from the weights, with new moments and step counts."),
        _setting("keep_optimizer", Kind.SWITCH, _WRITES,
            help="Keep the optimizer as it is, even if it no longer fits the weights."),
        _setting("dtype", Kind.TEXT, _REPAIRS, metavar="DTYPE",
            words=("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
            help="Cast floats to float32, float16, bfloat16, float8_e4m3fn or float8_e5m2, except tensors that"
            " overflow."),
        _setting("for_torch", Kind.TEXT, _REPAIRS, metavar="VERSION",
            help="Write a file that this release of torch can load, such as 0.4.0."),
        _setting("disarm", Kind.SWITCH, _WRITES, scope=Scope.ONE_FILE,
            help="For a file that is built to run code: write only the tensors of its state_dict."),
        _setting("seed", Kind.WHOLE, _REPAIRS, metavar="N", default="0",
            help="Seed of initial values and derived inputs."),
    ),
    "Forward test": (
        _setting("smoke", Kind.SWITCH, _WRITES, default="with --model", no="--no-smoke", needs_model=True,
            help="Load the result into the model and run a forward pass, in a process of its own."),
        _setting("input", Kind.INPUTS, (*_WRITES, MAP), metavar="SPEC", default="derived from the model",
            needs_model=True, help="Input of the forward test, once for each argument: 2x3x224x224,"
            " input_ids=2x16:int:0:1000, or a file (.npy, .pt, .safetensors)."),
        _setting("device", Kind.TEXT, _WRITES, metavar="auto|cpu|cuda|cuda:1|mps", default="auto", needs_model=True,
            help="The device that the forward test runs on."),
        _setting("timeout", Kind.NUMBER, (*_REPAIRS, MAP), metavar="SECONDS", default="300", needs_model=True,
            help="Time limit of the forward test, and of the proof of a map."),
        Option("prove", Kind.SWITCH, (MAP,),
            help="Run both models, with the same random weights and input: a map that gives equal outputs is verified."
            " A and B have to be models."),
        _setting("train_mode", Kind.SWITCH, _WRITES, needs_model=True,
            help="Also run the model in training mode, with a batch of at least 2."),
        _setting("backward", Kind.SWITCH, _WRITES, needs_model=True,
            help="Also run it in training mode with a backward pass, and check the gradients."),
        _setting("compare", Kind.FILE, _WRITES, metavar="FILE|source", words=("source",), needs_model=True,
            help="Also run it with the weights of another checkpoint, or with those of the source, and report how"
            " far apart the outputs are."),
    ),
    "Output": (
        Option("output", Kind.FILE, (REPAIR,), metavar="OUT", default="<stem>.fixed<suffix>", short="-o",
            help="The file to write."),
        _setting("force", Kind.SWITCH, (REPAIR,), scope=Scope.RUN, help="Replace a file that is already at OUT."),
        Option("in_place", Kind.SWITCH, (REPAIR,), help="Replace the file itself."),
        Option("backup", Kind.SWITCH, (REPAIR,), scope=Scope.CONFIG,
            help="With --in-place: keep the old file as <name>.bak."),
        _setting("format", Kind.TEXT, _REPAIRS, default="that of the output's suffix, else of the source",
            choices=("pth", "safetensors", "universal"),
            help="The format to write; `universal` is the folder from which DeepSpeed resumes on any number of GPUs."),
        _setting("shard_size", Kind.TEXT, _WRITES, metavar="SIZE", default="one file",
            help="Write numbered shards of at most this size (5GB, 500MB) with an index."),
        _setting("untie", Kind.SWITCH, _WRITES, no="--no-untie",
            help="In safetensors, write a tied tensor under each of its keys, for plain load_file."),
        Option("dry_run", Kind.SWITCH, _WRITES, short="-n", is_for_once=True,
            help="Show what would be done, and write nothing."),
        Option("plan", Kind.FILE, (REPAIR,), metavar="FILE", is_for_once=True,
            help="Write the edits to this file as JSON, to read them or to --apply them later."),
        Option("apply", Kind.FILE, (REPAIR,), metavar="FILE", is_for_once=True,
            help="Apply exactly the edits of a saved plan."),
    ),
    "Report": (
        Option("output_format", Kind.TEXT, (CHECK, REPAIR), default="full",
            choices=("full", "concise", "json", "github", "sarif", "junit"), scope=Scope.CONFIG, is_for_once=True,
            help="How the report is written."),
        Option("output_format", Kind.TEXT, (INSPECT, EXPLAIN), default="full", choices=("full", "concise", "json"),
            scope=Scope.CONFIG, is_for_once=True,
            help="How the answer is written."),
        Option("output_format", Kind.TEXT, (DIFF, MIGRATE), default="full", choices=("full", "json"),
            scope=Scope.CONFIG, is_for_once=True,
            help="How the result is written to stdout."),
        Option("output_format", Kind.TEXT, (MAP,), default="full", choices=("full", "json", "python"), is_for_once=True,
            help="How the map is written: as text, as a file for --rename-map, or as a Python function."),
        Option("report", Kind.FILE, _REPAIRS, metavar="FILE", is_for_once=True,
            help="Also write the report as a self-contained HTML page."),
        Option("quiet", Kind.SWITCH, _ALL, short="-q", scope=Scope.CONFIG, is_for_once=True,
            help="Print no notes and no progress, and nothing about files without defects."),
        Option("verbose", Kind.SWITCH, _ALL, short="-v", scope=Scope.CONFIG, is_for_once=True,
            help="Print every key and all evidence, and the traceback of an internal error."),
    ),
}

OPTIONS = tuple(option for group in GROUPS.values() for option in group)

_BY_NAME: dict[str, Option] = {}
for _option in OPTIONS:
    _BY_NAME.setdefault(_option.name, _option)  # of the three output formats the first, which has every form


def options_of(command: str) -> list[Option]:
    """Return the options of a command, in the order of its help."""
    return [option for option in OPTIONS if command in option.commands]


def scope_of(name: str) -> Scope:
    """Return where the option of this name may be written down."""
    return _BY_NAME[name].scope


def settings_of(command: str) -> frozenset[str]:
    """Return the names of the settings that the library's function for a command takes."""
    return frozenset(option.name for option in OPTIONS if option.is_setting and command in option.commands)


# ---- words: an option in messages and commands


def flag_text(option: Opt) -> str:
    """Return an option as it is typed on the command line: ``--fill target``, ``--no-values``."""
    return typed(_words(option.name, option.value)) or f"--{option.name.replace('_', '-')}"


def key_text(option: Opt) -> str:
    """Return an option as it is written in a TOML file: ``fill = "target"``."""
    key = _BY_NAME[option.name].long.removeprefix("--") if option.name in _BY_NAME else option.name
    if option.name in _BY_NAME and _BY_NAME[option.name].kind is Kind.PAIRS and option.value is not None:
        pairs = (text.partition("=") for text in _pairs(option.value))
        return f"{key} = {{ {', '.join(f'{json.dumps(name)} = {json.dumps(text)}' for name, _, text in pairs)} }}"
    return key if option.value is None else f"{key} = {json.dumps(option.value)}"


def command_words(command: str, source: str, choices: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the command for one file with the options that it has among these choices, word by word."""
    lasting = [option.name for option in options_of(command) if not option.is_for_once]
    named = [(name, choices[name]) for name in lasting if name in choices]
    return ("ckptfix", command, no_option(source), *(word for name, value in named for word in _words(name, value)))


def option_words(choices: Mapping[str, Any]) -> tuple[str, ...]:
    """Return these options as words of a command, in the order of the table."""
    return tuple(word for name in _BY_NAME if name in choices for word in _words(name, choices[name]))


def _words(name: str, value: object) -> list[str]:
    option = _BY_NAME.get(name)
    if option is None or value is None:
        return [option.long] if option is not None else []
    if option.kind is Kind.SWITCH:
        return [option.long] if value else [option.no] if option.no else []
    if option.kind is Kind.PAIRS:
        value = _pairs(value)
    if isinstance(value, (list, tuple)) and option.kind in LISTS:
        joined = [",".join(map(str, value))] if option.kind is Kind.NAMES and value else map(str, value)
        return [word for item in joined for word in (option.long, item)]
    return [
        option.long,
        json.dumps(value) if option.kind is Kind.ARGUMENTS and not isinstance(value, str) else str(value),
    ]


# ---- values


def library_settings(choices: Mapping[str, Any], command: str = REPAIR) -> dict[str, Any]:
    """Return the arguments of ``ckptfix.check`` or ``ckptfix.repair`` among these choices, in the library's form."""
    names = {"model", "model_args", "like", *settings_of(command)}
    return {name: _library_form(_BY_NAME[name], value) for name, value in choices.items() if name in names}


def _pairs(value: Any) -> tuple[str, ...]:
    """Return a table of texts as ``NAME=TEXT``; a list of these, or one, stays, and so does a placeholder."""
    if isinstance(value, Mapping):
        return tuple(f"{name}={text}" for name, text in value.items())
    return tuple(value) if isinstance(value, (list, tuple)) else (str(value),)


def _library_form(option: Option, value: Any) -> Any:
    if option.kind is Kind.PAIRS:
        return _pairs(value)
    if option.kind is Kind.NAMES:
        texts = (value,) if isinstance(value, str) else value
        return tuple(name for text in texts for name in text.replace(",", " ").split())
    if option.kind in (Kind.INPUTS, Kind.FILES):
        return (value,) if isinstance(value, str) else tuple(value)
    if option.kind is Kind.ARGUMENTS and isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise UsageError(Opt(option.name, value), f": invalid JSON ({error}); write '{{\"depth\": 18}}'") from error
        if not isinstance(value, dict | list):
            raise UsageError(Opt(option.name), ": give an object of keyword arguments or an array of positional ones")
    return value


_TOML: Mapping[Kind, tuple[str, Callable[[Any], bool]]] = {
    Kind.SWITCH: ("true or false", lambda value: isinstance(value, bool)),
    Kind.TEXT: ("a string", lambda value: isinstance(value, str)),
    Kind.FILE: ("a string", lambda value: isinstance(value, str)),
    Kind.NAMES: ("a list of strings", lambda value: is_texts(value)),
    Kind.INPUTS: ("a list of strings", lambda value: is_texts(value)),
    Kind.FILES: ("a string or a list of strings", lambda value: isinstance(value, str) or is_texts(value)),
    Kind.PAIRS: ("a table of strings", lambda value: isinstance(value, dict) and is_texts([*value.values()])),
    # A bool is not a number here: `seed = true` is a slip.
    Kind.WHOLE: ("an integer", lambda value: type(value) is int),
    Kind.NUMBER: ("a number", lambda value: type(value) in (int, float)),
    Kind.ARGUMENTS: ("a table or a list", lambda value: isinstance(value, dict | list)),
}


def is_texts(value: object) -> bool:
    """Return whether a value of a TOML file is a list of strings."""
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def toml_keys(*scopes: Scope) -> dict[str, tuple[Option, bool]]:
    """Return the keys that a TOML file may have for options of these scopes; True marks one that turns a switch off."""
    known = (option for option in _BY_NAME.values() if option.scope in scopes)
    return {key: (option, is_off) for option in known for key, is_off in option.keys}


def from_toml(
    where: str, folder: Path, table: Mapping[str, Any], keys: Mapping[str, tuple[Option, bool]], *others: str
) -> dict[str, Any]:
    """Return the options of a TOML table by name.

    ``where`` names the table in errors, and paths are relative to ``folder``; ``others`` are keys that the caller reads
    itself. Raises ``UsageError`` for an unknown key or a value of the wrong kind."""
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
    """Return the value with its paths relative to the folder of the file that it was read from."""
    if option.kind is Kind.FILE and not option.is_word(value) and "://" not in value:
        return str(folder / value)
    if option.kind is Kind.FILES:
        return [str(folder / text) for text in ([value] if isinstance(value, str) else value)]
    if option.kind is Kind.INPUTS:
        return [_input_below(folder, text) for text in value]
    if option.kind is Kind.PAIRS:
        return [below(folder, text) for text in _pairs(value)]
    return value


def _input_below(folder: Path, text: str) -> str:
    name, equals, file = text.partition("=") if text.partition("=")[0].isidentifier() else ("", "", text)
    return f"{name}{equals}{folder / file}" if file.endswith(INPUT_SUFFIXES) else text


# By these an input of the forward test is a file and not a shape.
INPUT_SUFFIXES = (".npy", ".pt", ".pth", ".safetensors")


def without_model(choices: Iterable[str]) -> list[str]:
    """Return those of the options that have no meaning without a model."""
    return [name for name in choices if _BY_NAME[name].needs_model]
