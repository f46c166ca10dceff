"""Where the next key of a dict may be written, behind damage in a pickle."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ckptfix.core.objects import Global
from ckptfix.reading.pickles.machine import PickleMachine
from ckptfix.reading.pickles.memo import Memo

_LINE = re.compile(rb"V[^\n\\]{1,250}\np(\d{1,9})\n")
_SHORT = re.compile(rb"(?=X[\x01-\xfa]\0\0\0|h.[hj]|j....[hj])", re.DOTALL)
_FRAMED = re.compile(rb"(?=\x8c[\x01-\xfa]|h.[hj]|j....[hj])", re.DOTALL)
"""Where a key of a dict may be written: as text that is kept under a number, in protocol 0, 1 to 3, and 4. One that was
written before is recalled.
"""
_PUT = re.compile(rb"q(.)|r(....)", re.DOTALL)
_GETS = re.compile(rb"(?:h(.)|j(....))(?:h(.)|j(....))", re.DOTALL)


class _Numberless(Memo):
    """The memo of protocol 4 behind damage, where nobody knows which number is next: new values are never recalled."""

    __slots__ = ()

    def __len__(self) -> int:
        return (1 << 40) + len(self.far)


def keys_behind(data: bytes, position: int, machine: PickleMachine, key: str | None) -> Iterator[tuple[int, Memo]]:
    """The next places behind a position that look like a key, each with a memo of what was kept before the damage.

    ``machine`` came to the damage, while the value of ``key`` was under way."""
    memo, is_numberless = machine.memo, machine.protocol >= 4
    # A key that comes twice is written under its own number again.
    places = [place for place, value in enumerate(memo.row) if value is key and key is not None]
    lowest = memo.first + (places[-1] if places else len(memo.row))
    is_text = machine.protocol < 2 and b"\np" in data[:200]
    pattern = _FRAMED if is_numberless else _LINE if is_text else _SHORT
    for match in pattern.finditer(data, position):
        start = match.start()
        if data[start] in b"hj":
            is_key = _names_a_tensor(data, memo, start)
        elif is_text:
            is_key = int(match[1]) >= lowest
        else:
            is_key = _is_text(data, start, lowest, is_numberless)
        if is_key:
            yield start, _copied(memo, is_numberless)


def _is_text(data: bytes, start: int, lowest: int, is_numberless: bool) -> bool:
    """Whether a short text begins at a place, which is kept under a number that was not given before."""
    begin = start + (2 if is_numberless else 5)
    stop = begin + data[start + 1]
    try:
        text = data[begin:stop].decode()
    except UnicodeDecodeError:
        return False
    if is_numberless:
        return text.isprintable() and data[stop : stop + 1] == b"\x94"
    put = _PUT.match(data, stop)
    return text.isprintable() and put is not None and int.from_bytes(put[1] or put[2], "little") >= lowest


def _names_a_tensor(data: bytes, memo: Memo, start: int) -> bool:
    """Whether two values that are named again are a text and a function, as where the tensor of a key begins."""
    match = _GETS.match(data, start)
    gets = [get for get in match.groups() if get is not None] if match is not None else []
    try:
        key, function = (memo.recall(int.from_bytes(get, "little")) for get in gets)
    except (LookupError, ValueError):
        return False
    return isinstance(key, str) and isinstance(function, Global)


def _copied(memo: Memo, is_numberless: bool) -> Memo:
    """A memo of its own with what was kept before the damage."""
    made = _Numberless() if is_numberless else Memo()
    made.first, made.row, made.far = memo.first, [*memo.row], dict(memo.far)
    return made
