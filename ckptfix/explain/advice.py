"""What to do about a message, and the file and model that its placeholders stand for."""

import re
from collections.abc import Iterator, Mapping

from msgspec import Struct

from ckptfix.core.wording import no_option, shell_join, shell_quote

FILE, MODEL = "FILE", "PKG.MOD:FACTORY"  # placeholders in a command for an unknown file or model
_PLACE = re.compile(r"\{(\w+)\}")
_OPENING = re.compile(r"(?:load|open)\(\{path\}")


class Advice(Struct, frozen=True):
    """One thing to do: a command of ckptfix, a change of the user's code, or a step described by ``text``.

    Placeholders are ``{FILE}`` and ``{MODEL}`` in a command, ``{path}`` and ``{load}`` (an expression for the
    state_dict) in code, and ``{name}`` of any named group."""

    text: str
    command: str = ""
    code: str = ""


Cause = tuple[str, tuple[str, ...]]  # a sentence, and the keys that it is about


class MessageContext(Struct, frozen=True):
    """What is known besides the text: the file or folder, the flags that name its model, as words, the file's entries,
    the Python expression for its state_dict, empty for a file that cannot be read, the command that merges the files of
    a training run, empty unless it is a folder of them, the command that saves the intact part of a file that cannot be
    read, whether it cannot be read, whether it is one rank's part, and whether its weights must not be replaced by
    untrained ones."""

    file: str | None = None
    model: tuple[str, ...] = ()
    code: str | None = None
    entries: frozenset[str] = frozenset()
    merging: str = ""
    salvaging: str = ""
    is_unreadable: bool = False
    is_rank: bool = False
    is_folder: bool = False
    keeps_weights: bool = False


def filled_advice(advice: tuple[Advice, ...], values: Mapping[str, str], subject: MessageContext) -> Iterator[Advice]:
    """Yield the advice that applies to the subject, with all placeholders filled in."""
    words = {
        "FILE": shell_quote(no_option(subject.file)) if subject.file else FILE,
        "MODEL": shell_join(subject.model[1:2]) if subject.model[:1] == ("--model",) else MODEL,
    }
    for each in advice:
        if "{load}" in each.code and not values["load"]:
            continue
        if subject.is_folder and _OPENING.search(each.code):
            continue
        command = each.command
        if subject.keeps_weights and "--fill target" in command:
            continue
        if subject.is_unreadable and command.startswith("ckptfix repair ") and "--salvage" not in command:
            continue  # it would fail with the error that the report on the file shows
        if subject.is_folder:
            command = re.sub(r"\bFOLDER\b", "{FILE}", command)
        if subject.model:
            command = command.replace("--model {MODEL}", shell_join(subject.model))
        yield Advice(filled(each.text, values), filled(command, words), filled(each.code, values))


def filled(text: str, values: Mapping[str, str]) -> str:
    """Return the text with known names in braces replaced by their values; other braces stay."""
    return _PLACE.sub(lambda place: values.get(place[1], place[0]), text)
