"""Text on its way to a stream: colours, the symbols that its encoding has, and nothing that could steer a terminal.

A renderer yields lines made of plain strings and ``Span`` objects. Only ``TextFormat.write`` turns them into text, so a
key, a message or a file name with an escape sequence in it cannot reach the terminal as one."""

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

# For streams whose encoding is not one of Unicode.
_ASCII = str.maketrans({"…": "...", "→": "->", "×": "x", "–": "-", "—": "-", "≥": ">=", "≤": "<=", "≈": "~"})  # noqa: RUF001 - the signs are the point


class Span(Struct, frozen=True):
    """A piece of a line with a role: ``error``, ``warning``, ``note``, ``good``, ``strong``, ``faint`` or ``command``.

    A line with a command in it is never broken: it has to work when it is pasted."""

    text: str
    role: str


Line = str | tuple[str | Span, ...]  # one line: text, or pieces of it


class TextFormat(Struct, frozen=True):
    """How lines become text: with colours or not, in which encoding, and the columns to break them at, 0 for none."""

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
            import shutil  # which takes a sixtieth of a look at names

            width = shutil.get_terminal_size((0, 0)).columns
        return cls(color, getattr(stream, "encoding", None) or "utf-8", width)

    def write(self, lines: Iterable[Line]) -> str:
        """Return the lines as one text that ends in a line break; the empty text for no lines."""
        return "".join(
            "".join(self._piece(piece) for piece in row).rstrip() + "\n" for line in lines for row in self._rows(line)
        )

    def _rows(self, line: Line) -> Iterator[tuple[str | Span, ...]]:
        """Yield the rows of a line: it is broken at spaces, and goes on two columns further in."""
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
                is_new = word != bare or not row or _text(row[-1]).endswith(" ")  # and not the end of a word
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
    """``1 element``, ``11.7 M elements``."""
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
    """Return a share in per cent that says 100 only of the whole, and 0 only of nothing: ``99.99 %``, ``< 0.01 %``."""
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
    """Return the same of a spec, with its layout if it is not dense."""
    return tensor_text(spec.dtype, spec.shape) + ("" if spec.layout == "strided" else f" {spec.layout}")


def evidence_items(evidence: Mapping[str, Any], length: int | None = None) -> Iterator[str]:
    """``prefix module``, ``share 1``, … from plain data; each cut to ``length`` characters."""
    for name, value in evidence.items():
        text = f"{name} {_figure(value)}"
        yield text if length is None else cut(text, length)


T = TypeVar("T")


def at_most(items: Sequence[T], limit: int | None) -> Sequence[T]:
    """Return the items that are shown if there is room for ``limit`` lines, None for all; the last counts the rest."""
    return items if limit is None or len(items) <= limit else items[: limit - 1]


def cut(text: str, length: int) -> str:
    """Return the text, its end replaced by an ellipsis where it is longer."""
    return text if len(text) <= length else text[: length - 1] + "…"


def _figure(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} {_figure(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_figure, value))}]"
    return str(value)
