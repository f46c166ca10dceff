"""What is known of each message: the entries of ``messages.toml``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ckptfix.core.config import parse_toml
from ckptfix.explain.text import Message

_NEAR, _AROUND, _LONGEST = 100, 60, 160
"""Characters of a message that are shown: from its start where the match is near, else from the match on."""


@dataclass(frozen=True)
class Advice:
    """One thing to do: a command of ckptfix, a change of the user's code, or a step that ``text`` tells.

    ``{FILE}`` and ``{MODEL}`` in a command, ``{path}`` and ``{load}`` (which gives the state_dict) in code, and
    ``{name}`` of any captured group are filled in.
    """

    text: str
    command: str = ""
    code: str = ""


@dataclass(frozen=True)
class Record:
    """What is known of one message.

    ``example`` is a genuine message. A message is this one if one of ``patterns`` is found in it; case does not matter,
    and a space matches any white space. The named groups fill ``cause`` and ``advice``; ``unknown`` stands in for
    groups that the message lacks. ``codes`` are the rules, or the beginnings of their codes, that find the cause. A
    ``general`` record, of a message that others come wrapped in, counts only if no other is found. ``frames`` are
    patterns of traceback lines, for messages that say too little by themselves. ``about_file``: the cause is what the
    file is or holds, though no rule finds anything wrong with it. ``read`` names the reader that looks at the keys of
    the message."""

    name: str
    example: str
    patterns: tuple[str, ...]
    cause: str
    advice: tuple[Advice, ...]
    source: str
    codes: tuple[str, ...] = ()
    unknown: Mapping[str, str] = field(default_factory=dict)
    general: bool = False
    about_file: bool = False
    read: str = ""
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


def _load() -> tuple[Record, ...]:
    data = parse_toml(Path(__file__).parent / "messages.toml")
    shared = {name: Advice(**advice) for name, advice in data["advice"].items()}

    def record(entry: dict[str, Any]) -> Record:
        advice = tuple(shared[each] if isinstance(each, str) else Advice(**each) for each in entry.pop("advice"))
        lists: dict[str, Any] = {name: tuple(entry.pop(name, ())) for name in ("patterns", "codes", "frames")}
        return Record(**entry, **lists, advice=advice)

    return tuple(record(entry) for entry in data["message"])


RECORDS = _load()
"""Every known message. A message matches exactly one of them, except for those that are general."""
