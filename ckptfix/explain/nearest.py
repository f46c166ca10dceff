"""The known message that an unknown text is most like."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache, lru_cache

from ckptfix.explain.record import Record
from ckptfix.explain.records import RECORDS
from ckptfix.explain.text import Message, messages

THRESHOLD = 0.45
"""Cosine of two messages from which on they are told as similar."""

_FEWEST = 3
"""Words that two messages have to share."""

_STEM = 6
"""Letters of a word that count: ``deserialize`` and ``deserializing`` are one."""

_FEWEST_TO_SPELL, _LIKE = 5, 0.85
"""Letters that a misspelt word has at least, and how like (0 to 1) it is to the right one."""

_WORD = re.compile(r"[a-z]{3,}")
_VALUE = re.compile(r"'[^']{0,200}'|\"[^\"]{0,200}\"|[\w./\\-]*[/\\][\w./\\-]*|\[[\d, ]*\]")
_COMMON = frozenset("the and for that this with from not are was has but you your its can".split())


def nearest(text: str) -> tuple[Record, float] | None:
    """The record whose example is most like the text, and how like it is (0 to 1); None where nothing is.

    Words count the more, the fewer examples have them (tf-idf), and words that none has count most, so a text of other
    things is like nothing. Names, numbers and paths do not count.
    """
    best: tuple[Record, float] | None = None
    for message in messages(text):
        own = _weighted(Counter(_spelt(word)[:_STEM] for word in _words(message).elements()))
        for record, words in _examples().items():
            likeness = _cosine(own, words)
            if likeness >= THRESHOLD and (best is None or likeness > best[1]):
                best = (_record(record), likeness)
    return best


def _words(message: Message) -> Counter[str]:
    text = _VALUE.sub(" ", message.readings[0][:2000].lower())
    text = re.sub(r"\b\w+error\b", " ", text)  # the class says little: half of all messages are of a RuntimeError
    return Counter(word for word in _WORD.findall(text) if word not in _COMMON)


@cache
def _vocabulary() -> Mapping[str, frozenset[str]]:
    """The words of all examples by their first letter."""
    words = {word for record in RECORDS for word in _words(Message((record.example,)))}
    return {letter: frozenset(word for word in words if word[0] == letter) for letter in {word[0] for word in words}}


@lru_cache(4096)
def _spelt(word: str) -> str:
    """The word, or the one of the vocabulary that it is a misspelling of: ``memmory``."""
    alike = _vocabulary().get(word[0], frozenset())
    if len(word) < _FEWEST_TO_SPELL or word in alike or any(known[:_STEM] == word[:_STEM] for known in alike):
        return word
    return next(iter(get_close_matches(word, sorted(alike), 1, _LIKE)), word)


@cache
def _examples() -> Mapping[str, Mapping[str, float]]:
    """The weighted words of each record's example, by the record's name."""
    return {record.name: _weighted(_stems(record)) for record in RECORDS}


def _stems(record: Record) -> Counter[str]:
    return Counter(word[:_STEM] for word in _words(Message((record.example,))).elements())


def _record(name: str) -> Record:
    return next(record for record in RECORDS if record.name == name)


@cache
def _frequencies() -> Mapping[str, int]:
    """How many examples have a word."""
    return Counter(word for record in RECORDS for word in set(_stems(record)))


def _weighted(words: Counter[str]) -> Mapping[str, float]:
    known = _frequencies()
    return {word: math.log((1 + len(RECORDS)) / (1 + known.get(word, 0))) for word in words}


def _cosine(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    common = one.keys() & other.keys()
    if len(common) < _FEWEST:
        return 0.0
    shared = sum(one[word] * other[word] for word in common)
    lengths = math.sqrt(sum(w * w for w in one.values()) * sum(w * w for w in other.values()))
    return shared / lengths if lengths else 0.0
