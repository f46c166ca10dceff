"""What a rule found: a finding, and perhaps the fix for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum, Flag, IntEnum, auto
from typing import Any

from msgspec import Struct, field

from ckptfix.core.edits import Edit


class Applicability(IntEnum):
    """How far a fix can be trusted, in order."""

    DISPLAY_ONLY = 0  # shown, never applied: the user has to decide
    # A value is invented, dropped or cast, or nothing confirms the guess. Needs `--unsafe-fixes` or its own flag.
    UNSAFE = 1
    SAFE = 2  # stored values stay bit-identical; anything added is what torch itself would supply


class Level(IntEnum):
    """How bad a finding is, in order. A note never changes the exit code."""

    NOTE = 0
    WARNING = 1
    ERROR = 2


class Subject(Enum):
    """What a finding is about."""

    FILE = auto()
    NAMES = auto()
    FIT = auto()  # to a target
    VALUES = auto()
    OPTIMIZER = auto()
    FORWARD = auto()  # what the model computes from the values

    @property
    def is_of_values(self) -> bool:
        """Whether such findings require reading values."""
        return self in (Subject.VALUES, Subject.FORWARD)


class Fix(Struct, frozen=True):
    """Edits that resolve a finding. ``asked``: the user's flag requests exactly this, whatever its applicability."""

    edits: tuple[Edit, ...]
    applicability: Applicability
    asked: bool = False

    @classmethod
    def safe(cls, edits: Iterable[Edit]) -> Fix:
        """Return a fix whose edits keep every stored value, or supply what torch itself would."""
        return cls(tuple(edits), Applicability.SAFE)

    @classmethod
    def unsafe(cls, edits: Iterable[Edit]) -> Fix:
        """Return a fix that is only applied with ``--unsafe-fixes``."""
        return cls(tuple(edits), Applicability.UNSAFE)

    @classmethod
    def requested(cls, edits: Iterable[Edit]) -> Fix:
        """Return an unsafe fix that the user's flag requests."""
        return cls(tuple(edits), Applicability.UNSAFE, asked=True)


class Blocks(Flag):
    """What must not be done while a finding remains."""

    NOTHING = 0
    WRITING = auto()  # no file may be written, whatever else was fixed
    LOADING = auto()  # the file must not be used at all, because it would run code
    # The file has the missing weights in another form: no remedy may drop them or fill in untrained values.
    FILLING = auto()
    USING = auto()  # the weights must not be given to a model, because they are wrong


class Placeholder(Struct, frozen=True):
    """A value of an option that only the user can give. Its option is shown, but not as a complete command."""

    name: str

    def __str__(self) -> str:
        return self.name


FILE = Placeholder("FILE")
NAME = Placeholder("NAME")
MODEL = Placeholder("PKG.MOD:FACTORY")


class Remedy(Struct, frozen=True):
    """One way to deal with a finding.

    ``options`` are settings by their Python names with their values (True for a switch). ``text`` continues the
    sentence after them (``takes the model's initial values``), and is a whole sentence without options. ``untrained``
    holds the parameters that would get untrained values, with their number of elements."""

    options: tuple[tuple[str, object], ...] = ()
    text: str = ""
    untrained: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, text: str, **options: object) -> Remedy:
        """Return the remedy of these options; without options, ckptfix cannot carry it out.

        >>> Remedy.of("drops them", unsafe_fixes=True).options
        (('unsafe_fixes', True),)"""
        return cls(tuple(options.items()), text)

    @property
    def is_complete(self) -> bool:
        """Whether the options make a complete command."""
        return bool(self.options) and not any(isinstance(value, Placeholder) for _, value in self.options)


def advise(text: str) -> tuple[Remedy, ...]:
    """Return a remedy in words that no option of ckptfix carries out."""
    return (Remedy.of(text),)


class Finding(Struct, frozen=True):
    """One thing about a checkpoint that is wrong or worth knowing.

    ``message`` is one sentence without the list of keys (the report folds ``keys``); ``evidence`` holds its figures as
    plain JSON data; ``remedies`` are the ways to deal with it if no fix was applied, the recommended one first;
    ``blocks`` is what it forbids while it remains. ``is_accepted``: the settings ask to leave it as it is."""

    code: str
    name: str
    level: Level
    message: str
    keys: tuple[str, ...] = ()
    evidence: Mapping[str, Any] = field(default_factory=dict)
    fix: Fix | None = None
    remedies: tuple[Remedy, ...] = ()
    blocks: Blocks = Blocks.NOTHING
    is_accepted: bool = False
    subject: Subject = Subject.FILE

    def __repr__(self) -> str:
        return f"<Finding {self.code} {self.name} {self.level.name.lower()}: {self.message}>"

    @property
    def is_fixable(self) -> bool:
        """Whether a repair can resolve the finding, perhaps only with ``--unsafe-fixes``."""
        return self.fix is not None and self.fix.applicability > Applicability.DISPLAY_ONLY

    @property
    def needs_unsafe(self) -> bool:
        """Whether the fix is applied only with ``--unsafe-fixes``."""
        return self.fix is not None and self.fix.applicability is Applicability.UNSAFE and not self.fix.asked


def counted(number: int, noun: str) -> str:
    """Return a number and its noun, for messages: ``1 key``, ``3 keys``, ``2 entries``, ``4 matrices``."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("matrix"):
        return f"{number} {noun[:-1]}ces"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{number} {noun[:-1]}ies"
    return f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"
