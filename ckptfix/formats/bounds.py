"""What one pickle may spend: limits that no real checkpoint meets and that keep a crafted one in bounds.

A pickle of a few bytes can name one object many times over. Whatever copies an object, hashes it or shows it has to be
bounded, or a small file takes all memory and time (memo bombs, colliding keys, calls that copy the same list again and
again). Nothing here depends on what the objects mean.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from ckptfix.errors import HostileError

OBJECTS = 2_000_000
"""Containers and objects that one pickle may make (a set takes 216 bytes); text and numbers are not counted."""

HANDED = 1 << 20
"""Items, beyond the size of the pickle, that the calls of a pickle may be handed to copy."""

KEY_NODES = 256
"""Parts of a key of a dict: a tuple is hashed through, and a shared nested one costs 2^depth."""

KEY_BITS = 4096
"""Size of a number that is a key."""

COLLISIONS = 64
"""Keys of one hash in one dict; each costs a look at all the others. Only numbers can be chosen to collide."""

_PLAIN_HASH = (1 << 61) - 1  # a smaller int is its own hash


class Bounds:
    """The account of one pickle of ``size`` bytes. Every method raises ``HostileError`` where it is overdrawn."""

    def __init__(self, path: str, size: int) -> None:
        self.path = path
        self._objects = OBJECTS
        self._handed = size + HANDED
        self._hashes: Counter[tuple[int, int]] = Counter()

    def make(self, made: Any) -> Any:
        """The new object itself, counted."""
        self._objects -= 1
        if self._objects < 0:
            raise HostileError(f"{self.path}: its pickle makes more than {OBJECTS} objects; do not use this file")
        return made

    def hand(self, *values: Any) -> None:
        """Count what a call is handed and may copy. Short arguments are shared by honest pickles too."""
        for value in values:
            if isinstance(value, (str, bytes, bytearray, list, tuple, dict, set)) and len(value) > 64:
                self._handed -= len(value)
        if self._handed < 0:
            raise HostileError(
                f"{self.path}: the calls of its pickle copy more than the pickle holds, over and over; do not use "
                "this file"
            )

    def key(self, key: Any, owner: object) -> Any:
        """The key itself, once it is known that it can be put into the dict or set ``owner`` in bounded time."""
        if type(key) is str:
            return key
        bounded_key(key, self.path)
        if isinstance(key, (tuple, frozenset, complex)) or (type(key) is int and abs(key) >= _PLAIN_HASH):
            place = (id(owner), hash(key))
            self._hashes[place] += 1
            if self._hashes[place] > COLLISIONS:
                raise HostileError(
                    f"{self.path}: the keys of a dict are chosen to have one hash, so that it takes for ever to fill;"
                    " do not use this file"
                )
        return key


def bounded_key(key: Any, path: str) -> Any:
    """The key itself, once it is known that it can be hashed and shown in bounded time."""
    nodes, pending = 0, [key]
    while pending:
        value = pending.pop()
        nodes += 1
        if nodes > KEY_NODES or (isinstance(value, int) and value.bit_length() > KEY_BITS):
            raise HostileError(
                f"{path}: a key of a dict is so large or nested so deeply that hashing it would not end; do not use "
                "this file"
            )
        if isinstance(value, (tuple, frozenset)):
            pending.extend(value)
    hash(key)
    return key


def bounded_keys(keys: Iterable[Any], path: str) -> list[Any]:
    """The keys of one new dict or set, each of them bounded."""
    account, owner = Bounds(path, 0), object()
    return [account.key(key, owner) for key in keys]


def shown(value: Any) -> str:
    """A value of a file in a message: short, and had in bounded time whatever it is."""
    if isinstance(value, (str, bytes, bytearray)):
        return repr(value[:40])
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    if value is None or isinstance(value, (bool, int, float, complex)):
        return repr(value)
    return f"a {type(value).__name__}"
