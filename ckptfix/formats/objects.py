"""What stands for the classes and objects of a pickle: names and records that never become the real thing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False, frozen=True)
class Global:
    """The name of a class or function in a pickle. It is never resolved."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False, repr=False)
class Opaque:
    """An object whose class stays closed: the class's name, the arguments it was made with, and what was put in
    afterwards.

    ``items`` came by append, ``pairs`` by item assignment, ``state`` by ``__setstate__``.
    """

    cls: Global
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    state: Any = None
    items: list[Any] = field(default_factory=list)
    pairs: dict[Any, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        # Never what it holds: a shared nested object would be written out 2^depth times.
        return f"<{self.cls}>"

    @property
    def attributes(self) -> dict[str, Any]:
        """The instance dict, empty where the state is something else. A slots state ``(dict, slots)`` is merged."""
        if isinstance(self.state, dict):
            return self.state
        if isinstance(self.state, tuple) and len(self.state) == 2:
            return {str(k): v for part in self.state if isinstance(part, dict) for k, v in part.items()}
        return {}
