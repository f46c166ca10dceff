"""The words of an explanation: what is known of a message, and what is said to one who met it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ckptfix.explain.text import Message

_NEAR, _AROUND, _LONGEST = 100, 60, 160
"""Characters of a message that are shown: from its start where the match is near, else from the match on."""


@dataclass(frozen=True)
class Advice:
    """One thing to do: a command of ckptfix, a change of the user's code, or a step that ``text`` tells.

    ``{FILE}`` and ``{MODEL}`` in a command, ``{path}`` in code, and ``{name}`` of any captured group are filled in.
    """

    text: str
    command: str = ""
    code: str = ""


@dataclass(frozen=True)
class Reading:
    """What the keys and shapes in a message say beyond the record: sentences, each with the keys that it is about, and
    the advice that follows from them.
    """

    causes: tuple[tuple[str, tuple[str, ...]], ...] = ()
    advice: tuple[Advice, ...] = ()


@dataclass(frozen=True)
class Record:
    """What is known of one message.

    ``example`` is a genuine message. A message is this one where one of ``patterns`` is found in it, whatever its case;
    each space stands for any white space. The named groups fill ``cause`` and ``advice``; ``unknown`` has what stands
    there for a group that the message does not have. ``codes`` are the rules, or their beginnings, that find the cause
    in a file. ``general`` marks messages that others come wrapped in: such a record counts where no other does.
    ``read`` looks closer at a message and says more. ``frames`` are patterns for messages that say too little by
    themselves: they count only in a whole traceback, of which no message is known but general ones.
    """

    name: str
    example: str
    patterns: tuple[str, ...]
    cause: str
    advice: tuple[Advice, ...]
    source: str
    codes: tuple[str, ...] = ()
    unknown: Mapping[str, str] = field(default_factory=dict)
    general: bool = False
    read: Callable[[Message], Reading] | None = None
    frames: tuple[str, ...] = ()

    @cached_property
    def _compiled(self) -> tuple[re.Pattern[str], ...]:
        return tuple(re.compile(pattern, re.IGNORECASE) for pattern in self.patterns)

    def said(self, message: Message) -> str:
        """The words of the message that are this record's, with those around them; all of it where it is short."""
        for reading in message.readings:
            for pattern in self._compiled:
                if found := pattern.search(reading):
                    if found.start() < _NEAR:
                        return reading if len(reading) <= _LONGEST else f"{reading[: _LONGEST - 1]}…"
                    kind = re.match(r"[\w.]+(?=: )", reading)
                    end = reading.find(" ", min(found.end() + _AROUND, found.start() + _LONGEST))
                    words = reading[found.start() : end] if end > 0 else reading[found.start() :]
                    return f"{kind[0]}: … {words}" if kind else f"… {words}"
        return message.headline

    def match(self, message: Message) -> Mapping[str, str] | None:
        """What the message says in the named groups; None where it is another message."""
        for reading in message.readings:
            for pattern in self._compiled:
                if found := pattern.search(reading):
                    said = {name: text for name, text in found.groupdict().items() if text is not None}
                    return {**self.unknown, **said}
        return None

    def match_frames(self, text: str) -> Mapping[str, str] | None:
        """What a whole traceback in one line says, for a message that is told by where it was raised."""
        found = any(re.search(pattern, text, re.IGNORECASE) for pattern in self.frames)
        return dict(self.unknown) if found else None
