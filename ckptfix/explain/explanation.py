"""Finds the known message in a text, and explains it."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.core.config import parse_toml
from ckptfix.errors import one_line
from ckptfix.explain.advice import MERGE, Advice, Cause, MessageContext, Requirement, filled, filled_advice
from ckptfix.explain.fit import read_fit
from ckptfix.explain.text import LONGEST_MESSAGE, Message, Relation, clean, file_name, folder_name, messages

# Characters: a match this near the start is shown from the start; those shown around a match; the most shown.
_NEAR, _AROUND, _LONGEST = 100, 60, 160


class KnownMessage(Struct, frozen=True, dict=True):
    """What is known of one message: a table of ``messages.toml``, whose head describes the fields."""

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
        """Return the part of the message that this record matches, with some context; all of it if it is short."""
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
        """Return the texts of the named groups, or of ``unknown``; None if the message does not match."""
        if (found := self._found(message)) is None:
            return None
        return {**self.unknown, **{name: text for name, text in found.groupdict().items() if text is not None}}

    def match_frames(self, text: str, beside_file: bool) -> Mapping[str, str] | None:
        """Return the named groups in a whole traceback as one line, for a message that is recognised by the code that
        raised it, or by the checkpoint named with it; None if it does not match."""
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
                said, needs = (text["text"], Requirement(text["needs"])) if isinstance(text, dict) else (text, None)
                if do.startswith("ckptfix "):
                    yield Advice(said, command=do, needs=needs)
                else:
                    yield Advice(said, code=do, needs=needs)

    def record(name: str, entry: dict[str, Any]) -> KnownMessage:
        lists = {field: tuple(value) for field, value in entry.items() if isinstance(value, list)}
        return KnownMessage(name, **{**entry, **lists, "advice": tuple(advice(entry.get("advice", {})))})

    return tuple(record(name, entry) for name, entry in data["message"].items())


RECORDS = _load()  # Every known message. A message matches one of them, not counting the general ones.


_OF_RANK = "The file holds one rank's part of each weight, and the rest is in the files of the other ranks."
_MERGE = Advice("puts the files of all ranks together, as the training left them in one folder", command=MERGE)
_SPREAD = (
    "The folder is a checkpoint of a distributed training. The weights are spread over its files, which only the"
    " framework that saved them loads as they are."
)


class Explanation(Struct, frozen=True):
    """What a text means.

    ``said`` is the explained part of the message, ``causes`` are sentences with the keys or lines that each is about,
    ``advice`` is what to do, with all placeholders filled in. ``codes`` are the rules that find the cause in a file.
    ``others`` are the names of other records that the text matched; ``chain`` says where in a chain of exceptions the
    message was found, and is empty without one. ``file`` is the checkpoint, if known; ``about_file`` says that the
    cause is what the file is or holds."""

    name: str
    said: str
    causes: tuple[Cause, ...]
    advice: tuple[Advice, ...]
    source: str
    codes: tuple[str, ...]
    others: tuple[str, ...] = ()
    chain: str = ""
    file: str | None = None
    about_file: bool = False

    @property
    def is_about_loading(self) -> bool:
        """Whether it is about what is loaded, so that loading something else may help."""
        return _is_about_loading(self.about_file, self.codes)


# Rules on names, containers and parts: their messages come from loading, those of others from running the model too.
_OF_LOADING = frozenset({"KEY", "FIL", "FIL101", "FIL102", "FIL105", "FIL109"})


def _is_about_loading(about_file: bool, codes: Iterable[str]) -> bool:
    return about_file or not _OF_LOADING.isdisjoint(codes)


def recognise(message: Message) -> list[tuple[KnownMessage, Mapping[str, str]]]:
    """Return the records that a message matches, with their named groups; general ones only if no other matches."""
    found = [(record, said) for record in RECORDS if (said := record.match(message)) is not None]
    return [pair for pair in found if not pair[0].general] or found


def explain(text: str, subject: MessageContext | None = None) -> Explanation | None:
    """Return what the text means; None if nothing in it is known.

    ``text`` is a message or any log with tracebacks. Of chained exceptions, the original one is explained: the cause
    if one was raised from the other, and the later one if it was raised while the first was handled, unless only the
    first is known."""
    subject = subject or MessageContext()
    is_given = subject.file is not None
    if not is_given:
        subject = replace(subject, file=file_name(text))
    parts = messages(text)
    known = [(number, recognise(message)) for number, message in enumerate(parts)]
    chosen = _choose(parts, {number: found for number, found in known if found})
    if parts and not is_given:
        subject = _with_folder(subject, parts[-1 if chosen is None else chosen])
    if chosen is None or known[chosen][1][0][0].general:
        by_frames = _by_frames(text, parts, subject, by_file=chosen is None and subject.file is not None)
        if chosen is None or by_frames is not None:
            return by_frames
    others = tuple(dict.fromkeys(record.name for number, found in known for record, _ in found if number != chosen))
    return _explanation(parts[chosen], known[chosen][1], _place_in_chain(parts, chosen), others, subject)


def _with_folder(subject: MessageContext, message: Message) -> MessageContext:
    """Return the subject with the folder of a save that a message names, also as its file if it names none."""
    folder = folder_name("\n".join(message.lines))
    if folder is None:
        return subject
    if subject.file not in (None, folder):
        return replace(subject, folder=folder)
    code = f"ckptfix.open_checkpoint({json.dumps(folder, ensure_ascii=False)}).state_dict()"
    return replace(subject, folder=folder, file=folder, code=code)


def _by_frames(text: str, parts: list[Message], subject: MessageContext, by_file: bool) -> Explanation | None:
    """Return the explanation of a message recognised by the frames of its traceback, or by the file that it names."""
    whole = " ".join(clean(text)[-LONGEST_MESSAGE:].split())
    found = [(record, said) for record in RECORDS if (said := record.match_frames(whole, by_file)) is not None]
    return _explanation(parts[-1], found, "", (), subject) if found else None


def _choose(parts: list[Message], known: Mapping[int, list[tuple[KnownMessage, Mapping[str, str]]]]) -> int | None:
    """Return the index of the message to explain, None if none is known."""
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
        merge = Advice("puts them together into one file", command=MERGE)
        own = [each for each in record.advice if each.code or each.needs is Requirement.RESUMABLE]
        advice = (*own, merge) if own and own[0].command and subject.is_resumable else (merge, *own)
    elif subject.is_rank and _is_about_loading(record.about_file, record.codes):
        own_causes = ((_OF_RANK, ()), *own_causes)
        advice = (_MERGE, *(each for each in advice if each.command != MERGE))
    if subject.salvaging and not any(each.salvages for each in advice):
        advice = (*advice, Advice("writes the tensors that are whole", subject.salvaging, needs=Requirement.PART))
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
        causes=((filled(record.held if is_held else record.cause, values), ()), *own_causes),
        advice=tuple(filled_advice(advice, values, subject)),
        source=record.source,
        codes=record.codes,
        others=tuple(dict.fromkeys(n for n in (*(other.name for other, _ in rest), *others) if n != record.name)),
        chain=chain,
        file=subject.file,
        about_file=record.about_file,
    )


# The least number of words of both messages, and the similarity (0 to 1) above which a known message is suggested.
_FEWEST_WORDS, _SIMILAR = 5, 0.53
_MOST_COMPARED = 20  # different messages, from the end of a log: each takes a hundredth of a second

_VALUE = re.compile(r"'[^']{0,200}'|\"[^\"]{0,200}\"|[\w./\\-]*[/\\][\w./\\-]*|\[[\d, ]*\]|\b\w*Error\b")


def nearest(text: str) -> tuple[KnownMessage, float] | None:
    """Return the record whose example is most similar to the text, with the similarity; None if none is close.

    Names, numbers, paths and the exception's class do not count."""
    best, least = None, _SIMILAR
    examples = [(record, words) for record in RECORDS if (words := _words(record.example))]
    texts = dict.fromkeys(_words(message.readings[0][:2000]) for message in reversed(messages(text)))
    for own in islice(filter(None, texts), _MOST_COMPARED):
        for record, example in examples:
            matcher = SequenceMatcher(None, own, example, autojunk=False)
            if matcher.quick_ratio() > least and (similarity := matcher.ratio()) > least:
                best, least = (record, similarity), similarity
    return best


def _words(text: str) -> str:
    """Return the words of a message that count, in a line; an empty text if they are too few."""
    words = re.findall(r"[a-z]{3,}", _VALUE.sub(" ", text).lower())
    return " ".join(words) if len(words) >= _FEWEST_WORDS else ""
