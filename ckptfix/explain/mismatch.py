"""The keys and shapes that a message of ``load_state_dict`` names, in the words of every release."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from ckptfix.explain.text import Message

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Mismatch:
    """What a message says of a file and a model.

    ``model`` is the class that was loaded into, empty where the message does not say. ``shapes`` has for each key the
    shape in the file and the one in the model. ``knows_missing`` tells whether the message would name missing keys, had
    there been any: torch before 0.4 stopped at the first unexpected one, and a paste may begin in the middle.
    ``is_cut``: somebody wrote dots for the rest.
    """

    model: str = ""
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    shapes: dict[str, tuple[Shape, Shape]] = field(default_factory=dict)
    running_statistics: tuple[str, ...] = ()
    knows_missing: bool = True
    is_cut: bool = False


_NAMES = r"""(?:\\?["'][^"']*["'](?:,\s?|\s(?=["']))?)+"""
_PLAIN_NAMES = r"[\w.]+(?:, [\w.]+)*"

_MISSING = re.compile(
    rf"Missing key\(s\) in state_dict: (?P<quoted>{_NAMES})"
    rf"|missing keys in state_dict: \"?(?:set\(\[|\{{|\[)(?P<set>[^\]}}]*)"
    rf"|missing_keys\s?=\s?\[(?P<list>[^\]]*)"
    rf"|(?:not initialized from the model checkpoint at [^\[]{{1,400}}|MISSING keys?:?\s?|Missing"
    rf" keys?:?\s?)\[(?P<some>[^\]]*)"
    rf"|missing keys in source state_dict: (?P<plain>{_PLAIN_NAMES})",
    re.IGNORECASE,
)
_UNEXPECTED = re.compile(
    rf"Unexpected key\(s\) in state_dict: (?P<quoted>{_NAMES})"
    r"|unexpected key \"(?P<one>[^\"]+)\" in state_dict"
    r"|unexpected_keys\s?=\s?\[(?P<list>[^\]]*)"
    r"|(?:were not used when initializing [^\[]{1,200}|Unexpected keys?:?\s?)\[(?P<some>[^\]]*)"
    rf"|unexpected key in source state_dict: (?P<plain>{_PLAIN_NAMES})",
    re.IGNORECASE,
)
_RUNNING = re.compile(rf"Unexpected running stats buffer\(s\) (?P<quoted>{_NAMES})", re.IGNORECASE)

_SIZE = r"(?:torch\.Size\()?[\[(]([\d, ]*)[\])]\)?"
# The first wording is that of torch since 1.0, `of` and `where` stand in 0.4.1's; 0.3 and 0.4.0 have the second.
_SIZE_MISMATCH = re.compile(
    rf"size mismatch for (?P<key>[^\s:]+): copying a param (?:with shape|of) {_SIZE} from checkpoint,"
    rf" (?:where )?the shape (?:in current model )?is {_SIZE}"
)
_WHILE_COPYING = re.compile(
    rf"While copying the parameter named \"?(?P<key>[^\s\",]+)\"?, whose dimensions in the model are {_SIZE} and whose"
    rf" dimensions in the checkpoint are {_SIZE}"
)
_CONTEXT = re.compile(r"Error\(s\) in loading state_dict for (?P<model>[\w.]+)")
_CUT = re.compile(r"[\"'],?\s*(?:\.\.\.|…)")
_QUOTED = re.compile(r"[\"']([^\"']+)[\"']")


def read_mismatch(message: Message) -> Mismatch:
    """The keys of a message. Of the two readings that one counts in which no key has a gap."""
    readings = [_read(reading) for reading in message.readings]
    return next((each for each in readings if _is_whole(each)), readings[0])


def _is_whole(mismatch: Mismatch) -> bool:
    keys = (*mismatch.missing, *mismatch.unexpected, *mismatch.shapes)
    return bool(keys) and not any(re.search(r"\s", key) for key in keys)


def _read(text: str) -> Mismatch:
    context = _CONTEXT.search(text)
    missing = tuple(dict.fromkeys(_listed(_MISSING, text)))
    is_old = 'unexpected key "' in text and not context
    starts_before = context is not None or "missing_keys" in text
    return Mismatch(
        model=context["model"] if context else "",
        missing=missing,
        unexpected=tuple(dict.fromkeys(_listed(_UNEXPECTED, text))),
        shapes=dict(_shapes(text)),
        running_statistics=tuple(_listed(_RUNNING, text)),
        knows_missing=bool(missing) or (starts_before and not is_old),
        is_cut=_CUT.search(text) is not None,
    )


def _listed(pattern: re.Pattern[str], text: str) -> Iterator[str]:
    for match in pattern.finditer(text):
        groups = match.groupdict()
        if groups.get("one"):
            yield groups["one"]
        elif groups.get("plain"):
            yield from groups["plain"].split(", ")
        else:
            listed = next((part for part in groups.values() if part), "")
            yield from _QUOTED.findall(listed)


def _shapes(text: str) -> Iterator[tuple[str, tuple[Shape, Shape]]]:
    for match in _SIZE_MISMATCH.finditer(text):
        yield match["key"], (_shape(match[2]), _shape(match[3]))
    for match in _WHILE_COPYING.finditer(text):
        yield match["key"], (_shape(match[3]), _shape(match[2]))


def _shape(text: str) -> Shape:
    return tuple(int(size) for size in re.findall(r"\d+", text))
