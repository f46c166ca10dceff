"""Formats lines for a stream: colours, symbols that its encoding has, and no control characters.

The modules of this room yield lines of plain strings and ``Span`` objects. Only ``TextFormat.write`` turns them into
text, so an escape sequence in a key, a message or a file name cannot reach the terminal."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from msgspec import Struct

from ckptfix.errors import printable

if TYPE_CHECKING:
    from ckptfix.core.spec import TensorSpec

_CODES = {
    "error": "1;31",
    "warning": "33",
    "note": "36",
    "good": "32",
    "strong": "1",
    "command": "1",
    "faint": "2",
}

# For streams whose encoding is not a Unicode one.
_ASCII = str.maketrans({"…": "...", "→": "->", "×": "x", "–": "-", "—": "-", "≥": ">=", "≤": "<=", "≈": "~"})  # noqa: RUF001 - the signs are the point


class Span(Struct, frozen=True):
    """A piece of a line with a role: ``error``, ``warning``, ``note``, ``good``, ``strong``, ``faint`` or ``command``.

    A line with a command is never wrapped: it has to work when it is pasted."""

    text: str
    role: str


Line = str | tuple[str | Span, ...]  # one line: text, or pieces of it


class TextFormat(Struct, frozen=True):
    """The format of a stream: colours, encoding, and the columns at which lines are wrapped, 0 for no wrapping."""

    color: bool = False
    encoding: str = "utf-8"
    width: int = 0

    @classmethod
    def of(cls, stream: TextIO, environment: Mapping[str, str] = os.environ) -> TextFormat:
        """Return the format for a stream: colours on a terminal, unless the environment says otherwise."""
        if environment.get("NO_COLOR"):
            color = False
        elif environment.get("FORCE_COLOR"):
            color = environment["FORCE_COLOR"] != "0"
        else:
            color = stream.isatty() and environment.get("TERM") != "dumb"
        width = 0
        if stream.isatty():
            import shutil  # imported late: it takes 2 % of a check of names

            width = shutil.get_terminal_size((0, 0)).columns
        return cls(color, getattr(stream, "encoding", None) or "utf-8", width)

    def write(self, lines: Iterable[Line]) -> str:
        """Return the lines as one text, each with a newline at its end."""
        return "".join(
            "".join(self._piece(piece) for piece in row).rstrip() + "\n" for line in lines for row in self._rows(line)
        )

    def _rows(self, line: Line) -> Iterator[tuple[str | Span, ...]]:
        """Yield the rows of a line, which is wrapped at spaces and continued with two more columns of indent."""
        pieces = (line,) if isinstance(line, str) else line
        texts = list(map(_text, pieces))
        is_command = any(isinstance(piece, Span) and piece.role == "command" for piece in pieces)
        if not self.width or is_command or sum(map(len, texts)) <= self.width:
            yield pieces
            return
        whole = "".join(texts)
        indent = " " * min(len(whole) - len(whole.lstrip(" ")) + 2, self.width // 2)
        row: list[str | Span] = []
        used = 0
        for piece, text in zip(pieces, texts, strict=True):
            for word in re.findall(r" *[^ ]+| +", text):
                bare = word.lstrip(" ")
                is_new = word != bare or not row or _text(row[-1]).endswith(" ")  # not the rest of a word
                if is_new and bare and used + len(word) > self.width and used > len(indent):
                    yield tuple(row)
                    row, used, word = [indent], len(indent), bare
                row.append(word if isinstance(piece, str) else Span(word, piece.role))
                used += len(word)
        yield tuple(row)

    def _piece(self, piece: str | Span) -> str:
        text = printable(_text(piece))
        if not self.encoding.lower().replace("_", "-").startswith(("utf-8", "utf8", "utf-16", "utf-32")):
            text = text.translate(_ASCII).encode(self.encoding, "backslashreplace").decode(self.encoding)
        if isinstance(piece, Span) and self.color and text:
            return f"\x1b[{_CODES[piece.role]}m{text}\x1b[0m"
        return text


def _text(piece: str | Span) -> str:
    return piece if isinstance(piece, str) else piece.text


def quantity(number: int) -> str:
    """Return a count in three figures: ``999``, ``11.7 M``, ``1.24 G``."""
    return _scaled(number, ("", " k", " M", " G", " T", " P"))


def elements(numel: int) -> str:
    """Return a number of elements in words: ``1 element``, ``11.7 M elements``."""
    return "1 element" if numel == 1 else f"{quantity(numel)} elements"


def size(nbytes: int) -> str:
    """Return a size in bytes in three figures and powers of 1000: ``512 B``, ``46.8 MB``."""
    return _scaled(nbytes, (" B", " kB", " MB", " GB", " TB", " PB"))


def _scaled(number: int, units: Sequence[str]) -> str:
    value = float(number)
    for unit in units[:-1]:
        # 999.5 and more would print as 1e+03.
        if abs(value) < 999.5:
            return f"{number}{unit}" if unit == units[0] else f"{_three(value)}{unit}"
        value /= 1000
    return f"{_three(value)}{units[-1]}"


def _three(value: float) -> str:
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f}"


def percent(part: int, whole: int) -> str:
    """Return a share in per cent, 100 only for the whole and 0 only for nothing: ``99.99 %``, ``< 0.01 %``."""
    if part >= whole:
        return "100 %"
    if part == 0:
        return "0 %"
    share = min(round(100 * part / whole, 2), 99.99)
    return "< 0.01 %" if share == 0 else f"{share:g} %"


def tensor_text(dtype: str, shape: Sequence[int] | None) -> str:
    """Return a tensor's dtype and shape: ``float32[64, 3, 7, 7]``; ``float32[?]`` for a shape not known yet."""
    return f"{dtype}[{'?' if shape is None else ', '.join(map(str, shape))}]"


def spec_text(spec: TensorSpec) -> str:
    """Return a spec's dtype and shape, and its layout if it is not strided."""
    return tensor_text(spec.dtype, spec.shape) + ("" if spec.layout == "strided" else f" {spec.layout}")


def evidence_items(evidence: Mapping[str, Any], length: int | None = None) -> Iterator[str]:
    """Yield plain data as ``prefix module``, ``share 1``, …, each cut to ``length`` characters."""
    for name, value in evidence.items():
        text = _figure(value) if name == "." else f"{name} {_figure(value)}"  # of the file as a whole
        yield text if length is None else cut(text, length)


T = TypeVar("T")


def at_most(items: Sequence[T], limit: int | None) -> Sequence[T]:
    """Return the items to show in ``limit`` lines, the last of which counts the rest; all of them for None."""
    return items if limit is None or len(items) <= limit else items[: limit - 1]


def cut(text: str, length: int) -> str:
    """Return the text, cut to ``length`` characters with an ellipsis at the end."""
    return text if len(text) <= length else text[: length - 1] + "…"


def _figure(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} {_figure(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_figure, value))}]"
    return str(value)
