"""From a text to its explanation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from functools import cached_property
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.core.config import parse_toml
from ckptfix.core.wording import no_option, quoted, typed
from ckptfix.errors import one_line
from ckptfix.explain.fit import Advice, read_fit
from ckptfix.explain.text import LONGEST_MESSAGE, Message, Relation, clean, file_name, messages

# Characters of a message that are shown: from its start where the match is near, else from the match on.
_NEAR, _AROUND, _LONGEST = 100, 60, 160


class KnownMessage(Struct, frozen=True, dict=True):
    """What is known of one message: a table of ``messages.toml``, which says at its top what each field is."""

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
    held: str = ""
    reads_keys: bool = False
    frames: tuple[str, ...] = ()
    beside_file: tuple[str, ...] = ()

    @cached_property
    def _compiled(self) -> tuple[re.Pattern[str], ...]:
        return tuple(re.compile(pattern, re.IGNORECASE) for pattern in self.patterns)

    def _found(self, message: Message) -> re.Match[str] | None:
        matches = (pattern.search(reading) for reading in message.readings for pattern in self._compiled)
        return next((found for found in matches if found), None)

    def said(self, message: Message) -> str:
        """Return the words of the message that are this record's, with those around them; all of it if it is short."""
        if (found := self._found(message)) is None:
            return message.headline
        reading = found.string
        if found.start() < _NEAR:
            return reading if len(reading) <= _LONGEST else f"{reading[: _LONGEST - 1]}…"
        kind = re.match(r"[\w.]+(?=: )", reading)
        end = reading.find(" ", min(found.end() + _AROUND, found.start() + _LONGEST))
        words = reading[found.start() : end] if end > 0 else reading[found.start() :]
        return f"{kind[0]}: … {words}" if kind else f"… {words}"

    def match(self, message: Message) -> Mapping[str, str] | None:
        """Return what the message says in the named groups; None for another message."""
        if (found := self._found(message)) is None:
            return None
        return {**self.unknown, **{name: text for name, text in found.groupdict().items() if text is not None}}

    def match_frames(self, text: str, beside_file: bool) -> Mapping[str, str] | None:
        """Return what a whole traceback in one line says, for a message that is recognised by where it was raised or by
        the file beside it."""
        for pattern in (*self.frames, *(self.beside_file if beside_file else ())):
            if found := re.search(pattern, text, re.IGNORECASE):
                return {**self.unknown, **found.groupdict()}
        return None


def _load() -> tuple[KnownMessage, ...]:
    data = parse_toml(Path(__file__).parent / "messages.toml")

    def advice(given: Mapping[str, Any]) -> Iterator[Advice]:
        for do, text in given.items():
            if text is True:
                yield from advice(data["advice"][do])
            elif not text:
                yield Advice(do)
            else:
                yield Advice(text, command=do) if do.startswith("ckptfix ") else Advice(text, code=do)

    def record(name: str, entry: dict[str, Any]) -> KnownMessage:
        lists = {field: tuple(value) for field, value in entry.items() if isinstance(value, list)}
        return KnownMessage(name, **{**entry, **lists, "advice": tuple(advice(entry.get("advice", {})))})

    return tuple(record(name, entry) for name, entry in data["message"].items())


RECORDS = _load()  # Every known message. A message matches exactly one of them, except for those that are general.


FILE, MODEL = "FILE", "PKG.MOD:FACTORY"  # placeholders in a command for an unknown file or model
_PLACE = re.compile(r"\{(\w+)\}")
_OPENING = re.compile(r"(?:load|open)\(\{path\}")
_SPREAD = (
    "The folder is a checkpoint of a distributed training. The weights are spread over its files, which only the"
    " framework that saved them loads as they are."
)


class MessageContext(Struct, frozen=True):
    """What is known beside the text: the file, the flags that name its model, word by word, the entries of the file,
    the expression that gives its state_dict in Python, empty for a file that cannot be read, and the command that puts
    the files of a training run together, empty for what is not a folder of them."""

    file: str | None = None
    model: tuple[str, ...] = ()
    code: str | None = None
    entries: frozenset[str] = frozenset()
    merging: str = ""


class Explanation(Struct, frozen=True):
    """What a text means.

    ``said`` is the line of the message that it is about, ``causes`` are sentences with the keys or lines that each is
    about, ``advice`` is what to do, with everything filled in. ``codes`` are the rules that find the cause in a file.
    ``others`` are the names of records that the same text matched too; ``chain`` says where in a chain of exceptions
    the message was found, empty if there is none. ``file`` is the checkpoint, if it is known;
    ``about_file`` says that the cause is what the file is or holds."""

    name: str
    said: str
    causes: tuple[tuple[str, tuple[str, ...]], ...]
    advice: tuple[Advice, ...]
    source: str
    codes: tuple[str, ...]
    others: tuple[str, ...] = ()
    chain: str = ""
    file: str | None = None
    about_file: bool = False

    @property
    def is_about_loading(self) -> bool:
        """Whether it is about what is loaded, and so a reason to load something else."""
        return _is_about_loading(self.about_file, self.codes)


# Rules on names, containers and parts: their messages come from loading, those of others from running the model too.
_OF_LOADING = frozenset({"KEY", "FIL", "FIL101", "FIL102", "FIL105", "FIL109"})


def _is_about_loading(about_file: bool, codes: Iterable[str]) -> bool:
    return about_file or not _OF_LOADING.isdisjoint(codes)


def recognise(message: Message) -> list[tuple[KnownMessage, Mapping[str, str]]]:
    """Return the records that a message matches, each with what it captured; a general one only where no other does."""
    found = [(record, said) for record in RECORDS if (said := record.match(message)) is not None]
    return [pair for pair in found if not pair[0].general] or found


def explain(text: str, subject: MessageContext | None = None) -> Explanation | None:
    """Return what the text means; None if nothing in it is known.

    ``text`` is a message or any log with tracebacks. Of chained exceptions the one is explained that the rest follow
    from: the cause where one was raised from the other, and the later one where it was raised while the first was
    handled, unless only the first is known."""
    subject = subject or MessageContext()
    if subject.file is None:
        subject = replace(subject, file=file_name(text))
    parts = messages(text)
    known = [(number, recognise(message)) for number, message in enumerate(parts)]
    chosen = _choose(parts, {number: found for number, found in known if found})
    if chosen is None or known[chosen][1][0][0].general:
        by_frames = _by_frames(text, parts, subject, by_file=chosen is None and subject.file is not None)
        if chosen is None or by_frames is not None:
            return by_frames
    others = tuple(dict.fromkeys(record.name for number, found in known for record, _ in found if number != chosen))
    return _explanation(parts[chosen], known[chosen][1], _place_in_chain(parts, chosen), others, subject)


def _by_frames(text: str, parts: list[Message], subject: MessageContext, by_file: bool) -> Explanation | None:
    """Return what is known of a message by the lines of code that it came through, or by the file that it is about."""
    whole = " ".join(clean(text)[-LONGEST_MESSAGE:].split())
    found = [(record, said) for record in RECORDS if (said := record.match_frames(whole, by_file)) is not None]
    return _explanation(parts[-1], found, "", (), subject) if found else None


def _choose(parts: list[Message], known: Mapping[int, list[tuple[KnownMessage, Mapping[str, str]]]]) -> int | None:
    """Return which of the messages is explained."""
    special = [number for number, found in known.items() if not found[0][0].general]
    numbers = special or list(known)
    if not numbers:
        return None
    chosen = numbers[-1]
    while parts[chosen].relation is Relation.CAUSED and chosen - 1 in numbers:
        chosen -= 1
    return chosen


def _place_in_chain(parts: list[Message], chosen: int) -> str:
    chained = {Relation.CAUSED, Relation.WHILE_HANDLING}
    begin = chosen
    while begin and parts[begin].relation in chained:
        begin -= 1
    end = chosen + 1
    while end < len(parts) and parts[end].relation in chained:
        end += 1
    if end - begin == 1:
        return ""
    rest = "the others follow from it" if chosen == begin else "the ones before it were handled"
    if begin < chosen and parts[chosen].relation is Relation.CAUSED:
        rest = "the ones before it are not known here"
    return f"number {chosen - begin + 1} of {end - begin} chained exceptions; {rest}"


def _explanation(
    message: Message,
    found: list[tuple[KnownMessage, Mapping[str, str]]],
    chain: str,
    others: tuple[str, ...],
    subject: MessageContext,
) -> Explanation:
    (record, captured), *rest = found
    own_causes, own_advice = read_fit(message) if record.reads_keys else ((), ())
    advice = (*own_advice, *record.advice)
    if subject.merging and _is_about_loading(record.about_file, record.codes):
        # The keys and shapes in the message are one rank's, and say nothing of the whole.
        own_causes = ((_SPREAD, ()),)
        merge = Advice("puts them together into one file", command=subject.merging)
        advice = (merge, *(each for each in record.advice if each.code))
    is_held = record.held != "" and captured.get("key") in subject.entries
    path = json.dumps(subject.file, ensure_ascii=False) if subject.file else "path"
    values = {
        **{name: one_line(text) for name, text in captured.items()},
        "path": path,
        "load": f'torch.load({path}, map_location="cpu")' if subject.code is None else subject.code,
    }
    return Explanation(
        name=record.name,
        said=record.said(message),
        causes=((_filled(record.held if is_held else record.cause, values), ()), *own_causes),
        advice=tuple(_filled_advice(advice, values, subject)),
        source=record.source,
        codes=record.codes,
        others=tuple(dict.fromkeys(n for n in (*(other.name for other, _ in rest), *others) if n != record.name)),
        chain=chain,
        file=subject.file,
        about_file=record.about_file,
    )


def _filled_advice(advice: tuple[Advice, ...], values: Mapping[str, str], subject: MessageContext) -> Iterator[Advice]:
    words = {
        "FILE": quoted(no_option(subject.file)) if subject.file else FILE,
        "MODEL": typed(subject.model[1:2]) if subject.model[:1] == ("--model",) else MODEL,
    }
    for each in advice:
        if "{load}" in each.code and not values["load"]:
            continue
        if subject.merging and _OPENING.search(each.code):
            continue  # a folder
        command = each.command
        if subject.model:
            command = command.replace("--model {MODEL}", typed(subject.model))
        yield Advice(_filled(each.text, values), _filled(command, words), _filled(each.code, values))


def _filled(text: str, values: Mapping[str, str]) -> str:
    """Return the text with the values that are known in the place of their names; other braces stay."""
    return _PLACE.sub(lambda place: values.get(place[1], place[0]), text)


# Words that two messages have at least, and their similarity (0 to 1) from which one is offered for the other.
_FEWEST_WORDS, _SIMILAR = 5, 0.53

_VALUE = re.compile(r"'[^']{0,200}'|\"[^\"]{0,200}\"|[\w./\\-]*[/\\][\w./\\-]*|\[[\d, ]*\]|\b\w*Error\b")


def nearest(text: str) -> tuple[KnownMessage, float] | None:
    """Return the record whose example reads most like the text, with its similarity; None if none is close.

    Names, numbers, paths and the exception's class do not count."""
    best: tuple[KnownMessage, float] | None = None
    for message in messages(text):
        own = _words(message.readings[0][:2000])
        for record in RECORDS:
            example = _words(record.example)
            if min(len(own), len(example)) >= _FEWEST_WORDS:
                similarity = SequenceMatcher(None, " ".join(own), " ".join(example), autojunk=False).ratio()
                if similarity >= _SIMILAR and (best is None or similarity > best[1]):
                    best = (record, similarity)
    return best


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z]{3,}", _VALUE.sub(" ", text).lower())
