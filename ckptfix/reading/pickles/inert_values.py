"""What stands in for the calls by which pickle itself writes values of the standard library.

Each function is an entry of the table of ``inert``: it gets the table and the arguments of the call,
and gives the value, or ``NotImplemented`` where the arguments are not those that pickle writes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Protocol

from ckptfix.bytes.limits import bounded_keys
from ckptfix.core.objects import Global, Opaque
from ckptfix.errors import HostileError

NAME_LIMIT = 1000
"""Characters of a dotted name that getattr builds."""


class Table(Protocol):
    """What an entry needs of the table that it stands in."""

    path: str
    derived: set[str]

    def call(self, function: Global, args: tuple[Any, ...]) -> Any:
        """The inert value of a call."""
        ...


def ordered_dict(table: Table, pairs: Any = ()) -> Any:
    """``collections.OrderedDict``, with its pairs in the call as Python 2 writes it."""
    if not pairs and isinstance(pairs, (tuple, list)):
        return OrderedDict()  # the hooks of every tensor
    pairs = list(pairs.items()) if isinstance(pairs, dict) else pairs
    keys = bounded_keys([key for key, _ in pairs], table.path)
    return OrderedDict((key, value) for key, (_, value) in zip(keys, pairs, strict=True))


def new_dict(table: Table, *args: Any) -> Any:
    """``dict()``."""
    return NotImplemented if args else {}


def new_list(table: Table, values: Any = ()) -> Any:
    """``list()`` and ``list(values)``."""
    return list(values) if isinstance(values, (list, tuple)) else NotImplemented


def new_set(table: Table, values: Any = ()) -> Any:
    """``set(values)``."""
    return set(bounded_keys(values, table.path)) if isinstance(values, (list, tuple)) else NotImplemented


def new_frozenset(table: Table, values: Any = ()) -> Any:
    """``frozenset(values)``."""
    made = new_set(table, values)
    return made if made is NotImplemented else frozenset(made)


def new_complex(table: Table, real: float = 0.0, imaginary: float = 0.0) -> Any:
    """``complex(real, imaginary)``."""
    return complex(real, imaginary)


def new_bytes(table: Table, value: Any = b"", *_: Any) -> Any:
    """``bytes(…)``: what protocol 2 writes for empty bytes."""
    return bytes(value) if isinstance(value, (bytes, bytearray, list)) else NotImplemented


def new_bytearray(table: Table, value: Any = b"", encoding: Any = None) -> Any:
    """``bytearray(…)``; protocol 2 writes it as a latin-1 string with its encoding."""
    if isinstance(value, str):
        return bytearray(value, "latin-1")
    return bytearray(value) if isinstance(value, (bytes, bytearray)) else NotImplemented


def encode(table: Table, text: Any, encoding: Any = "latin1") -> Any:
    """``_codecs.encode(text, "latin1")``: bytes as protocol 2 writes them."""
    if isinstance(text, str) and encoding in ("latin1", "latin-1"):
        return text.encode("latin-1")
    return NotImplemented


def reconstruct(table: Table, cls: Any, base: Any, state: Any) -> Any:
    """``copyreg._reconstructor(cls, base, state)``: an object of protocol 0 or 1; ``state`` fills a list, dict or
    number base.
    """
    if not isinstance(cls, Global):
        return NotImplemented
    made = table.call(cls, ())
    if isinstance(made, Opaque):
        if isinstance(state, dict):
            made.own_pairs().update(state)
        elif isinstance(state, (list, tuple)):
            made.own_items().extend(state)
    return made


def new_object(table: Table, cls: Any, *args: Any) -> Any:
    """``copyreg.__newobj__(cls, *args)``."""
    return table.call(cls, args) if isinstance(cls, Global) else NotImplemented


def attribute(table: Table, owner: Any, name: Any, *_: Any) -> Any:
    """``getattr(cls, name)``: how Python 3.11 pickles a member of an enum, and a way to hide the name of a
    function.
    """
    if not isinstance(owner, Global) or not isinstance(name, str):
        return NotImplemented
    if len(owner.name) + len(name) > NAME_LIMIT:
        raise HostileError(f"{table.path}: getattr is called on its own result over and over; do not use this file")
    member = Global(owner.module, f"{owner.name}.{name}")
    table.derived.add(str(member))
    return member
