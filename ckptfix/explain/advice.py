"""What to do about a message, and the file and model that its placeholders stand for."""

import re
from collections.abc import Iterator, Mapping
from enum import Enum

from msgspec import Struct

from ckptfix.core.wording import no_option, shell_join, shell_quote

FILE, FOLDER, MODEL = "FILE", "FOLDER", "PKG.MOD:FACTORY"  # placeholders in a command for what is unknown
_PLACE = re.compile(r"\{(\w+)\}")


class Requirement(Enum):
    """What a step needs of the checkpoint to work."""

    NOTHING = "nothing"
    PART = "part"  # any part of it that is intact: the command also works with --salvage
    FILE = "file"  # that it is one file, which the step opens
    WHOLE = "whole"  # all its weights
    RANKS = "ranks"  # a folder with the files of all ranks
    RESUMABLE = "resumable"  # such a folder, with an optimizer whose state is by name


MERGE = "ckptfix repair {FOLDER} -o model.pth"
_OF_VERBS = {
    "check": Requirement.PART,
    "inspect": Requirement.PART,
    "map": Requirement.WHOLE,
    "repair": Requirement.WHOLE,
}


class Advice(Struct, frozen=True):
    """One thing to do: a command of ckptfix, a change of the user's code, or a step described by ``text``.

    Placeholders are ``{FILE}``, ``{FOLDER}`` and ``{MODEL}`` in a command, ``{path}`` and ``{load}`` (an expression for
    the state_dict) in code, and ``{name}`` of any named group. ``needs`` is None if the verb of the command tells it,
    and for code that needs nothing."""

    text: str
    command: str = ""
    code: str = ""
    needs: Requirement | None = None

    @property
    def needed(self) -> Requirement:
        """What this step needs of the checkpoint."""
        if self.needs is not None:
            return self.needs
        if self.command == MERGE:
            return Requirement.RANKS
        return _OF_VERBS[self.command.split()[1]] if self.command else Requirement.NOTHING

    @property
    def salvages(self) -> bool:
        """Whether this is a command that writes the intact part of a checkpoint."""
        return self.command != "" and self.needs is Requirement.PART


Cause = tuple[str, tuple[str, ...]]  # a sentence, and the keys that it is about


class MessageContext(Struct, frozen=True):
    """What is known besides the text: the file or folder, the folder that it is or is read with, the flags that name
    its model, as words, the file's entries, the Python expression for its state_dict, empty for a file that cannot be
    read, the command that merges the files of a training run, empty unless it is a folder of them, the command that
    saves the intact part of a file that cannot be read, whether it cannot be read, whether it is one rank's part,
    whether DeepSpeed can resume from it as a universal checkpoint, whether its weights must not be replaced by
    untrained ones, and whether it has a defect with which no option of a repair makes it write a file."""

    file: str | None = None
    model: tuple[str, ...] = ()
    code: str | None = None
    entries: frozenset[str] = frozenset()
    merging: str = ""
    salvaging: str = ""
    is_unreadable: bool = False
    is_rank: bool = False
    is_resumable: bool = True
    folder: str = ""
    keeps_weights: bool = False
    is_refused: bool = False

    def offers(self, step: Advice) -> bool:
        """Return whether a step works, as far as is known."""
        needed = step.needed
        if self.is_unreadable:
            return needed is Requirement.NOTHING or (needed is Requirement.PART and self.salvaging != "")
        is_folder = self.folder != "" and self.folder == self.file
        lacking = {
            Requirement.PART: step.salvages and (self.is_rank or self.is_refused),
            Requirement.FILE: is_folder,
            Requirement.WHOLE: self.is_rank or self.is_refused,
            Requirement.RANKS: is_folder if self.is_rank else self.is_refused,
            Requirement.RESUMABLE: self.is_refused or not self.is_resumable,
        }
        return not lacking.get(needed, False)


def filled_advice(advice: tuple[Advice, ...], values: Mapping[str, str], subject: MessageContext) -> Iterator[Advice]:
    """Yield the advice that applies to the subject, with all placeholders filled in."""
    folder = subject.folder or (subject.file if subject.is_unreadable else "")  # any of its files stands for a folder
    words = {
        "FILE": shell_quote(no_option(subject.file)) if subject.file else FILE,
        "FOLDER": shell_quote(no_option(folder)) if folder else FOLDER,
        "MODEL": shell_join(subject.model[1:2]) if subject.model[:1] == ("--model",) else MODEL,
    }
    for each in advice:
        if not subject.offers(each):
            continue
        command = each.command
        if subject.keeps_weights and "--fill target" in command:
            continue
        if command == MERGE and subject.merging:
            command = subject.merging
        elif subject.is_unreadable and each.needed is Requirement.PART and not each.salvages:
            command = f"{command} --salvage"
        if subject.model:
            command = command.replace("--model {MODEL}", shell_join(subject.model))
        yield Advice(filled(each.text, values), filled(command, words), filled(each.code, values), each.needed)


def filled(text: str, values: Mapping[str, str]) -> str:
    """Return the text with known names in braces replaced by their values; other braces stay."""
    return _PLACE.sub(lambda place: values.get(place[1], place[0]), text)
