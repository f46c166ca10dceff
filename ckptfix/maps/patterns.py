"""Patterns of keys: ``blocks.{n}.attn.{query,key}.weight``.

``{n}`` is a number, ``{n+1}``, ``{2n+1}`` and ``{3-n}`` are numbers computed from it, ``{a,b}`` is one of these texts,
and ``*`` is any text, including dots."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from itertools import count

from msgspec import Struct
from msgspec.structs import replace

_PIECE = re.compile(r"\{[^{}]*\}|\*|[^{}*]+|.", re.DOTALL)
_NUMBER = re.compile(r"(\d*)([a-z])([+-]\d+)?|(\d+)-([a-z])")

# The values of variables by name: a number, the index of one of several texts, or any text.
Binding = Mapping[str, int | str]


class Variable(Struct, frozen=True):
    """A variable part of a pattern. Variables of the same ``name`` have the same value."""

    name: str
    options: tuple[str, ...] = ()
    scale: int = 1
    offset: int = 0

    @property
    def is_number(self) -> bool:
        return not self.options and self.name.isalpha()

    @property
    def regex(self) -> str:
        if self.options:
            return f"({'|'.join(map(re.escape, self.options))})"
        return r"(0|[1-9]\d{0,8})" if self.is_number else "(.+)"

    def value(self, text: str) -> int | str | None:
        """Return the value that a text of a key stands for, None if there is none."""
        if self.options:
            return self.options.index(text)
        if not self.is_number:
            return text
        value, rest = divmod(int(text) - self.offset, self.scale)
        return value if not rest and value >= 0 else None

    def text(self, value: int | str) -> str:
        """Return the text of a value in a key. Raises ``ValueError`` if its number would be negative."""
        if isinstance(value, str):
            return value
        if self.options:
            return self.options[value]
        number = self.scale * value + self.offset
        if number < 0:
            raise ValueError(f"{{{self.name}}} would count down to {number}")
        return str(number)


class Pattern(Struct, frozen=True, dict=True):
    """A pattern of keys: a sequence of texts and variables."""

    pieces: tuple[str | Variable, ...]

    @cached_property
    def variables(self) -> tuple[Variable, ...]:
        return tuple(piece for piece in self.pieces if isinstance(piece, Variable))

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(variable.name for variable in self.variables)

    @cached_property
    def regex(self) -> re.Pattern[str]:
        text = (piece.regex if isinstance(piece, Variable) else re.escape(piece) for piece in self.pieces)
        return re.compile("".join(text), re.DOTALL)

    def match(self, key: str) -> dict[str, int | str] | None:
        """Return the values of the variables in a key, None if the key does not match."""
        if not self.variables:
            return {} if (key,) == self.pieces else None
        found = self.regex.fullmatch(key)
        if found is None:
            return None
        values: dict[str, int | str] = {}
        for variable, text in zip(self.variables, found.groups(), strict=True):
            value = variable.value(text)
            if value is None or values.setdefault(variable.name, value) != value:
                return None
        return values

    def matches(self, key: str) -> bool:
        return self.match(key) is not None

    def key(self, values: Binding) -> str:
        return "".join(piece if isinstance(piece, str) else piece.text(values[piece.name]) for piece in self.pieces)

    def renamed(self, names: Mapping[str, str]) -> Pattern:
        pieces = (
            replace(piece, name=names.get(piece.name, piece.name)) if isinstance(piece, Variable) else piece
            for piece in self.pieces
        )
        return Pattern(tuple(pieces))


def parse(text: str) -> Pattern:
    """Parse a pattern. Raises ``ValueError`` for invalid braces."""
    pieces: list[str | Variable] = []
    stars = count()
    for piece in _PIECE.findall(text):
        if piece == "*":
            pieces.append(Variable(f"*{next(stars)}"))
        elif piece[0] not in "{}":
            pieces.append(piece)
        elif number := _NUMBER.fullmatch(piece[1:-1]):
            scale, name, offset, top, down = number.groups()
            pieces.append(
                Variable(name, (), int(scale or 1) or 1, int(offset or 0)) if name else Variable(down, (), -1, int(top))
            )
        elif "," in piece:
            options = tuple(option.strip() for option in piece[1:-1].split(","))
            if len(set(options)) < len(options):
                raise ValueError(f"{piece} names a string twice")
            pieces.append(Variable(",".join(options), options))
        else:
            raise ValueError(f"{piece} is not a pattern; write {{n}} for a number, {{a,b}} for one of several texts")
    return Pattern(tuple(pieces))
