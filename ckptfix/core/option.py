"""What an option is: its name, type, commands, and the files in which it may be set."""

from collections.abc import Iterator
from enum import Enum, auto

from msgspec import Struct

CHECK, REPAIR, MIGRATE, INSPECT, DIFF, MAP, RULE, EXPLAIN = "check repair migrate inspect diff map rule explain".split()
LOAD = "load"  # a function of the library without a command

WRITES = (REPAIR, MIGRATE)
REPAIRS = (CHECK, *WRITES)
READS = (*REPAIRS, INSPECT, DIFF)
FITS = (*REPAIRS, EXPLAIN)
ALL = (*READS, MAP, RULE, EXPLAIN)


class Type(Enum):
    """The type of an option's value."""

    SWITCH = auto()
    TEXT = auto()
    FILE = auto()
    NAMES = auto()  # a list of names; one text may hold several, separated by commas or spaces
    INPUTS = auto()  # a list of shapes and files
    FILES = auto()  # a list of files, each perhaps with `=NUMBER` after it
    PAIRS = auto()  # a table of texts; on the command line a repeated NAME=TEXT
    WHOLE = auto()
    NUMBER = auto()
    ARGUMENTS = auto()  # the arguments of a function: a mapping or a list


LISTS = (Type.NAMES, Type.INPUTS, Type.FILES, Type.PAIRS)  # kinds of options that can be given several times


class Scope(Enum):
    """Where an option may be set."""

    RUN = auto()  # on the command line only
    CONFIG = auto()  # in `ckptfix.toml` too
    REPAIR = auto()  # in `ckptfix.toml`, and in any table of `zoo.toml`
    # In `[[files]]` of `zoo.toml` only: the option gives up part of a file, so it is decided for files by name.
    ONE_FILE = auto()


class Option(Struct, frozen=True):
    """An option of one or more commands.

    ``name`` is the name of the library's argument; the long flag is the same with dashes, unless ``flag`` is given.
    ``no`` is the long flag that turns a switch off. ``words`` are offered by completion; for a FILE, these and values
    that begin with one of ``prefixes`` are not file names. ``default`` describes the default value in the help.
    ``is_setting``: the library takes it as a setting. ``is_for_once``: printed commands leave it out."""

    name: str
    kind: Type
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
        """Return whether a value of a FILE option is not a file name."""
        return value in self.words or value.startswith(self.prefixes)

    @property
    def keys(self) -> Iterator[tuple[str, bool]]:
        """The keys of a configuration file for this option, and whether each turns a switch off."""
        yield self.long.removeprefix("--"), False
        if self.no:
            yield self.no.removeprefix("--"), True
