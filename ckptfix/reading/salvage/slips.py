"""Files that are shorter or longer than their layout says: where the bytes are missing, or too many.

Most often at the end: a transfer that stopped, or something that was hung on. But a block that a resumed transfer
fetched twice, or one that it passed over, lies in the middle, and then every tensor behind it lies somewhere else than
the header says. Sizes alone do not tell these apart. Two things do:

- a block that is there twice: bytes that equal those at the distance of the surplus, for at least that distance, and
  that do not repeat themselves anyway. Without the second copy the file is what it was.
- the values. The numbers of a tensor are of like magnitude, and another tensor has another: the weight of a norm lies
  around one, its bias around zero, a counter is a small integer. Each place at which the slip may be reads the same
  bytes as other numbers, and the right one takes fewer bits to describe them (minimum description length: Rissanen,
  Modeling by shortest data description, 1978). A place is believed where every other takes ``MARGIN`` bits more.

What neither tells stays in doubt, and is said."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptfix.bytes.sources import BLOCK, Content
from ckptfix.bytes.torn import TornBytes
from ckptfix.core.facts import Fact, Kind
from ckptfix.core.spec import ByteSource, TensorSpec
from ckptfix.reading.folders.chunks import Box, ChunkedBytes
from ckptfix.reading.salvage.descriptions import saved_bits

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MARGIN = 64.0
"""Bits by which the description from one place has to be shorter than from another: to learn what numbers are like
takes twenty to thirty for each tensor, and a slip in the middle of one makes two of it."""

WINDOW = 1 << 14
"""Bytes on both sides of a tensor's edge that are looked at; the middle of a large tensor tells nothing."""

MOST_TENSORS = 1 << 14
"""Tensors of a file whose values are compared, which takes about a second for a thousand."""

_LEAST_BLOCK, _LEAST_VARIETY, _HEAD = 32, 16, 1 << 12
_LEAST_TEXT = 8
_ANOTHER_FILE = re.compile(rb'PK\x03\x04|.{4}\0{4}\{\s*"', re.DOTALL)


@dataclass(frozen=True)
class Slip:
    """Where the bytes of a layout lie in a file that has ``surplus`` bytes more than it (fewer, where negative).

    What ends at ``first`` or before lies where the layout says; what then begins at ``last`` or behind it in the file
    lies ``surplus`` bytes further on. Between them nothing is known, except that where the two are one place, the
    bytes behind it follow those before. ``doubtful`` begins where nothing confirms that the layout holds."""

    surplus: int
    first: int
    last: int
    doubtful: int
    cause: Fact | None = None

    def source(self, content: Content, begin: int, nbytes: int) -> ByteSource:
        """The bytes of a tensor that begins at a byte of the layout, as far as they can be told."""
        stop, size = begin + nbytes, len(content)
        if stop <= self.first and stop <= size:
            return content.source(begin, nbytes)
        if begin + self.surplus >= self.last:
            return content.source(begin + self.surplus, nbytes)
        if self.surplus > 0 and self.first + self.surplus == self.last:
            head = self.first - begin
            parts = ((0, content.source(begin, head)), (head, content.source(self.last, nbytes - head)))
            return ChunkedBytes((nbytes,), 1, [(Box((at,), (part.nbytes,)), part) for at, part in parts])
        present = max(0, min(stop, self.first, size) - begin)
        return TornBytes(content.path, nbytes, present, content.source(begin, present) if present else None)

    def is_doubtful(self, content: Content, begin: int, nbytes: int) -> bool:
        """Whether a tensor that is whole in this reading may have other bytes in another."""
        stop, away = begin + nbytes, self.surplus
        if not nbytes or stop <= self.doubtful or stop > len(content):
            return False
        return any(
            content.buffer[at : min(at + BLOCK, stop)] != content.buffer[at + away : min(at + BLOCK, stop) + away]
            for at in range(begin, stop, BLOCK)
        )


def find_slip(content: Content, placed: Sequence[tuple[int, TensorSpec]], end: int) -> Slip:
    """The slip of a file whose size is not the ``end`` of its layout.

    ``placed`` gives the tensors in their order and the byte of the layout at which each begins, without gaps."""
    surplus = len(content) - end
    if surplus > 0 and (twice := _doubled(content, surplus, {begin for begin, _ in placed})) is not None:
        cause = Fact.of(Kind.BYTES_TWICE, surplus=surplus, start=twice)
        return Slip(surplus, twice, twice + surplus, end, cause)
    at_end = Slip(surplus, min(end, len(content)), len(content), end)
    if surplus > 0 and _ANOTHER_FILE.match(bytes(content.buffer[end : end + 16])):
        return at_end
    slip = _by_values(content, placed, end)
    return at_end if surplus > 0 and not slip.cause and _is_foreign(content, end) else slip


def _doubled(content: Content, distance: int, edges: set[int]) -> int | None:
    """Where a block lies of which a copy follows at once; None where there is none, or where several may be meant.

    Bytes that repeat themselves by nature tell nothing: constants, rows of one kind, two equal tensors side by side."""
    if distance < _LEAST_BLOCK:
        return None
    found = None
    for start, stop in _runs(content, distance):
        block = bytes(content.buffer[start : start + min(distance, BLOCK)])
        again = content.buffer.find(block[:_HEAD], start + 1, start + distance + len(block[:_HEAD]) - 1)
        if len(set(block)) < _LEAST_VARIETY or 0 <= again < start + distance:
            continue
        if found is not None or any({at, at + distance} <= edges for at in edges if start <= at <= stop - distance):
            return None
        found = start
    return found


def _runs(content: Content, distance: int) -> Iterator[tuple[int, int]]:
    """Every run of at least ``distance`` bytes that are equal to those so much further on: where it begins and ends."""
    import numpy as np

    stop, last = len(content) - distance, -1
    for start in range(0, stop, BLOCK):
        here, there = (_bytes(content, at, min(BLOCK, stop - start)) for at in (start, start + distance))
        words = len(here) // 8 * 8
        if words and not (here[:words].view(np.uint64) == there[:words].view(np.uint64)).any():
            # No run lies in here as a whole: one may end in the first word, and one begin behind the last.
            low = int((here[:8] != there[:8]).argmax()) + start
            if low - last > distance:
                yield last + 1, low
            last = start + len(here) - 1 - int((here[::-1] != there[::-1]).argmax())
            continue
        differ = np.flatnonzero(here != there) + start
        if len(differ):
            edges = np.concatenate(([last], differ))
            for index in np.flatnonzero(np.diff(edges) > distance):
                yield int(edges[index]) + 1, int(edges[index + 1])
            last = int(differ[-1])
    if stop - last > distance:
        yield last + 1, stop


def _bytes(content: Content, start: int, count: int) -> NDArray[np.uint8]:
    import numpy as np

    return np.frombuffer(bytes(content.buffer[start : start + count]), dtype=np.uint8)


def _is_foreign(content: Content, end: int) -> bool:
    """Whether what lies behind the layout tells by itself that it is no part of a tensor, and begins just there."""
    from ckptfix.reading.foreign.pages import as_text

    tail = bytes(content.buffer[end : end + BLOCK])
    if not tail.strip(b"\r\n"):
        return True
    is_last_filled = bytes(content.buffer[end - 1 : end]) != b"\0"
    return (is_last_filled and not any(tail)) or (len(tail) >= _LEAST_TEXT and as_text(tail) is not None)


def _by_values(content: Content, placed: Sequence[tuple[int, TensorSpec]], end: int) -> Slip:
    """The slip that the values tell of; one at the end where they tell nothing, with what is doubtful then."""
    size = len(content)
    surplus = size - end
    before = _Reading(content, [(begin, spec) for begin, spec in placed if begin < min(end, size)])
    behind = _Reading(content, [(begin + surplus, spec) for begin, spec in placed if begin + spec.nbytes + surplus > 0])
    start = placed[0][0] if placed else end
    gap = max(surplus, 0)
    stop = min(end, size)
    if gap > 2 * WINDOW or len(placed) > MOST_TENSORS:
        return Slip(surplus, stop, size, start)  # it is not seen as a whole, so that places cannot be compared
    edges = {begin for begin, _ in before.placed} | {begin - gap for begin, _ in behind.placed} | {start, stop}
    inner = {begin + spec.nbytes // spec.itemsize // 2 * spec.itemsize for begin, spec in placed}
    inner |= {end - (1 << bit) for bit in range(3, 20)}  # the last numbers of all
    places = sorted(place for place in edges | inner if start <= place <= stop)
    # Each place has to be judged by the same bytes, and with it the block that would be too many there.
    windows = _Windows(sorted({edge + more for edge in (places if gap else edges) for more in (0, gap)}), size)
    saved = _scores(before, behind, places, windows, gap, is_known=False)
    # The right place may lie between two that are looked at, and strange bytes may cost nothing there.
    margin = MARGIN + 8 * gap
    possible = [place for place, bits in zip(places, saved, strict=True) if bits >= max(saved) - margin]
    # A place that cuts off tensors has less to learn: that alone is no reason to believe it.
    likely = places[saved.index(max(saved))]
    better, at_end = _scores(before, behind, [likely, stop], windows, gap, is_known=True)
    if possible[-1] == stop or better < at_end + margin:
        # Of a file that was cut the last tensor is lost anyway.
        is_sure = possible[0] >= (before.edge_below(stop, start) if surplus < 0 else stop)
        return Slip(surplus, stop, size, end if is_sure else before.edge_below(possible[0], start))
    # The slip lies near the likely places, in a tensor that one of them touches.
    first = before.edge_below(possible[0], start)
    last = behind.edge_above(possible[-1] + gap, size)
    cause = Fact.of(Kind.BYTES_SHIFTED, surplus=surplus, first=first, last=last)
    return Slip(surplus, first, last, end, cause)


def _scores(
    before: _Reading, behind: _Reading, places: Sequence[int], windows: _Windows, gap: int, *, is_known: bool
) -> list[float]:
    """The bits that the values save in describing the file, for each place of the slip; these are in order."""
    up_to = before.saved_up_to(places, windows, is_known)
    from_on = behind.saved_from([place + gap for place in places], windows, is_known)
    between = [saved_bits(windows.read(before.content, at, at + gap), "bytes", is_known=is_known) for at in places]
    return [sum(parts) for parts in zip(up_to, between, from_on, strict=True)]


class _Windows:
    """The ranges of a file that are looked at: those around edges, which are in order. Where they meet they are one."""

    def __init__(self, edges: Sequence[int], size: int) -> None:
        self.size = size
        self._lows: list[int] = []
        self._highs: list[int] = []
        for edge in edges:
            low, high = edge - WINDOW, min(edge + WINDOW, size)
            if self._highs and low <= self._highs[-1]:
                self._highs[-1] = high
            elif low < high:
                self._lows.append(low)
                self._highs.append(high)

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The ranges between two bytes."""
        for at in range(bisect_right(self._highs, start), bisect_left(self._lows, stop)):
            yield max(self._lows[at], start), min(self._highs[at], stop)

    def read(self, content: Content, start: int, stop: int, first: int | None = None, step: int = 1) -> bytes:
        """The bytes that are looked at between two bytes: whole elements of ``step`` bytes, one of which begins at
        ``first``.
        """
        parts = []
        for low, high in self.within(start, stop):
            low += ((start if first is None else first) - low) % step
            parts.append(bytes(content.buffer[low : low + max(0, high - low) // step * step]))
        return b"".join(parts)


@dataclass(frozen=True)
class _Reading:
    """The tensors of a layout at one place in the file, and how many bits their values save in describing it."""

    content: Content
    placed: Sequence[tuple[int, TensorSpec]]
    _memory: dict[tuple[int, int, int, bool], float] = field(default_factory=dict)

    def saved_up_to(self, places: Sequence[int], windows: _Windows, is_known: bool) -> list[float]:
        """The bits saved on all bytes before each of the places, which are in order."""
        made, total, index = [], 0.0, 0
        for place in places:
            while index < len(self.placed) and self._stop(index) <= place:
                total += self._saved(index, 0, place, windows, is_known)
                index += 1
            made.append(total + (self._saved(index, 0, place, windows, is_known) if index < len(self.placed) else 0.0))
        return made

    def saved_from(self, places: Sequence[int], windows: _Windows, is_known: bool) -> list[float]:
        """The bits saved on all bytes from each of the places on, which are in order."""
        made, total, index = [], 0.0, len(self.placed) - 1
        for place in reversed(places):
            while index >= 0 and self.placed[index][0] >= place:
                total += self._saved(index, place, windows.size, windows, is_known)
                index -= 1
            made.append(total + (self._saved(index, place, windows.size, windows, is_known) if index >= 0 else 0.0))
        return made[::-1]

    def edge_below(self, place: int, start: int) -> int:
        """Where the tensor begins that ends at a place or holds it."""
        return max((begin for begin, _ in self.placed if begin < place), default=start)

    def edge_above(self, place: int, size: int) -> int:
        """Where the tensor ends that begins at a place or holds it."""
        return min((self._stop(index) for index in range(len(self.placed)) if self._stop(index) > place), default=size)

    def _stop(self, index: int) -> int:
        begin, spec = self.placed[index]
        return begin + spec.nbytes

    def _saved(self, index: int, start: int, stop: int, windows: _Windows, is_known: bool) -> float:
        """The bits that the elements of a tensor between two bytes save."""
        begin, spec = self.placed[index]
        low, high = max(begin, start), min(self._stop(index), stop)
        if low >= high:
            return 0.0
        made = self._memory.get((index, low, high, is_known))
        if made is None:
            data = windows.read(self.content, low, high, begin, spec.itemsize)
            made = self._memory[index, low, high, is_known] = saved_bits(data, spec.dtype, is_known=is_known)
        return made
