"""What stands for the classes and objects of a pickle: names and records that never become the real thing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(eq=False, frozen=True, slots=True)
class Global:
    """The name of a class or function in a pickle. It is never resolved."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


_NO_PAIRS: Mapping[Any, Any] = MappingProxyType({})


def _no_pairs() -> Mapping[Any, Any]:
    return _NO_PAIRS


@dataclass(eq=False, repr=False, slots=True)
class Opaque:
    """An object whose class stays closed: the class's name, the arguments it was made with, and what was put in
    afterwards.

    ``items`` came by append, ``pairs`` by item assignment, ``state`` by ``__setstate__``. A file may hold a million
    objects, and most of them have none: the empty ones are shared, and ``own_items`` and ``own_pairs`` are what is
    filled.
    """

    cls: Global
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=_no_pairs)
    state: Any = None
    _items: list[Any] | None = None
    _pairs: dict[Any, Any] | None = None

    @property
    def items(self) -> list[Any]:
        """What was appended, in order; to be read and not to be filled."""
        return [] if self._items is None else self._items

    @property
    def pairs(self) -> dict[Any, Any]:
        """What was set by key; to be read and not to be filled."""
        return {} if self._pairs is None else self._pairs

    def own_items(self) -> list[Any]:
        """Return the list of the items, to be filled."""
        if self._items is None:
            self._items = []
        return self._items

    def own_pairs(self) -> dict[Any, Any]:
        """Return the dict of the pairs, to be filled."""
        if self._pairs is None:
            self._pairs = {}
        return self._pairs

    def __repr__(self) -> str:
        # Never what it holds: a shared nested object would be written out 2^depth times.
        return f"<{self.cls}>"

    @property
    def attributes(self) -> dict[str, Any]:
        """The instance dict, empty if the state is something else. A slots state ``(dict, slots)`` is merged."""
        if isinstance(self.state, dict):
            return self.state
        if isinstance(self.state, tuple) and len(self.state) == 2:
            return {str(k): v for part in self.state if isinstance(part, dict) for k, v in part.items()}
        return {}
